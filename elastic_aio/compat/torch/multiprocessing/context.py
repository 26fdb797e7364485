"""torch.distributed.elastic.multiprocessing: `start_processes` and its `PContext`.

The processes are those of `elastic_aio.sync.start_processes`, in a loop of their own.  A
context ends itself after its result: then nothing of it is left, and the signal handlers
are those that the program had.

What differs on purpose: a failure stops the group at once and not at the next `wait`; the
first failure of a result is the root cause; the caller's dicts are not changed; signals
are handled only while processes run.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from elastic_aio import group as native
from elastic_aio import sync
from elastic_aio.compat.torch.errors import ProcessFailure
from elastic_aio.compat.torch.multiprocessing.logs import (
    DefaultLogsSpecs,
    LogsSpecs,
    ReifiedLayout,
)
from elastic_aio.compat.torch.multiprocessing.processes import (
    WorkerProcess,
    numa_mode,
    processes_of,
    start_method_of,
    torch_errors,
)
from elastic_aio.group import BareGroup, make_group
from elastic_aio.spec.job import StartMethod
from elastic_aio.spec.stop import StopPlan, StopStep

__all__ = [
    "MultiprocessContext",
    "PContext",
    "RunProcsResult",
    "SignalException",
    "SubprocessContext",
    "start_processes",
]

logger = logging.getLogger(__name__)

_DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class SignalException(Exception):
    """A signal has arrived while processes run; `sigval` is its number."""

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        """Keep the text and the signal."""
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

    `return_values` are those of functions; `failures` begin with the root cause; `stdouts`
    and `stderrs` are paths, empty where the stream is not captured.
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
        """Make the directories of the logs; `start` starts the processes.

        Args:
            name: of the group; it is the prefix of lines, with the local rank.
            entrypoint: a function or a program.
            args: arguments by local rank.
            envs: variables by local rank.
            logs_specs: where output goes.
            log_line_prefixes: prefixes of lines by local rank.
            duplicate_stdout_filters: copy shown lines of stdout that contain one of these
                texts to a file.
            duplicate_stderr_filters: the same for stderr.
        """
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
        self._thread: sync.GroupThread | None = None
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
            group = make_group(
                self.name,
                self.entrypoint,
                {rank: tuple(args) for rank, args in self.args.items()},
                self.envs,
                logs=self._layout,
                start_method=self._start_method,
                numa_binding=numa_mode(self._numa_options),
            )
            self._thread = sync.GroupThread(group, signals=False)
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

        Args:
            timeout: seconds; 0 does not wait, a negative number waits without limit.
            period: accepted for torch's callers; nothing is polled.

        Returns:
            The result; None if the timeout has passed first.

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
        """Stop the processes that still run.  Idempotent.

        Args:
            death_sig: the first signal; None is SIGTERM.
            timeout: seconds until SIGKILL.
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
        """Release everything, at the second time nothing."""
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
        """Prepare; the arguments are those of `PContext` and `start_processes`."""
        self._numa_options = numa_options
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )


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
        """Prepare; the arguments are those of `PContext` and `start_processes`."""
        self._numa_options = numa_options
        super().__init__(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
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
        name: of the group; it is the prefix of lines, with the local rank.
        entrypoint: a function, or the name or path of a program.
        args: arguments by local rank, 0 to n-1; those of a program are made text.
        envs: variables by local rank, which override the inherited environment.
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
    settings: dict[str, Any] = {
        "log_line_prefixes": log_line_prefixes,
        "numa_options": numa_options,
        "duplicate_stdout_filters": duplicate_stdout_filters,
        "duplicate_stderr_filters": duplicate_stderr_filters,
    }
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, logs_specs, **settings)
    else:
        context = MultiprocessContext(
            name, entrypoint, args, envs, start_method, logs_specs, **settings
        )
    context.start()
    return context


def validate_full_rank(by_rank: Mapping[int, Any], nprocs: int, what: str) -> None:
    """Check that the keys are the local ranks 0 to nprocs - 1.

    Raises:
        RuntimeError: they are not.
    """
    actual, expected = set(by_rank), set(range(nprocs))
    if actual != expected:
        raise RuntimeError(
            f"{what}, local rank mapping mismatch, expected: {expected}, actual: {actual}"
        )
