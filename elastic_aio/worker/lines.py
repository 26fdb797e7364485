"""Whole lines: what a Python worker prints is one write for each line.

Workers share a terminal or a pipe.  The interpreter runs with `-u`, by which a print is two writes,
of its text and of its end: another worker may write between them.  Here text without an end waits
for the end, or for a flush; what goes to `sys.stdout.buffer` does not wait.

A script imports this before it starts: nothing here is new, and `__future__` is a file.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def write_lines() -> None:
    """Let `sys.stdout` and `sys.stderr` write each line in one piece, unless the user refuses."""
    # "lines" is the launcher's: an interpreter that the worker starts buffers nothing by it.
    if os.environ.get("PYTHONUNBUFFERED", "") not in ("", "0", "lines"):
        return
    # A debugger at the terminal would step into the `write` of here.
    may_debug = sys.stdin is not None and sys.stdin.isatty()
    stream: Any
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.reconfigure(line_buffering=True, write_through=False)
            stream._CHUNK_SIZE = 1 << 16  # bytes of a line that are still one write
            if not may_debug:
                stream.write = _split(stream.write)
        except (AttributeError, OSError, ValueError):
            pass  # there is none, or it is another implementation's


def _split(write: "Any") -> "Any":
    """Return a `write` of a stream that keeps back what follows the last end of a line."""

    def write_split(text: str, /) -> "Any":
        end = text.rfind("\n") + 1 if isinstance(text, str) else 0
        return write(text[:end]) + write(text[end:]) if 0 < end < len(text) else write(text)

    return write_split
