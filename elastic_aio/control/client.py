"""The client of control sockets, with and without an event loop.

Commands do nothing else and load no asyncio: their waits block, so that `run_blocking` runs a
coroutine of this module in one step.  In a program the same coroutines wait in its event loop.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from signal import SIGKILL, pidfd_send_signal
from typing import Any, Final, TypeVar
from weakref import WeakSet

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.control import sockets
from elastic_aio.control.protocol import (
    AcceptedReply,
    AwaitEnd,
    ControlRequest,
    DoneReply,
    DumpReply,
    DumpStacks,
    EndReply,
    ErrorReply,
    EventReply,
    GetEvents,
    GetStatus,
    PreemptJob,
    ReloadJob,
    Reply,
    RestartJob,
    ScaleJob,
    SendSignal,
    StatusReply,
    StopJob,
    decode_reply,
    encode,
)
from elastic_aio.errors import AgentUnreachable, ControlError, JobNotFound
from elastic_aio.process import proc
from elastic_aio.process.rusage import with_usage
from elastic_aio.spec.checks import signal_number
from elastic_aio.status import Event, JobStatus
from elastic_aio.text import counted, error_reason, format_value, one_line, printable

NO_JOB: Final = "no job of this user runs on this host"
ANSWER_S: Final = 10.0
"""Seconds in which an agent reads a request."""

_ENDED: Final = "the job has ended: its control socket is gone"
_EARLY_S: Final = 0.002  # a timer of uvloop may fire a millisecond before its time
_DUMP_S: Final = 60.0
_NAMES_MAX: Final = 10
_PATIENCE_S: Final = 2.0
_LINE_MAX: Final = 64 << 20
_CHUNK: Final = 1 << 16

R = TypeVar("R", bound=Struct)
T = TypeVar("T")
Wait = Callable[[Sequence[int], float | None], Awaitable[None]]
"""Waits until a descriptor is readable; raises TimeoutError after so many seconds."""


async def wait_blocking(descriptors: Sequence[int], timeout: float | None) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    if not poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
        raise TimeoutError("timed out")


async def wait_in_loop(descriptors: Sequence[int], timeout: float | None) -> None:
    from elastic_aio.aio import wait_readable  # asyncio, which a command does without

    await wait_readable(descriptors, timeout)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose waits are `wait_blocking`: it never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("the coroutine waits for an event loop")


def iterate_blocking(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yield what an asynchronous generator yields whose waits are `wait_blocking`."""
    with suppress(StopAsyncIteration):
        while True:
            yield run_blocking(items.__anext__())


class RunningJob(Struct, frozen=True):
    """A job of this user on this host: its agent's socket and process, and its status.

    `status` is None if the agent does not answer: it is suspended, or very busy.  `is_local`: the
    processes of the job have the same pids here as for the agent.
    """

    path: str
    pid: int
    status: JobStatus | None
    is_local: bool = True

    def __str__(self) -> str:
        if self.status is None:
            return f"pid {self.pid} (does not answer)"
        return f"{one_line(self.status.run_id, 40)} (pid {self.pid})"


