"""LineFilter: copies the shown lines that contain one of some texts to a further file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence

from elastic_aio.text import os_bytes


class LineFilter:
    """Copies lines of one stream to a file that all workers of a node share.

    The file is open only while matching lines are written to it: a filter needs no descriptor and
    no end.
    """

    def __init__(
        self, path: str, texts: Sequence[str], on_error: Callable[[OSError], None]
    ) -> None:
        """Append to `path` the lines with one of `texts`; `on_error` gets the first error."""
        self._path = path
        self._texts = [*map(os_bytes, texts)]
        self._on_error: Callable[[OSError], None] | None = on_error

    def __repr__(self) -> str:
        return f"<LineFilter for {self._path}>"

    def copy(self, block: bytes, prefix: bytes) -> None:
        """Copy the matching lines of a block of whole lines, each with the prefix.

        After an error, nothing is copied any more.
        """
        if self._on_error is None or not any(text in block for text in self._texts):
            return
        lines = block.split(b"\n")[:-1]  # `splitlines` also splits at other characters
        matching = [line for line in lines if any(text in line for text in self._texts)]
        copied = b"".join(prefix + line + b"\n" for line in matching)
        try:
            self._append(copied)
        except OSError as error:
            on_error, self._on_error = self._on_error, None
            on_error(error)

    def _append(self, content: bytes) -> None:
        # One write with O_APPEND: the blocks of several workers are not mixed.  O_NONBLOCK: a
        # worker may have put a named pipe there, whose opening would wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self._path, flags, 0o666), "wb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", self._path)
            file.write(content)
