"""`aio-elastic`: the command line.

Exit codes: 0 success; the culprit's own code (128 + n for a signal) when the job
failed; 128 + n when signal n stopped it; 126 and 127 when a worker could not be
executed or found; 75 when the nodes of a job did not come together; 2 for a command
line that cannot be accepted; 1 for anything that this machine lacks.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from elastic_aio._version import __version__
from elastic_aio.errors import (
    JobEnded,
    JobFailed,
    RendezvousFailed,
    SpecError,
    SurroundingsError,
)
from elastic_aio.events import (
    AttemptFailed,
    Event,
    JobStarted,
    Restarting,
    RoundForming,
    StandingBy,
    WorkerStarted,
    event_to_json,
)
from elastic_aio.launcher import launch, no_thread_per_child, run_coroutine
from elastic_aio.logs.sink import Console, open_console, open_sink
from elastic_aio.logs.writer import LineWriter
from elastic_aio.report import Level, describe, format_failure
from elastic_aio.torchrun import RunRequest, UsageError, in_options, parse_run
from elastic_aio.worker.context import ERROR_FILE
from elastic_aio.worker.errorfile import render_error_file, with_exit_code

__all__ = ["entry", "main"]

_USAGE = """\
usage: aio-elastic run [options] script [arguments of the script]
       aio-elastic events [--rdzv-endpoint HOST:PORT] [--rdzv-id ID] [--json]
       aio-elastic store [--host HOST] [--port PORT] [--token-file FILE]
       aio-elastic store ping ENDPOINT
       aio-elastic --version

`aio-elastic run --help` lists the options of a run; they are torchrun's.
"""
# Seconds without progress after which a blocked console is left alone.
_PATIENCE_S = 5.0
_LEVELS = {
    "NOTSET": 0,
    "DEBUG": 10,
    "INFO": 20,
    "WARNING": 30,
    "WARN": 30,
    "ERROR": 40,
    "CRITICAL": 50,
    "FATAL": 50,
}


def entry() -> int:
    """Run the command line of this process; return the exit code."""
    code = main()
    # The exit code is settled.  A closing interpreter puts default actions back, and a
    # late signal would replace it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # What is left is the interpreter's end.  It collects garbage several times over,
    # and all that lives by now would be walked each time: 10 ms for nothing.
    gc.freeze()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        argv: the arguments; None takes those of the process.
    """
    _mend_inheritance()
    arguments = sys.argv[1:] if argv is None else list(argv)
    match arguments:
        case ["run", *rest]:
            return _main_run(rest)
        case ["store", *rest]:
            from elastic_aio.store_cli import main_store  # only this command needs it

            return main_store(rest)
        case ["events", *rest]:
            from elastic_aio.events_cli import main_events  # likewise

            return main_events(rest)
        case ["--version" | "-V"]:
            print(f"aio-elastic {__version__}")
            return 0
        case ["--help" | "-h"]:
            print(_USAGE, end="")
            return 0
        case []:
            return _complain("", "a command is required: aio-elastic run [options] script", 2)
    return _complain("", f"unknown command {arguments[0]!r}: must be 'run', 'events' or 'store'", 2)


def _main_run(argv: list[str]) -> int:
    try:
        request = parse_run(argv, os.environ)
        events = _open_events(request.events_file)
        level = _level(os.environ.get("LOGLEVEL", ""))
    except UsageError as error:
        return _complain("run", str(error), 2)
    try:
        signals = request.signals.stop | request.signals.forward
        with no_thread_per_child(), _put_back_handlers(signals):
            return run_coroutine(lambda: _run(request, events, level))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # before our own handler was there: nothing had started
    except SpecError as error:
        return _complain("run", in_options(error), 2)
    except (SurroundingsError, OSError) as error:
        return _complain("run", str(error), 1)


