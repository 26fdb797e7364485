"""What workers print and where it goes: `LogSpec`, stream masks, and layouts of plug-ins.

The grammar of `-r` and `-t` is torchrun's, `0..3` or `rank:mask,rank:mask`, for ranks of any size
and with ranges: `0-3:3,10:1`.

A plug-in derives from `LogLayout` and plans where the streams of each worker go, before anything is
opened; the library creates directories and files and writes to the console.  An entry point of the
group `elastic_aio.logs_specs` makes a plug-in known to `--logs-specs`; it is called with the
settings of `LogSpec`::

    [project.entry-points."elastic_aio.logs_specs"]
    by_day = "my_package.logs:ByDay"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntFlag
from os import PathLike
from typing import Final, Literal

from elastic_aio.errors import SpecError
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Converted, SpecValue, field, spec_fields
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

_OF_FILES: Final = (
    *("redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters"),
    *("duplicate_stderr_filters", "on_full", "max_bytes", "keep_attempts", "keep_runs"),
)
"""Settings without an effect where nothing is captured."""

_ACCEPTED = "must be a mask 0-3 or a list such as '0:3,1:1' or '0-3:3,10:1'"


class StdMap(Value, frozen=True):
    """The streams selected for each local rank."""

    everyone: Std = Std.NONE
    """The mask of the ranks that `by_rank` does not name."""
    by_rank: tuple[tuple[int, Std], ...] = ()
    """Pairs of a local rank and its mask, in ascending order."""

    @classmethod
    def parse(cls, name: str, value: object) -> StdMap:
        """Read a `StdMap` from a mask, a mapping, or the text of `-r`/`-t`.

        Ranks that a list does not name get no stream, as in torchrun.

        Raises:
            SpecError: naming `name`; the value has none of these forms.
        """
        if isinstance(value, StdMap):
            return value
        if isinstance(value, Mapping):
            return cls(by_rank=_checked(name, value, list(value.items())))
        if checks.is_integer(value):
            return cls(everyone=_mask(name, value, value))
        if not isinstance(value, str):
            raise SpecError(name, value, _ACCEPTED)
        if _is_number(value.strip()):
            return cls(everyone=_mask(name, value, int(value)))
        pairs: list[tuple[object, object]] = []
        for part in value.split(","):
            ranks, colon, mask = part.strip().partition(":")
            first, dash, last = ranks.partition("-")
            last = last if dash else first
            if not (colon and _is_number(first) and _is_number(last) and _is_number(mask)):
                raise SpecError(name, value, _ACCEPTED)
            if int(first) > int(last):
                raise SpecError(name, value, f"range {ranks} runs backwards")
            pairs += [(rank, int(mask)) for rank in range(int(first), int(last) + 1)]
        return cls(by_rank=_checked(name, value, pairs))

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


def _mask(name: str, value: object, mask: object) -> Std:
    if checks.is_integer(mask) and 0 <= mask <= Std.ALL:
        return Std(mask)
    raise SpecError(name, value, _ACCEPTED)


def _checked(
    name: str, value: object, pairs: list[tuple[object, object]]
) -> tuple[tuple[int, Std], ...]:
    masks: dict[int, Std] = {}
    for rank, mask in pairs:
        if not checks.is_integer(rank) or not 0 <= rank <= checks.MAX_NUMBER:
            raise SpecError(name, value, _ACCEPTED)
        if rank in masks:
            raise SpecError(name, value, f"must name rank {rank} only once")
        masks[rank] = _mask(name, value, mask)
    return tuple(sorted(masks.items()))


def _map(name: str, value: object) -> StdMap:
    return StdMap.parse(name, value)


def _ranks(name: str, value: object) -> frozenset[int]:
    return frozenset(
        checks.checked_integer(name, rank, at_least=0) for rank in checks.checked_items(name, value)
    )


def _prefix(name: str, value: object) -> str:
    if "\n" in (prefix := checks.checked_text(name, value)):
        raise SpecError(name, prefix, "must be a single line")
    return prefix


def _filters(name: str, value: object) -> tuple[str, ...]:
    for text in (texts := checks.checked_items(name, value)):
        if not checks.checked_text(name, text) or "\n" in text:
            raise SpecError(name, text, "must hold texts within a line, none of them empty")
    return tuple(texts)


def _max_bytes(name: str, value: object) -> int:
    if not checks.is_integer(value) or not _MAX_BYTES_MIN <= value <= _MAX_BYTES_MAX:
        problem = f"must be a whole number from {_MAX_BYTES_MIN} to {_MAX_BYTES_MAX}"
        raise SpecError(name, value, problem)
    return value


_FILTERS_HELP: Final = (
    "texts, separated by commas (',,' is a comma): tee'd lines of {0} that hold one of them are"
    " also written to filtered_{0}.log (default: none)"
)


class LogSpec(SpecValue, prefix="logs."):
    """Where the output of the workers goes.

    `redirects` and `tee` accept a mask, a mapping of local ranks to masks, or the text of the
    command line: `3`, `{0: 3}` and `"0:3"`.
    """

    log_dir: Converted[str | None, str | PathLike[str] | None] = field(
        default=None,
        check=checks.checked_path,
        option="--log-dir DIR",
        help="directory for logs; '/dev/null' keeps none (default: a temporary directory when"
        " needed)",
    )
    """Directory for the logs of all runs.  None creates a temporary directory when it is needed;
    "/dev/null" captures nothing and leaves every stream inherited."""
    redirects: Converted[StdMap, StdMap | Mapping[int, int] | int | str] = field(
        default=StdMap(),
        check=_map,
        option="--redirects STREAMS",
        help="streams written to log files: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank"
        " as in '0-3:3,10:1' (default 0)",
        short="-r",
    )
    """Streams that go to files only."""
    tee: Converted[StdMap, StdMap | Mapping[int, int] | int | str] = field(
        default=StdMap(),
        check=_map,
        option="--tee STREAMS",
        help="streams written to log files and to the console; values as for --redirects"
        " (default 0)",
        short="-t",
    )
    """Streams that go to files and, with a prefix, to the console."""
    streams: Literal["split", "joined"] | None = field(
        default=None, check=checks.OneOf(("split", "joined"))
    )
    """By "joined" both streams of a worker are one, in the order of its lines, if other settings do
    not tell them apart.  None is "split", in a file of `aio-elastic up` "joined"."""
    local_ranks_filter: Converted[frozenset[int], Iterable[int]] = field(
        default=frozenset(),
        check=_ranks,
        option="--local-ranks-filter RANKS",
        help="local ranks whose output reaches the console, as in '0,2' (default: all); without"
        " --tee or --redirects, the output of the others is dropped",
    )
    """Local ranks shown on the console; empty shows all."""
    prefix: str | None = field(
        default=None,
        check=_prefix,
        own_option="--log-prefix TEMPLATE",
        help="template of the prefix of tee'd lines (default '[${role}${local_rank}]:')",
    )
    """Template of the line prefix; None is torchrun's `[${role}${local_rank}]:`, for a child of a
    group `[CHILD:RANK]:`.  `${role}` (or `${role_name}`), `${rank}`, `${local_rank}`, `${attempt}`,
    `${host}`, `${stream}`, `${child}` and `${timestamp}` are replaced."""
    duplicate_stdout_filters: Converted[tuple[str, ...], Iterable[str]] = field(
        default=(),
        check=_filters,
        option="--duplicate-stdout-filters TEXTS",
        help=_FILTERS_HELP.format("stdout"),
    )
    """Texts that select lines of stdout for a further file, `filtered_stdout.log`, of each node and
    attempt.  It gets the lines with one of the texts that the console shows of tee'd streams, with
    their prefixes."""
    duplicate_stderr_filters: Converted[tuple[str, ...], Iterable[str]] = field(
        default=(),
        check=_filters,
        option="--duplicate-stderr-filters TEXTS",
        help=_FILTERS_HELP.format("stderr"),
    )
    """As `duplicate_stdout_filters`, for `filtered_stderr.log`."""
    on_full: Literal["fail", "console"] = field(
        default="fail",
        check=checks.OneOf(("fail", "console")),
        own_option="--on-full ACTION",
        help="when the disk of the log files is full: 'fail' (the worker's write fails) or"
        " 'console' (the console shows what the files do not take) (default 'fail')",
    )
    """What happens when the disk of the log files is full: "fail" fails the worker's own write;
    "console" leads the streams through this process, which shows on the console what a file does
    not take."""
    color: Literal["auto", "always", "never"] = field(
        default="never",
        check=checks.OneOf(("auto", "always", "never")),
        own_option="--color WHEN",
        help="colors by rank in the prefixes of tee'd lines, and in the launcher's own lines:"
        " 'always', 'never' or 'auto' (on a terminal, unless NO_COLOR is set) (default 'auto')",
    )
    """Whether prefixes have the color of their rank; "auto": where the console is a terminal."""
    capture: bool = field(
        default=True,
        own_option="--no-capture",
        help="leave the workers' standard error alone where it is no terminal: it does not pass"
        " through the launcher, whose report of a failure then has none of its lines",
    )
    """Whether stderr that would go to a pipe or a file is captured, to say why a worker failed.  It
    passes through this process, unchanged, and through a file in the run's directory, which is
    removed unless its attempt or the job fails.  A terminal is never captured."""
    max_bytes: int | None = field(
        default=None,
        check=_max_bytes,
        own_option="--log-max-bytes SIZE",
        help="disk space of each log file, as in '100M': the beginning of a longer one is freed"
        " (default: no limit)",
    )
    """Disk space that each log file may take: the beginning of a longer file is freed.  The last
    half of it is always kept, and the lines that the console has not shown yet."""
    keep_attempts: int | None = field(
        default=None,
        check=checks.Whole(at_least=1),
        own_option="--log-keep-attempts N",
        help="attempts whose log directories are kept, the latest (default: all)",
    )
    """How many attempts' directories are kept, the latest; None keeps all."""
    keep_runs: int | None = field(
        default=None,
        check=checks.Whole(at_least=1),
        own_option="--log-keep-runs N",
        help="runs whose directories are kept in --log-dir, the latest that had this option"
        " (default: all)",
    )
    """How many runs' directories are kept in `log_dir`, the latest, among those that were made
    with this setting; None keeps all.  Those of running jobs are always kept."""

    def _check(self) -> None:
        if self.keep_runs is not None and self.log_dir is None:
            raise SpecError("logs.keep_runs", self.keep_runs, "needs a log directory")

    @property
    def is_off(self) -> bool:
        """Whether nothing is captured (`log_dir` is `/dev/null`)."""
        return self.log_dir == "/dev/null"

    @property
    def is_in_no_file(self) -> bool:
        """Whether no stream is redirected or tee'd, and no subclass says otherwise."""
        return type(self) is LogSpec and self.redirects.is_empty and self.tee.is_empty

    @property
    def is_joined(self) -> bool:
        """Whether both streams are one, unless filters or the prefix tell them apart."""
        names_one = self.duplicate_stdout_filters or self.duplicate_stderr_filters
        return self.streams == "joined" and not names_one and "${stream}" not in (self.prefix or "")

    @property
    def ignored(self) -> tuple[str, ...]:
        """The settings that have no effect because nothing is captured."""
        if not self.is_off:
            return ()
        values = {name: getattr(self, name) for name in _OF_FILES}
        return tuple(
            name
            for name, value in values.items()
            if value != spec_fields(LogSpec)[name].default
            and not (isinstance(value, StdMap) and value.is_empty)
        )

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
    """Prefix of the lines on the console, as it is; None: the prefix of the `LogSpec`."""


class LogLayout(LogSpec):
    """Base class of plug-ins: the settings of a `LogSpec`, and its own plan of files."""

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
