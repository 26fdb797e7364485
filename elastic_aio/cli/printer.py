"""The lines of `aio-elastic run` on stderr: one for each event, a countdown, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from elastic_aio.aio import create_task, run_in_thread
from elastic_aio.errors import JobEnded, JobFailed, RendezvousFailed
from elastic_aio.events import AttemptFailed, Event, JobFinished, JobStarted, WorkerStarted
from elastic_aio.logs.console import LineWriter, Sink, SinkLost, styled
from elastic_aio.outcome import EndCause, LaunchResult
from elastic_aio.report import format_failure, format_success
from elastic_aio.status import Level, StatusTracker
from elastic_aio.text import format_duration, format_value, one_line, shown_bytes

_NAME: Final = b"aio-elastic: "
_BOLD: Final = b"\x1b[1m"
_GREEN: Final = b"\x1b[1;32m"
_YELLOW: Final = b"\x1b[1;33m"
_RED: Final = b"\x1b[1;31m"

_OMP_NOTICE: Final = "OMP_NUM_THREADS is not set: each worker gets 1; set what suits your program"


class EventPrinter:
    """Prints a line on stderr for each event of at least `level`."""

    def __init__(self, stderr: Sink, level: int, *, color: str = "never") -> None:
        """Print into `stderr`, which the caller closes.

        Events below `level` are not printed, except the end of a failed job.  `color` is "auto" (on
        a terminal), "always" or "never".
        """
        self._writer = LineWriter(stderr)
        self._level = level
        self._is_colored = color == "always" or (color == "auto" and stderr.is_terminal)
        self._is_terminal = stderr.is_terminal
        self._countdown: _Countdown | None = None
        if stderr.is_terminal and level <= Level.WARNING:
            style = _BOLD if self._is_colored else b""
            # Every write erases the line, also an empty write.
            self._countdown = _Countdown(stderr, style, lambda: self._writer.put(b""))
        self._held: list[Event] = []
        self._said = ""  # the last sentence
        self._status = StatusTracker()
        self.warns_of_threads = False
        """Whether to print once that several workers get OMP_NUM_THREADS=1."""

    def print_line(self, line: str) -> None:
        self._writer.put(shown_bytes(f"{line}\n"))

    def print(self, text: str, style: bytes = _BOLD) -> None:
        """Print lines, each with our name, which has a style if there are colors."""
        prefix = styled(_NAME, style if self._is_colored else b"")
        self._writer.put(b"".join(prefix + shown_bytes(f"{one}\n") for one in text.split("\n")))

    def warn(self, text: str) -> None:
        if self._level <= Level.WARNING:
            self.print(text, _YELLOW)

    def on_event(self, event: Event) -> None:
        """Print an event, or hold it until a worker has been started."""
        self._status(event)
        if self._countdown is not None:
            self._countdown.on_event(event)
        # If no worker can be started at all, the final line is the only one printed;
        # so earlier events are held until something has started.
        is_unstarted = isinstance(event, AttemptFailed) and event.root.pid is None
        if isinstance(event, JobStarted) or is_unstarted:
            self._held.append(event)
            return
        is_shown = isinstance(event, WorkerStarted) or event.level >= self._level
        if is_shown and not isinstance(event, JobFinished):
            for held in self._held:
                self._print_event(held)
            self._held.clear()
        self._print_event(event)

    def _print_event(self, event: Event) -> None:
        if event.level < self._level:
            return
        self._said = event.sentence
        self.print(event.sentence, _RED if isinstance(event, AttemptFailed) else _BOLD)
        if isinstance(event, JobStarted) and event.nproc_per_node > 1 and self.warns_of_threads:
            self.warns_of_threads = False
            self.print(_OMP_NOTICE, _YELLOW)

    def print_success(self, result: LaunchResult) -> None:
        if result.cause is EndCause.RUN_HAD_ENDED:
            self.print(f"{one_line(result.reason)}{_how_to_run(result)}")
        elif (self._status.nproc or result.children) and self._level <= Level.WARNING:
            self.print(format_success(result, self._status), _GREEN)

    async def print_result(self, error: JobEnded, name: str, python: str | None = None) -> None:
        """Print the failure report of a job of this `name` if workers failed, else one line.

        On a terminal a page follows the line; a program that reads it gets the line only.
        `python` is the interpreter that the caller has named.

        Cancellation: the report is not printed.
        """
        failures = error.result.failures
        has_workers = isinstance(error, JobFailed) and not isinstance(error, RendezvousFailed)
        if has_workers and failures and failures[0].pid is not None:
            # The end of the child has just said so.
            child, reason = error.result.failed_child, error.result.reason
            if not (child and self._said.endswith(reason.removeprefix(f"{child}: "))):
                self.print(reason, _RED)
            # Half a second for hundreds of long tracebacks.
            self.print_line(await run_in_thread(format_failure, error.result, name))
        else:
            text = one_line(str(error))
            if error.result.cause is EndCause.RUN_HAD_ENDED:
                text += _how_to_run(error.result)
            if python and text.startswith(f"cannot run {python}: "):
                text = f"PYTHON_EXEC: {text}"
            self.print(text, _RED)
            if self._is_terminal and isinstance(error, JobFailed):
                from elastic_aio.cli.exit_codes import guide_of_end  # after a failure only

                guide = guide_of_end(error.result.exit_code, error.result.cause)
                self.print_line(f"Help: aio-elastic help {guide}")

    async def drain(self, patience: float) -> None:
        """Wait until everything is printed, or the console is blocked for `patience` seconds."""
        if self._countdown is not None:
            self._countdown.clear()
        await self._writer.drain(patience)


def _how_to_run(result: LaunchResult) -> str:
    return (
        f"; no worker was started here (a new job needs another --rdzv-id than"
        f" {format_value(result.run_id, 40)}, or --rdzv-conf reuse=true)"
    )


class _Countdown:
    """The last line of a terminal while the job waits: for what, and how long yet."""

    def __init__(self, sink: Sink, style: bytes, erase: Callable[[], None]) -> None:
        self._sink = sink
        self._style = style
        self._erase = erase
        self._task: asyncio.Task[None] | None = None

    def on_event(self, event: Event) -> None:
        """Begin to count at an event that begins a wait; stop at any other."""
        self.clear()
        before, left, after = event.countdown or ("", None, "")
        if left is not None and left >= 1:
            until = asyncio.get_running_loop().time() + left
            self._task = create_task(self._count(before, after, until), name="count down")

    def clear(self) -> None:
        """Stop counting, and erase the line: workers may write to the terminal themselves."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self._erase()

    async def _count(self, text: str, after: str, until: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (left := until - loop.time()) > 0:
                line = shown_bytes(f"{text}{format_duration(max(left, 1.0))}{after}")
                async with self._sink.lock:
                    await self._sink.show_frame(line, _NAME, self._style)
                await asyncio.sleep(min(left, 1.0))  # the time itself is what is shown
            self._erase()
        except SinkLost:
            pass  # as for every other line
