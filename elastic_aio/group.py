"""Groups of processes without a restart policy, for programs with an event loop.

`BareGroup` runs one attempt of workers that differ by rank, with the guardian, the process tree,
descriptors for output and memory files for results, as `launch` does.  The rest of this module
gives it two interfaces of torch: `start_processes`, and `spawn`.  `elastic_aio.multiprocessing`
exports them; `elastic_aio.sync` has them for scripts.
"""

from __future__ import annotations

import asyncio
import os
import signal as signals
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_aio.agent.agent import driver_of, make_agent
from elastic_aio.agent.driver import Driver
from elastic_aio.agent.entrypoint import BareOptions
from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.agent.worker_group import WorkerGroup
from elastic_aio.aio import Notifier, run_shielded, running_loop, wait_shielded
from elastic_aio.errors import SpecError
from elastic_aio.events import WorkerExited
from elastic_aio.launcher import handle_signals
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.outcome import Failure, signal_name
from elastic_aio.process.calls import CallResult
from elastic_aio.signals import ReceivedSignals
from elastic_aio.spec.checks import checked_console, checked_integer, checked_items
from elastic_aio.spec.job import Command, Function, LaunchSpec, NumaMode, StartMethod
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.stop import DEFAULT_GRACE, SignalSpec, StopPlan, StopStep

_SPAWN_GRACE_S = 30.0  # as in torch's `spawn`


# ------------------------------------------------------------------------ the group


