"""What workers print and where it goes: `LogSpec`, stream masks, and layouts of plug-ins.

The grammar of `-r` and `-t` is torchrun's, `0..3` or `rank:mask,rank:mask`, for ranks of
any size and with ranges: `0-3:3,10:1`.

A plug-in derives from `LogLayout` and plans where the streams of each worker go, before
anything is opened; the library creates directories and files and writes to the console.
An entry point of the group `elastic_aio.logs_specs` makes a plug-in known to
`--logs-specs`; it is called with the settings of `LogSpec`::

    [project.entry-points."elastic_aio.logs_specs"]
    by_day = "my_package.logs:ByDay"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntFlag
from os import PathLike
from typing import Final, Literal

from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import (
    MAX_NUMBER,
    checked_integer,
    checked_items,
    checked_part,
    checked_path,
    checked_text,
    is_integer,
    set_fields,
)
from elastic_aio.value import Value

ENTRY_POINTS: Final = "elastic_aio.logs_specs"
"""The entry point group of `LogLayout` plug-ins."""


class Std(IntFlag):
    """Standard streams, with torch's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


_MAX_BYTES_MIN, _MAX_BYTES_MAX = 1 << 16, 1 << 50

_ACCEPTED = "must be a mask 0-3 or a list such as '0:3,1:1' or '0-3:3,10:1'"


class StdMap(Value, frozen=True):
    """The streams selected for each local rank."""

    everyone: Std = Std.NONE
    """The mask of the ranks that `by_rank` does not name."""
    by_rank: tuple[tuple[int, Std], ...] = ()
    """Pairs of a local rank and its mask, in ascending order."""

    @classmethod
    def parse(cls, field: str, value: object) -> StdMap:
        """Read a `StdMap` from a mask, a mapping, or the text of `-r`/`-t`.

        Ranks that a list does not name get no stream, as in torchrun.

        Raises:
            SpecError: naming `field`; the value has none of these forms.
        """
        if isinstance(value, StdMap):
            return value
        if isinstance(value, Mapping):
            return cls(by_rank=_checked(field, value, list(value.items())))
        if is_integer(value):
            return cls(everyone=_mask(field, value, value))
        if not isinstance(value, str):
            raise SpecError(field, value, _ACCEPTED)
        if _is_number(value.strip()):
            return cls(everyone=_mask(field, value, int(value)))
        pairs: list[tuple[object, object]] = []
        for part in value.split(","):
            ranks, colon, mask = part.strip().partition(":")
            first, dash, last = ranks.partition("-")
            last = last if dash else first
            if not (colon and _is_number(first) and _is_number(last) and _is_number(mask)):
                raise SpecError(field, value, _ACCEPTED)
            if int(first) > int(last):
                raise SpecError(field, value, f"range {ranks} runs backwards")
            pairs += [(rank, int(mask)) for rank in range(int(first), int(last) + 1)]
        return cls(by_rank=_checked(field, value, pairs))

    def of(self, local_rank: int) -> Std:
        """Return the streams of one worker."""
        return dict(self.by_rank).get(local_rank, self.everyone)

    @property
    def is_empty(self) -> bool:
        """Whether no stream of any worker is selected."""
        return not self.everyone and not any(mask for _, mask in self.by_rank)

    @property
    def highest_rank(self) -> int:
        """The highest local rank named; -1 when none is."""
        return max((rank for rank, _ in self.by_rank), default=-1)


def _is_number(text: str) -> bool:
    # At most five digits: no host runs more workers, and a range is expanded.
    return text.isdecimal() and len(text) <= 5


def _mask(field: str, value: object, mask: object) -> Std:
    if is_integer(mask) and 0 <= mask <= Std.ALL:
        return Std(mask)
    raise SpecError(field, value, _ACCEPTED)


def _checked(
    field: str, value: object, pairs: list[tuple[object, object]]
) -> tuple[tuple[int, Std], ...]:
    masks: dict[int, Std] = {}
    for rank, mask in pairs:
        if not is_integer(rank) or not 0 <= rank <= MAX_NUMBER:
            raise SpecError(field, value, _ACCEPTED)
        if rank in masks:
            raise SpecError(field, value, f"must name rank {rank} only once")
        masks[rank] = _mask(field, value, mask)
    return tuple(sorted(masks.items()))


