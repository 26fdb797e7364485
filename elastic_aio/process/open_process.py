"""One program with all that it starts, as an `async with` block: `open_process`.

It is the layer below a job: a child with pipes, the tree of its descendants, and the guardian.
There are no ranks, no restarts, no events and no log files.

The order of closing: standard input; the tree is stopped; the other streams, so that a process
which prints while it stops gets no SIGPIPE; the guardian leaves the process alone, and ends after
the last one of the program.  Until then it would end the tree if this program were killed.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from subprocess import DEVNULL, PIPE, STDOUT
from types import TracebackType
from typing import IO, Any, Self

from anyio import BrokenResourceError, BusyResourceError, ClosedResourceError, EndOfStream
from anyio.abc import ByteReceiveStream, ByteSendStream
from anyio.lowlevel import checkpoint

from elastic_aio import aio
from elastic_aio.errors import HostError, SpecError
from elastic_aio.outcome import ExitStatus
from elastic_aio.process.children import Child, ChildSpec, check_sigchld, spawn_with_popen
from elastic_aio.process.descendants import marker_value
from elastic_aio.process.descriptors import StandardStreams, limit, with_descriptor_limit
from elastic_aio.process.guardian import Guardian
from elastic_aio.process.guardian_process import GuardedJob
from elastic_aio.process.tree import ProcessTree
from elastic_aio.spec import checks
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import error_reason
from elastic_aio.worker.context import NOTIFY_FD

_DEFAULT_STOP = StopPlan.within(5)
# Seconds for which a process may end by itself at the end of its input, as a client of MCP has it.
_EOF_S = 2.0
# Reads of a pipe that is drained, before other tasks run: a megabyte.
_READS = 16
_CHUNK = 65536
_DESCRIPTOR_MAX = (1 << 31) - 1


def open_process(
    argv: Sequence[str | os.PathLike[str]],
    *,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    stop: StopPlan | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    pass_fds: Sequence[int] = (),
    python: str | None = None,
) -> Process:
    """Return a process for an `async with` block, which starts it and stops its whole tree.

    The tree is gone when the block is left: by its end, an exception, or a cancellation; and if
    this program is killed, its guardian ends the tree.

    Args:
        argv: the program and its arguments; no shell.
        stdin: what it reads: `PIPE` or `DEVNULL` of `subprocess`, a descriptor, a file, or None for
            that of this program.
        stdout: what it writes to, likewise.
        stderr: the same; or `STDOUT`.
        stop: how the tree is stopped; None: SIGTERM, 5 seconds, SIGKILL.  If `stdin` is a pipe, its
            end comes before the steps: `EOF 2 s`, or the grace of the first step if shorter.
        env: all its variables; None: those of this program.
        cwd: its working directory; None: that of this program.
        pass_fds: descriptors that it inherits under their numbers.
        python: an interpreter for the guardian, in case this program is not run by one.

    Cancellation: of the block stops the tree first.

    Raises:
        SpecError: an argument is wrong.
        SpawnError: (in the block) the program cannot be executed.
        HostError: (in the block) this program or host lacks something.
    """
    words = [
        os.fspath(word) if isinstance(word, os.PathLike) else word
        for word in checks.checked_items("argv", argv)
    ]
    if not words or not words[0]:
        raise SpecError("argv", argv, "must begin with a program")
    if stop is not None and not isinstance(stop, StopPlan):
        raise SpecError("stop", stop, "must be a StopPlan")
    for name, stream in ("stdin", stdin), ("stdout", stdout), ("stderr", stderr):
        _check_stream(name, stream)
    _parts_of(stop or _DEFAULT_STOP, has_pipe=stdin == PIPE)
    return Process(
        tuple(checks.checked_text("argv", word) for word in words),
        streams=(stdin, stdout, stderr),
        plan=stop or _DEFAULT_STOP,
        env=None if env is None else checks.checked_texts("env", env),
        cwd=None if cwd is None else checks.checked_path("cwd", cwd),
        pass_fds=tuple(
            _checked_descriptor(one) for one in checks.checked_items("pass_fds", pass_fds)
        ),
        python=python,
    )


def _parts_of(plan: StopPlan, *, has_pipe: bool) -> tuple[float | None, StopPlan]:
    """Return for how long a process may end at the end of its input, if at all, and the signals."""
    if not has_pipe:
        return None, plan.checked_without_pipe()
    if plan.closes_input:
        eof, *signals = plan.steps
        return eof.grace, plan.replace(steps=signals)
    return min([_EOF_S, plan.steps[0].grace]) if plan.steps else None, plan


def _checked_descriptor(value: object) -> int:
    number = checks.checked_integer("pass_fds", value, at_least=0)
    if not os.path.lexists(f"/proc/self/fd/{number}"):
        raise SpecError("pass_fds", value, "must be open descriptors")
    return number


def _check_stream(name: str, value: object) -> None:
    number = value
    with suppress(OSError, ValueError):  # it is closed, or has none
        number = value.fileno() if hasattr(value, "fileno") else value
    special = {"PIPE": PIPE, "DEVNULL": DEVNULL, **({"STDOUT": STDOUT} if name == "stderr" else {})}
    is_descriptor = checks.is_integer(number) and (
        0 <= number <= _DESCRIPTOR_MAX or number in special.values()
    )
    if number is not None and not is_descriptor:
        known = ", ".join(special)
        raise SpecError(name, value, f"must be a descriptor, a file, {known} or None")


def _descriptor_of(value: int | IO[Any] | None) -> int | None:
    return value if value is None or isinstance(value, int) else value.fileno()


class Process:
    """A running program with its tree; made by `open_process`."""

    def __init__(
        self,
        argv: tuple[str, ...],
        *,
        streams: Sequence[int | IO[Any] | None],
        plan: StopPlan,
        env: Mapping[str, str] | None,
        cwd: str | None,
        pass_fds: tuple[int, ...],
        python: str | None,
    ) -> None:
        self.stdin: PipeSendStream | None = None
        """What it reads, if that is a pipe; `aclose` ends it."""
        self.stdout: PipeReceiveStream | None = None
        """What it writes, if that is a pipe.  What is not read when the block ends is dropped."""
        self.stderr: PipeReceiveStream | None = None
        """The same."""
        self._argv = argv
        self._streams = streams  # a file that only the caller's expression had must stay open
        self._plan = plan
        self._env = env
        self._cwd = cwd
        self._pass_fds = tuple(one for one in pass_fds if one > 2)  # the others are `streams`
        self._python = python
        self._fork = aio.ForkGuard()
        self._is_entered = False
        self._child: Child | None = None
        self._tree: ProcessTree | None = None
        self._guardian: Guardian | None = None
        self._job: GuardedJob | None = None

    def __repr__(self) -> str:
        return f"<Process {self._argv[0]}: {self._child or 'not started'}>"

    async def __aenter__(self) -> Self:
        aio.running_loop()
        check_sigchld()
        if self._is_entered:
            raise RuntimeError("a process is started once; call open_process again")
        self._is_entered = True
        self._fork = aio.ForkGuard()
        self._clock = aio.PausableClock()
        self._stopping = asyncio.Lock()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        aio.separate_in_forks(self._closed)
        try:
            await self._open()
        except BaseException:  # a cancellation too
            await aio.run_shielded(self._close)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._fork.is_copy:
            await aio.run_shielded(self._close)

    # ---------------------------------------------------------------- while it runs

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its session."""
        return self._started.pid

    @property
    def status(self) -> ExitStatus | None:
        """How it has ended; None while it runs."""
        child = self._started
        return child.exited.result().status if child.exited.done() else None

    @property
    def returncode(self) -> int | None:
        """The same in `subprocess`'s convention: a code, or minus a signal.

        It is 255 if another part of this program has reaped the process, as asyncio says it.
        """
        status = self.status
        if status is None:
            return None
        return 255 if status.returncode is None else status.returncode

    async def wait(self) -> int:
        """Wait for the end of the process itself, whatever it leaves behind; return `returncode`.

        Cancellation: leaves it running.
        """
        await asyncio.wait([self._started.exited])
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signal: int | str) -> bool:
        """Send a signal to the process itself, by number or name; return whether it still ran."""
        return self._started.send_signal(checks.signal_number("signal", signal))

    async def stop(self, plan: StopPlan | None = None) -> None:
        """Stop the process and all that it has started, by another plan if one is given.
        Returns when nothing is left, or only what SIGKILL does not end.  Idempotent.

        Cancellation: leaves processes running; the end of the block stops them.
        """
        assert self._tree is not None, "the block comes first"
        assert self._guardian is not None
        eof, plan = _parts_of(plan or self._plan, has_pipe=self.stdin is not None)
        async with self._stopping:
            if eof is not None and self.stdin is not None:
                self.stdin.close()
                await self._clock.wait_for(self._started.exited, seconds=eof)
            survivors = await self._tree.stop(plan, lambda number, pids: None)
            can_help = any(not survivor.is_denied for survivor in survivors)
            if can_help and await self._guardian.end_job():
                survivors = await self._tree.wait_reaped(plan.reap_timeout)
        for one in survivors:
            program = one.program or self._argv[0]
            _warn(f"process {one.pid} ({program}) cannot be killed: state {one.state}")

    @property
    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("the process is not started: use `async with open_process(...)`")
        return self._child

    # ---------------------------------------------------------- open and close

    async def _open(self) -> None:
        _, plan = _parts_of(self._plan, has_pipe=self._streams[0] == PIPE)
        job = self._job = GuardedJob.create(plan)
        self._tree = ProcessTree(job.marker, self._clock, job.sessions, since=job.since)
        self._guardian = Guardian(
            job, plan, on_restarted=lambda pid: None, on_lost=_warn, python=self._python
        )
        self._guardian.start()
        await self._guardian.wait_ready()
        with ExitStack() as opened:
            try:
                standard = StandardStreams()
                opened.callback(standard.close)
                ends = self._open_ends(standard, opened)
            except OSError as error:
                raise HostError(f"cannot open a pipe: {error_reason(error)}") from error
            with self._tree.starting():
                self._child = await spawn_with_popen(self._child_spec(job, ends))
            self._tree.add(self._child)
        self._streams = ()
        self._keep_pipes()

    def _child_spec(self, job: GuardedJob, ends: tuple[int, int, int]) -> ChildSpec:
        inherited = {name: value for name, value in os.environ.items() if name != NOTIFY_FD}
        env = {**(inherited if self._env is None else self._env), job.marker: marker_value()}
        spec = ChildSpec(self._argv, env, self._cwd, *ends, self._pass_fds)
        return with_descriptor_limit(spec, limit.original)

    def _open_ends(self, standard: StandardStreams, opened: ExitStack) -> tuple[int, int, int]:
        """Return the descriptors that the process gets, which `opened` closes."""
        ends: list[int] = []
        for number, value in enumerate(map(_descriptor_of, self._streams)):
            if value is None:
                ends.append(standard.inherited(number))
            elif value == DEVNULL:
                ends.append(standard.null)
            elif value == STDOUT:
                ends.append(ends[1])
            elif value == PIPE:
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ends.append(writer if number else reader)
                opened.callback(os.close, ends[-1])
                if number:
                    stream = PipeReceiveStream(reader, self._keep_pipes)
                    setattr(self, "stdout" if number == 1 else "stderr", stream)
                else:
                    self.stdin = PipeSendStream(writer)
            else:
                ends.append(value)
        return ends[0], ends[1], ends[2]

    def _keep_pipes(self) -> None:
        """Let the guardian read what is printed while it ends the tree."""
        if self._job is not None:
            streams = (self.stdout, self.stderr)
            kept = [one.descriptor for one in streams if one is not None and one.descriptor >= 0]
            self._job.keep_pipes(kept)

    async def _close(self) -> None:
        """Stop the tree and release everything.  Idempotent."""
        received = [one for one in (self.stdout, self.stderr) if one is not None]
        if self._child is not None:
            for stream in received:
                stream.drop()  # a process may print while it stops
            await self.stop()
        for each in (*received, self.stdin):
            if each is not None:
                each.close()
        if self._guardian is not None:
            await self._guardian.aclose()
        if self._tree is not None:
            await self._tree.aclose()
        job, self._job = self._job, None
        if job is not None:
            job.close()
        aio.set_result_if_pending(self._closed, None)


