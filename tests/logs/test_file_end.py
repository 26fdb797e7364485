"""The end of a log file, from the beginning of a line, without what was freed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_aio.logs import file_end
from elastic_aio.logs.file_end import last_lines, read_end
from elastic_aio.logs.trimmer import free_range


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
    monkeypatch.setattr(file_end, "_LINES_MAX", 7)
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
