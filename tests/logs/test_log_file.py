"""LogFile reads a growing file and notices when it is truncated; the end of a file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio.logs import log_file
from elastic_aio.logs.log_file import LogFile, last_lines, read_end
from elastic_aio.logs.trimmer import free_range


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of an empty file."""
    path = tmp_path / "log"
    path.touch()
    return path


@pytest.fixture
def log(path: Path) -> Iterator[LogFile]:
    """The file, opened."""
    log = LogFile(os.open(str(path), os.O_RDONLY))
    yield log
    log.close()


def change_time(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))


def note_events(log: LogFile) -> None:
    log.is_opened = log.is_written = True


def test_the_same_bytes_are_read_again_after_a_while(path: Path, log: LogFile) -> None:
    path.write_bytes(b"tick\n")
    assert log.read(0, 1.0) == b"tick\n"
    path.write_bytes(b"tick\n")
    change_time(path)
    note_events(log)
    assert log.read(5, 2.0) == b""
    when = log.look_again_at
    assert when is not None
    assert 2.0 < when < 2.2
    assert log.read(5, 2.01) == b""
    assert log.read(5, when) is None
    log.restart()
    assert log.look_again_at is None
    assert log.read(0, 3.0) == b"tick\n"
    assert log.read(5, 9.0) == b""


def test_the_same_bytes_are_read_again_at_the_end(path: Path, log: LogFile) -> None:
    """No process writes any more, so there is nothing to wait for."""
    path.write_bytes(b"tick\n")
    assert log.read(0, 1.0) == b"tick\n"
    path.write_bytes(b"tick\n")
    change_time(path)
    note_events(log)
    assert log.read(5, math.inf) is None


@pytest.mark.parametrize("now", [2.0, math.inf])
@pytest.mark.parametrize("event", ["is_opened", "is_written"])
def test_a_change_of_the_time_and_one_event_are_no_truncation(
    event: str, now: float, path: Path, log: LogFile
) -> None:
    """As by `touch` or a write that fails; as by ftruncate(2) to the size that the file has."""
    path.write_bytes(b"tick\n")
    note_events(log)
    assert log.read(0, 1.0) == b"tick\n"
    change_time(path)
    setattr(log, event, True)
    assert log.read(5, now) == b""
    assert log.read(5, log.look_again_at or now) == b""
    assert log.look_again_at is None


def test_events_that_come_after_a_read_still_tell_of_a_truncation(path: Path, log: LogFile) -> None:
    """The truncation is reported and read, and meanwhile the file has been written again."""
    path.write_bytes(b"tick\n")
    assert log.read(0, 1.0) == b"tick\n"
    path.write_bytes(b"tick\n")
    change_time(path)
    log.is_written = True
    assert log.read(5, 2.0) == b""
    note_events(log)
    when = log.look_again_at
    assert when is not None
    assert log.read(5, when) is None


def test_a_file_that_was_opened_may_be_truncated_later(path: Path, log: LogFile) -> None:
    """A read may come between the two."""
    path.write_bytes(b"tick\n")
    assert log.read(0, 1.0) == b"tick\n"
    log.is_opened = True
    assert log.read(5, 2.0) == b""
    path.write_bytes(b"tick\n")
    change_time(path)
    log.is_written = True
    assert log.read(5, math.inf) is None


def test_a_late_report_of_a_write_is_no_truncation(path: Path, log: LogFile) -> None:
    """A read may find what is written before its report arrives."""
    path.write_bytes(b"tick\n")
    assert log.read(0, 1.0) == b"tick\n"
    note_events(log)
    assert log.read(5, 2.0) == b""
    change_time(path)
    assert log.read(5, math.inf) == b""


def test_a_write_in_progress_is_no_truncation(path: Path, log: LogFile) -> None:
    """write(2) changes the time of a file before its size."""
    path.write_bytes(b"one\n")
    assert log.read(0, 1.0) == b"one\n"
    change_time(path)
    note_events(log)
    assert log.read(4, 2.0) == b""
    due = log.look_again_at
    assert due is not None
    with path.open("ab") as file:
        file.write(b"two\n")
    assert log.read(4, 9.0) == b"two\n"
    assert log.look_again_at is None
    assert log.read(8, 9.0) == b""


def test_an_empty_file_that_is_truncated_is_no_loss(path: Path, log: LogFile) -> None:
    assert log.read(0, 1.0) == b""
    change_time(path)
    assert log.read(0, math.inf) == b""


def test_bytes_that_are_gone_cannot_be_read_again(path: Path, log: LogFile) -> None:
    path.write_bytes(b"0123456789")
    assert log.read(0, 1.0) == b"0123456789"
    assert log.read_again(2, 5) == b"234"
    assert log.unread(4) == 6
    os.truncate(path, 2)
    assert log.read_again(2, 5) == b""
    assert log.unread(4) == 0
    assert log.read(10, 2.0) is None


@pytest.mark.parametrize(
    ("content", "count", "shown"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
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
    assert content[last_lines(str(path), count) :] == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(100, b"one\ntwo\n"), (7, b"two\n"), (5, b"two\n"), (2, b"o\n")]
)
def test_the_end(size: int, shown: bytes, tmp_path: Path) -> None:
    """A line that is longer than the end is cut."""
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    assert read_end(str(path), size) == shown


def test_the_last_lines_begin_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if more are wanted than are looked for."""
    monkeypatch.setattr(log_file, "_LINES_MAX", 7)
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    assert last_lines(str(path), 9) == 4


@pytest.mark.parametrize("size", [14_000, 1 << 20])
def test_what_was_freed_is_left_out(tmp_path: Path, size: int) -> None:
    """`max_bytes` frees the begin of a file, in the middle of a line."""
    path = tmp_path / "log"
    text = b"".join(b"line %d\n" % number for number in range(2000))
    path.write_bytes(text)
    with path.open("rb+") as writer:
        free_range(writer.fileno(), 0, 8192)
    kept = text[text.index(b"\n", 8192) + 1 :]
    assert read_end(str(path), size) == kept
    assert text[last_lines(str(path), 2000) :] == kept
    free_whole(path)
    assert read_end(str(path), size) == b""


def free_whole(path: Path) -> None:
    with path.open("rb+") as writer:
        size = os.fstat(writer.fileno()).st_size
        free_range(writer.fileno(), 0, size + -size % 4096)


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="seek"):
        read_end(str(path), 10)