def _filters(stream: str, value: object) -> tuple[str, ...]:
    field = f"logs.duplicate_{stream}_filters"
    for text in (texts := checked_items(field, value)):
        if not checked_text(field, text) or "\n" in text:
            raise SpecError(field, text, "must hold texts within a line, none of them empty")
    return tuple(texts)


def _check_retention(max_bytes: object, keep_attempts: object, keep_runs: object) -> None:
    if max_bytes is not None and not (
        is_integer(max_bytes) and _MAX_BYTES_MIN <= max_bytes <= _MAX_BYTES_MAX
    ):
        problem = f"must be a whole number from {_MAX_BYTES_MIN} to {_MAX_BYTES_MAX}"
        raise SpecError("logs.max_bytes", max_bytes, problem)
    for name, value in (("keep_attempts", keep_attempts), ("keep_runs", keep_runs)):
        if value is not None:
            checked_integer(f"logs.{name}", value, at_least=1)


@dataclass(frozen=True, slots=True, init=False)
class LogSpec:
    """Where the output of the workers goes.

    `redirects` and `tee` accept a mask, a mapping of local ranks to masks, or the text
    of the command line: `3`, `{0: 3}` and `"0:3"`.
    """

    log_dir: str | None = None
    """Directory for the logs of all runs.

    None creates a temporary one when it is needed; "/dev/null" captures nothing and leaves
    every stream inherited.
    """
    redirects: StdMap = StdMap()
    """Streams that go to files only."""
    tee: StdMap = StdMap()
    """Streams that go to files and, with a prefix, to the console."""
    local_ranks_filter: frozenset[int] = frozenset()
    """Local ranks shown on the console; empty shows all."""
    prefix: str | None = None
    """Template of the line prefix; None is torchrun's `[${role}${local_rank}]:`.

    `${role}` (or `${role_name}`), `${rank}`, `${local_rank}`, `${attempt}`, `${host}`,
    `${stream}` and `${timestamp}` are replaced.
    """
    duplicate_stdout_filters: tuple[str, ...] = ()
    """Texts that select lines of stdout for a further file, `filtered_stdout.log`.

    It gets the lines that the console shows of tee'd streams, with their prefixes, if they hold
    one of the texts; there is one on each node for each attempt.
    """
    duplicate_stderr_filters: tuple[str, ...] = ()
    """As `duplicate_stdout_filters`, for `filtered_stderr.log`."""
    on_full: Literal["fail", "console"] = "fail"
    """What happens when the disk of the log files is full.

    "fail" fails the worker's own write; "console" leads the streams through this process,
    which shows on the console what a file does not take.
    """
    color: Literal["auto", "always", "never"] = "never"
    """Whether prefixes have the color of their rank; "auto": where the console is a terminal."""
    capture: bool = True
    """Whether stderr that would go to a pipe or a file is captured, to say why a worker failed.

    It passes through this process, unchanged, and through a file in the run's directory, which
    is removed unless the job fails.  A terminal is never captured.
    """
    max_bytes: int | None = None
    """Disk space that each log file may take: the beginning of a longer one is freed.

    The last half of it is always kept, and what the console has not shown yet.
    """
    keep_attempts: int | None = None
    """How many attempts' directories are kept, the latest; None keeps all."""
    keep_runs: int | None = None
    """How many runs' directories are kept in `log_dir`, the latest, among those that were made
    with this setting; None keeps all.  Those of running jobs are always kept."""

    def __init__(
        self,
        *,
        log_dir: str | PathLike[str] | None = None,
        redirects: StdMap | Mapping[int, int] | int | str = 0,
        tee: StdMap | Mapping[int, int] | int | str = 0,
        local_ranks_filter: Iterable[int] = (),
        prefix: str | None = None,
        duplicate_stdout_filters: Iterable[str] = (),
        duplicate_stderr_filters: Iterable[str] = (),
        on_full: Literal["fail", "console"] = "fail",
        color: Literal["auto", "always", "never"] = "never",
        capture: bool = True,
        max_bytes: int | None = None,
        keep_attempts: int | None = None,
        keep_runs: int | None = None,
    ) -> None:
        """Check and keep every setting; the fields say what they mean."""
        ranks = checked_items("logs.local_ranks_filter", local_ranks_filter)
        for rank in ranks:
            checked_integer("logs.local_ranks_filter", rank, at_least=0)
        if prefix is not None and "\n" in checked_text("logs.prefix", prefix):
            raise SpecError("logs.prefix", prefix, "must be a single line")
        if on_full not in ("fail", "console"):
            raise SpecError("logs.on_full", on_full, "must be 'fail' or 'console'")
        if color not in ("auto", "always", "never"):
            raise SpecError("logs.color", color, "must be 'auto', 'always' or 'never'")
        _check_retention(max_bytes, keep_attempts, keep_runs)
        if keep_runs is not None and log_dir is None:
            raise SpecError("logs.keep_runs", keep_runs, "needs a log directory")
        set_fields(
            self,
            log_dir=None if log_dir is None else checked_path("logs.log_dir", log_dir),
            redirects=StdMap.parse("logs.redirects", redirects),
            tee=StdMap.parse("logs.tee", tee),
            local_ranks_filter=frozenset(ranks),
            prefix=prefix,
            duplicate_stdout_filters=_filters("stdout", duplicate_stdout_filters),
            duplicate_stderr_filters=_filters("stderr", duplicate_stderr_filters),
            on_full=on_full,
            color=color,
            capture=checked_part("logs.capture", capture, kind=bool),
            max_bytes=max_bytes,
            keep_attempts=keep_attempts,
            keep_runs=keep_runs,
        )

    @property
    def is_off(self) -> bool:
        """Whether nothing is captured (`log_dir` is `/dev/null`)."""
        return self.log_dir == "/dev/null"

    @property
    def is_in_no_file(self) -> bool:
        """Whether no stream is redirected or tee'd, and no subclass says otherwise."""
        return type(self) is LogSpec and self.redirects.is_empty and self.tee.is_empty

    @property
    def ignored(self) -> tuple[str, ...]:
        """The settings that have no effect because nothing is captured."""
        settings = {
            "redirects": not self.redirects.is_empty,
            "tee": not self.tee.is_empty,
            "local_ranks_filter": bool(self.local_ranks_filter),
            "duplicate_stdout_filters": bool(self.duplicate_stdout_filters),
            "duplicate_stderr_filters": bool(self.duplicate_stderr_filters),
            "on_full": self.on_full != "fail",
            "max_bytes": self.max_bytes is not None,
            "keep_attempts": self.keep_attempts is not None,
            "keep_runs": self.keep_runs is not None,
        }
        return tuple(name for name, is_set in settings.items() if is_set and self.is_off)

    def check_with(self, nproc: int) -> None:
        """Raise `SpecError` for ranks that a node of `nproc` workers does not have."""
        highest = {
            "logs.redirects": self.redirects.highest_rank,
            "logs.tee": self.tee.highest_rank,
            "logs.local_ranks_filter": max(self.local_ranks_filter, default=-1),
        }
        for name, rank in highest.items():
            if rank >= nproc:
                raise SpecError(name, rank, f"local ranks must be from 0 to {nproc - 1}")


