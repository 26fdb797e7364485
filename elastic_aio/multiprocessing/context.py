"""`spawn` and its context, with the names, messages and behaviour of torch.multiprocessing."""

from __future__ import annotations

import os
import signal as signals
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from elastic_aio.agent.bare_group import BareGroup
from elastic_aio.agent.program import PerRankOverrides
from elastic_aio.aio import run_shielded, running_loop
from elastic_aio.spec.checks import checked_integer, checked_items
from elastic_aio.spec.job import Function, LaunchSpec, StartMethod
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.stop import StopPlan, StopStep

_GRACE_S = 30.0  # that of torch's `spawn`


class ProcessException(Exception):
    """A process of `spawn` has failed.

    `error_index` is its index, `error_pid` its process id (`pid` in older versions of
    torch).
    """

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        """Keep the message and the process."""
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
        """Keep the message, the process, and how it exited."""
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)
        return type(self), args


class ProcessContext:
    """The processes of `spawn(..., join=False)`.

    Call `join` until it returns True or raises.  As an async context manager it stops
    the processes that still run at the end of the block.
    """

    def __init__(
        self, group: BareGroup, _on_terminate: Callable[[int], None] | None = None
    ) -> None:
        """Use `spawn` to get one."""
        self._group = group
        self._joined: set[int] = set()
        self._on_terminate = _on_terminate

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the processes that still run."""
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the processes that still run and release everything.  Idempotent."""
        await self._group.stop()

    def pids(self) -> list[int]:
        """Return the process ids in order."""
        return [pid for _, pid in sorted(self._group.pids().items())]

    async def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until processes have ended.

        Returns as soon as at least one more has exited, or the timeout has passed.  If
        one has failed, the others are stopped and its exception is raised.

        Cancellation: the processes go on.

        Args:
            timeout: seconds; None waits without limit.
            grace_period: after a failure, seconds in which the others may exit by
                themselves before SIGTERM, and again as many before SIGKILL; None
                sends SIGTERM at once and SIGKILL after 30 seconds.

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
        grace = _GRACE_S if grace_period is None else grace_period
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

    Another start method is ignored with a warning, as in torch; see `start_context` for
    the arguments.

    Cancellation: no process is left, if `join` is true.

    Raises:
        ProcessRaisedException: a function has raised.
        ProcessExitedException: a process exited with a code, or by a signal.
        SpecError: a setting cannot be accepted.
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
    *,
    _on_terminate: Callable[[int], None] | None = None,
) -> ProcessContext | None:
    """Run `fn(index, *args)` in `nprocs` processes: torch.multiprocessing's `start_processes`.

    The return values of the functions are dropped.  Cancellation: no process is left.

    Args:
        fn: the function.
        args: its arguments after the index.
        nprocs: how many processes.
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
    own_args = tuple(checked_items("args", args))
    if checked_integer("nprocs", nprocs, at_least=0) == 0:
        return None
    logs = LogSpec(log_dir=os.devnull)
    spec = LaunchSpec(Function(fn), nproc_per_node=nprocs, logs=logs, start_method=start_method)
    overrides = PerRankOverrides(
        args=(own_args,) * nprocs,
        envs=({},) * nprocs,
        is_quiet=True,
        is_daemon=daemon,
        with_index=True,
        waits_for_stop=True,
    )
    group = BareGroup(spec, overrides)
    await group.start()
    context = ProcessContext(group, _on_terminate)
    if not join:
        return context
    async with context:
        while not await context.join():
            pass
    return None


def warn_of_start_method(start_method: str) -> None:
    """Warn the caller's caller, with torch's message, that `spawn` only spawns."""
    if start_method != "spawn":
        text = (
            f"This method only supports start_method=spawn (got: {start_method}).\n"
            "To use a different start_method use:\n\t\t"
            " elastic_aio.multiprocessing.start_context(...)"
        )
        warnings.warn(text, FutureWarning, stacklevel=3)
