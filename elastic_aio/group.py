"""`start_processes`: functions or programs as one group, which a failure stops."""

from __future__ import annotations

import signal as signals
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from elastic_aio.agent.bare_group import BareGroup
from elastic_aio.agent.program import PerRankOverrides
from elastic_aio.errors import SpecError
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.outcome import Failure, signal_name
from elastic_aio.spec.checks import checked_console, checked_items
from elastic_aio.spec.job import Command, Function, LaunchSpec, NumaMode, StartMethod
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.stop import DEFAULT_GRACE, StopPlan, StopStep


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """One process of a group that did not succeed, with torch's field names.

    `local_rank` and `pid` name the process.  `exitcode` is negative for signals;
    `error_file` and `message` are of the error it recorded; `timestamp` is Unix seconds;
    `failure` has all details.
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

    `return_values` are those of functions, None for programs; `failures` are the processes
    that failed; `stdouts` and `stderrs` are paths, empty if the stream was not captured.
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

    Entering starts them; leaving stops those that still run, by SIGTERM and after 25
    seconds SIGKILL.
    """

    def __init__(self, group: BareGroup) -> None:
        """Use `start_processes` to get one."""
        self._group = group
        self._is_entered = False

    def __repr__(self) -> str:
        return f"<GroupContext {self._group!r}>"

    @property
    def name(self) -> str:
        """Name of the group."""
        return self._group.name

    async def __aenter__(self) -> GroupContext:
        """Start all processes.

        Cancellation: no process is left.

        Raises:
            SpecError: a setting does not fit, or something cannot be pickled.
            SpawnError: one could not be started; none is left.
            HostError: this host lacks something.
        """
        if self._is_entered:
            raise ValueError("a group of processes is started once; make another one")
        self._is_entered = True
        await self._group.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the processes that still run, and release everything."""
        await self._group.stop()

    async def wait(self, timeout: float | None = None) -> RunProcsResult | None:
        """Wait until all have succeeded, or one has failed and the others are stopped.

        Cancellation: the processes go on.

        Args:
            timeout: seconds; None and negative numbers wait without limit, 0 does not wait.

        Returns:
            The result; None if the timeout has passed first.
        """
        self._check_started()
        await self._group.wait_over(None if timeout is None or timeout < 0 else timeout)
        return self._result() if self._group.is_over else None

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return self._group.pids()

    async def close(self, signal: int = signals.SIGTERM, timeout: float = DEFAULT_GRACE) -> None:
        """Stop the processes that still run: `signal`, and after `timeout` seconds SIGKILL."""
        self._check_started()
        await self._group.stop(StopPlan((StopStep(signal, timeout),)))

    def _check_started(self) -> None:
        if not self._is_entered:
            raise RuntimeError("not started: use `async with start_processes(...)`")

    def _result(self) -> RunProcsResult:
        group = self._group
        failures, calls = group.failures, group.calls
        logs = {rank: record.logs for rank, record in group.records.items()}
        values = {rank: calls[rank].value if calls else None for rank in group.local_ranks}
        return RunProcsResult(
            return_values={} if failures else values,
            failures={failure.local_rank: _process_failure(failure) for failure in failures},
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
        args: arguments by local rank, 0 to n-1.  Those of a program are converted to text.
        envs: variables by local rank, which override the inherited environment.
        logs: where output goes; None leaves the streams inherited.
        start_method: how functions start (see `LaunchSpec`).
        preload: modules that the fork server imports.
        numa_binding: which CPUs each process is bound to (see `LaunchSpec`).
        console: where output is shown, see `ConsoleTarget`; None is this process's own
            stdout and stderr.

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
    )
    overrides = PerRankOverrides(args=tuple(own_args), envs=own_envs)
    return GroupContext(BareGroup(spec, overrides, console=checked_console(console)))


def _check_ranks(field: str, by_rank: Mapping[int, Any], count: int) -> None:
    """Check that the keys of a mapping are the local ranks 0 to count - 1."""
    expected = set(range(count))
    if not by_rank or set(by_rank) != expected:
        missing = sorted(expected - set(by_rank))
        unknown = sorted(set(by_rank) - expected, key=repr)
        details = [f"missing: {missing}"] if missing else []
        details += [f"unknown: {unknown}"] if unknown else []
        ranks = f"0 to {count - 1}" if count else "from 0"
        problem = "; ".join([f"must name the local ranks {ranks}", *details])
        raise SpecError(field, sorted(by_rank, key=repr), problem)
