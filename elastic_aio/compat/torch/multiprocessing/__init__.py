"""torch.distributed.elastic.multiprocessing, and `spawn` of torch.multiprocessing.

Synchronous as there: `start_processes` returns a context whose processes run.  An async program
uses `elastic_aio.multiprocessing`.  `start_context` is torch.multiprocessing's `start_processes`.

What differs on purpose: a failure stops a group at once and not at the next `wait`; the first
failure of a result is the root cause; the caller's dicts are not changed; a context ends itself
after its result, and signals are handled only while processes run.  As with multiprocessing, the
processes of `spawn` run on when their context is not referred to any more, and the program waits
for them when it ends, unless they are daemons.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_sentinels
from types import FrameType
from typing import Any, cast

from elastic_aio import group as native
from elastic_aio.compat.torch.errors import ProcessFailure
from elastic_aio.compat.torch.installation import note_use
from elastic_aio.compat.torch.multiprocessing.logs import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    ReifiedLayout,
    Std,
    redirect,
    redirect_stderr,
    redirect_stdout,
    to_map,
)
from elastic_aio.errors import SpawnError, SpecError
from elastic_aio.events import WorkerExited
from elastic_aio.group import (
    BareGroup,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    make_processes,
    warn_of_start_method,
)
from elastic_aio.outcome import ExitStatus
from elastic_aio.spec.job import NumaMode, StartMethod
from elastic_aio.spec.stop import StopPlan, StopStep
from elastic_aio.sync import GroupThread, SyncProcessContext, join_processes

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessFailure",
    "ProcessRaisedException",
    "RunProcsResult",
    "SignalException",
    "SpawnContext",
    "Std",
    "SubprocessContext",
    "WorkerProcess",
    "redirect",
    "redirect_stderr",
    "redirect_stdout",
    "spawn",
    "start_context",
    "start_processes",
    "to_map",
]

logger = logging.getLogger(__name__)
spawn_logger = logging.getLogger("torch.multiprocessing.spawn")  # programs and tests look there

_DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


# ------------------------------------------------------------------- one process


class WorkerProcess:
    """A process of a context, with the interface of `multiprocessing.Process`."""

    def __init__(self, thread: GroupThread, index: int, daemon: bool) -> None:
        """Use the context's `processes` to get one."""
        self.pid = self.ident = thread.group.pids()[index]
        self.name = f"Process-{index + 1}"
        self.daemon = daemon
        self.exitcode: int | None = None
        self._thread: GroupThread | None = thread
        self._index = index
        self._lock = threading.Lock()
        self._exited = threading.Event()
        self._sentinel = -1

    def __repr__(self) -> str:
        state = "running" if self.exitcode is None else f"exit code {self.exitcode}"
        return f"<WorkerProcess {self.name}, pid {self.pid}: {state}>"

    def note_exit(self, status: ExitStatus) -> None:
        code = status.returncode
        with self._lock:
            self.exitcode, self._thread = 255 if code is None else code, None
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
        """Raise a ValueError if the process runs; the sentinel is closed with this object."""
        if self.is_alive():
            raise ValueError(
                "Cannot close a process while it is still running."
                " You should first call join() or terminate()."
            )

    def _signal(self, number: int) -> None:
        if (thread := self._thread) is None:
            return

        async def send() -> None:
            if self.is_alive() and not thread.group.is_over:
                thread.group.send_signal(self._index, number)

        work = send()
        try:
            thread.call(work)
        except RuntimeError:
            work.close()  # the loop has ended, and with it all processes


def processes_of(thread: GroupThread, *, daemon: bool = False) -> list[WorkerProcess]:
    """Return the processes of a group; they may be daemons of multiprocessing."""
    group = thread.group
    processes = [WorkerProcess(thread, rank, daemon) for rank in group.local_ranks]

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


def start_method_of(method: str | None) -> StartMethod:
    """Return a start method, which is not checked; None is multiprocessing's default."""
    name = multiprocessing.get_start_method() if method is None else method
    return cast("StartMethod", name)


@contextmanager
def torch_errors() -> Iterator[None]:
    """Raise the errors of this library as the errors that torch's callers expect."""
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


# --------------------------------------------------------------- start_processes