class Channel:
    """A connection to an agent, for one request; must be closed."""

    def __init__(self, path: str, wait: Wait) -> None:
        """Connect at once, or raise an OSError; BlockingIOError: too many clients wait for it."""
        self._wait = wait
        self._received = bytearray()
        self._yields = False  # a first reply may be there although the time is over
        with ExitStack() as undo:  # Ctrl-C too: no descriptor stays open
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.enter_context(self._socket)
            self._socket.connect(path)
            if not sockets.is_peer_allowed(self._socket):
                raise PermissionError(f"{path} is another user's")
            # A fork of the agent may hold the other end open.
            self.agent = sockets.open_peer(self._socket, path)
            """A pidfd of the agent, or -1."""
            if self.agent >= 0:
                undo.callback(os.close, self.agent)
            self._resources = undo.pop_all()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what was not answered.  Idempotent."""
        self._resources.close()

    def give_up(self) -> None:
        """End the connection for both sides; a `receive` that waits returns None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def pid(self) -> int:
        """Process id of the agent; 0 in another pid namespace."""
        return sockets.peer_of(self._socket)[0]

    def send(self, request: ControlRequest) -> None:
        """Send the request: the kernel has room for it.

        An agent that has refused the connection has said so already.
        """
        with suppress(BrokenPipeError):
            self._socket.sendall(encode(request))

    async def receive(self, timeout: float | None = None) -> Reply | None:
        """Return the next reply; None after the last reply, or if the agent was killed.

        Args:
            timeout: seconds; None waits without a limit.

        Cancellation: loses no reply.

        Raises:
            TimeoutError: there is none in time.
            OSError: the connection is lost.
            ControlError: the agent sends something else.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (end := self._received.find(b"\n")) < 0:
            chunk = await self._read(deadline)
            if not chunk:
                if self._received:
                    raise ControlError("the answer has no end")
                return None
            self._received += chunk
            if len(self._received) > _LINE_MAX:
                raise ControlError("the answer is too long")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return decode_reply(line)

    async def _read(self, deadline: float | None) -> bytes:
        """Return what has arrived; nothing at the end of the connection, or of the agent."""
        watched = [number for number in (self._socket.fileno(), self.agent) if number >= 0]
        is_gone, waits = False, self._yields
        while True:
            if waits:
                await self._wait(watched, None if deadline is None else deadline - time.monotonic())
                is_gone = sockets.has_ended(self.agent)
            self._yields = waits = True  # so that a long answer does not block the event loop
            try:
                return self._socket.recv(_CHUNK)
            except BlockingIOError:
                if is_gone:
                    return b""


class JobClient:
    """What another process of this user can ask of a job, at its agent's control socket.

    Each request has a connection of its own, so several can be made at the same time.  Its methods
    raise AgentUnreachable if the agent has not read the request in time, and so will not perform
    it, or if the connection is lost; ControlError if the agent refuses the request.

    Cancellation: a request that the agent has read is performed.
    """

    _wait = staticmethod(wait_in_loop)

    def __init__(self, job: RunningJob, *, timeout: float = ANSWER_S) -> None:
        """Prepare; nothing is sent.  The agent has `timeout` seconds to read each request."""
        self.job = job
        self._timeout = timeout
        self._channels: WeakSet[Channel] = WeakSet()

    def __repr__(self) -> str:
        return f"<JobClient of {self.job}>"

    def close(self) -> None:
        """Give up the requests that are not answered.  Idempotent."""
        for channel in self._channels:
            channel.give_up()

    async def status(self, *, usage: bool = True, makes_files: bool = False) -> JobStatus:
        """Return the present status.

        Args:
            usage: read what the workers have used, if they are processes of this pid namespace.
            makes_files: each captured stream has its file from now on, also an empty stream.
        """
        async with self._request(GetStatus(makes_files=makes_files)) as channel:
            reply = await self._receive(channel, self._timeout, StatusReply)
            is_local = channel.pid == reply.status.agent_pid
        return with_usage(reply.status) if usage and is_local else reply.status

    async def events(self, after: int = -1, *, follow: bool = False) -> AsyncGenerator[Event, None]:
        """Iterate over the events after the number `after`; with `follow` to the end of the job."""
        from elastic_aio.event_json import event_from_fields  # most requests read no event

        async with self._request(GetEvents(after=after, follow=follow)) as channel:
            limit = None if follow else self._timeout
            while True:
                reply = await self._receive(channel, limit, EventReply, DoneReply)
                if not isinstance(reply, EventReply):
                    break
                yield event_from_fields(reply.event)

    async def stop(
        self,
        reason: str = "",
        *,
        signal: int | str | None = None,
        kill: bool = False,
        wait: bool = True,
        child: str = "",
    ) -> EndReply | None:
        """End the job by its stop plan; return how it has ended, None of a child.

        Args:
            reason: for the events and the result.
            signal: number or name; replaces the first signal of the plan.
            kill: end all processes at once.
            wait: wait for the end; otherwise return None when the stop has begun.
        """
        number = None if signal is None else signal_number("signal", signal)
        request = StopJob(reason=reason, signal=number, kill=kill, wait=wait, child=child)
        if wait and not child:
            return await self._ask(request, EndReply)
        await self._ask(request, DoneReply, None if wait else self._timeout)
        return None

    async def kill_launcher(self) -> bool:
        """Kill the launcher of an agent that does not answer; its guardian ends the workers.

        Returns whether it has ended in time; False too if it is in another pid namespace.

        Raises:
            ControlError: it is another program than a command of this package, which may have
                other jobs and other work.
        """
        deadline = time.monotonic() + self._timeout
        with self._connected() as channel:
            if not sockets.is_of_own_process(self.job.path):
                program, pid = proc.name_of(channel.pid), self.job.pid
                problem = "may have other jobs, and is not killed"
                raise ControlError(f"its launcher, {program}, {problem} (kill -9 {pid} does)")
            with ExitStack() as stack, suppress(OSError):
                ending = [channel.agent]
                for child in proc.list_children(channel.pid):  # the guardian too
                    with suppress(ProcessLookupError):
                        ending.append(os.pidfd_open(child))
                        stack.callback(os.close, ending[-1])
                pidfd_send_signal(channel.agent, SIGKILL)
                for pidfd in ending:
                    await self._wait([pidfd], deadline - time.monotonic())
            return sockets.has_ended(channel.agent)

    async def restart(self, reason: str = "", *, child: str = "") -> bool:
        """Replace the present attempt; True once another one runs, False if the job has ended."""
        return (await self._ask(RestartJob(reason=reason, child=child), DoneReply)).is_done

    async def reload(self, child: str = "") -> bool:
        """Start the workers of a child anew, one after the other; return whether all were."""
        return (await self._ask(ReloadJob(child=child), DoneReply)).is_done

    async def scale(self, child: str, number: int) -> None:
        """Change the number of the workers of a child."""
        await self._ask(ScaleJob(child=child, number=number), DoneReply)

    async def preempt(self, seconds: float | None = None, reason: str = "") -> bool:
        """Give notice of a preemption in so many `seconds`; None: the seconds of the job's spec.

        False: a stop, or a notice before, leaves no more time.
        """
        request = PreemptJob(seconds=seconds, reason=reason)
        return (await self._ask(request, DoneReply, self._timeout)).is_done

    async def signal(
        self, signal: int | str, rank: int | None = None, *, child: str = ""
    ) -> DoneReply:
        """Send a signal to the worker `rank`, or to each worker of the node.

        Returns the `pids` that got it, and the `unhandled` ranks, which have no handler for it.
        """
        request = SendSignal(signal=signal_number("signal", signal), rank=rank, child=child)
        return await self._ask(request, DoneReply, self._timeout)

    async def dump(self, reason: str = "", *, child: str = "") -> DumpReply:
        """Return what all workers of the node are doing: the `text`, and the `path` of its file."""
        request = DumpStacks(reason=reason, child=child)
        return await self._ask(request, DumpReply, max(_DUMP_S, self._timeout))

    async def wait(self, timeout: float | None = None) -> EndReply:
        """Wait for the end of the job; return its `state`, `why`, and its `exit_code`.

        Raises:
            TimeoutError: it has not ended after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            return await self._ask(AwaitEnd(), EndReply, timeout)
        except AgentUnreachable:
            if deadline is None or time.monotonic() + _EARLY_S < deadline:
                raise
            raise TimeoutError(f"the job has not ended after {timeout:g} s") from None

    # ---------------------------------------------------------------- requests

    @contextmanager
    def _connected(self) -> Iterator[Channel]:
        """Yield a connection; its errors become those of this class."""
        try:
            with Channel(self.job.path, self._wait) as channel:
                self._channels.add(channel)
                yield channel
        except OSError as error:
            if isinstance(error, FileNotFoundError) or _has_closed(self.job.path, error):
                raise JobNotFound(_ENDED) from error
            raise AgentUnreachable(f"the agent does not answer: {error_reason(error)}") from error

    @asynccontextmanager
    async def _request(
        self, request: ControlRequest, timeout: float | None = None
    ) -> AsyncIterator[Channel]:
        """Send a request, and yield the connection when the agent has read it."""
        with self._connected() as channel:
            channel.send(replace(request, acknowledge=True))
            limit = self._timeout if timeout is None else min(timeout, self._timeout)
            await self._receive(channel, limit, AcceptedReply)
            yield channel

    async def _receive(self, channel: Channel, timeout: float | None, *kinds: type[R]) -> R:
        """Return the next reply, which is of one of these kinds."""
        reply = await channel.receive(timeout)
        if isinstance(reply, kinds):
            return reply
        if reply is None and _is_gone(self.job.path):
            raise JobNotFound(_ENDED)
        if reply is None:
            raise AgentUnreachable("the connection to the agent is lost")
        if isinstance(reply, ErrorReply):
            raise ControlError(reply.problem)
        raise ControlError("the agent has sent another kind of answer")

    async def _ask(self, request: ControlRequest, kind: type[R], timeout: float | None = None) -> R:
        """Return the answer to a request, which takes `timeout` seconds at most."""
        async with self._request(request, timeout) as channel:
            return await self._receive(channel, timeout, kind)