class BareGroup:
    """The processes of one group, run by an `Agent`; must be stopped once it was started."""

    def __init__(
        self, spec: LaunchSpec, options: BareOptions, *, console: ConsoleTarget | None = None
    ) -> None:
        """Prepare the workers of `spec`; nothing is started."""
        self.name = spec.role
        self.local_ranks: Sequence[int] = range(int(spec.nproc_per_node))
        self._is_entered = False
        self._driver: Driver | None = None
        changed = self._changed = Notifier()
        listeners = self._exit_listeners = list[Callable[[WorkerExited], None]]()
        exited = self._exited = set[int]()

        def notify(change: object) -> None:
            # Without a reference to this object, which may be collected.
            changed.notify_all()
            if isinstance(change, WorkerExited):
                exited.add(change.local_rank)
                for listener in listeners:
                    listener(change)

        self._notify = notify
        self._agent = make_agent(spec, console=console, listeners=[notify], bare=options)

    def __repr__(self) -> str:
        exited, count = len(self.exited()), len(self.records)
        return f"<BareGroup {self.name}: {exited} of {count} have exited>"

    async def start(self) -> None:
        if self._is_entered:
            raise ValueError("a group of processes is started once; make another one")
        self._is_entered = True
        await self._agent.__aenter__()
        driver = driver_of(self._agent)
        assert isinstance(driver, Driver), "it is no group of jobs"
        self._driver = driver
        self.done.add_done_callback(self._notify)
        try:
            await self._wait_until(
                lambda: len(self.records) == len(self.local_ranks) or self._workers.start_error
            )
            if error := self._workers.start_error:
                raise error
        except BaseException:  # a cancellation too: started workers must not stay
            await self._agent.__aexit__(None, None, None)
            raise

    def on_exit(self, listener: Callable[[WorkerExited], None]) -> None:
        self._exit_listeners.append(listener)

    def send_signal(self, local_rank: int, number: int) -> None:
        self._running.send(number, self.records[local_rank].pid)

    async def handle_signals(
        self, received: ReceivedSignals, on_stop: Callable[[int], object]
    ) -> None:
        """Stop the workers by the group's plan at each received signal (see `launcher`)."""
        await handle_signals(self._agent, SignalSpec(forward=()), received, on_stop)

    # --------------------------------------------------------------- questions

    def check_started(self) -> None:
        if not self._is_entered:
            raise RuntimeError("not started: use `async with start_processes(...)`")

    @property
    def done(self) -> asyncio.Future[None]:
        """Done when nothing of the started group is left."""
        return self._running.done

    @property
    def is_over(self) -> bool:
        return self._driver is not None and self._driver.done.done()

    @property
    def records(self) -> dict[int, WorkerRecord]:
        driver = self._driver
        return {} if driver is None or driver.group is None else driver.group.records

    def pids(self) -> dict[int, int]:
        return {local_rank: record.pid for local_rank, record in self.records.items()}

    def exited(self) -> set[int]:
        """Return the local ranks of the workers whose exit has been published."""
        return {*self._exited}

    @property
    def calls(self) -> Mapping[int, CallResult]:
        """How the calls of functions ended, by local rank, once the group is over."""
        return self._workers.calls

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures, the root cause first, once the group is over."""
        if self._running.error is not None:
            raise self._running.error
        return self._workers.failures

    @property
    def return_values(self) -> dict[int, Any]:
        """What functions returned, None for programs; empty after a failure, once it is over."""
        if self.failures:
            return {}
        calls = self.calls
        return {rank: calls[rank].value if calls else None for rank in self.local_ranks}

    # ------------------------------------------------------------------- waits

    async def wait_exited(self, count: int, timeout: float | None) -> None:
        await self._wait_until(lambda: len(self.exited()) >= count or self.is_over, timeout)

    async def wait_over(self, timeout: float | None) -> bool:
        await self._wait_until(lambda: self.is_over, timeout)
        return self.is_over

    async def _wait_until(
        self, condition: Callable[[], object], timeout: float | None = None
    ) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not condition():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                await asyncio.sleep(0)  # exits that have happened may wait for a turn of the loop
                return
            await self._changed.wait(left)

    async def stop(self, plan: StopPlan | None = None) -> None:
        """Stop all processes by `plan`, or by the group's own, and release everything.

        Idempotent; does nothing before a start, or in a fork of the process that started it.
        Cancellation: raised after the group is over.
        """
        driver = self._driver
        if driver is None or driver.is_copy:
            return
        plan = plan and plan.checked_without_pipe()
        driver.is_left = True
        driver.request_stop("the group was stopped", plan=plan)
        await wait_shielded(driver.done)

    @property
    def _running(self) -> Driver:
        assert self._driver is not None, "it is started first"
        return self._driver

    @property
    def _workers(self) -> WorkerGroup:
        group = self._running.group
        assert isinstance(group, WorkerGroup), "the agent starts a group first"
        return group


# ------------------------------------------------------------------ start_processes


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """One process of a group that did not succeed, with torch's field names.

    `local_rank` and `pid` name the process.  `exitcode` is negative for signals; `error_file` and
    `message` are of the error it recorded; `timestamp` is Unix seconds; `failure` has all details.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    message: str
    timestamp: int
    failure: Failure

    def signal_name(self) -> str:
        """Return the name of the signal that killed it; `<N/A>` if it was not a signal."""
        if self.exitcode >= 0 or -self.exitcode not in set(signals.Signals):
            return "<N/A>"
        return signal_name(-self.exitcode)

    def timestamp_isoformat(self) -> str:
        """Return the local time in ISO 8601."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))


@dataclass(frozen=True, slots=True)
class RunProcsResult:
    """The result of a group, by local rank.

    `return_values` are from functions, None for programs; `failures` are the processes that failed;
    `stdouts` and `stderrs` are paths, empty if the stream was not captured.
    """

    # Not shown: see `LaunchResult`.
    return_values: Mapping[int, Any] = field(default_factory=dict, repr=False)
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    stdouts: Mapping[int, str] = field(default_factory=dict)
    stderrs: Mapping[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Return whether a process has failed."""
        return bool(self.failures)


