"""Python workers forked by a server that has imported what they need: restarts cost no import.

The server (`forkserver_main`) is a child of ours.  It takes any plan whose command
is Python code that we know how to run: our own bootstrap, a script, a module.  A
request is a memory file with the plan, and the worker's descriptors, all in one
message; they keep their new numbers there, since what the server has preloaded may
use the old ones.

With "started" comes a pidfd that the server has opened before it could reap; so the
number cannot be somebody else's.  The exit's status comes from the server, which is
the parent.  When the server is lost, exits are seen by pidfd and their status is
lost too, and the next start makes another server.

A forked worker shows the server's environment in `/proc`; hence the server carries
the job's marker, and the process tree is told to spare it.
"""

from __future__ import annotations

import asyncio
import collections
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_aio.errors import SpawnError, SurroundingsError
from elastic_aio.outcome import ExitStatus
from elastic_aio.process import sweep
from elastic_aio.process.base import Child, ChildPlan, Exit, Spawner, check_folder, spawn_error
from elastic_aio.process.exits import ExitWatch
from elastic_aio.process.payload import interpreter_flags, memory_file
from elastic_aio.process.reaped import story, usage_of

__all__ = ["ForkServer"]

_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forkserver_main.py")
_MESSAGE_MAX = 1 << 16


class ForkServer:
    """A spawner of Python workers, and the server behind it; must be closed."""

    def __init__(
        self,
        spawner: Spawner,
        *,
        python: str,
        path: Sequence[str],
        preload: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        streams: tuple[int, int, int],
        on_started: Callable[[int], None],
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            spawner: starts the server.
            python: its interpreter.
            path: where it finds the modules.
            preload: modules that it imports.
            env: its environment, with the job's marker.
            cwd: its working directory.
            streams: its standard streams; stay the caller's to close.
            on_started: told the server's pid when it runs.
        """
        self._spawner = spawner
        self._python = python
        self._settings = {"path": list(path), "argv": list(sys.argv), "preload": list(preload)}
        self._env = env
        self._cwd = cwd
        self._streams = streams
        self._on_started = on_started
        self._link: _Link | None = None
        self._one_at_a_time = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ForkServer {self._link}>"

    async def start(self) -> None:
        """Start the server; its imports go on after that.

        Raises:
            SpawnError: it could not be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = -1
        try:
            settings = memory_file("settings")
            os.write(settings, pickle.dumps(self._settings))
            numbers = (str(theirs.fileno()), str(settings))
            stdin, stdout, stderr = self._streams
            server = await self._spawner(
                ChildPlan(
                    argv=(self._python, *interpreter_flags(), "-u", _MAIN, *numbers),
                    env=self._env,
                    cwd=self._cwd,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(), settings),
                )
            )
        except BaseException:  # a cancellation too: nobody else knows the socket
            ours.close()
            raise
        finally:
            theirs.close()
            if settings >= 0:
                os.close(settings)
        self._link = _Link(server, ours)
        self._on_started(server.pid)

    async def __call__(self, plan: ChildPlan) -> Child:
        """Let the server fork one worker.

        Raises:
            SpawnError: it could not be started, or a module not be imported.
        """
        check_folder(plan)
        async with self._one_at_a_time:
            if self._link is None or self._link.is_lost:
                await self.start()
            assert self._link is not None, "start() has made it"
            await self._link.ready()
            return await self._link.fork(plan)

    async def aclose(self) -> None:
        """End the server and wait until it is gone.  May be started over."""
        if self._link is not None:
            await self._link.aclose()


