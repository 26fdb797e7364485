"""What a short command writes: its last line says why it has failed."""

from __future__ import annotations

import asyncio
import os
from io import FileIO

from elastic_aio.text import one_line

_TAIL = 4096  # bytes of the output that are kept
_READS = 16  # of 64 KiB: more than a pipe holds, unless a program has made it larger
_LINE_MAX = 200


class CommandOutput:
    """The end of what a command writes; must be closed."""

    def __init__(self) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        self._reader, self.writer = FileIO(reader), FileIO(writer, "w")
        self._tail = b""
        asyncio.get_running_loop().add_reader(reader, self._read)

    def _read(self) -> bool:
        """Read once; return whether there was something."""
        data = self._reader.read(1 << 16)
        if data == b"":  # the end; None: there is nothing yet
            asyncio.get_running_loop().remove_reader(self._reader)
        self._tail = (self._tail + (data or b""))[-_TAIL:]
        return bool(data)

    def last_line(self) -> str:
        """Return the last line that is not empty, after the end of the command."""
        for _ in range(_READS):  # what it has left behind may write without end
            if not self._read():
                break
        lines = reversed(self._tail.decode("utf-8", "replace").splitlines())
        return next(filter(None, (one_line(line, _LINE_MAX) for line in lines)), "")

    def close(self) -> None:
        self.writer.close()
        asyncio.get_running_loop().remove_reader(self._reader)
        self._reader.close()