class GroupContext:
    """The processes of `start_processes`: an async context manager.

    Entering starts them; leaving stops those that still run, by SIGTERM and after 25 s SIGKILL.
    """

    def __init__(self, group: BareGroup) -> None:
        """Use `start_processes` to get one."""
        self.group = group
        self.name = group.name

    def __repr__(self) -> str:
        return f"<GroupContext {self.group!r}>"

    async def __aenter__(self) -> GroupContext:
        """Start all processes; after an error or a cancellation none is left.

        Raises:
            SpecError: a setting does not fit, or something cannot be pickled.
            SpawnError: one could not be started.
            HostError: this host lacks something.
        """
        await self.group.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.group.stop()

    async def wait(self, timeout: float | None = None) -> RunProcsResult | None:
        """Wait until all have succeeded, or one has failed and the others are stopped.

        Cancellation: the processes go on.

        Args:
            timeout: seconds; None and negative numbers wait without limit, 0 does not wait.

        Returns:
            The result; None if the timeout has passed first.
        """
        self.group.check_started()
        limit = None if timeout is None or timeout < 0 else timeout
        return self._result() if await self.group.wait_over(limit) else None

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return self.group.pids()

    async def close(self, signal: int = signals.SIGTERM, timeout: float = DEFAULT_GRACE) -> None:
        """Stop the processes that still run: `signal`, and after `timeout` seconds SIGKILL."""
        self.group.check_started()
        await self.group.stop(StopPlan((StopStep(signal, timeout),)))

    def _result(self) -> RunProcsResult:
        group = self.group
        logs = {rank: record.logs for rank, record in group.records.items()}
        return RunProcsResult(
            return_values=group.return_values,
            failures={one.local_rank: _process_failure(one) for one in group.failures},
            stdouts={rank: log.stdout.path or "" for rank, log in logs.items()},
            stderrs={rank: log.stderr.path or "" for rank, log in logs.items()},
        )


def _process_failure(failure: Failure) -> ProcessFailure:
    code = failure.status.returncode
    error = failure.error
    message = error.message if error else failure.message
    if not message:
        status = failure.status
        message = (
            f"Signal {status.signal} ({signal_name(status.signal)}) received by PID {failure.pid}"
            if status.signal is not None
            else f"Process {failure.pid} ended with {status}"
        )
    return ProcessFailure(
        local_rank=failure.local_rank,
        pid=failure.pid or -1,
        exitcode=255 if code is None else code,
        error_file=(error and error.path) or "<N/A>",
        message=message,
        timestamp=int(failure.time),
        failure=failure,
    )


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str | Sequence[str],
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    logs: LogSpec | None = None,
    *,
    start_method: StartMethod = "spawn",
    preload: Sequence[str] = (),
    numa_binding: NumaMode | None = None,
    console: ConsoleTarget | None = None,
) -> GroupContext:
    """Prepare a group of processes; `async with` starts it.

    Args:
        name: of the group; also the role in the prefixes of lines.
        entrypoint: a function; or a program, alone or with its first arguments.
        args: arguments by local rank, 0 to n-1; converted to text for a program.
        envs: variables by local rank, which override the inherited environment.
        logs: where output goes; None leaves the streams inherited.
        start_method, numa_binding: as in `LaunchSpec`.
        preload: modules that the fork server imports.
        console: where output is shown, see `ConsoleTarget`; None is this process's own stdout and
            stderr.

    Raises:
        SpecError: the ranks of `args` or `envs` are not 0 to n-1, and other settings.
    """
    count = len(args)
    _check_ranks("args", args, count)
    _check_ranks("envs", envs, count)
    target: Function | Command
    own_args: list[tuple[Any, ...]] = [
        tuple(checked_items(f"args[{rank}]", args[rank])) for rank in range(count)
    ]
    if isinstance(entrypoint, (str, list, tuple)):
        target = Command((entrypoint,) if isinstance(entrypoint, str) else tuple(entrypoint))
        own_args = [tuple(map(str, row)) for row in own_args]
    elif callable(entrypoint):
        target = Function(entrypoint)
    else:
        raise SpecError("entrypoint", entrypoint, "must be a function or a program")
    own_envs = tuple(LaunchSpec(["true"], env=envs[rank]).env for rank in range(count))
    spec = LaunchSpec(
        target,
        nproc_per_node=count,
        role=name,
        logs=logs,
        run_id=name or None,
        start_method=start_method,
        preload=preload,
        numa_binding=numa_binding,
        worker_args=own_args,
        worker_env=own_envs,
    )
    return GroupContext(BareGroup(spec, BareOptions(), console=checked_console(console)))


