"""The standard streams that the processes of a job inherit from this one."""

from __future__ import annotations

import os


class StandardStreams:
    """This process's standard streams, and `/dev/null`; must be closed.

    In a program that was started without standard streams, the next files that it opens
    get their numbers: its event loop, for example.  Python and libuv open everything with
    FD_CLOEXEC, so a descriptor that has this flag is no standard stream.
    """

    def __init__(self) -> None:
        """Open `/dev/null`, and occupy the numbers of closed standard streams with it.

        Otherwise a file of the job would get such a number, and could not be passed on.

        Raises:
            OSError: no descriptor is left.
        """
        self._opened: list[int] = []
        while not self._opened or self._opened[-1] <= 2:
            self._opened.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        self.null = self._opened[-1]
        """Descriptor of `/dev/null`."""

    def __repr__(self) -> str:
        return f"<StandardStreams, /dev/null is {self.null}>"

    def inherited(self, number: int) -> int:
        """Return the standard stream of this number; `/dev/null` if it is closed."""
        try:
            return number if os.get_inheritable(number) else self.null
        except OSError:
            return self.null

    def close(self) -> None:
        """Close `/dev/null`.  Idempotent."""
        while self._opened:
            os.close(self._opened.pop())