def _warn(why: str) -> None:
    warnings.warn(why, RuntimeWarning, stacklevel=2)


# ------------------------------------------------------------------------- the streams


class _Pipe:
    """An end of a pipe, for which one task at a time waits."""

    def __init__(self, descriptor: int, on_closed: Callable[[], object] = bool) -> None:
        """Take over a descriptor; `on_closed` is called when it is closed."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        """-1 once it is closed."""
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def _check(self, action: str) -> None:
        if self._waiter is not None:
            raise BusyResourceError(action)
        if self.descriptor < 0:
            raise ClosedResourceError

    async def _wait(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        """Wait until the loop calls what is added for this descriptor, or raise
        ClosedResourceError."""
        waiter = self._waiter = self._loop.create_future()
        descriptor = self.descriptor
        add(descriptor, aio.set_result_if_pending, waiter, None)
        try:
            await waiter
        finally:
            self._waiter = None
            if self.descriptor >= 0:
                remove(descriptor)

    async def aclose(self) -> None:
        """Close this end: a process that writes gets SIGPIPE, and a reader the end of the file.

        Idempotent.
        """
        self.close()
        await checkpoint()

    def close(self) -> None:
        """Close the descriptor, and wake the task that waits for it.  Idempotent."""
        if self.descriptor < 0:
            return
        descriptor, self.descriptor = self.descriptor, -1
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        os.close(descriptor)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ClosedResourceError())
        self._on_closed()


class PipeReceiveStream(_Pipe, ByteReceiveStream):
    """What a process writes to a pipe.

    Cancellation: of `receive` loses no bytes.
    """

    async def receive(self, max_bytes: int = _CHUNK) -> bytes:
        """Return the next bytes, 1 to `max_bytes`.

        Raises:
            EndOfStream: no process holds the other end open.
            ClosedResourceError: this end is closed.
            BusyResourceError: another task receives.
        """
        if max_bytes < 1:
            raise ValueError(f"max_bytes: must be at least 1 (got {max_bytes})")
        await checkpoint()
        while True:
            self._check("receiving from")
            try:
                content = os.read(self.descriptor, max_bytes)
            except BlockingIOError:
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
                continue
            if not content:
                raise EndOfStream
            return content

    def drop(self) -> None:
        """Read all that comes from now on, so that no process waits, unless a task receives."""
        if self.descriptor >= 0 and self._waiter is None:
            self._loop.add_reader(self.descriptor, self._on_readable)

    def _on_readable(self) -> None:
        try:
            for _ in range(_READS):
                if not os.read(self.descriptor, _CHUNK):
                    self.close()
                    return
        except BlockingIOError:
            return


class PipeSendStream(_Pipe, ByteSendStream):
    """What a process reads from a pipe.

    Cancellation: of `send` may leave a part of the bytes sent.
    """

    async def send(self, item: bytes) -> None:
        """Return when the pipe has taken all bytes.

        Raises:
            BrokenResourceError: no process holds the other end open.
            ClosedResourceError: this end is closed.
            BusyResourceError: another task sends.
        """
        self._check("sending to")
        await checkpoint()
        left = memoryview(item)
        while left:
            self._check("sending to")
            try:
                left = left[os.write(self.descriptor, left) :]
            except BlockingIOError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
            except BrokenPipeError as error:
                raise BrokenResourceError from error

    async def send_eof(self) -> None:
        """Close the pipe: the process reads its end.  Idempotent."""
        await self.aclose()
