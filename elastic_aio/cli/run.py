"""`aio-elastic run`: run a job, print its progress on stderr, return its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.cli.forced_exit import forced_exit
from elastic_aio.cli.options import choose_loop, print_error
from elastic_aio.cli.printer import EventPrinter
from elastic_aio.cli.run_options import RunRequest, as_option_error
from elastic_aio.errors import HostError, JobEnded, JobFailed, SpecError
from elastic_aio.events import Event, JobFinished
from elastic_aio.launcher import receive_signals, run_coroutine, supervise, use_pidfd_child_watcher
from elastic_aio.logs.console import open_sink
from elastic_aio.outcome import LaunchResult
from elastic_aio.process.adopted import subreaper
from elastic_aio.signals import ReceivedSignals
from elastic_aio.spec.checks import UsageError, invalid_value, parse_int
from elastic_aio.spec.job import Command, LaunchSpec
from elastic_aio.spec.stop import SignalSpec
from elastic_aio.status import Level
from elastic_aio.text import error_reason
from elastic_aio.worker.context import ERROR_FILE
from elastic_aio.worker.errorfile import pass_on_error_file, write_error_file

if TYPE_CHECKING:
    from elastic_aio.agent.agent import Agent
    from elastic_aio.cli.event_file import EventFile
    from elastic_aio.cli.sd_notify import ServiceNotifier
    from elastic_aio.http.server import StatusServer
    from elastic_aio.recorder import RunRecorder

HandlerFactory = Callable[[Callable[[str], None]], Callable[[Event], None]]
"""Makes a listener for events from a function that writes a line to standard error."""

_CONSOLE_PATIENCE = 5.0
"""Seconds without progress after which a blocked console or event file is abandoned."""
_LATE_S = 0.2
"""Seconds from the start of a job after which its recorder is loaded."""


def main_run(request: RunRequest, *, owns_process: bool) -> int:
    """Run the job of a command line; return the exit code.

    With `owns_process` all children of this process belong to the job.
    """
    try:
        factory = choose_loop(request.loop)
        level = _level(os.environ.get("LOGLEVEL", ""))
        level = level if request.level is None else request.level
        make_handler = _handler_factory(request.event_log_handler)
        events = None
        if request.events_file is not None:
            from elastic_aio.cli.event_file import EventFile  # most jobs write no events

            events = EventFile(request.events_file)
    except UsageError as error:
        return print_error(request.command, as_option_error(error, request.variables), 2)
    subreaper.owns_process = owns_process
    notices = handled = request.spec.preemption.signals
    if request.reloads_on_hup:
        handled |= {signal.SIGHUP}
        request = request.replace(
            spec=request.spec, signals=_without_hup(request.signals), reread=request.reread
        )
    notifier = _service_notifier() if owns_process else None
    try:
        with use_pidfd_child_watcher(), receive_signals(request.signals, handled) as received:
            if owns_process:
                forced_exit.choose(received.stops, notices)
                received.on_signal = forced_exit.note
            code = run_coroutine(
                lambda: _run(request, events, level, received, make_handler, notifier),
                loop_factory=factory,
            )
            if owns_process:
                # Outside, a signal would find the default actions.
                forced_exit.handle_late()
            return code
    except SpecError as error:
        _write_error_file(error)
        return print_error(request.command, as_option_error(error, request.variables), 2)
    except HostError as error:
        _write_error_file(error)
        return print_error(request.command, str(error), 1)
    except OSError as error:
        _write_error_file(error)
        subject = "" if error.filename is None else f"{error.filename}: "
        return print_error(request.command, f"{subject}{error_reason(error)}", 1)


def _without_hup(signals: SignalSpec) -> SignalSpec:
    """Return what stops a job that SIGHUP reloads."""
    return signals.replace(stop=signals.stop - {signal.SIGHUP})


def _handler_factory(name: str) -> HandlerFactory | None:
    """Return the maker of the listener for `--event-log-handler`; None without one."""
    if name == "null":
        return None
    from elastic_aio.torch_events import load_event_handler

    return load_event_handler(name)


def _service_notifier() -> ServiceNotifier | None:
    """Return the notifier that tells systemd about the job; None if this process is no service."""
    if "NOTIFY_SOCKET" not in os.environ:
        return None
    from elastic_aio.cli.sd_notify import take_notifier  # most jobs are started by hand

    return take_notifier()


async def _run(
    request: RunRequest,
    events: EventFile | None,
    level: int,
    received: ReceivedSignals,
    make_handler: HandlerFactory | None,
    notifier: ServiceNotifier | None,
) -> int:
    stderr = open_sink("stderr", 2)
    printer = EventPrinter(stderr, level, color=request.color)
    printer.warns_of_threads = not (
        not isinstance(request.spec, LaunchSpec)
        or isinstance(request.spec.entrypoint, Command)
        or {**os.environ, **request.spec.env}.get("OMP_NUM_THREADS")
    )
    handler = None if make_handler is None else make_handler(printer.print_line)
    listeners: list[Callable[[Event], None]] = [printer.on_event]
    if events is not None:
        events.begin()
        listeners.append(events.on_event)
    for warning in request.warnings:
        printer.warn(warning)
    if handler is not None:
        listeners.append(handler)
    try:
        result = await _supervise(request, received, printer, listeners, notifier)
        code = 0
        printer.print_success(result)
    except JobEnded as error:
        code = error.result.exit_code
        await printer.print_result(error, request.spec.name, getattr(request.spec, "python", None))
        _write_error_file(error)
    finally:
        # The exit code is settled: later signals have no effect while the report is printed.
        signals = request.signals
        received.discard(signals.stop | signals.forward | request.spec.preemption.signals)
        if events is not None and (why := await events.close(_CONSOLE_PATIENCE)) is not None:
            printer.print(f"--events: some events are not written ({why})")
        await printer.drain(_CONSOLE_PATIENCE)
        stderr.close()
    return code


async def _supervise(
    request: RunRequest,
    received: ReceivedSignals,
    printer: EventPrinter,
    listeners: list[Callable[[Event], None]],
    notifier: ServiceNotifier | None,
) -> LaunchResult:
    async with AsyncExitStack() as stack:
        if notifier is not None:
            listeners.append(stack.enter_context(notifier))
        if request.http is not None:
            listeners += await _serve(request.http, request.variables, stack, printer)
        if request.is_recorded:
            recorder = _LateRecorder()
            listeners.append(recorder)
            stack.push_async_callback(recorder.close, printer)
        reloader = _Reloader(request, printer) if request.reloads_on_hup else None
        if reloader is not None:
            stack.push_async_callback(reloader.aclose)
        return await supervise(
            request.spec,
            request.signals,
            received,
            None if reloader is None else reloader.reload,
            listeners=listeners,
            adopt_orphans=True,
            control=request.has_control,
        )


class _Reloader:
    """Reloads a job at SIGHUP, as its file now says."""

    def __init__(self, request: RunRequest, printer: EventPrinter) -> None:
        self._request = request
        self._printer = printer
        self._tasks: set[asyncio.Task[None]] = set()

    def reload(self, agent: Agent) -> None:
        task = create_task(self._reload(agent), name="reload the job")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self, agent: Agent) -> None:
        try:
            spec = None if self._request.reread is None else self._request.reread()
            if not await agent.reload("", spec):
                self._printer.warn("the reload has failed, what it has not replaced runs on")
        except (SpecError, UsageError) as error:
            self._printer.warn(f"nothing is reloaded: {error}")

    async def aclose(self) -> None:
        await cancel_and_wait(self._tasks)


class _LateRecorder:
    """Records a run from the time on when its workers have begun, or it has ended."""

    def __init__(self) -> None:
        self._source: Callable[[], Agent | None] = lambda: None
        self._recorder: RunRecorder | None = None

    def use_agent(self, source: Callable[[], Agent | None]) -> None:
        self._source = source
        asyncio.get_running_loop().call_later(_LATE_S, self._begin)

    def __call__(self, event: Event) -> None:
        if isinstance(event, JobFinished):
            self._begin()(event)

    def _begin(self) -> RunRecorder:
        if self._recorder is None:
            from elastic_aio.recorder import RunRecorder  # a start does without

            self._recorder = RunRecorder()
            self._recorder.use_agent(self._source)
        return self._recorder

    async def close(self, printer: EventPrinter) -> None:
        if self._recorder is not None:
            async with self._recorder as recorder:
                pass
            if recorder.problem:
                printer.warn(f"the record of this run is not complete: {recorder.problem}")


async def _serve(
    address: str, variables: Mapping[str, str], stack: AsyncExitStack, printer: EventPrinter
) -> list[StatusServer]:
    """Serve `--http`; print the port if it was chosen here."""
    from elastic_aio.http.server import StatusServer  # most jobs have none

    try:
        server = StatusServer(address)
        await stack.enter_async_context(server)
    except SpecError as error:
        if "--http" not in variables:
            raise
        # All agents of a host often share torch's variable, and only one gets the port.
        printer.warn(as_option_error(error, variables))
        return []
    if server.address != address:
        printer.print(f"--http: listening at http://{server.address}")
    return [server]


def _level(text: str) -> int:
    if not text:
        return Level.WARNING
    if (number := parse_int(text)) is not None:
        return number
    levels = logging.getLevelNamesMapping()
    if text.upper() in levels:
        return levels[text.upper()]
    raise invalid_value("LOGLEVEL", f"must be one of: {', '.join(levels)}", text)


def _write_error_file(error: Exception) -> None:
    """Write the root cause's error file for the parent launcher, if it expects one.

    Without an error file of the workers there is none, unless the launcher's own error ended the
    job.
    """
    target = os.environ.get(ERROR_FILE)
    if not target:
        return
    root = error.root_cause if isinstance(error, JobFailed) else None
    warning = None
    try:
        if root is None:
            from elastic_aio.worker.recorder import worker_error

            write_error_file(worker_error(error, target))
        elif root.error is not None and root.error.path:
            warning = pass_on_error_file(root, target)
    except OSError as problem:
        reason = error_reason(problem)
        print_error(
            "run", str(invalid_value(ERROR_FILE, f"cannot be written: {reason}", target)), 0
        )
    if warning is not None:
        print_error("run", f"{ERROR_FILE}: {warning}", 0)