class CommandClient(JobClient):
    """The client of a command without an event loop: `run_blocking` runs its coroutines."""

    _wait = staticmethod(wait_blocking)

    @contextmanager
    def following(self, after: int) -> Iterator[Callable[[float], Event | None]]:
        """Yield a function that returns the next event, or None after so many seconds."""
        from elastic_aio.event_json import event_from_fields

        def following(seconds: float) -> Event | None:
            with suppress(TimeoutError):
                reply = run_blocking(self._receive(channel, seconds, EventReply))
                return event_from_fields(reply.event)
            return None

        request = self._request(GetEvents(after=after, follow=True))
        with run_blocking(request.__aenter__()) as channel:
            yield following


# ------------------------------------------------------------------ which jobs there are


@asynccontextmanager
async def connect(
    job: str | int | None = None, *, timeout: float = ANSWER_S
) -> AsyncIterator[JobClient]:
    """Find a job of this user on this host; its `JobClient` can be used in the block.

    Args:
        job: id of the run, pid of the launcher, what the workers run, or the path of a control
            socket; None is the only job.
        timeout: seconds in which the agent has to read each request.

    Raises:
        JobNotFound: there is no such job, or there are several.
    """
    is_path = isinstance(job, str) and job.endswith(sockets.SOCKET_SUFFIX)
    paths = [str(job)] if is_path else sockets.socket_paths(sockets.directories())
    jobs = await _look(paths, min(timeout, _PATIENCE_S), wait_in_loop)
    if is_path and not jobs:
        raise JobNotFound(f"no job is at this control socket (got {format_value(job)})")
    found = choose(jobs, None if job is None or is_path else str(job))
    client = JobClient(found, timeout=timeout)
    try:
        yield client
    finally:
        client.close()


