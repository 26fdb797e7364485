"""Which stream of which worker goes where: a plan, made before anything is opened.

Layout, as torch.distributed.elastic has it::

    <log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}
"""

from __future__ import annotations

import re
from enum import Enum

from msgspec import Struct

from elastic_aio.logspecs import LogsSpecs, LogsWorker
from elastic_aio.spec import LogSpec
from elastic_aio.std import Std

__all__ = ["StreamPlan", "StreamTarget", "WorkerLogs", "attempt_folder", "plan_logs", "run_prefix"]


class StreamTarget(Enum):
    """Where a worker's stream goes."""

    CONSOLE = "console"
    """Our own descriptor, inherited."""
    NOWHERE = "nowhere"
    """`/dev/null`: a stream that was filtered out."""
    FILE = "file"


class StreamPlan(Struct, frozen=True):
    """One stream: its target, its file if it has one, and whether that is shown."""

    target: StreamTarget
    path: str | None = None
    is_shown: bool = False


class WorkerLogs(Struct, frozen=True):
    """The streams and the error file of one worker; no folder means no files."""

    stdout: StreamPlan
    stderr: StreamPlan
    folder: str | None
    error_file: str


def run_prefix(run_id: str) -> str:
    """Return the beginning of a run's folder name; what a path cannot hold becomes `_`."""
    harmless = re.sub(r"[^\w.+:@=-]", "_", run_id)[:100].lstrip(".")
    # A name has 255 bytes, and some belong to what follows.
    return harmless.encode()[:200].decode(errors="ignore") + "_"


def attempt_folder(run_folder: str, attempt: int) -> str:
    """Return the folder of one attempt."""
    return f"{run_folder}/attempt_{attempt}"


def plan_logs(spec: LogSpec, run_folder: str | None, attempt: int, local_rank: int) -> WorkerLogs:
    """Decide where one worker's output goes.

    A tee'd stream is redirected too: the file is what the console copies.  With
    neither, a stream is inherited.  `local_ranks_filter` mutes the others: their
    files are complete, but not shown, and inherited streams go nowhere.

    Args:
        spec: what the user chose.
        run_folder: folder of the run; None when nothing can or shall be kept.
        attempt: number of the attempt.
        local_rank: the worker.
    """
    if run_folder is None or spec.is_off:
        chosen = redirected = Std.NONE
        folder = None
    else:
        chosen = spec.tee.of(local_rank)
        redirected = spec.redirects.of(local_rank) | chosen
        folder = f"{attempt_folder(run_folder, attempt)}/{local_rank}"
    if isinstance(spec, LogsSpecs):
        return _plug_in_logs(spec, LogsWorker(local_rank, attempt, folder))
    listed = spec.is_off or not spec.local_ranks_filter or local_rank in spec.local_ranks_filter

    def stream(bit: Std, name: str) -> StreamPlan:
        if redirected & bit:
            is_shown = bool(chosen & bit) and listed
            return StreamPlan(StreamTarget.FILE, f"{folder}/{name}.log", is_shown)
        return StreamPlan(StreamTarget.CONSOLE if listed else StreamTarget.NOWHERE)

    return WorkerLogs(
        stdout=stream(Std.OUT, "stdout"),
        stderr=stream(Std.ERR, "stderr"),
        folder=folder,
        error_file="" if folder is None else f"{folder}/error.json",
    )


def _plug_in_logs(specs: LogsSpecs, worker: LogsWorker) -> WorkerLogs:
    chosen = specs.plan(worker)

    def stream(name: str, path: str | None) -> StreamPlan:
        if path is None:
            return StreamPlan(StreamTarget.CONSOLE)
        if path == "/dev/null":
            return StreamPlan(StreamTarget.NOWHERE)
        return StreamPlan(StreamTarget.FILE, path, name in chosen.shown)

    return WorkerLogs(
        stdout=stream("stdout", chosen.stdout),
        stderr=stream("stderr", chosen.stderr),
        folder=worker.folder,
        error_file=chosen.error_file,
    )
