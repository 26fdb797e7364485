"""Plans of the workers' log files and streams, made before anything is opened.

The layout is torch.distributed.elastic's, with the host and `node.json` for nodes that
share a file system::

    <log_dir>/<run_id>_<host>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}
    <log_dir>/<run_id>_<host>_<random>/attempt_<n>/filtered_{stdout,stderr}.log
    <log_dir>/<run_id>_<host>_<random>/node.json

Without a `log_dir` and without a redirected or tee'd stream a worker has no directory before
its first captured byte, which makes it: its error file is `attempt_<n>/error_<local_rank>.json`.
"""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct

from elastic_aio.spec.logs import LogLayout, LogLayoutContext, LogSpec, Std
from elastic_aio.value import from_json, to_json


class StreamTarget(Enum):
    """Where a worker's stream goes."""

    CONSOLE = "console"
    """The agent's own descriptor, inherited."""
    NOWHERE = "nowhere"
    """`/dev/null`: the stream is filtered out."""
    FILE = "file"
    """A log file."""


class StreamPlan(Struct, frozen=True):
    target: StreamTarget
    path: str | None = None
    is_shown: bool = False
    """Whether the console shows the file."""
    is_relayed: bool = False
    """Whether it passes through this process, so that a full disk does not fail the worker."""
    is_muted: bool = False
    """Whether the console may not show what a full disk does not take."""
    is_captured: bool = False
    """Whether it is passed on unchanged: its file is for the failure report."""


class CapturedStreams(Struct, frozen=True):
    """The streams without a file of their own that are captured."""

    streams: Std = Std.NONE
    """The captured streams that the console shows."""
    is_joined: bool = False
    """Whether both are the same file for the agent: they go to one file, so that the order of a
    worker's writes to both stays."""
    has_muted: bool = False
    """Whether the standard error of workers that are not shown is captured."""


NOT_CAPTURED = CapturedStreams()


class WorkerLogs(Struct, frozen=True):
    """The streams and the error file of one worker.

    `directory` is made before the worker starts; None: no file of the worker needs it by then.
    Shown lines have `prefix`, or else the prefix of the `LogSpec`.
    """

    stdout: StreamPlan
    stderr: StreamPlan
    directory: str | None
    error_file: str
    prefix: str | None = None


def run_prefix(run_id: str, host: str = "") -> str:
    """Return the prefix of a run's directory name: characters unfit for a path become `_`.

    The domain of the host is left out.
    """
    safe = re.sub(r"[^\w.+:@=-]", "_", run_id)[:100].lstrip(".")
    short = host if re.fullmatch(r"[\d.]*", host) else host.partition(".")[0]
    node = re.sub(r"[^\w.:-]", "_", short, flags=re.ASCII)[:63]
    # A file name has at most 255 bytes: 12 come before this prefix, and a random suffix follows.
    run = safe.encode()[:160].decode(errors="ignore")
    return f"{run}_{node}_" if node else f"{run}_"


class NodeRecord(Struct, frozen=True, kw_only=True):
    """The node that writes into a run's directory: the content of `node.json` there."""

    run_id: str
    host: str
    pid: int
    """The launcher's process id."""
    started_at: float
    """Unix seconds."""
    node_rank: int | None = None
    """The requested group rank, if any."""
    group_rank: int | None = None
    """The group rank in the last round; None before the first."""

    def encode(self) -> bytes:
        return to_json(self) + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> NodeRecord:
        """Read what `encode` has returned, or raise a ValueError; unknown fields are left out."""
        return from_json(content, cls)


def attempt_directory(run_directory: str, attempt: int) -> str:
    return f"{run_directory}/attempt_{attempt}"


def filtered_logs(spec: LogSpec, run_directory: str | None, attempt: int) -> dict[str, str]:
    """Return the files for the lines that duplicate filters select, by the stream's name."""
    filters = {
        "stdout": spec.duplicate_stdout_filters,
        "stderr": spec.duplicate_stderr_filters,
    }
    paths = spec.filtered_paths() if isinstance(spec, LogLayout) else None
    if paths is not None:
        return {name: path for name, path in paths.items() if filters[name]}
    if run_directory is None or spec.is_off:
        return {}
    directory = attempt_directory(run_directory, attempt)
    return {name: f"{directory}/filtered_{name}.log" for name, texts in filters.items() if texts}


