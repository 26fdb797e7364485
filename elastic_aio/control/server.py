"""The control socket of an agent: a Unix socket that only its user can connect to.

The job never needs it.  Idle it costs two descriptors and no wake-up; the code that answers
requests is loaded with the first connection.  A socket that was removed is made anew: at the logout
of a user, systemd-logind removes the directory /run/user/UID.

The name of a socket is never used twice, and it appears only when the socket listens.  So a socket
that refuses connections belongs to a launcher that was killed, and may be removed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from elastic_aio.aio import ForkGuard, create_task
from elastic_aio.control.sockets import is_peer_allowed, make_directory, socket_name
from elastic_aio.errors import ControlError
from elastic_aio.process.adopted import subreaper
from elastic_aio.sockets import Acceptor
from elastic_aio.text import error_reason, format_value
from elastic_aio.value import to_json

if TYPE_CHECKING:
    from elastic_aio.control.session import ControlledJob
    from elastic_aio.logs.inotify import InotifyWatcher

_CLOSE_S: Final = 0.25
"""Seconds for the last answers when the job is over."""


class ControlServer:
    """Answers requests about one job; `close` comes with the end of the job."""

    def __init__(
        self,
        job: ControlledJob,
        on_unavailable: Callable[[str], None],
        *,
        connections_max: int = 64,
        waiting_max: int = 48,
        watched_after: float = 10.0,
        remade_after: float = 1.0,
    ) -> None:
        """Prepare; nothing listens before `open`.  The job is not kept alive.

        Args:
            job: what requests are about.
            on_unavailable: called with the reason when no socket can be made.
            connections_max: connections at a time.
            waiting_max: those of them that may follow the job or wait for it.
            watched_after: seconds until the socket is watched.  A short job does without: the
                kernel frees a watch after an RCU grace period, for which the end of the process
                waits (5 to 20 ms).
            remade_after: seconds from the removal of the socket to the next socket: a directory
                is removed in steps.
        """
        self.path = ""
        """Path of the socket; empty while nothing listens."""
        self._job = weakref.ref(job)
        self._on_unavailable = on_unavailable
        self._fork = ForkGuard()
        self._loop = asyncio.get_running_loop()
        self._acceptor: Acceptor | None = None
        self._watcher: InotifyWatcher | None = None
        self._timer: asyncio.TimerHandle | None = None  # until it is watched, or made anew
        self._connections_max = connections_max
        self._waiting_max = waiting_max
        self._waiting = 0
        self.watched_after = watched_after
        """Seconds until the next socket is watched."""
        self._remade_after = remade_after
        self._sessions: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<ControlServer at {self.path or 'no path'}, {len(self._sessions)} connections>"

    def open(self) -> None:
        """Listen, if that is possible: there may be no directory, or no descriptor."""
        try:
            self._listen()
        except OSError as error:
            self._on_unavailable(error_reason(error))

    def _listen(self) -> None:
        directory = make_directory()
        name = socket_name(is_own=subreaper.owns_process)
        unfinished = os.path.join(directory, f".{name}")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        acceptor = Acceptor([listener], self._on_connection)
        try:
            listener.bind(unfinished)
            os.chmod(unfinished, 0o600)
            acceptor.start()
            self.path = os.path.join(directory, name)
            os.rename(unfinished, self.path)
        except OSError:
            acceptor.close()
            self.path = ""
            raise
        self._acceptor = acceptor
        self._timer = self._loop.call_later(self.watched_after, self._watch)

    def _watch(self) -> None:
        from elastic_aio.logs.inotify import IN_ATTRIB, IN_MOVE_SELF, InotifyWatcher

        # The removal of its name changes the attributes of a socket; it exists until it is closed.
        self._watcher = InotifyWatcher(self._on_change, IN_ATTRIB | IN_MOVE_SELF, polls=False)
        self._watcher.add(self.path, 0)
        self._on_change({})  # it may have been removed before

    def _on_change(self, _events: Mapping[int, int]) -> None:
        if not os.path.lexists(self.path):
            self.close()
            self.watched_after = 0.0
            self._timer = self._loop.call_later(self._remade_after, self.open)

    def close(self) -> None:
        """Listen no more; answers in progress go on.  Idempotent; needs no running loop."""
        if self._timer is not None:
            self._timer.cancel()
        if self._acceptor is None or self._fork.is_copy:
            return
        with suppress(OSError):  # the directory was cleared
            os.unlink(self.path)  # first: a client whose connection ends then finds no socket
        self.path = ""
        self._acceptor.close()
        self._acceptor = None
        if self._watcher is not None:
            self._watcher.close()

    async def aclose(self) -> None:
        """Listen no more, and end all connections soon.

        Cancellation: the connections end at once.
        """
        self.close()
        try:
            if self._sessions:
                await asyncio.wait(self._sessions, timeout=_CLOSE_S)
        finally:
            for session in self._sessions:
                session.cancel()
        if self._sessions:
            await asyncio.wait(self._sessions)

    def _on_connection(self, connection: socket.socket) -> None:
        job = self._job()
        if job is None or not is_peer_allowed(connection):
            connection.close()
            return
        try:
            from elastic_aio.control.session import serve  # most jobs are never asked
        except Exception as error:  # noqa: BLE001  # the package was removed since the start
            refuse(connection, f"the request failed: {format_value(error)}")
            self._log(error)
            return
        if len(self._sessions) >= self._connections_max:
            refuse(connection, f"{self._connections_max} connections are open already")
            return
        task = create_task(serve(connection, job, self._place), name="answer a control request")
        self._sessions.add(task)
        task.add_done_callback(self._on_answered)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Take a place of a client that waits, or raise a ControlError."""
        if self._waiting >= self._waiting_max:
            raise ControlError(f"{self._waiting} clients follow the job or wait for it already")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _on_answered(self, session: asyncio.Task[None]) -> None:
        self._sessions.discard(session)
        if not session.cancelled() and (error := session.exception()) is not None:
            self._log(error)

    def _log(self, error: BaseException) -> None:
        context = {"message": "a control request failed", "exception": error}
        self._loop.call_exception_handler(context)


def refuse(connection: socket.socket, problem: str) -> None:
    """Answer without a request, and close the connection."""
    with connection, suppress(OSError):
        connection.send(to_json({"reply": "error", "problem": problem}) + b"\n")
