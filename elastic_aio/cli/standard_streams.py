"""The standard output and error of a command: all of a text is written, or an error is raised.

O_NONBLOCK is a flag of the open file description (open(2)): another program that has the terminal,
pipe or socket too may set the flag at any time.
"""

from __future__ import annotations

import io
import select
import sys
from typing import Any


class StandardStream(io.FileIO):
    """A descriptor; a write waits until all is written, also with O_NONBLOCK."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        while left:
            if (count := super().write(left)) is None:  # it takes nothing now
                poll = select.poll()
                poll.register(self, select.POLLOUT)
                poll.poll()  # also returns when the last reader has exited
            left = left[count or 0 :]
        return len(data)


def use_standard_streams() -> None:
    """Make `sys.stdout` and `sys.stderr` wait, unless they are closed or another program's."""
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        former = getattr(sys, name)
        if former is None or former is not getattr(sys, f"__{name}__"):
            continue
        former.flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(StandardStream(descriptor, "w", closefd=False)),
            former.encoding,
            former.errors,
            line_buffering=former.line_buffering or former.write_through,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
