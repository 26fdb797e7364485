"""The lines of a log file: whole, with a prefix, from the last ones on."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from elastic_aio.cli.logs import LinePrinter, present_streams, streams_without_file
from elastic_aio.logs.lines import LogLine
from elastic_aio.status import JobStatus, WorkerStatus


def line(raw: bytes, rank: int = 3, *, missed: int | None = 0, child: str = "") -> LogLine:
    return LogLine(rank, "stdout", 0, 0.0, raw, missed, child)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([line(b"one\n"), line(b"two\n", 4)], b"[3]: one\n[4]: two\n"),
        ([line(b"one")], b"[3]: one\n"),
        ([line(b"one"), line(b"two\n", 4)], b"[3]: one\n[4]: two\n"),
        ([line(b"a long "), line(b"line"), line(b" ends\n")], b"[3]: a long line ends\n"),
        ([line(b"cut"), line(b"new\n", missed=5)], b"[3]: cut\n[3]: new\n"),
        ([line(b"", missed=5)], b""),
        ([line(b"one\n", child="web/3")], b"[web/3:3]: one\n"),
        ([line(b"one\n", child="a/0")], b"[a/0:3]: one\n"),
        ([line(b"one\n", child="3")], b"[3]: one\n"),
    ],
)
def test_lines_are_whole_and_have_their_prefix(
    lines: list[LogLine], shown: bytes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Of a line that comes in pieces the first one only."""
    printer = LinePrinter(has_prefix=True)
    for one in lines:
        printer.print([one])
    printer.finish()
    assert capfdbinary.readouterr().out == shown


def test_what_is_missing_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter(has_prefix=False)
    printer.print([line(b"a\n", missed=8192), line(b"b\n", missed=None)])
    out, err = capfd.readouterr()
    assert out == "a\nb\n"
    assert err == (
        "aio-elastic logs: rank 3: 8192 bytes of stdout can be read no more\n"
        "aio-elastic logs: rank 3: a part of stdout can be read no more\n"
    )


@pytest.mark.parametrize("is_one_file", [False, True])
def test_each_file_is_read_once_from_its_last_lines(tmp_path: Path, is_one_file: bool) -> None:
    out = str(tmp_path / "out")
    err = out if is_one_file else str(tmp_path / "err")
    Path(out).write_bytes(b"a\nb\nc\n")
    worker = WorkerStatus(1, 1, 1, "running", 0.0, stdout_path=out, stderr_path=err)
    streams = present_streams(JobStatus(workers=(worker,)), None, 2)
    found = [(stream.stream, stream.path, stream.begin) for stream in streams]
    # The second file does not exist any more.
    both = [("stdout", out, 2), ("stderr", err, 0)]
    assert found == ([("output", out, 2)] if is_one_file else both)
    assert not [*present_streams(JobStatus(workers=(worker,)), 0, 2)]


@pytest.mark.parametrize(
    ("paths", "missing"),
    [
        (("/a", "/b"), ""),
        ((None, "/b"), "standard output"),
        (("/a", None), "standard error"),
        ((None, None), "standard output and standard error"),
    ],
)
def test_streams_in_no_file_are_named(paths: tuple[str | None, str | None], missing: str) -> None:
    stdout, stderr = paths
    workers = tuple(WorkerStatus(rank, rank, 1, "running", 0.0) for rank in range(2))
    workers = tuple(replace(one, stdout_path=stdout, stderr_path=stderr) for one in workers)
    assert streams_without_file(workers) == missing