class SignalException(Exception):
    """A signal has arrived while processes run; `sigval` is its number."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.sigval)


def _terminate_process_handler(signum: int, frame: FrameType | None) -> None:
    number = signal.Signals(signum)
    raise SignalException(f"Process {os.getpid()} got signal: {number}", number)


class _SignalHandlers:
    """Raises `SignalException` for signals while contexts are open."""

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self._contexts = 0

    def enter(self) -> bool:
        """Install the handlers; return whether `leave` has to be called."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "Failed to register signal handlers since torchelastic is running on a child"
                " thread. This could lead to orphaned worker processes if the torchrun is"
                " terminated."
            )
            return False
        self._contexts += 1
        names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _DEFAULT_SIGNALS)
        for name in names.split(","):
            try:
                number = getattr(signal, name.strip())
                former = signal.signal(number, _terminate_process_handler)
                if former is not _terminate_process_handler:
                    self._former[number] = former
                logger.info("Registered signal handler for %s", name)
            except (AttributeError, ValueError, OSError, TypeError):
                logger.warning("Failed to register signal handler for %s", name, exc_info=True)
        return True

    def leave(self) -> None:
        """Restore the handlers when no context is left; not from another thread."""
        self._contexts -= 1
        if self._contexts or threading.current_thread() is not threading.main_thread():
            return
        former, self._former = self._former, {}
        for number, handler in former.items():
            if signal.getsignal(number) is _terminate_process_handler:
                signal.signal(number, handler)


_handlers = _SignalHandlers()


@dataclass
class RunProcsResult:
    """The result of a group by local rank.

    `return_values` are for functions; `failures` begin with the root cause; `stdouts` and `stderrs`
    are paths, empty where the stream is not captured.
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Return whether a process has failed."""
        return len(self.failures) > 0


class PContext:
    """The processes of `start_processes`; must be waited for or closed."""

    _started_twice = ""
    _numa_options: Any = None

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        """Make the directories of the logs; the arguments are as for `start_processes`."""
        self.name = name
        self.nprocs = len(args)
        self.envs = {rank: dict(env) for rank, env in envs.items()}
        self._logs_specs = logs_specs
        dest = logs_specs.reify(self.envs)
        validate_full_rank(dest.stdouts, self.nprocs, "stdouts")
        validate_full_rank(dest.stderrs, self.nprocs, "stderrs")
        self.entrypoint = entrypoint
        self.args = args
        self.stdouts = dest.stdouts
        self.stderrs = dest.stderrs
        self.error_files = dest.error_files
        filters = duplicate_stdout_filters or (), duplicate_stderr_filters or ()
        with torch_errors():
            self._layout = ReifiedLayout(dest, log_line_prefixes, *filters)
        paths = self._layout.filtered_paths()
        self.filtered_stdout = paths.get("stdout") if filters[0] else None
        self.filtered_stderr = paths.get("stderr") if filters[1] else None
        self._processes: list[WorkerProcess] | None = None
        self._thread: GroupThread | None = None
        self._has_handlers = False
        self._result: RunProcsResult | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.nprocs} processes>"

    def start(self) -> None:
        """Start the processes.

        Raises:
            OSError: a process cannot be started; none is left.
            ValueError: they are started already.
        """
        if self._processes is not None:
            raise ValueError(self._started_twice)
        note_use()
        self._processes = []
        self._has_handlers = _handlers.enter()
        try:
            self._start()
        except BaseException:  # SignalException too: nothing is left open
            self._end()
            raise

    def _start(self) -> None:
        if not self.nprocs:
            return
        for path in [*self.stdouts.values(), *self.stderrs.values()]:
            if os.path.isfile(path):
                os.unlink(path)  # ours are new files, torch's are truncated
        for env in self.envs.values():
            for value in env.values():
                if not isinstance(value, str):
                    raise TypeError(f"str expected, not {type(value).__name__}")
        with torch_errors():
            context = native.start_processes(
                self.name,
                self.entrypoint,
                {rank: tuple(args) for rank, args in self.args.items()},
                self.envs,
                self._layout,
                start_method=self._start_method,
                numa_binding=numa_mode(self._numa_options),
            )
            self._thread = GroupThread(context.group, signals=False)
        self._processes = processes_of(self._thread)

    @property
    def _start_method(self) -> StartMethod:
        return "spawn"

    @property
    def processes(self) -> list[WorkerProcess]:
        """The processes by local rank; empty before the start."""
        return list(self._processes or ())

    @property
    def sentinels(self) -> dict[int, int]:
        """The local ranks of the processes that run, by sentinel."""
        running = (process for process in enumerate(self.processes) if process[1].is_alive())
        return {process.sentinel: rank for rank, process in running}

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return {rank: process.pid for rank, process in enumerate(self.processes)}

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all processes have succeeded, or one has failed and the others are stopped.

        Returns None if the timeout passes first.

        Args:
            timeout: seconds; 0 does not wait, a negative number waits without limit.
            period: accepted for torch's callers; nothing is polled.

        Raises:
            SignalException: a signal has arrived; the processes go on.
        """
        if self._result is None and self._processes is not None:
            thread = self._thread
            if thread is None:
                self._result = RunProcsResult()
            elif thread.call(thread.group.wait_over(None if timeout < 0 else timeout)):
                self._result = self._made_result(thread.group)
            if self._result is not None:
                self._end()
        return self._result

    def close(self, death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        """Stop the processes that still run: `death_sig`, and after `timeout` seconds SIGKILL.

        Idempotent; the first signal is SIGTERM by default.
        """
        if self._thread is not None and not self._is_closed:
            plan = StopPlan((StopStep(death_sig or signal.SIGTERM, timeout),))
            self._thread.call(self._thread.group.stop(plan))
            self.wait(0)
        self._end()

    def _made_result(self, group: BareGroup) -> RunProcsResult:
        failures = {one.local_rank: ProcessFailure.from_failure(one) for one in group.failures}
        return RunProcsResult(
            group.return_values, self._failures(failures), self.stdouts, self.stderrs
        )

    def _failures(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        return failures

    def _end(self) -> None:
        """Release everything, and at the second call nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._thread is not None:
                self._thread.close()
        finally:
            if self._has_handlers:
                _handlers.leave()
            if isinstance(self._logs_specs, DefaultLogsSpecs):
                self._logs_specs.tidy()


