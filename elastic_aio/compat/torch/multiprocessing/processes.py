"""torch.multiprocessing: `spawn`, and the context of its processes.

The processes are `elastic_aio.sync`'s.  As with multiprocessing, they run on when their
context is not referred to any more, and the program waits for them when it ends, unless
they are daemons.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for_sentinels
from typing import Any, cast

from elastic_aio import sync
from elastic_aio.errors import SpawnError, SpecError
from elastic_aio.events import WorkerExited
from elastic_aio.group import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    make_processes,
    warn_of_start_method,
)
from elastic_aio.outcome import ExitStatus
from elastic_aio.spec.job import NumaMode, StartMethod

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "SpawnContext",
    "WorkerProcess",
    "spawn",
    "start_context",
]

logger = logging.getLogger("torch.multiprocessing.spawn")  # programs and tests look there


class WorkerProcess:
    """A process of a context, with the interface of `multiprocessing.Process`."""

    def __init__(self, pid: int, index: int, daemon: bool, send: Callable[[int], None]) -> None:
        """Use the context's `processes` to get one.

        Args:
            pid: its process id.
            index: its position in the context.
            daemon: whether it is a daemon of multiprocessing.
            send: sends it a signal, if it runs.
        """
        self.pid = self.ident = pid
        self.name = f"Process-{index + 1}"
        self.daemon = daemon
        self.exitcode: int | None = None
        self._send: Callable[[int], None] | None = send
        self._lock = threading.Lock()
        self._exited = threading.Event()
        self._sentinel = -1

    def __repr__(self) -> str:
        state = "running" if self.exitcode is None else f"exit code {self.exitcode}"
        return f"<WorkerProcess {self.name}, pid {self.pid}: {state}>"

    def note_exit(self, status: ExitStatus) -> None:
        """Note that the process has exited."""
        code = status.returncode
        with self._lock:
            self.exitcode, self._send = 255 if code is None else code, None
            if self._sentinel >= 0:
                os.eventfd_write(self._sentinel, 1)
        self._exited.set()

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process has exited."""
        with self._lock:
            if self._sentinel < 0:
                is_over = self.exitcode is not None
                self._sentinel = os.eventfd(int(is_over), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                weakref.finalize(self, os.close, self._sentinel)
            return self._sentinel

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has exited, for `timeout` seconds at most; None has no limit."""
        self._exited.wait(timeout)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Release the process, which must have exited; the sentinel is closed with this object.

        Raises:
            ValueError: it still runs.
        """
        if self.is_alive():
            raise ValueError(
                "Cannot close a process while it is still running."
                " You should first call join() or terminate()."
            )

    def _signal(self, number: int) -> None:
        send = self._send
        if send is not None:
            send(number)


def processes_of(thread: sync.GroupThread, *, daemon: bool = False) -> list[WorkerProcess]:
    """Return the processes of a group; they may be daemons of multiprocessing."""
    group = thread.group

    def sender(rank: int) -> Callable[[int], None]:
        async def send(number: int) -> None:
            if not group.is_over:
                group.send_signal(rank, number)

        def send_from_here(number: int) -> None:
            work = send(number)
            try:
                thread.call(work)
            except RuntimeError:
                work.close()  # the loop has ended, and with it all processes

        return send_from_here

    pids = group.pids()
    processes = [
        WorkerProcess(pids[rank], rank, daemon, sender(rank)) for rank in group.local_ranks
    ]

    # Weakly: the group is collected late, and a process closes its sentinel when it is.
    references = [weakref.ref(process) for process in processes]

    def on_exit(event: WorkerExited) -> None:
        if (process := references[event.local_rank]()) is not None:
            process.note_exit(event.status)

    async def attach() -> None:
        group.on_exit(on_exit)
        for rank in group.exited():
            processes[rank].note_exit(group.records[rank].status)

    thread.call(attach())
    return processes


class ProcessContext:
    """The processes of `spawn(..., join=False)`."""

    def __init__(self, thread: sync.GroupThread | None, daemon: bool = False) -> None:
        """Use `spawn` to get one; None is a context without processes."""
        self._context: sync.SyncProcessContext | None = None
        self._joined: frozenset[int] = frozenset()
        self.processes: list[WorkerProcess] = []
        if thread is not None:
            self._context = sync.SyncProcessContext(thread, _log_termination)
            self.processes = processes_of(thread, daemon=daemon)
            _running.add(self)

    def __repr__(self) -> str:
        return f"<ProcessContext of {len(self.processes)} processes>"

    @property
    def sentinels(self) -> dict[int, int]:
        """The indexes of the processes that are not joined yet, by sentinel."""
        return {
            process.sentinel: index
            for index, process in enumerate(self.processes)
            if index not in self._joined
        }

    def pids(self) -> list[int]:
        """Return the process ids in order."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until at least one more process has exited.

        Args:
            timeout: seconds; None waits without limit, a negative number does not wait.
            grace_period: after a failure, seconds in which the others may exit before
                SIGTERM, and again before SIGKILL; None sends SIGTERM at once, and SIGKILL
                after 30 seconds.

        Returns:
            True if all have exited, False if some still run.

        Raises:
            ProcessRaisedException: a function has raised; the others are stopped.
            ProcessExitedException: a process exited with another code than 0, or by a signal.
        """
        if self._context is None:
            return True
        limit = None if timeout is None else max(timeout, 0.0)
        try:
            return self._context.join(limit, grace_period)
        finally:
            self._joined = self._context.joined
            if self._context.is_over:
                _running.discard(self)

    def _wait_at_exit(self) -> None:
        """End daemons, and wait for the others, as multiprocessing does."""
        if self._context is None:
            return
        try:
            while any(process.is_alive() and not process.daemon for process in self.processes):
                wait_for_sentinels(
                    [process.sentinel for process in self.processes if process.is_alive()]
                )
        finally:
            self._context.close()


class SpawnContext(ProcessContext):
    """The former name of `ProcessContext`; warns."""

    def __init__(self, thread: sync.GroupThread | None, daemon: bool = False) -> None:
        """Warn of the name."""
        warnings.warn("SpawnContext is renamed to ProcessContext since 1.4 release.", stacklevel=2)
        super().__init__(thread, daemon)


# Processes run on without a reference to their context.
_running: set[ProcessContext] = set()


@atexit.register
def _wait_for_all() -> None:
    for context in list(_running):
        context._wait_at_exit()


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run `fn(index, *args)` in `nprocs` new interpreters (see `start_context`).

    Another start method is ignored with a warning.
    """
    warn_of_start_method(start_method, "torch.multiprocessing.start_processes")
    return start_context(fn, args, nprocs, join, daemon, "spawn")


def start_context(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod | None = "spawn",
) -> ProcessContext | None:
    """Run `fn(index, *args)` in `nprocs` processes: torch.multiprocessing's `start_processes`.

    Args:
        fn: the function; its value is dropped.
        args: its arguments after the index.
        nprocs: how many processes.
        join: wait until all have exited.
        daemon: mark them as daemons, which may have no multiprocessing children.
        start_method: "spawn", "fork" or "forkserver"; None is multiprocessing's default.

    Returns:
        None if `join` is true, else the context.

    Raises:
        ProcessRaisedException: a function has raised.
        ProcessExitedException: a process exited with another code than 0, or by a signal.
        ValueError: there is no such start method.
        pickle.PicklingError: the function or an argument cannot be pickled.
    """
    method = start_method_of(start_method)
    if method not in ("spawn", "fork", "forkserver"):
        raise ValueError(f"cannot find context for {method!r}")
    if nprocs <= 0:
        return None if join else ProcessContext(None)
    with torch_errors():
        group = make_processes(fn, args, nprocs, daemon, method)
        assert group is not None, "there are processes"
        if join:
            sync.join_processes(group, on_terminate=_log_termination)
            return None
        return ProcessContext(sync.GroupThread(group, signals=True), daemon)


def start_method_of(method: str | None) -> StartMethod:
    """Return a start method, which is not checked; None is multiprocessing's default."""
    name = multiprocessing.get_start_method() if method is None else method
    return cast("StartMethod", name)


def _log_termination(pid: int) -> None:
    logger.warning("Terminating process %s via signal SIGTERM", pid)


@contextmanager
def torch_errors() -> Iterator[None]:
    """Raise the errors of this library as those that torch's callers expect."""
    try:
        yield
    except SpecError as error:
        if "cannot be pickled" in error.problem:
            raise pickle.PicklingError(str(error)) from error
        raise
    except SpawnError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


def numa_mode(options: Any) -> NumaMode | None:
    """Return the mode of torch `NumaOptions`, or of `--numa-binding`; not checked yet."""
    mode: Any = getattr(options, "affinity_mode", options)
    value: NumaMode | None = getattr(mode, "value", mode)
    return value
