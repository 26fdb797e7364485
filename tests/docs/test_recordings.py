"""The recorded sessions: their format, their screens on the site, whether they are old."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.site.casts import CASTS, SESSIONS, Screen, player, read_cast, record, screens


@pytest.mark.parametrize("name", SESSIONS)
def test_a_recording_is_one_of_asciinema(name: str) -> None:
    lines = (CASTS / f"{name}.cast").read_text().splitlines()
    assert json.loads(lines[0])["version"] == 2
    times = [at for at, _ in read_cast(CASTS / f"{name}.cast")]
    assert times == sorted(times)
    text = "".join(output for _, output in read_cast(CASTS / f"{name}.cast"))
    assert not re.search(r"/tmp/cast-|/root|/home/", text)


def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.cast").write_text('{"version": 3}\n')
    with pytest.raises(ValueError, match=r"x\.cast: version 2 is expected"):
        read_cast(tmp_path / "x.cast")


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ("a\r\nb", ["a", "b"]),
        ("abc\rx", ["xbc"]),
        ("abc\r\x1b[Kx", ["x"]),
        ("one\r\ntwo\r\n\x1b[2Ax\r\n", ["xne", "two"]),
        ("ab\x1b[2K\rc", ["c"]),
        ("a\x1b[3Cb\x1b[1Gc", ["c   b"]),
        ("a\r\nb\r\n\x1b[2A\x1b[J", [""]),
        ("\x1b]0;title\x07\x1b[?25la", ["a"]),
        ("\x1b[5Aa", ["a"]),
    ],
)
def test_a_screen_shows_what_a_terminal_does(output: str, lines: list[str]) -> None:
    screen = Screen()
    screen.write(output)
    shown = screen.lines()
    assert shown[: len(lines)] == lines
    assert not any(shown[len(lines) :])


def test_a_screen_has_the_colors() -> None:
    screen = Screen()
    screen.write("\x1b[1;31m<a>\x1b[0m b\x1b[92mc\x1b[39md")
    assert screen.html() == (
        '<span class="bold c-red">&lt;a&gt;</span> b<span class="c-green">c</span>d'
    )


def test_the_last_screen_is_shown_without_scripts() -> None:
    shown = player("first-job")
    assert "finished: 4 workers" in shown.partition("</pre>")[0]
    assert len(screens(read_cast(CASTS / "first-job.cast"))) > 2


@pytest.mark.docs
def test_the_first_job_still_looks_so() -> None:
    """The lines of another run differ in numbers and order only."""

    def lines(frames: list[tuple[float, str]]) -> set[str]:
        screen = Screen()
        screen.write("".join(output for _, output in frames))
        return {
            re.sub(r"(?<=[ _])[0-9a-f]{8,16}\b|[0-9a-f]{16}|\d+", "N", line)
            for line in screen.lines()
        }

    # A worker that is stopped early prints nothing.
    ours, now = lines(read_cast(CASTS / "first-job.cast")), lines(record("first-job"))
    assert {line for line in ours ^ now if line.startswith("aio-elastic")} == set()