class SubprocessContext(PContext):
    """Processes that run a program."""

    _started_twice = (
        "The subprocess handlers already initialized."
        " Most likely the start method got called twice."
    )

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self._numa_options = numa_options
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)


class MultiprocessContext(PContext):
    """Processes that run a function."""

    _started_twice = (
        "The process context already initialized. Most likely the start method got called twice."
    )

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, tuple[Any, ...]],
        envs: Mapping[int, Mapping[str, str]],
        start_method: StartMethod | None,
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
    ) -> None:
        self._numa_options = numa_options
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self.start_method = start_method

    @property
    def _start_method(self) -> StartMethod:
        return start_method_of(self.start_method)

    def _failures(self, failures: dict[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        return dict(list(failures.items())[:1])  # torch reports the first one only


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, tuple[Any, ...]],
    envs: Mapping[int, Mapping[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: StartMethod | None = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Start processes that run a function or a program, each with its own arguments.

    Args:
        name, entrypoint, args, envs: as for `elastic_aio.multiprocessing.start_processes`.
        logs_specs: where output goes.
        log_line_prefixes: prefixes of lines on the console by local rank.
        start_method: how functions start: "spawn", "fork" or "forkserver"; None is
            multiprocessing's default.
        numa_options: torch `NumaOptions`, or a mode of `--numa-binding`.
        duplicate_stdout_filters: copy shown lines of stdout that contain one of these texts
            to a file.
        duplicate_stderr_filters: the same for stderr.

    Raises:
        RuntimeError: the ranks of `args` or `envs` are not 0 to n-1.
        OSError: a program cannot be started.
        pickle.PicklingError: the function or an argument cannot be pickled.
    """
    validate_full_rank(args, len(args), "args")
    validate_full_rank(envs, len(args), "envs")
    settings: tuple[Any, ...] = (
        logs_specs,
        log_line_prefixes,
        numa_options,
        duplicate_stdout_filters,
        duplicate_stderr_filters,
    )
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, *settings)
    else:
        context = MultiprocessContext(name, entrypoint, args, envs, start_method, *settings)
    context.start()
    return context


def validate_full_rank(by_rank: Mapping[int, Any], nprocs: int, what: str) -> None:
    """Raise a RuntimeError unless the keys are the local ranks 0 to nprocs - 1."""
    actual, expected = set(by_rank), set(range(nprocs))
    if actual != expected:
        raise RuntimeError(
            f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}"
        )


# ------------------------------------------------------------------------- spawn


class ProcessContext:
    """The processes of `spawn(..., join=False)`."""

    def __init__(self, thread: GroupThread | None, daemon: bool = False) -> None:
        """Use `spawn` to get one; None is a context without processes."""
        self._context: SyncProcessContext | None = None
        self._joined: frozenset[int] = frozenset()
        self.processes: list[WorkerProcess] = []
        if thread is not None:
            self._context = SyncProcessContext(thread, _log_termination)
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
        """Wait until at least one more process has exited; return whether all have.

        Arguments and errors are as for `elastic_aio.multiprocessing.ProcessContext.join`; a
        negative timeout does not wait.
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

    def __init__(self, thread: GroupThread | None, daemon: bool = False) -> None:
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

    As `elastic_aio.multiprocessing.start_context` does.  The start method None is
    multiprocessing's default; the result is None only if `join` is true.

    Raises:
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
            join_processes(group, on_terminate=_log_termination)
            return None
        return ProcessContext(GroupThread(group, signals=True), daemon)


def _log_termination(pid: int) -> None:
    spawn_logger.warning("Terminating process %s via signal SIGTERM", pid)