def _check_ranks(field: str, by_rank: Mapping[int, Any], count: int) -> None:
    expected = set(range(count))
    if not by_rank or set(by_rank) != expected:
        missing = sorted(expected - set(by_rank))
        unknown = sorted(set(by_rank) - expected, key=repr)
        details = [f"missing: {missing}"] if missing else []
        details += [f"unknown: {unknown}"] if unknown else []
        ranks = f"0 to {count - 1}" if count else "from 0"
        problem = "; ".join([f"must name the local ranks {ranks}", *details])
        raise SpecError(field, sorted(by_rank, key=repr), problem)


# ---------------------------------------------------------------------------- spawn


class ProcessException(Exception):
    """A process of `spawn` has failed.

    `error_index` is its index, `error_pid` its process id (`pid` in older versions of torch).
    """

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = self.pid = error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """A process's function has raised an Exception; the message holds its traceback."""


class ProcessExitedException(ProcessException):
    """A process has exited; `exit_code` is negative for a signal, which `signal_name` names."""

    def __init__(
        self,
        msg: str,
        error_index: int,
        error_pid: int,
        exit_code: int,
        signal_name: str | None = None,
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)
        return type(self), args


class ProcessContext:
    """The processes of `spawn(..., join=False)`.

    Call `join` until it returns True or raises.  As an async context manager it stops the processes
    that still run at the end of the block.
    """

    def __init__(self, group: BareGroup, on_terminate: Callable[[int], None] | None = None) -> None:
        """Use `spawn` to get one; `on_terminate` gets the pids that a failed `join` stops."""
        self._group = group
        self._joined: set[int] = set()
        self._on_terminate = on_terminate

    def __repr__(self) -> str:
        return f"<ProcessContext {self._group!r}>"

    @property
    def is_over(self) -> bool:
        """Whether all processes have exited and all resources are released."""
        return self._group.is_over

    @property
    def joined(self) -> frozenset[int]:
        """Indexes of the processes that `join` has seen to exit."""
        return frozenset(self._joined)

    async def __aenter__(self) -> ProcessContext:
        """Return the context; its processes run already."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the processes that still run and release everything.  Idempotent."""
        await self._group.stop()

    def pids(self) -> list[int]:
        """Return the process ids in order."""
        return [pid for _, pid in sorted(self._group.pids().items())]

    async def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until at least one more process has exited, or the timeout has passed.

        After a failure the other processes are stopped and its exception is raised.

        Cancellation: the processes go on.

        Args:
            timeout: seconds; None waits without limit.
            grace_period: after a failure, seconds in which the others may exit by themselves before
                SIGTERM, and again as many before SIGKILL; None sends SIGTERM at once and SIGKILL
                after 30 seconds.

        Returns:
            True if all have exited, False if some still run.

        Raises:
            ProcessRaisedException: a function has raised.
            ProcessExitedException: a process exited with a code, or by a signal.
        """
        group = self._group
        if len(self._joined) == len(group.local_ranks):
            return True
        if not group.exited() - self._joined:
            await group.wait_exited(len(self._joined) + 1, timeout)
        for rank in sorted(
            group.exited() - self._joined, key=lambda rank: group.records[rank].order
        ):
            self._joined.add(rank)
            if not group.records[rank].status.is_success:
                await run_shielded(lambda: self._stop(grace_period))
                raise self._exception(rank)
        if len(self._joined) < len(group.local_ranks):
            return False
        await self._group.stop()
        return True

    async def _stop(self, grace_period: float | None) -> None:
        if grace_period is not None:
            await self._group.wait_exited(len(self._group.local_ranks), grace_period)
        if self._on_terminate is not None:
            for rank in sorted(self._group.records.keys() - self._group.exited()):
                self._on_terminate(self._group.records[rank].pid)
        grace = _SPAWN_GRACE_S if grace_period is None else grace_period
        self._joined.update(self._group.local_ranks)
        await self._group.stop(StopPlan((StopStep(signals.SIGTERM, grace),)))

    def _exception(self, rank: int) -> ProcessException:
        group = self._group
        pid, status = group.records[rank].pid, group.records[rank].status
        result = group.calls[rank]
        if result.is_exception and result.error is not None:
            text = f"\n\n-- Process {rank:d} terminated with the following error:\n"
            return ProcessRaisedException(text + (result.error.traceback or ""), rank, pid)
        if status.signal is not None:
            number = status.signal
            is_known = number in set(signals.Signals)
            name = signals.Signals(number).name if is_known else f"<Unknown signal {number}>"
            text = f"process {rank:d} terminated with signal {name}"
            return ProcessExitedException(text, rank, pid, -number, name)
        code = 255 if status.code is None else status.code
        text = f"process {rank:d} terminated with exit code {code:d}"
        return ProcessExitedException(text, rank, pid, code)


async def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
) -> ProcessContext | None:
    """Run `fn(index, *args)` in `nprocs` new interpreters, as torch's `spawn` does.

    Another start method is ignored with a warning, as in torch; see `start_context` for the
    arguments and errors.

    Cancellation: no process is left, if `join` is true.
    """
    warn_of_start_method(start_method)
    return await start_context(fn, args, nprocs, join, daemon, "spawn")


def warn_of_start_method(
    start_method: str, other: str = "elastic_aio.multiprocessing.start_context"
) -> None:
    """Warn the caller's caller, with torch's message, that `spawn` only spawns."""
    if start_method != "spawn":
        text = (
            f"This method only supports start_method=spawn (got: {start_method}).\n"
            f"To use a different start_method use:\n\t\t {other}(...)"
        )
        warnings.warn(text, FutureWarning, stacklevel=3)


async def start_context(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
) -> ProcessContext | None:
    """Run `fn(index, *args)` in `nprocs` processes: torch.multiprocessing's `start_processes`.

    The return values of the functions are dropped.  Cancellation: no process is left.

    Args:
        join: wait until all have exited.
        daemon: mark them as daemons, which may have no multiprocessing children.
        start_method: how they start (see `LaunchSpec`).

    Returns:
        None when `join` is true or `nprocs` is 0, and else the context.

    Raises:
        ProcessRaisedException: a function has raised.
        ProcessExitedException: a process exited with a code, or by a signal.
        SpecError: a setting cannot be accepted.
    """
    running_loop()
    group = make_processes(fn, args, nprocs, daemon, start_method)
    if group is None:
        return None
    await group.start()
    context = ProcessContext(group)
    if not join:
        return context
    async with context:
        while not await context.join():
            pass
    return None


def make_processes(
    fn: Callable[..., Any],
    args: Sequence[Any],
    nprocs: int,
    daemon: bool,
    start_method: StartMethod,
) -> BareGroup | None:
    """Return the group of `start_context`; None without processes."""
    own_args = tuple(checked_items("args", args))
    if checked_integer("nprocs", nprocs, at_least=0) == 0:
        return None
    logs = LogSpec(log_dir=os.devnull)
    spec = LaunchSpec(
        Function(fn), args=own_args, nproc_per_node=nprocs, logs=logs, start_method=start_method
    )
    options = BareOptions(is_quiet=True, is_daemon=daemon, with_index=True, waits_for_stop=True)
    return BareGroup(spec, options)