async def list_jobs(patience: float = _PATIENCE_S) -> list[RunningJob]:
    """Return the jobs of this user on this host, by the time of their start.

    Sockets of launchers that were killed are removed.  All agents together have `patience` seconds
    to answer: one may be suspended.
    """
    return await _look(sockets.socket_paths(sockets.directories()), patience, wait_in_loop)


def find_jobs(patience: float = _PATIENCE_S) -> list[RunningJob]:
    """Return what `list_jobs` returns, in a program without an event loop."""
    return run_blocking(_look(sockets.socket_paths(sockets.directories()), patience, wait_blocking))


async def _look(paths: Sequence[str], patience: float, wait: Wait) -> list[RunningJob]:
    with ExitStack() as stack:
        channels: list[tuple[str, Channel | None]] = []
        for path in paths:
            try:
                channel = stack.enter_context(Channel(path, wait))
            except ConnectionRefusedError:
                _remove(path)
            except BlockingIOError:
                channels.append((path, None))
            except OSError:
                continue  # just closed, or another user's
            else:
                with suppress(OSError):
                    channel.send(GetStatus())
                channels.append((path, channel))
        deadline = time.monotonic() + patience
        jobs = [await _read_job(path, channel, deadline) for path, channel in channels]
    found = [job for job in jobs if job is not None]
    return sorted(found, key=lambda job: (job.status and job.status.started_at) or 0.0)


