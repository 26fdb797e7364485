"""Accepts the connections of a server, and pauses while it can take no more.

asyncio's own servers retry at once when no descriptor is left, and libuv accepts and
closes: either costs a whole processor while clients try again.  A paused acceptor leaves
the connections in the queue of the kernel.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from elastic_aio.aio import create_task
from elastic_aio.sockets import BACKLOG

_BATCH: Final = 64
"""Connections to accept before other work of the loop."""

_SPARE_DESCRIPTORS: Final = 64
"""Descriptors of this process that are left for the rest of the program."""

_RETRY: Final = 1.0
"""Seconds until the next attempt without descriptors."""

_NO_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts connections on bound sockets, which it owns."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        count: Callable[[], int],
    ) -> None:
        """Prepare.

        Args:
            sockets: bound sockets.
            make_protocol: makes the protocol of a connection.
            count: the number of open connections; `resume` is called when it has fallen.
        """
        self._loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        self._make_protocol = make_protocol
        self._count = count
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        is_limited = descriptors != resource.RLIM_INFINITY
        self._limit = max(1, descriptors - _SPARE_DESCRIPTORS) if is_limited else sys.maxsize
        self._opening: set[asyncio.Task[None]] = set()
        self._is_paused = True
        self._retry: asyncio.TimerHandle | None = None

    @property
    def is_closed(self) -> bool:
        """Whether no more connections are accepted."""
        return not self._sockets

    def start(self) -> None:
        """Listen; clients can connect from now on.

        Raises:
            OSError: another program listens at the port.
        """
        for sock in self._sockets:
            sock.setblocking(False)  # a client may be gone again before accept(2)
            sock.listen(BACKLOG)
        self.resume()

    def resume(self) -> None:
        """Accept again, if accepting was paused and there is room."""
        if not self._is_paused or not self._sockets or self._is_full():
            return
        self._is_paused = False
        self._cancel_retry()
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def close(self) -> None:
        """Stop listening.  Idempotent."""
        self._pause()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    async def wait_opened(self) -> None:
        """Wait until all accepted connections have their protocol: an iteration of the loop."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _is_full(self) -> bool:
        return self._count() + len(self._opening) >= self._limit

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            for sock in self._sockets:
                self._loop.remove_reader(sock)
        self._cancel_retry()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_BATCH):
            if self._is_full():
                self._pause()
                return
            try:
                connection, _ = sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client has closed it already
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                self._pause()
                # A poll: other parts of the program close descriptors without notice.
                self._retry = self._loop.call_later(_RETRY, self.resume)
                return
            connection.setblocking(False)
            task = create_task(self._open(connection), name="accepted connection")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # the client has closed it already