class LogLayoutContext(Value, frozen=True):
    """The worker whose streams a `LogLayout` plans."""

    local_rank: int
    """Rank of the worker on its node."""
    attempt: int
    """Number of the attempt, from 0."""
    directory: str | None
    """The worker's own directory, which exists when it starts; None if nothing is kept."""


class LogDestinations(Value, frozen=True):
    """Where the streams of one worker go."""

    stdout: str | None = None
    """Path of a new file, whose directory is created; None inherits, "/dev/null" drops."""
    stderr: str | None = None
    """As `stdout`."""
    error_file: str = ""
    """Path of torch's error file; empty for none."""
    shown: frozenset[str] = frozenset()
    """Which of "stdout" and "stderr" are copied from their files to the console."""
    prefix: str | None = None
    """Prefix of the lines on the console, as it is; None is that of the `LogSpec`."""


class LogLayout(LogSpec):
    """Base class of plug-ins: the settings of a `LogSpec`, and its own plan of files."""

    __slots__ = ()

    def plan(self, worker: LogLayoutContext) -> LogDestinations:
        """Return where the streams of one worker go.

        Must be pure: it is called more than once for a worker, and the plans must be equal.
        """
        raise NotImplementedError(f"{type(self).__name__} must define plan()")

    def filtered_paths(self) -> Mapping[str, str] | None:
        """Return the files for selected lines, of "stdout" and "stderr" (`duplicate_...`).

        None (the default) leaves them in the directory of the attempt.
        """
        return None
