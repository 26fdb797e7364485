"""The place that decides where each stream goes, for those who want another layout.

A plug-in derives from `LogsSpecs` and says where the streams of one worker go: a pure
plan, made before anything is opened.  Making folders and opening files, and showing
what is shown, stays the library's doing.  An entry point of the group
`elastic_aio.logs_specs` makes a plug-in known to `--logs-specs`; it is called with
the settings of `LogSpec`::

    [project.entry-points."elastic_aio.logs_specs"]
    by_day = "my_package.logs:ByDay"
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_aio.spec import LogSpec

__all__ = ["ENTRY_POINTS", "DefaultLogsSpecs", "LogsDest", "LogsSpecs", "LogsWorker"]

ENTRY_POINTS = "elastic_aio.logs_specs"


@dataclass(frozen=True, slots=True)
class LogsWorker:
    """Whose logs are planned: `folder` is its own, made before it starts; None if none is kept."""

    local_rank: int
    attempt: int
    folder: str | None


@dataclass(frozen=True, slots=True)
class LogsDest:
    """Where one worker's streams go.

    `stdout` and `stderr` are paths of new files, whose folders are made; None
    inherits ours, "/dev/null" drops the stream.  `shown` names the streams among
    "stdout" and "stderr" whose files are shown on the console.  `error_file` is the
    path of torch's error file; empty keeps none.
    """

    stdout: str | None = None
    stderr: str | None = None
    error_file: str = ""
    shown: frozenset[str] = frozenset()


class LogsSpecs(LogSpec):
    """Base of plug-ins: the settings of a `LogSpec`, and a plan of one's own."""

    __slots__ = ()

    def plan(self, worker: LogsWorker) -> LogsDest:
        """Say where one worker's streams go; pure, and the same whenever it is asked."""
        raise NotImplementedError


class DefaultLogsSpecs(LogSpec):
    """The layout of torch.distributed.elastic, which a plain `LogSpec` has too."""

    __slots__ = ()