def plan_logs(
    spec: LogSpec,
    run_directory: str | None,
    attempt: int,
    local_rank: int,
    captured: CapturedStreams = NOT_CAPTURED,
    *,
    is_given: bool = False,
) -> WorkerLogs:
    """Decide where a worker's output goes.

    A tee'd stream is redirected too: the console shows the file.  Other streams that are not
    redirected are captured or inherited.  Workers outside `local_ranks_filter` are muted: their
    files are complete, but not shown, and their other streams go to /dev/null.  `run_directory` is
    None if no files can or shall be kept.  `is_given`: workers may write in their own directories
    only.
    """
    if run_directory is None or spec.is_off:
        tee = redirected = Std.NONE
        directory = None
    else:
        tee = spec.tee.of(local_rank)
        redirected = spec.redirects.of(local_rank) | tee
        directory = f"{attempt_directory(run_directory, attempt)}/{local_rank}"
    if directory is None:
        captured = NOT_CAPTURED
    if isinstance(spec, LogLayout):
        return _plan_layout(spec, LogLayoutContext(local_rank, attempt, directory), captured)
    is_joined = redirected == Std.ALL and tee in (Std.NONE, Std.ALL) and spec.is_joined
    is_unmuted = spec.is_off or not spec.local_ranks_filter or local_rank in spec.local_ranks_filter

    def stream(bit: Std, name: str) -> StreamPlan:
        if redirected & bit:
            is_shown = bool(tee & bit) and is_unmuted
            path = f"{directory}/{'output' if is_joined else name}.log"
            return _file_plan(spec, path, is_shown=is_shown, is_muted=not is_unmuted)
        if is_unmuted:
            return StreamPlan(StreamTarget.CONSOLE)
        if bit == Std.ERR and captured.has_muted:
            return _captured_plan(f"{directory}/{name}.log", is_muted=True)
        return StreamPlan(StreamTarget.NOWHERE)

    stdout, stderr = _captured(
        stream(Std.OUT, "stdout"), stream(Std.ERR, "stderr"), directory, captured
    )
    error_file = "" if directory is None else f"{directory}/error.json"
    if run_directory is not None and spec.log_dir is None and not redirected and not is_given:
        # Most workers fail never and write no line: no directory is made and removed for them.
        error_file = f"{attempt_directory(run_directory, attempt)}/error_{local_rank}.json"
        directory = None
    return WorkerLogs(stdout=stdout, stderr=stderr, directory=directory, error_file=error_file)


def _captured(
    stdout: StreamPlan, stderr: StreamPlan, directory: str | None, captured: CapturedStreams
) -> tuple[StreamPlan, StreamPlan]:
    """Return the plans with files for the streams that are captured in place of inherited."""
    is_out, is_err = (
        plan.target is StreamTarget.CONSOLE and bool(captured.streams & bit)
        for plan, bit in ((stdout, Std.OUT), (stderr, Std.ERR))
    )
    if captured.is_joined:
        if is_out and is_err:
            joined = _captured_plan(f"{directory}/output.log")
            return joined, joined
        is_out = False  # its order with another stream does not matter
    if is_out:
        stdout = _captured_plan(f"{directory}/stdout.log")
    if is_err:
        stderr = _captured_plan(f"{directory}/stderr.log")
    return stdout, stderr


def _captured_plan(path: str, *, is_muted: bool = False) -> StreamPlan:
    return StreamPlan(
        StreamTarget.FILE,
        path,
        is_shown=not is_muted,
        is_relayed=True,
        is_muted=is_muted,
        is_captured=True,
    )


def _plan_layout(
    layout: LogLayout, context: LogLayoutContext, captured: CapturedStreams
) -> WorkerLogs:
    destinations = layout.plan(context)

    def stream(name: str, path: str | None) -> StreamPlan:
        if path is None:
            return StreamPlan(StreamTarget.CONSOLE)
        if path == "/dev/null":
            return StreamPlan(StreamTarget.NOWHERE)
        return _file_plan(layout, path, is_shown=name in destinations.shown, is_muted=False)

    stdout, stderr = _captured(
        stream("stdout", destinations.stdout),
        stream("stderr", destinations.stderr),
        context.directory,
        captured,
    )
    return WorkerLogs(
        stdout=stdout,
        stderr=stderr,
        directory=context.directory,
        error_file=destinations.error_file,
        prefix=destinations.prefix,
    )


def _file_plan(spec: LogSpec, path: str, *, is_shown: bool, is_muted: bool) -> StreamPlan:
    is_relayed = spec.on_full == "console"
    return StreamPlan(StreamTarget.FILE, path, is_shown, is_relayed, is_relayed and is_muted)
