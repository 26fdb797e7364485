"""The client of the fork server: workers forked from a process with their imports done.

The server (`forkserver_main`) is a child of ours.  It takes any `ChildSpec` whose command is Python
code that it can run: the bootstrap of functions, a script, a module.  A request is one message with
a memory file, which holds the command, and the worker's descriptors; these keep their new numbers
in the worker, since modules that the server has imported may use the old ones.

The "started" reply brings a pidfd that the server has opened before it could reap, so the pid
cannot have been used again.  The exit status comes from the server, which is the parent.  If the
server ends, exits are seen by pidfd without a status, and the next spawn starts another server.

The server has this process's descriptor limit, since each worker needs some.  A forked worker has
the server's environment in /proc, so the server has the job's marker; the process tree excludes the
server.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import os
import pickle
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_aio.errors import HostError, SpawnError
from elastic_aio.outcome import ExitStatus
from elastic_aio.process import children
from elastic_aio.process.calls import import_path, interpreter_flags, memory_file
from elastic_aio.process.descriptors import limit
from elastic_aio.process.rusage import usage_of
from elastic_aio.text import error_reason

_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forkserver_main.py")
_MESSAGE_MAX = 1 << 16
_KILL_S = 10.0
"""Seconds until a killed server is left behind: an uninterruptible system call holds it."""

_EXIT_S = 1.0
"""Seconds for a server that has closed its socket to end by itself."""


class ForkServer:
    """A spawner of Python workers, and its server process; must be closed."""

    def __init__(
        self,
        spawner: children.Spawner,
        *,
        python: str,
        program: Sequence[str],
        preload: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        streams: tuple[int, int, int],
        on_started: Callable[[children.Child], None],
    ) -> None:
        """Configure; nothing is started yet.

        Args:
            python: its interpreter.
            program: the script, or `-m` and the module, that all workers run; it sees no
                option of our interpreter.  Empty for functions, which have our `sys.path`.
            preload: modules that it imports.
            env: its environment, with the job's marker.
            streams: its standard streams; the caller closes them.
            on_started: called with each server when it runs.
        """
        self._spawner = spawner
        self._python = python
        self._flags = [] if program else interpreter_flags()
        self._settings = {
            "program": list(program),
            "python": sys.executable,
            "path": import_path(),
            "argv": list(sys.argv),
            "preload": list(preload),
        }
        self._env = env
        self._cwd = cwd
        self._streams = streams
        self._on_started = on_started
        self._channel: _Channel | None = None
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ForkServer {self._channel}>"

    @property
    def is_importing(self) -> bool:
        """Whether the server runs and cannot fork yet."""
        return self._channel is not None and not self._channel.ready.done()

    async def start(self) -> None:
        """Start the server, which then goes on importing, or raise a SpawnError."""
        own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = -1
        try:
            settings = memory_file("settings")
            with open(settings, "wb", closefd=False) as file:  # noqa: ASYNC230  # in memory
                file.write(pickle.dumps(self._settings))
            numbers = (str(server_end.fileno()), str(settings))
            stdin, stdout, stderr = self._streams
            server = await self._spawner(
                children.ChildSpec(
                    argv=(self._python, *self._flags, "-u", _MAIN, *numbers),
                    env=self._env,
                    cwd=self._cwd,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(server_end.fileno(), settings),
                )
            )
        except BaseException as error:  # a cancellation too: nothing else closes the socket
            own_end.close()
            if isinstance(error, OSError):
                problem = f"cannot keep its settings in memory: {error_reason(error)}"
                raise SpawnError(problem, permanent=False, exit_code=1) from error
            raise
        finally:
            server_end.close()
            if settings >= 0:
                os.close(settings)
        self._channel = _Channel(server, own_end)
        self._on_started(server)

    async def __call__(self, spec: children.ChildSpec, /) -> children.Child:
        """Let the server fork one worker.

        Raises:
            SpawnError: the server or the worker could not be started, or a module could
                not be imported.
        """
        children.check_directory(spec)
        async with self._lock:
            if self._channel is None or self._channel.is_lost:
                await self.start()
            assert self._channel is not None, "start() has made it"
            if not self._channel.ready.done():
                await asyncio.wait([self._channel.ready])
            self._channel.ready.result()
            return await self._channel.fork(spec)

    async def aclose(self) -> None:
        """Kill the server and wait until it is reaped, for 10 seconds at most.  Idempotent."""
        if self._channel is not None:
            await self._channel.aclose()


class _Channel:
    def __init__(self, server: children.Child, sock: socket.socket) -> None:
        self._server = server
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._requests: collections.deque[asyncio.Future[children.Child]] = collections.deque()
        self._workers: dict[int, _ForkedChild] = {}
        self._import_error = ""
        sock.setblocking(False)
        self._loop.add_reader(sock, self._receive)
        server.exited.add_done_callback(lambda _: self._on_exit())

    def __repr__(self) -> str:
        return f"<channel to {self._server}, {len(self._workers)} workers>"

    @property
    def is_lost(self) -> bool:
        return self._socket.fileno() < 0

    async def fork(self, spec: children.ChildSpec) -> children.Child:
        try:
            request = memory_file("request")
        except HostError as error:
            raise SpawnError(str(error), permanent=False, exit_code=1) from error
        started: asyncio.Future[children.Child] = self._loop.create_future()
        self._requests.append(started)
        try:
            with open(request, "wb") as file:  # noqa: ASYNC230  # in memory
                content = {
                    "argv": list(spec.argv),
                    "env": dict(spec.env),
                    "cwd": spec.cwd,
                    "numbers": list(spec.pass_fds),
                    "soft_limit": limit.original,
                    "cpus": spec.cpus,
                }
                file.write(pickle.dumps(content))
                file.flush()
                streams = (spec.stdin, spec.stdout, spec.stderr)
                socket.send_fds(self._socket, [b"R"], [request, *streams, *spec.pass_fds])
        except OSError as error:
            self._requests.remove(started)
            raise children.spawn_error(error, spec) from error
        try:
            return await started
        except OSError as error:
            raise children.spawn_error(error, spec) from error

    async def aclose(self) -> None:
        self._server.send_signal(signal.SIGKILL)
        if not self._server.exited.done():
            await asyncio.wait([self._server.exited], timeout=_KILL_S)
        self._on_lost()

    def _on_exit(self) -> None:
        """Read what the server has sent, but no end of file: its forks may hold the socket."""
        while not self.is_lost and self._receive():
            pass
        self._on_lost()

    def _receive(self) -> bool:
        """Handle one message; return False if there is none yet."""
        try:
            content, descriptors, _, _ = socket.recv_fds(
                self._socket, _MESSAGE_MAX, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:
            content, descriptors = b"", []
        if not content:
            self._on_end_of_file()
            return True
        match pickle.loads(content):
            case ("ready",):
                self.ready.set_result(None)
            case ("failed", str(text)):
                self._import_error = text
            case ("started", int()) if not descriptors:
                # None is left here.  The start has failed, and the stop that follows finds it.
                self._refuse(errno.EMFILE)
            case ("started", int(pid)):
                child = self._workers[pid] = _ForkedChild(pid, descriptors[0])
                request = self._requests.popleft()
                if request.cancelled():
                    child.send_signal(signal.SIGKILL)  # it is in no process tree
                else:
                    request.set_result(child)
            case ("refused", int(number)):
                self._refuse(number)
            case ("exited", int(pid), int(status), rusage) if pid in self._workers:
                self._workers.pop(pid).on_reaped(status, resource.struct_rusage(rusage))
        return True

    def _refuse(self, number: int) -> None:
        request = self._requests.popleft()
        if not request.cancelled():
            request.set_exception(OSError(number, os.strerror(number)))

    def _on_end_of_file(self) -> None:
        """Wait for the server's end, which says how it has ended."""
        if self._server.exited.done():
            self._on_lost()
        else:
            self._loop.remove_reader(self._socket)
            # It ends just now, or has closed its socket and can start no worker any more.
            self._loop.call_later(_EXIT_S, self._server.send_signal, signal.SIGKILL)

    def _on_lost(self) -> None:
        if self.is_lost:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        problem = self._import_error or "the fork server has ended"
        if not self._import_error and self._server.exited.done():
            problem += f": {self._server.exited.result().status}"
        pending: list[asyncio.Future[Any]] = [self.ready, *self._requests]
        for future in pending:
            if not future.done():
                # Another server may not be killed.
                error = SpawnError(problem, permanent=bool(self._import_error), exit_code=1)
                future.set_exception(error)
                future.exception()  # marks it as retrieved: it may not be awaited
        self._requests.clear()
        for worker in self._workers.values():
            worker.on_server_lost()
        self._workers.clear()


class _ForkedChild(children.PidfdChild):
    _is_reaped_here = False

    def on_reaped(self, wait_status: int, rusage: resource.struct_rusage) -> None:
        """Set the exit that the server reports."""
        os.close(self._pidfd)
        self._pidfd = -1
        status = ExitStatus.from_returncode(os.waitstatus_to_exitcode(wait_status))
        self.set_exited(children.ChildExit(status, time.monotonic(), usage_of(rusage)))

    def on_server_lost(self) -> None:
        """Watch the worker by its pidfd; only the server could have reported the status."""

        def on_end() -> None:
            self._pidfd = -1  # the watch closes it
            self.set_exited(children.ChildExit(ExitStatus(), time.monotonic()))

        children.PidfdWatch(self._pidfd, on_end)
