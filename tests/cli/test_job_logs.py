"""The lines of a log file: whole, with a prefix, from the last ones on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from elastic_aio.cli.job_logs import _LINE_MAX, _LogFile, _streams_without_file
from elastic_aio.logs.trimmer import free_range
from elastic_aio.status import JobStatus, WorkerStatus


@contextmanager
def opened(path: Path, prefix: bytes = b"") -> Iterator[_LogFile]:
    file = _LogFile(str(path), prefix)
    try:
        yield file
    finally:
        os.close(file.descriptor)


def lines(file: _LogFile) -> bytes:
    """Return all lines that are complete by now."""
    found = b""
    while (more := file.read_lines()) is not None:
        found += more
    return found


def test_lines_are_whole_and_have_their_prefix(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    with opened(path, b"[3]: ") as file:
        assert lines(file) == b"[3]: one\n"
        with path.open("ab") as writer:
            writer.write(b"o\nthree")
        assert lines(file) == b"[3]: two\n"
        assert file.rest() == b"[3]: three\n"


@pytest.mark.parametrize(
    ("content", "count", "shown"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\n"),
        (b"a\nb\n", 0, b""),
        (b"a\nb\n", 2, b"a\nb\n"),
        (b"a\nb\n", 9, b"a\nb\n"),
        (b"", 3, b""),
        (b"\n\n\n", 2, b"\n\n"),
    ],
)
def test_the_last_lines(content: bytes, count: int, shown: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with opened(path) as file:
        file.skip_to_tail(count)
        assert lines(file) == shown


def test_what_was_freed_is_not_shown(tmp_path: Path) -> None:
    """`max_bytes` frees the begin of a file, in the middle of a line."""
    path = tmp_path / "log"
    text = b"".join(b"line %d\n" % number for number in range(2000))
    path.write_bytes(text)
    with path.open("rb+") as writer:
        free_range(writer.fileno(), 0, 8192)
    with opened(path) as file:
        file.skip_to_tail(2000)
        assert lines(file) == text[text.index(b"\n", 8192) + 1 :]


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    """It comes in pieces."""
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 * _LINE_MAX))
    with opened(path) as file:
        shown = lines(file)
        assert len(shown) + len(file.rest()) >= 3 * _LINE_MAX
        assert len(file.rest()) <= _LINE_MAX + 1


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
    assert _streams_without_file(JobStatus(workers=workers)) == missing
