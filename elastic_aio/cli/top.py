"""`aio-elastic top`: a live view of jobs and their workers.

The agent is asked only when its events report a change; the usage of the workers is read from /proc
here.  So a watched job stays as idle as any other.  With `rich` (the extra `colors`) the view has
colors and borders, otherwise it is a plain table.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.cli import status_text
from elastic_aio.cli.local_jobs import EXIT_CODES, choose_job, command, job_parser
from elastic_aio.control.client import CommandClient, RunningJob, find_jobs, run_blocking
from elastic_aio.errors import ControlError
from elastic_aio.events import Event, JobFinished
from elastic_aio.process.rusage import with_usage
from elastic_aio.spec.checks import parse_seconds
from elastic_aio.status import JobStatus

_INTERVAL_S: Final = 2.0
_CLEAR: Final = "\x1b[H\x1b[2J"


class View(Struct, frozen=True):
    head: list[str]
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


Draw = Callable[[View], None]


@command("top")
def main_top(argv: Sequence[str]) -> int:
    parser = job_parser(
        "top",
        "Show jobs and workers, and go on until Ctrl-C or the end of the job.",
        epilog=f"Colors need the package rich (pip install 'elastic_aio[colors]'). {EXIT_CODES}",
    )
    parser.add_argument(
        "--interval",
        type=lambda text: parse_seconds("--interval", text, is_positive=True, limit=1e6),
        default=_INTERVAL_S,
        metavar="SECONDS",
        help=f"time between two views (default {_INTERVAL_S:g})",
    )
    parser.add_argument("--once", action="store_true", help="one view, then exit")
    parser.add_argument("--plain", action="store_true", help="a plain table, without rich")
    arguments = parser.parse_args(argv)
    jobs = find_jobs()
    if arguments.job is None and len(jobs) > 1:
        return _watch(_Jobs(), arguments)
    with _Workers(choose_job(arguments.job, jobs)) as workers:
        return _watch(workers, arguments)


def _watch(source: _Jobs | _Workers, arguments: argparse.Namespace) -> int:
    with _screen(is_plain=arguments.plain) as draw:
        view = source.view()
        if arguments.once and isinstance(source, _Workers):
            time.sleep(status_text.MEASURED_S)
            view = source.view()
        draw(view)
        while not arguments.once and source.wait(arguments.interval):
            draw(source.view())
    return 0


class _Jobs:
    """All jobs of this user; each view asks their agents."""

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return True

    def view(self) -> View:
        now = time.time()
        return View(
            [], status_text.JOB_COLUMNS, [status_text.job_row(job, now) for job in find_jobs()]
        )


class _Workers:
    """The workers of a job, and their shares of a CPU.

    The events of the job, which this object follows, say when its agent must be asked again.
    """

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._client = CommandClient(job)
        self._status = run_blocking(self._client.status())
        self._asked_at = time.time()
        self._meter = status_text.CpuMeter()
        self._end: JobFinished | None = None
        self._next_event: Callable[[float], Event | None] | None = None
        self._resources = ExitStack()

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def wait(self, seconds: float) -> bool:
        if self._end is not None:
            return False
        if self._next_event is None:  # not for a single view
            following = self._client.following(self._status.seq)
            self._next_event = self._resources.enter_context(following)
        deadline, has_changed = time.monotonic() + seconds, False
        while (left := deadline - time.monotonic()) > 0:
            event = self._next_event(left)
            has_changed = has_changed or event is not None
            if isinstance(event, JobFinished):
                self._end = event
                break
        if self._end is not None:
            end = self._end
            self._status = replace(
                self._status,
                phase=end.state.value,
                since=end.time,
                reason=end.why,
                goodput=end.goodput or self._status.goodput,
            )
        elif has_changed:
            with contextlib.suppress(ControlError):  # it is just ending
                self._status = run_blocking(self._client.status())
                self._asked_at = time.time()
        return True

    def view(self) -> View:
        now = time.time()
        if self._job.is_local:
            self._status = with_usage(self._status)
        head = [
            *status_text.head_lines(self._advanced(now), now),
            *status_text.child_table(self._status, now),
        ]
        return View(head, *status_text.worker_cells(self._status, now, self._meter.share))

    def _advanced(self, now: float) -> JobStatus:
        """Return the status with the time that all workers have run since it was asked for."""
        status = self._status
        if not status.is_running:
            return status
        productive = status.goodput.productive + max(0.0, now - self._asked_at)
        goodput = replace(status.goodput, productive=productive)
        return replace(status, goodput=goodput)


# ------------------------------------------------------------------ the screen


@contextlib.contextmanager
def _screen(*, is_plain: bool) -> Iterator[Draw]:
    """Yield a function that draws a view: with rich on a terminal, if it is installed."""
    if not sys.stdout.isatty():
        yield _print
        return
    if not is_plain:
        with contextlib.suppress(ImportError):
            from rich.live import Live

            with Live(auto_refresh=False, screen=False, transient=False) as live:
                yield lambda view: live.update(rich_view(view), refresh=True)
            return
    yield _redraw


def _print(view: View) -> None:
    print("\n".join([*view.head, *status_text.table(view.columns, view.rows), ""]), flush=True)


def _redraw(view: View) -> None:
    width, height = shutil.get_terminal_size()
    lines = status_text.fit([*view.head, "", *status_text.table(view.columns, view.rows)], width)
    print(_CLEAR + "\n".join(lines[: height - 1]), flush=True)


_STYLES: Final = {
    "running": "green",
    "succeeded": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "preempted": "yellow",
    "stopping": "yellow",
    "restarting": "yellow",
}


def rich_view(view: View) -> Any:
    """Return a view as an object that rich renders."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in view.columns:
        is_number = column in ("RANK", "PID", "CPU", "CPU TIME", "PEAK MEM", "ATTEMPT")
        drawn.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for row in view.rows:
        words = (cell.partition(" ")[0] for cell in row)
        style = next((_STYLES[word] for word in words if word in _STYLES), "")
        drawn.add_row(*(Text(cell, style=style) for cell in row))
    return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in view.head), "", drawn)
