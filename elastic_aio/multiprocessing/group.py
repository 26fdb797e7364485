"""`start_processes`: functions or programs as one group, which a failure stops."""

from __future__ import annotations

import asyncio
import signal as signals
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from elastic_aio.agent.crew import CrewRun
from elastic_aio.agent.work import Crew
from elastic_aio.aio import outlast, owned_task, see_through
from elastic_aio.errors import SpecError
from elastic_aio.logs.sink import Console
from elastic_aio.outcome import Failure
from elastic_aio.policy import StopPlan, StopStep
from elastic_aio.signames import signal_name
from elastic_aio.spec import Command, Function, LaunchSpec, LogSpec, StartMethod

__all__ = ["ProcessFailure", "ProcessGroup", "RunProcsResult", "start_processes"]

_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """One process of a group that did not succeed, with torch's field names.

    `exitcode` is negative for signals; `timestamp` is Unix seconds; `failure` is
    the whole story.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    message: str
    timestamp: int
    failure: Failure

    def signal_name(self) -> str:
        """Return the name of the signal that ended it; `<N/A>` when none did."""
        if self.exitcode >= 0 or -self.exitcode not in set(signals.Signals):
            return "<N/A>"
        return signal_name(-self.exitcode)

    def timestamp_isoformat(self) -> str:
        """Return the local time in ISO 8601."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))


@dataclass(frozen=True, slots=True)
class RunProcsResult:
    """What became of a group, by local rank.

    `return_values` are those of functions, None for programs; `stdouts` and
    `stderrs` are paths, empty where nothing was captured.
    """

    # Not shown: see `LaunchResult`.
    return_values: Mapping[int, Any] = field(default_factory=dict, repr=False)
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    stdouts: Mapping[int, str] = field(default_factory=dict)
    stderrs: Mapping[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Tell whether any process has failed."""
        return bool(self.failures)


class ProcessGroup:
    """The processes of `start_processes`: an async context manager.

    Entering starts them; leaving stops what still runs, by SIGTERM and after 30
    seconds SIGKILL.
    """

    def __init__(self, run: CrewRun) -> None:
        """Use `start_processes` to get one."""
        self._run = run
        self._watching: asyncio.Task[None] | None = None
        self._result: asyncio.Future[RunProcsResult] | None = None
        self._plan = StopPlan()

    def __repr__(self) -> str:
        return f"<ProcessGroup {self._run!r}>"

    @property
    def name(self) -> str:
        """What the group was called."""
        return self._run.name

    async def __aenter__(self) -> ProcessGroup:
        """Start all processes.

        Raises:
            SpecError: a setting does not fit, or something cannot be pickled.
            SpawnError: one could not be started; none is left.
            SurroundingsError: the machine lacks something.
        """
        if self._result is not None:
            raise ValueError("a group of processes is started once; make another one")
        self._result = asyncio.get_running_loop().create_future()
        await self._run.start()
        self._watching = owned_task(self._watch(), name=f"watch {self.name}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop what still runs, and give everything back."""
        await see_through(self._leave)

    async def wait(self, timeout: float | None = None) -> RunProcsResult | None:
        """Wait until all have succeeded, or one has failed and the others are stopped.

        Cancelling this wait stops nothing.

        Args:
            timeout: seconds; None and negative numbers wait for ever, 0 only looks.

        Returns:
            The result; None when the time is over first.
        """
        result = self._started
        if not result.done():
            limit = None if timeout is None or timeout < 0 else timeout
            await asyncio.wait([result], timeout=limit)
        return result.result() if result.done() else None

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return self._run.pids()

    async def close(self, signal: int = signals.SIGTERM, timeout: float = _GRACE_S) -> None:
        """Stop what still runs: `signal`, and after `timeout` seconds SIGKILL."""
        self._plan = StopPlan((StopStep(signal, timeout),))
        self._run.ask_to_stop()
        assert self._watching is not None, "the block has been entered"
        await outlast(self._watching)

    @property
    def _started(self) -> asyncio.Future[RunProcsResult]:
        if self._result is None:
            raise RuntimeError("not started: use `async with start_processes(...)`")
        return self._result

    async def _watch(self) -> None:
        """Wait for the group's end, stop what is left of it, and say what became of it."""
        run = self._run
        await run.ended_or_failed()
        await see_through(lambda: run.stop(self._plan))
        told = await run.told()
        failures = await run.failures(told)
        values = (
            {} if failures else {rank: told[rank].value if told else None for rank in run.ranks}
        )
        result = RunProcsResult(
            return_values=values,
            failures={one.local_rank: _process_failure(one) for one in failures},
            stdouts={rank: run.logs_of(rank).stdout.path or "" for rank in run.ranks},
            stderrs={rank: run.logs_of(rank).stderr.path or "" for rank in run.ranks},
        )
        if not self._started.done():
            self._started.set_result(result)

    async def _leave(self) -> None:
        if self._watching is not None and not self._watching.done():
            self._run.ask_to_stop()
            await outlast(self._watching)
        await self._run.close()


def _process_failure(failure: Failure) -> ProcessFailure:
    code = failure.status.returncode
    error = failure.error
    message = error.message if error else failure.message
    if not message:
        said = failure.status
        message = (
            f"Signal {said.signal} ({signal_name(said.signal)}) received by PID {failure.pid}"
            if said.signal is not None
            else f"Process {failure.pid} ended with {said}"
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
    console: Console | None = None,
) -> ProcessGroup:
    """Prepare a group of processes; `async with` starts it.

    Args:
        name: what the group is called, in prefixes too.
        entrypoint: a function; or a program, alone or with its first arguments.
        args: arguments by local rank, 0 to n-1.  A program's are made text.
        envs: variables by local rank, over the inherited environment.
        logs: where output goes; None leaves it alone.
        start_method: how functions start (see `LaunchSpec`).
        preload: modules for the server of "forkserver".
        console: where tee'd output goes; None is this process's own.

    Raises:
        SpecError: the ranks of `args` or `envs` are not 0 to n-1, and other settings.
    """
    count = len(args)
    _check_ranks("args", args, count)
    _check_ranks("envs", envs, count)
    what: Function | Command
    given: list[tuple[Any, ...]] = [tuple(args[rank]) for rank in range(count)]
    if isinstance(entrypoint, (str, list, tuple)):
        what = Command((entrypoint,) if isinstance(entrypoint, str) else tuple(entrypoint))
        given = [tuple(str(one) for one in own) for own in given]
    elif callable(entrypoint):
        what = Function(entrypoint)
    else:
        raise SpecError("entrypoint", entrypoint, "must be a function or a program")
    own_envs = tuple(LaunchSpec(["true"], env=envs[rank]).env for rank in range(count))
    spec = LaunchSpec(
        what,
        nproc_per_node=count,
        role=name,
        logs=logs,
        run_id=name or None,
        start_method=start_method,
        preload=preload,
    )
    crew = Crew(args=tuple(given), envs=own_envs)
    return ProcessGroup(CrewRun(spec, crew, console=console))


def _check_ranks(field: str, given: Mapping[int, Any], count: int) -> None:
    """Refuse a mapping that does not name each local rank, and none besides."""
    expected = set(range(count))
    if not given or set(given) != expected:
        missing = sorted(expected - set(given))
        strange = sorted(set(given) - expected, key=repr)
        said = [f"misses {missing}"] if missing else []
        said += [f"has {strange} besides"] if strange else []
        why = f" (it {' and '.join(said)})" if said else ""
        ranks = f"0 to {count - 1}" if count else "from 0"
        raise SpecError(field, sorted(given, key=repr), f"must name the local ranks {ranks}{why}")
