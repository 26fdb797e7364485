"""`console=`: text streams and functions, and streams of Python that have been replaced."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    ConsoleLost,
    Event,
    JobFailed,
    LaunchSpec,
    LogLine,
    LogSpec,
    SpecError,
    launch,
)
from tests.support.children import python, shell

BOTH = 'echo "out $RANK"; echo "err $RANK" >&2'


@pytest.mark.both_loops
async def test_a_text_stream_gets_everything_in_order() -> None:
    """Of both streams of a worker, unchanged."""
    code = "import os\nfor n in range(500): os.write(1 + n % 2, f'{n} ä\\n'.encode())"
    shown = io.StringIO()
    await launch(LaunchSpec(python(code)), console=shown)
    assert shown.getvalue() == "".join(f"{number} ä\n" for number in range(500))


async def test_two_text_streams() -> None:
    """Tee'd lines have their prefix there."""
    out, err = io.StringIO(), io.StringIO()
    await launch(LaunchSpec(shell(BOTH), logs=LogSpec(tee=1)), console=(out, err))
    assert out.getvalue() == "[default0]:out 0\n"
    assert err.getvalue() == "err 0\n"


async def test_a_text_file(tmp_path: Path) -> None:
    with (tmp_path / "console").open("w") as file:
        file.write("before\n")
        await launch(LaunchSpec(shell(BOTH), logs=LogSpec(tee=3)), console=file)
    text = (tmp_path / "console").read_text()
    assert text.startswith("before\n")
    assert sorted(text.splitlines()[1:]) == ["[default0]:err 0", "[default0]:out 0"]


async def test_capsys_works(capsys: pytest.CaptureFixture[str]) -> None:
    """`sys.stdout` and `sys.stderr` have been replaced; tee'd or not."""
    await launch(LaunchSpec(shell(BOTH)))
    assert capsys.readouterr() == ("out 0\n", "err 0\n")
    await launch(LaunchSpec(shell(BOTH), logs=LogSpec(tee=3)))
    assert capsys.readouterr() == ("[default0]:out 0\n", "[default0]:err 0\n")


async def test_capfd_works(capfd: pytest.CaptureFixture[str]) -> None:
    await launch(LaunchSpec(shell(BOTH)))
    assert capfd.readouterr() == ("out 0\n", "err 0\n")


async def test_a_redirected_stdout_of_python(capfd: pytest.CaptureFixture[str]) -> None:
    """Only the stream that was replaced."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        await launch(LaunchSpec(shell(BOTH)))
    assert text.getvalue() == "out 0\n"
    assert capfd.readouterr() == ("", "err 0\n")


@pytest.mark.both_loops
@pytest.mark.parametrize("logs", [{}, {"tee": 3}, {"redirects": 1}])
async def test_a_function_gets_every_line(logs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Of what the console would show; nothing is shown elsewhere."""
    lines: list[LogLine] = []
    spec = LaunchSpec(shell(BOTH), nproc_per_node=2, logs=LogSpec(**logs))
    await launch(spec, console=lines.append)
    found = sorted((line.stream, line.rank, line.text) for line in lines)
    expected = [("stderr", 0, "err 0"), ("stderr", 1, "err 1")]
    if "redirects" not in logs:
        expected += [("stdout", 0, "out 0"), ("stdout", 1, "out 1")]
    assert found == expected
    assert capfd.readouterr() == ("", "")


async def test_many_lines_for_a_function() -> None:
    numbers: list[int] = []
    code = "import sys\nsys.stdout.write(''.join(f'{n}\\n' for n in range(50000)))"
    await launch(LaunchSpec(python(code)), console=lambda line: numbers.append(int(line.text)))
    assert numbers == [*range(50000)]


class _Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise ValueError("broken")


def _fail(line: LogLine) -> None:
    raise ValueError("broken")


@pytest.mark.parametrize("console", [_Broken(), _fail])
async def test_a_console_that_raises_is_lost(console: Any) -> None:
    """The job goes on, and its failure has its reason."""
    seen: list[Event] = []
    with pytest.raises(JobFailed, match="err 0"):
        await launch(LaunchSpec(shell(f"{BOTH}; exit 3")), console=console, listeners=[seen.append])
    lost = [event.why for event in seen if isinstance(event, ConsoleLost)]
    assert lost
    assert all("ValueError: broken" in why for why in lost)


async def _never(line: LogLine) -> None:
    raise AssertionError


@pytest.mark.parametrize("console", [_never, "text", (1,), (1, -2), (1, "x"), 7])
async def test_mistakes(console: Any) -> None:
    with pytest.raises(SpecError, match="console"):
        await launch(LaunchSpec(["true"]), console=console)
