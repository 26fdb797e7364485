"""The file of selected lines, in a directory that workers can write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_aio.logs.line_filter import LineFilter


def test_selected_lines_are_appended(tmp_path: Path) -> None:
    """Whole lines, each with its prefix."""
    errors: list[OSError] = []
    lines = LineFilter(str(tmp_path / "f"), ["loss", "x"], errors.append)
    lines.copy(b"loss 1\nother\nax\n", b"[0]:")
    lines.copy(b"nothing\n", b"[0]:")
    lines.copy(b"loss 2\n", b"[1]:")
    assert (tmp_path / "f").read_bytes() == b"[0]:loss 1\n[0]:ax\n[1]:loss 2\n"
    assert not errors


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_pipe_in_place_of_the_file_blocks_nothing(tmp_path: Path, has_reader: bool) -> None:
    """It is one error."""
    path = tmp_path / "f"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    errors: list[OSError] = []
    lines = LineFilter(str(path), ["loss"], errors.append)
    for _ in range(2):
        lines.copy(b"loss 1\n", b"")
    assert len(errors) == 1
    if reader is not None:
        assert os.read(reader, 9) == b""
        os.close(reader)
