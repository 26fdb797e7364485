"""The sockets on which the workers of a job report: one pair for each, and one with an address.

A worker inherits one end of a pair of datagram sockets, so that the other end tells which worker
a message is from.  Its end does not block: a message is dropped, with an error of the write,
when the launcher does not read (as bash shows).  Datagram sockets raise no SIGPIPE.

The socket with an address is for programs that know `NOTIFY_SOCKET` only.  The kernel tells the
sender's pid there (SO_PASSCRED of unix(7)).

What is read in one turn of the event loop is limited, and so is what is read in a second: any
process of the job may write without end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from elastic_aio.agent.liveness_table import MESSAGE_MAX
from elastic_aio.errors import SpawnError
from elastic_aio.process import proc_scan
from elastic_aio.process.base import reason_of

_BURST = 128
"""Messages of one worker that are read in one turn of the event loop."""
_WINDOW_S = 0.05
_WINDOW_MAX = 1024
"""Messages of all workers that are read in one window."""
_ANCESTORS_MAX = 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7)


class NotifySockets:
    """The sockets of one job on this host; must be closed."""

    def __init__(self, on_message: Callable[[int, bytes], None]) -> None:
        """Begin without sockets; `on_message` gets local rank and content of each message."""
        self.address = ""
        """The address for `NOTIFY_SOCKET`; empty before `open_address`."""
        self.find_worker: Callable[[int], int | None] = lambda pid: None
        """Returns the local rank of the worker that leads the session of this number."""
        self._on_message = on_message
        self._ends: dict[int, int] = {}  # descriptors by local rank
        self._shared: socket.socket | None = None
        self._window = 0.0
        self._count = 0
        self._paused: list[Callable[[], None]] = []
        self._resume: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<NotifySockets of {len(self._ends)} workers>"

    def open_address(self) -> None:
        """Open the socket with an address, an abstract one: nothing is left of it.

        Raises:
            OSError: no descriptor is left.
        """
        shared = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            shared.bind("")  # the kernel chooses the address
        except OSError:
            shared.close()
            raise
        self._shared = shared
        self.address = "@" + shared.getsockname()[1:].decode("ascii")
        asyncio.get_running_loop().add_reader(shared.fileno(), self._on_shared_readable)

    @contextmanager
    def open_worker(self, local_rank: int) -> Iterator[int]:
        """Open the sockets of a worker that is being spawned; the value is what it inherits.

        Raises:
            SpawnError: no descriptor is left.
        """
        try:
            own, theirs = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
            )
        except OSError as error:
            message = f"cannot open the socket for its messages: {reason_of(error)}"
            raise SpawnError(message, permanent=False, exit_code=1) from error
        with theirs:
            descriptor = self._ends[local_rank] = own.detach()
            asyncio.get_running_loop().add_reader(
                descriptor, self._on_readable, local_rank, descriptor
            )
            try:
                yield theirs.fileno()
            except BaseException:  # a cancellation too
                self.close_worker(local_rank)
                raise

    def close_worker(self, local_rank: int) -> None:
        """Read what a worker has sent last, and close its socket.  Idempotent."""
        descriptor = self._ends.get(local_rank)
        if descriptor is not None:
            self._read(local_rank, descriptor, _BURST)
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
            del self._ends[local_rank]

    def close_workers(self) -> None:
        """Close the sockets of all workers.  Idempotent."""
        for local_rank in [*self._ends]:
            self.close_worker(local_rank)

    def close(self) -> None:
        """Close all sockets.  Idempotent."""
        self.close_workers()
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        self._paused.clear()
        if self._shared is not None:
            asyncio.get_running_loop().remove_reader(self._shared.fileno())
            self._shared.close()
            self._shared = None

    def read_all(self) -> None:
        """Read what has arrived: the event loop may have been blocked since."""
        for local_rank, descriptor in [*self._ends.items()]:
            self._read(local_rank, descriptor, _BURST)

    # ----------------------------------------------------------------- reads

    def _on_readable(self, local_rank: int, descriptor: int) -> None:
        if self._ends.get(local_rank) != descriptor:
            return
        if self._read(local_rank, descriptor, self._allowance()):
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)

        def resume() -> None:
            if self._ends.get(local_rank) == descriptor:
                loop.add_reader(descriptor, self._on_readable, local_rank, descriptor)

        self._pause(resume)

    def _read(self, local_rank: int, descriptor: int, limit: int) -> bool:
        """Read at most `limit` messages; return whether there are no more."""
        for _ in range(limit):
            try:
                message = os.read(descriptor, MESSAGE_MAX + 1)
            except BlockingIOError:
                return True
            except OSError:
                return True  # the peer's error, which this read has cleared
            self._count += 1
            self._on_message(local_rank, message)
        return False

    def _on_shared_readable(self) -> None:
        shared = self._shared
        if shared is None:
            return
        for _ in range(self._allowance()):
            try:
                message, ancillary, _, _ = shared.recvmsg(
                    MESSAGE_MAX + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:
                return
            self._count += 1
            local_rank = self._sender(ancillary)
            if local_rank is not None:
                self._on_message(local_rank, message)
        loop = asyncio.get_running_loop()
        loop.remove_reader(shared.fileno())

        def resume() -> None:
            if self._shared is shared:
                loop.add_reader(shared.fileno(), self._on_shared_readable)

        self._pause(resume)

    def _sender(self, ancillary: list[tuple[int, int, bytes]]) -> int | None:
        """Return the local rank of the worker that a message comes from, or from below it."""
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, user, _ = _CREDENTIALS.unpack_from(data)
                if user not in (0, os.geteuid()):
                    return None
                with suppress(OSError):
                    return self._find_ancestor(pid)
        return None

    def _find_ancestor(self, pid: int) -> int | None:
        for _ in range(_ANCESTORS_MAX):
            process = proc_scan.read_process(pid)
            if process is None:
                return None
            if (local_rank := self.find_worker(process.session)) is not None:
                return local_rank
            pid = process.parent
        return None

    # ---------------------------------------------------------------- limits

    def _allowance(self) -> int:
        """Return how many messages may be read now."""
        now = asyncio.get_running_loop().time()
        if now - self._window >= _WINDOW_S:
            self._window, self._count = now, 0
        return max(0, min(_BURST, _WINDOW_MAX - self._count))

    def _pause(self, resume: Callable[[], None]) -> None:
        self._paused.append(resume)
        if self._resume is None:
            loop = asyncio.get_running_loop()
            self._resume = loop.call_later(_WINDOW_S, self._on_resume)

    def _on_resume(self) -> None:
        self._resume = None
        paused, self._paused = self._paused, []
        for resume in paused:
            resume()