class _Link:
    """The connection to one server process."""

    def __init__(self, server: Child, channel: socket.socket) -> None:
        self._server = server
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._asked: collections.deque[asyncio.Future[Child]] = collections.deque()
        self._workers: dict[int, _ServedChild] = {}
        self._said_last = "it has ended"
        channel.setblocking(False)
        self._loop.add_reader(channel, self._on_readable)

    def __repr__(self) -> str:
        return f"<link to {self._server}, {len(self._workers)} workers>"

    @property
    def is_lost(self) -> bool:
        return self._channel.fileno() < 0

    async def ready(self) -> None:
        if not self._ready.done():
            await asyncio.wait([self._ready])
        self._ready.result()

    async def fork(self, plan: ChildPlan) -> Child:
        try:
            request = memory_file("request")
        except SurroundingsError as error:
            raise SpawnError(str(error), permanent=False, exit_code=1) from error
        started: asyncio.Future[Child] = self._loop.create_future()
        self._asked.append(started)
        try:
            with open(request, "wb") as file:  # noqa: ASYNC230  # in memory
                said = {
                    "argv": list(plan.argv),
                    "env": dict(plan.env),
                    "cwd": plan.cwd,
                    "numbers": list(plan.pass_fds),
                }
                file.write(pickle.dumps(said))
                file.flush()
                streams = (plan.stdin, plan.stdout, plan.stderr)
                socket.send_fds(self._channel, [b"R"], [request, *streams, *plan.pass_fds])
        except OSError as error:
            self._asked.remove(started)
            raise spawn_error(error, plan) from error
        try:
            return await started
        except OSError as error:
            raise spawn_error(error, plan) from error

    async def aclose(self) -> None:
        self._server.send_signal(signal.SIGKILL)
        if not self._server.exited.done():
            await asyncio.wait([self._server.exited])
        self._lose()

    def _on_readable(self) -> None:
        try:
            content, descriptors, _, _ = socket.recv_fds(
                self._channel, _MESSAGE_MAX, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            content, descriptors = b"", []
        if not content:
            self._lose()
            return
        self._heed(pickle.loads(content), descriptors)

    def _heed(self, words: tuple[Any, ...], descriptors: list[int]) -> None:
        match words:
            case ("ready",):
                self._ready.set_result(None)
            case ("failed", str(text)):
                self._said_last = text
            case ("started", int(pid)):
                child = self._workers[pid] = _ServedChild(pid, descriptors[0])
                asked = self._asked.popleft()
                if asked.cancelled():
                    child.send_signal(signal.SIGKILL)  # nobody else will ever stop it
                else:
                    asked.set_result(child)
            case ("refused", int(number)):
                asked = self._asked.popleft()
                if not asked.cancelled():
                    asked.set_exception(OSError(number, os.strerror(number)))
            case ("exited", int(pid), int(status), used):
                self._workers.pop(pid).reaped(status, resource.struct_rusage(used))

    def _lose(self) -> None:
        """Take the server for gone."""
        if self.is_lost:
            return
        self._loop.remove_reader(self._channel)
        self._channel.close()
        text = f"the server that forks workers is of no use: {self._said_last}"
        waits: list[asyncio.Future[Any]] = [self._ready, *self._asked]
        for waiting in waits:
            if not waiting.done():
                waiting.set_exception(SpawnError(text, permanent=True, exit_code=1))
                waiting.exception()  # marks it as seen: there may be nobody to ask
        self._asked.clear()
        for worker in self._workers.values():
            worker.watch()
        self._workers.clear()


class _ServedChild:
    """A worker that the server has forked and will reap."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self._pid = pid
        self._pidfd = pidfd
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return story(self)

    @property
    def pid(self) -> int:
        return self._pid

    def has_ended(self) -> bool:
        if self._pidfd < 0:
            return True
        waiting = select.poll()
        waiting.register(self._pidfd, select.POLLIN)
        return bool(waiting.poll(0))

    def send_signal(self, number: int) -> bool:
        # A zombie takes signals too, but no longer as a process that could heed one.
        return not self.has_ended() and sweep.send(self._pidfd, number)

    def reaped(self, wait_status: int, used: resource.struct_rusage) -> None:
        """Take the end from the server, which has reaped it."""
        os.close(self._pidfd)
        self._pidfd = -1
        code = os.waitstatus_to_exitcode(wait_status)
        status = ExitStatus.from_returncode(code)
        self.exited.set_result(Exit(status, time.monotonic(), usage_of(used)))

    def watch(self) -> None:
        """See the end by pidfd: the one who could tell the status is gone."""

        def ended() -> None:
            self._pidfd = -1  # the watch closes it
            self.exited.set_result(Exit(ExitStatus(), time.monotonic()))

        ExitWatch(self._pidfd, ended)