async def _run(request: RunRequest, events: int | None, level: int) -> int:
    """Run a job and tell its story on stderr; return the exit code."""
    console = open_console()
    narrator = _Narrator(console, level)
    events_sink = None if events is None else open_sink("events", events)
    recorder = None if events_sink is None else LineWriter(events_sink)
    for notice in request.notices:
        narrator.say(notice)

    def listen(event: Event) -> None:
        narrator.tell(event)
        if recorder is not None:
            recorder.put(event_to_json(event) + b"\n")

    # These are back when the launch puts back what it found: a signal meant for
    # workers that have just ended must not end us before the report is out.
    _take_no_notice_of(request.signals.forward)
    try:
        await launch(request.spec, signals=request.signals, console=console, listeners=[listen])
        code = 0
    except JobEnded as error:
        code = error.result.exit_code
        narrator.conclude(error, request.spec.name)
        if isinstance(error, JobFailed):
            _pass_on_error_file(error, narrator.node)
    finally:
        _take_no_notice_of(request.signals.stop)
        if recorder is not None and (not await recorder.drained(_PATIENCE_S) or recorder.lost):
            narrator.say(f"--events: not everything could be written ({recorder.lost})")
        await narrator.drained()
        console.close()
        if events_sink is not None and events is not None:
            events_sink.close()
            os.close(events)
    return code


class _Narrator:
    """Tells on stderr what happens, as far as it matters enough."""

    def __init__(self, console: Console, level: int) -> None:
        self._writer = LineWriter(console.err)
        self._level = level
        self._held: list[Event] = []
        self.node = ""
        """The name of this host."""

    def say(self, text: str) -> None:
        lines = "".join(f"aio-elastic: {line}\n" for line in text.split("\n"))
        self._writer.put(lines.encode("utf-8", "replace"))

    def tell(self, event: Event) -> None:
        self.node = event.node
        match event:
            # A worker that cannot be started at all is worth one line, the last one;
            # so what comes before it waits until something has started.
            case JobStarted():
                self._held.append(event)
                return
            case AttemptFailed() if event.root.pid is None:
                self._held.append(event)
                return
            case WorkerStarted() | Restarting() | RoundForming() | StandingBy():
                for held in self._held:
                    self._say_if_it_matters(held)
                self._held.clear()
        self._say_if_it_matters(event)

    def _say_if_it_matters(self, event: Event) -> None:
        level, text = describe(event)
        if level >= self._level:
            self.say(text)

    def conclude(self, error: JobEnded, name: str) -> None:
        failures = error.result.failures
        has_workers = isinstance(error, JobFailed) and not isinstance(error, RendezvousFailed)
        if has_workers and failures and failures[0].pid is not None:
            self.say(error.result.reason)
            self._writer.put(format_failure(error.result, name).encode("utf-8", "replace") + b"\n")
        else:
            self.say(" ".join(str(error).split()))

    async def drained(self) -> None:
        await self._writer.drained(_PATIENCE_S)


def _mend_inheritance() -> None:
    """Put right what a careless parent has handed down.

    Closed standard streams would be filled by whatever is opened next; with an
    ignored SIGCHLD the kernel would throw the workers' exit statuses away.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def _put_back_handlers(numbers: Iterable[int]) -> Iterator[None]:
    former = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _take_no_notice_of(numbers: Iterable[int]) -> None:
    """Let signals pass without effect, those excepted that were ignored already.

    By a handler and not by SIG_IGN, which the workers would inherit.
    """
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _level(text: str) -> int:
    if not text:
        return Level.WARNING
    if text.isdecimal():
        return int(text)
    if text.upper() in _LEVELS:
        return _LEVELS[text.upper()]
    raise UsageError(f"LOGLEVEL: must be one of {', '.join(_LEVELS)}, not {text!r}")


def _open_events(path: str | None) -> int | None:
    if path is None:
        return None
    # O_NONBLOCK: a named pipe without a reader is an error, not a wait.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise UsageError(
            f"--events: must be a file that can be written ({said}), not {path!r}"
        ) from error


def _pass_on_error_file(error: JobFailed, node: str) -> None:
    """Put the root cause's error file where our own launcher looks for one."""
    target = os.environ.get(ERROR_FILE)
    root = error.failures[0] if error.failures else None
    if not target or root is None or root.error is None or not root.error.path:
        return
    try:
        if root.host == node:
            with open(root.error.path, "rb") as file:
                content = file.read()
        else:
            content = render_error_file(root.error)
        with open(target, "wb") as file:
            file.write(with_exit_code(content, root.status.returncode or 0))
    except (OSError, ValueError) as problem:
        _complain("run", f"the error file could not be passed on to {target}: {problem}", 0)


def _complain(command: str, text: str, code: int) -> int:
    """Say one line on stderr, if there is one; return `code`."""
    line = " ".join(text.split())
    try:
        os.write(2, f"aio-elastic{f' {command}' if command else ''}: {line}\n".encode())
    except OSError:
        pass  # nobody listens
    return code


if __name__ == "__main__":
    raise SystemExit(entry())
