"""`spawn` and its context, with the names, messages and manners of torch.multiprocessing."""

from __future__ import annotations

import os
import signal as signals
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from elastic_aio.agent.crew import CrewRun
from elastic_aio.agent.work import Crew
from elastic_aio.aio import see_through
from elastic_aio.policy import StopPlan, StopStep
from elastic_aio.spec import Function, LaunchSpec, LogSpec, StartMethod

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "spawn",
    "start_context",
    "warn_of_start_method",
]

_GRACE_S = 30.0


class ProcessException(Exception):
    """A process of `spawn` has failed.

    `error_index` is its index, `error_pid` (and `pid`, as older versions of torch
    have it) its process id.
    """

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        """Keep the message and who it was."""
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    @property
    def pid(self) -> int:
        """The process id."""
        return self.error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """A process's function has raised an Exception; the message holds its traceback."""


class ProcessExitedException(ProcessException):
    """A process was ended by a signal, or exited with a code.

    `exit_code` is negative for signals, whose name is `signal_name`.
    """

    def __init__(
        self,
        msg: str,
        error_index: int,
        error_pid: int,
        exit_code: int,
        signal_name: str | None = None,
    ) -> None:
        """Keep the message, who it was, and how it ended."""
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[Any, ...]:
        known = (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)
        return type(self), known


class ProcessContext:
    """The processes of `spawn(..., join=False)`.

    Wait for them by `join`, until it returns True or raises.  As an async context
    manager it stops at the end of the block what still runs.
    """

    def __init__(self, run: CrewRun) -> None:
        """Use `spawn` to get one."""
        self._run = run
        self._joined: set[int] = set()
        self._is_over = False

    def __repr__(self) -> str:
        return f"<ProcessContext {self._run!r}>"

    @property
    def is_over(self) -> bool:
        """Whether everything has ended and was given back."""
        return self._is_over

    async def __aenter__(self) -> ProcessContext:
        """Return the context; its processes run already."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop what still runs."""
        await self.aclose()

    async def aclose(self) -> None:
        """Stop what still runs and give everything back; may be repeated."""
        await see_through(lambda: self._finish(StopPlan()))

    def pids(self) -> list[int]:
        """Return the process ids in order."""
        return [pid for _, pid in sorted(self._run.pids().items())]

    async def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until processes have ended.

        Returns as soon as at least one more has, or the time is over: True when all
        are done, False while some remain.  When one has failed the others are
        stopped and its exception is raised.

        Args:
            timeout: seconds; None waits for ever.
            grace_period: after a failure, seconds in which the others may end by
                themselves before SIGTERM, and again as many before SIGKILL; None
                sends SIGTERM at once and SIGKILL after 30 seconds.

        Raises:
            ProcessRaisedException: a function has raised.
            ProcessExitedException: a process was ended otherwise.
            asyncio.CancelledError: the caller was cancelled; processes run on.
        """
        run = self._run
        if len(self._joined) == len(run.ranks):
            return True
        if not run.ended() - self._joined:
            await run.next_exit(self._joined, timeout)
        for rank in sorted(run.ended() - self._joined, key=run.order_of):
            self._joined.add(rank)
            if not run.exit_of(rank).status.is_success:
                await see_through(lambda: self._stop(grace_period))
                raise await self._exception(rank)
        if len(self._joined) < len(run.ranks):
            return False
        await see_through(lambda: self._finish(StopPlan()))
        return True

    async def _stop(self, grace_period: float | None) -> None:
        if grace_period is not None:
            await self._run.all_ended(grace_period)
        grace = _GRACE_S if grace_period is None else grace_period
        self._joined.update(self._run.ranks)
        await self._finish(StopPlan((StopStep(signals.SIGTERM, grace),)))

    async def _finish(self, plan: StopPlan) -> None:
        if self._is_over:
            return
        await self._run.stop(plan)
        await self._run.told()  # before the close, which gives the results back
        await self._run.close()
        self._is_over = True

    async def _exception(self, rank: int) -> ProcessException:
        run = self._run
        pid, status = run.pids()[rank], run.exit_of(rank).status
        told = (await run.told())[rank]
        if told.is_exception and told.error is not None:
            text = f"\n\n-- Process {rank:d} terminated with the following error:\n"
            return ProcessRaisedException(text + (told.error.traceback or ""), rank, pid)
        if status.signal is not None:
            number = status.signal
            known = number in set(signals.Signals)
            name = signals.Signals(number).name if known else f"<Unknown signal {number}>"
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

    Another start method is warned of and not taken, as there; see `start_context`.

    Raises:
        ProcessRaisedException: a function has raised.
        ProcessExitedException: a process was ended otherwise.
        SpecError: a setting cannot be accepted.
        asyncio.CancelledError: the caller was cancelled; no process is left.
    """
    warn_of_start_method(start_method)
    return await start_context(fn, args, nprocs, join, daemon, "spawn")


async def start_context(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
) -> ProcessContext | None:
    """Run `fn(index, *args)` in `nprocs` processes: torch.multiprocessing's `start_processes`.

    What the functions return is dropped.

    Args:
        fn: the function.
        args: its arguments after the index.
        nprocs: how many processes.
        join: wait for their end.
        daemon: mark them as daemons, which may have no multiprocessing children.
        start_method: how they start (see `LaunchSpec`).

    Returns:
        None when `join` is true or `nprocs` is 0, and else the context.

    Raises:
        ProcessRaisedException: a function has raised.
        ProcessExitedException: a process was ended otherwise.
        SpecError: a setting cannot be accepted.
        asyncio.CancelledError: the caller was cancelled; no process is left.
    """
    if isinstance(nprocs, int) and not isinstance(nprocs, bool) and nprocs == 0:
        return None
    spec = LaunchSpec(
        Function(fn),
        nproc_per_node=nprocs,
        logs=LogSpec(log_dir=os.devnull),
        start_method=start_method,
    )
    given = tuple(args)
    crew = Crew(
        args=(given,) * nprocs,
        envs=({},) * nprocs,
        is_quiet=True,
        is_daemon=daemon,
        with_index=True,
    )
    run = CrewRun(spec, crew)
    await run.start()
    context = ProcessContext(run)
    if not join:
        return context
    async with context:
        while not await context.join():
            pass
    return None


def warn_of_start_method(start_method: str) -> None:
    """Warn the caller's caller, in torch's words, that `spawn` only spawns."""
    if start_method != "spawn":
        text = (
            f"This method only supports start_method=spawn (got: {start_method}).\n"
            "To use a different start_method use:\n\t\t"
            " elastic_aio.processes.start_context(...)"
        )
        warnings.warn(text, FutureWarning, stacklevel=3)
