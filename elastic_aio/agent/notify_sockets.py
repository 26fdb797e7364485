"""The sockets on which the workers of a job report: one pair for each, and one with an address.

A worker inherits one end of a pair of datagram sockets, so that the other end tells which worker
a message is from.  Its end does not block: a message is dropped, with an error of the write,
when the launcher does not read (as bash shows).  Datagram sockets raise no SIGPIPE.

The socket with an address is for programs that know `NOTIFY_SOCKET` only.  The kernel tells the
sender's pid there (SO_PASSCRED of unix(7)).

A socket that has been read is read again after a period, until it is empty twice: workers that
report every second would cause as many wake-ups, and any process of the job may write without
end.  The first message after such a pause is read at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from elastic_aio.errors import SpawnError
from elastic_aio.process import proc
from elastic_aio.text import error_reason
from elastic_aio.watch.deadlines import MESSAGE_MAX

PERIOD_S = 1.0
"""Seconds after which a socket is read again."""
_BURST = 512
"""Messages of one worker that are read at a time; the kernel keeps fewer."""
_PERIOD_MAX = 1024
"""Messages of all workers that are read at the end of a period."""
_ANCESTORS_MAX = 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7)


class NotifySockets:
    """The sockets of one job on this host; must be closed."""

    def __init__(self, on_message: Callable[[int, bytes], None], *, period: float) -> None:
        """Begin without sockets.

        Args:
            on_message: called with local rank and content of each message.
            period: seconds after which a socket is read again.
        """
        self.address = ""
        """The address for `NOTIFY_SOCKET`; empty before `open_address`."""
        self.find_worker: Callable[[int], int | None] = lambda pid: None
        """Returns the local rank of the worker that leads the session of this number."""
        self._on_message = on_message
        self._period = period
        self._ends: dict[int, int] = {}  # descriptors by local rank
        self._shared: socket.socket | None = None
        self._readers: dict[int, Callable[[int], int]] = {}  # by descriptor
        # Descriptors, in the order in which they are read; True: it was empty the last time.
        self._paused: dict[int, bool] = {}
        self._timer: asyncio.TimerHandle | None = None

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
        self._add_reader(shared.fileno(), partial(self._read_shared, shared))

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
            message = f"cannot open the socket for its messages: {error_reason(error)}"
            raise SpawnError(message, permanent=False, exit_code=1) from error
        with theirs:
            descriptor = self._ends[local_rank] = own.detach()
            self._add_reader(descriptor, partial(self._read, local_rank, descriptor))
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
            self._remove_reader(descriptor)
            os.close(descriptor)
            del self._ends[local_rank]

    def close_workers(self) -> None:
        """Close the sockets of all workers.  Idempotent."""
        for local_rank in [*self._ends]:
            self.close_worker(local_rank)

    def close(self) -> None:
        """Close all sockets.  Idempotent."""
        self.close_workers()
        if self._shared is not None:
            self._remove_reader(self._shared.fileno())
            self._shared.close()
            self._shared = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def read_all(self) -> None:
        """Read what has arrived: the event loop may have been blocked since."""
        for read in [*self._readers.values()]:
            read(_BURST)

    # ----------------------------------------------------------------- reads

    def _add_reader(self, descriptor: int, read: Callable[[int], int]) -> None:
        self._readers[descriptor] = read
        asyncio.get_running_loop().add_reader(descriptor, self._on_readable, descriptor)

    def _remove_reader(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        del self._readers[descriptor]
        self._paused.pop(descriptor, None)

    def _on_readable(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)
        self._paused[descriptor] = False
        if self._timer is None:
            self._timer = loop.call_later(self._period, self._on_period)
        self._readers[descriptor](_BURST)

    def _on_period(self) -> None:
        """Read the sockets that have been read before; wait for those that are empty now."""
        loop = asyncio.get_running_loop()
        self._timer, left = None, _PERIOD_MAX
        for descriptor, was_empty in [*self._paused.items()]:
            if left <= 0:
                break
            count = self._readers[descriptor](min(_BURST, left))
            left -= count
            del self._paused[descriptor]
            if count or not was_empty:
                self._paused[descriptor] = not count
            else:
                loop.add_reader(descriptor, self._on_readable, descriptor)
        if self._paused:
            self._timer = loop.call_later(self._period, self._on_period)

    def _read(self, local_rank: int, descriptor: int, limit: int) -> int:
        """Read at most `limit` messages of a worker; return how many there were."""
        for count in range(limit):
            try:
                message = os.read(descriptor, MESSAGE_MAX + 1)
            except OSError:  # there are no more; or an error of the peer, which this has cleared
                return count
            self._on_message(local_rank, message)
        return limit

    def _read_shared(self, shared: socket.socket, limit: int) -> int:
        for count in range(limit):
            try:
                message, ancillary, _, _ = shared.recvmsg(
                    MESSAGE_MAX + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:
                return count
            if (local_rank := self._sender(ancillary)) is not None:
                self._on_message(local_rank, message)
        return limit

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
            process = proc.read_process(pid)
            if process is None:
                return None
            if (local_rank := self.find_worker(process.session)) is not None:
                return local_rank
            pid = process.parent
        return None
