"""The end of a job as text: a line about a success, and the failure report in torchrun's layout."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Sequence

from elastic_aio.outcome import Failure, LaunchResult, signal_name
from elastic_aio.reasons import LOST_PEER, plain_lines, reason_of
from elastic_aio.status import StatusTracker
from elastic_aio.text import counted, format_duration, printable

_HELP = "aio-elastic help"
_HINT = f"none was recorded; see {_HELP} failures"
_HANG = re.compile(
    r"\((?:heartbeat|ready|progress|exit skew) timeout\)|WATCHDOG=trigger"
    r"|^phase '.*' has not ended after |timer '.*' expired after "
)
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_WIDTH_MAX = 60


def format_success(result: LaunchResult, status: StatusTracker) -> str:
    """Return one line about a job that has succeeded, which `status` has seen."""
    job = status.job
    parts = [counted(status.nproc, "worker")]
    if result.children:
        parts = [counted(len(result.children), "child", "children")]
    if job.master:  # there was a round
        nodes = counted(job.group_world_size, "node")
        parts = [f"{counted(job.world_size, 'worker')} on {nodes}"]
    parts.append(format_duration(result.duration))
    if result.restarts:
        parts.append(counted(result.restarts, "restart"))
    if job.membership_changes:
        parts.append(counted(job.membership_changes, "membership change"))
    return f"finished: {', '.join(parts)}"


def format_failure(result: LaunchResult, name: str) -> str:
    """Return the failure report of a job: several printable lines, without a final newline.

    `name` is `LaunchSpec.name`.  The layout is torchrun's, with additions: workers that the
    supervisor stopped are marked, a known cause is named, the last lines of stderr replace a
    missing traceback, and the log directory and a guide are named.
    """
    return "\n".join(map(printable, plain_lines(_failure(result, name))))


def _failure(result: LaunchResult, name: str) -> str:
    if not result.failures:
        return f"{name} FAILED: {result.reason}"
    name = result.failed_child or name
    root, *others = result.failures
    # Numbered by rank, independently of the order of the causes.
    by_rank = sorted(result.failures, key=lambda failure: failure.rank)
    child = result.failed_child
    blocks = {id(one): _block(index, one, child) for index, one in enumerate(by_rank)}
    in_order = [blocks[id(failure)] for failure in (root, *others)]
    parts = [report_of(f"{name} FAILED", in_order)]
    if result.log_dir:
        parts.append(f"Logs: {result.log_dir}")
    parts.append(f"Help: {_HELP} {guide_of(root)}")
    return "\n".join(parts)


def guide_of(failure: Failure) -> str:
    """Return the page, and the section of it, that says what to do about a failure."""
    if failure.cause == LOST_PEER:
        return "restarts the-root-cause"
    if failure.cause:
        return "failures known-causes"
    if _HANG.search(failure.reason):
        return "hangs deadlines"
    if failure.status.signal in _CRASHES:
        return "failures crashes"
    return "failures"


def report_of(title: str, blocks: Sequence[str], *, border: str = "=", section: str = "-") -> str:
    """Return a report in torchrun's layout; the first block is the root cause's."""
    lines = [title, *(line for block in blocks for line in block.split("\n"))]
    width = min(_WIDTH_MAX, max(map(len, lines)))
    return "\n".join(
        [
            "",
            border * width,
            title,
            section * width,
            "Failures:",
            "\n".join(blocks[1:]) or "  <NO_OTHER_FAILURES>",
            section * width,
            "Root Cause (first observed failure):",
            blocks[0],
            border * width,
        ]
    )


def block_of(index: int, fields: Iterable[tuple[str, str]]) -> str:
    """Return the block of a failure in such a report, from names and values."""
    return f"[{index}]:\n" + "\n".join(f"  {key:<10}: {value}" for key, value in fields)


def _block(index: int, failure: Failure, child: str = "") -> str:
    status = failure.status
    code = "?" if status.returncode is None else str(status.returncode)
    signal = f" ({signal_name(status.signal)})" if status.signal is not None else ""
    fields: list[tuple[str, str]] = [
        ("time", time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(failure.time))),
        ("host", failure.host),
        *([("child", child)] if child else []),
        ("rank", f"{failure.rank} (local_rank: {failure.local_rank})"),
        ("exitcode", f"{code} (pid: {failure.pid}){signal}"),
        ("error_file", (failure.error and failure.error.path) or "<N/A>"),
    ]
    if failure.is_victim:
        fields.append(("stopped", "by the supervisor, because of the root cause"))
    if failure.cause:
        fields.append(("cause", failure.cause))
    fields += [("note", note) for note in failure.notes]
    fields.append(("traceback", _traceback(failure)))
    if failure.stderr_tail and not (failure.error and failure.error.traceback):
        tail = "\n".join(f"    {line}" for line in failure.stderr_tail)
        place = failure.stderr_path or "its standard error, which no file has taken"
        fields.append(("stderr", f"last lines of {place}:\n{tail}"))
    return block_of(index, fields)


def _traceback(failure: Failure) -> str:
    if failure.error is not None:
        text = failure.error.traceback or failure.error.message
        first, *rest = text.rstrip("\n").split("\n")
        return "\n".join([first, *(f"  {line}" for line in rest)])
    if failure.message:
        return failure.message
    if failure.status.signal is not None:
        number = failure.status.signal
        return f"Signal {number} ({signal_name(number)}) received by PID {failure.pid}"
    if failure.stderr_tail:
        return failure.reason or reason_of("", failure.stderr_tail)
    return _HINT