async def _read_job(path: str, channel: Channel | None, deadline: float) -> RunningJob | None:
    """Return the job behind a socket; None if it has ended."""
    named = sockets.named_pid(path)
    if channel is None:
        return RunningJob(path, named, None)
    try:
        reply = await channel.receive(max(0.0, deadline - time.monotonic()))
    except (OSError, ControlError) as error:
        if _has_closed(path, error):
            return None
        return RunningJob(path, channel.pid or named, None)
    if not isinstance(reply, StatusReply):
        # It has ended, or cannot answer: its package was removed, or it has too many clients.
        return None if reply is None else RunningJob(path, channel.pid or named, None)
    agent = reply.status.agent_pid or named
    return RunningJob(path, agent, reply.status, is_local=channel.pid == agent)


def _has_closed(path: str, error: Exception) -> bool:
    """Whether an agent has broken off since its job is over: it removes its socket before."""
    return isinstance(error, ConnectionError) and _is_gone(path)


def _is_gone(path: str) -> bool:
    return not os.path.lexists(path)


def _remove(path: str) -> None:
    with suppress(OSError):
        # `connect` takes any path; a socket of another program refuses until that listens.
        if sockets.has_agent_name(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def choose(jobs: Sequence[RunningJob], name: str | None, *, begins: bool = False) -> RunningJob:
    """Return the job of this name, or the only job, or raise JobNotFound; see `matches`."""
    found = matches(jobs, name, begins=begins)
    got = "" if name is None else f" (got {format_value(name)})"
    if len(found) == 1:
        return found[0]
    if not jobs:
        raise JobNotFound(NO_JOB + got)
    known = _names(found or jobs)
    ids, pids = {_run_id(job) for job in found}, {job.pid for job in found}
    if len(ids) == 1 and any(ids) and len(pids) == len(found):
        # Several nodes of one job on this host, or jobs of one id; not of one program.
        raise JobNotFound(f"{len(found)} launchers match: give the pid of one: {known}")
    if name is None:
        raise JobNotFound(f"must be given, {counted(len(jobs), 'job')} run here: {known}")
    is_begun = not found and matches(jobs, name, begins=True)
    missing = "must be a whole id or a pid" if is_begun else "no such job"
    problem = "matches several: " if found else f"{missing}; running here: "
    raise JobNotFound(f"{problem}{known}{got}")


def _names(jobs: Sequence[RunningJob]) -> str:
    """Return the names of the jobs, the latest of many."""
    left_out = len(jobs) - _NAMES_MAX
    more = [f"and {left_out} more"] if left_out > 0 else []
    return "; ".join([*map(str, jobs[-_NAMES_MAX:]), *more])


def matches(
    jobs: Sequence[RunningJob], name: str | None, *, begins: bool = False
) -> list[RunningJob]:
    """Return the jobs that a name may mean: exact matches, else what the workers run.

    With `begins` it may also be the beginning of a run id.  That is no name for a request: where
    the job `a` has just ended, `stop a` must not stop `a2`.
    """
    if name is None:
        return list(jobs)
    if not name:
        return []
    begins = begins and not _is_short_number(name)
    exact = [job for job in jobs if name in (str(job.pid), _run_id(job), printable(_run_id(job)))]
    programs = [(job, job.status.entrypoint) for job in jobs if job.status is not None]
    named = [job for job, path in programs if name in (path, os.path.basename(path))]
    return exact or named or [job for job in jobs if begins and _run_id(job).startswith(name)]


def _is_short_number(name: str) -> bool:
    """Return whether a name may be a rank: it is not the beginning of an id of a run then."""
    return name.isdecimal() and len(name) < 4


def _run_id(job: RunningJob) -> str:
    return "" if job.status is None else job.status.run_id
