"""Where torch's processes write: `Std`, `LogsSpecs`, the `LogsDest` that it makes, `redirect`."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, TextIO

from elastic_aio.logs.paths import run_prefix
from elastic_aio.spec.logs import LogDestinations, LogLayout, LogLayoutContext, LogSpec
from elastic_aio.torch_logs import destinations_of

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "Std",
    "redirect",
    "redirect_stderr",
    "redirect_stdout",
    "to_map",
]

logger = logging.getLogger(__name__)

_MAPPING = r"^(\d+:[0123],)*(\d+:[0123])$"
_VALUE = r"^[0123]$"
_STREAMS = ("stdout", "stderr")


class Std(IntFlag):
    """Standard streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read `0` to `3` or `RANK:MASK,RANK:MASK`; raise a ValueError for another form."""
        if re.match(_VALUE, vm):
            return Std(int(vm))
        if not re.match(_MAPPING, vm):
            raise ValueError(f"{vm} does not match: <{_VALUE}> or <{_MAPPING}>")
        pairs = (part.split(":") for part in vm.split(","))
        return {int(rank): Std(int(mask)) for rank, mask in pairs}


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return the streams of each local rank, `Std.NONE` for ranks that a mapping lacks."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


@dataclass
class LogsDest:
    """Paths by local rank; an empty path is a stream of the launcher's own."""

    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Says where processes write; a plug-in defines `reify` and `root_log_dir`."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        """Keep the settings.

        Args:
            log_dir: base directory.
            redirects: streams that go to files only.
            tee: streams that go to files and to the console.
            local_ranks_filter: local ranks that the console shows; None is all.
        """
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the paths of an attempt, and make their directories.

        `envs` are variables of the processes by local rank; each gets `TORCHELASTIC_ERROR_FILE`.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The base directory."""


class DefaultLogsSpecs(LogsSpecs):
    """The layout `<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/stdout.log`.

    Without `log_dir` a temporary directory is made when it is needed.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        """Make the base directory; the arguments are as for `LogsSpecs`.

        Raises:
            NotADirectoryError: it is a file.
        """
        if log_dir and log_dir != os.devnull:
            if os.path.isfile(log_dir):
                raise NotADirectoryError(f"log_dir: {log_dir} is a file")
            os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir or None, redirects, tee, local_ranks_filter)
        self._run_log_dir: str | None = None
        self._is_temporary = False

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DefaultLogsSpecs) and self._settings() == other._settings()

    __hash__ = None  # type: ignore[assignment]  # the settings can be dicts

    def _settings(self) -> tuple[object, ...]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter

    @property
    def root_log_dir(self) -> str:
        """The base directory; a temporary one is made now."""
        if self._root_log_dir is None:
            self._root_log_dir = tempfile.mkdtemp(prefix="torchelastic_")
            self._is_temporary = True
        return self._root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the paths of an attempt, whose number is `TORCHELASTIC_RESTART_COUNT`.

        The logs of an attempt with the same number are kept: the new directory then gets a further
        number.
        """
        if not envs:
            logger.warning("Empty envs map provided when defining logging destinations.")
        common = envs[0] if envs else {}
        directory = self._make_attempt(common)
        redirects = to_map(self._redirects, len(envs))
        tee = to_map(self._tee, len(envs))
        dest = LogsDest(
            filtered_stdout=f"{directory}/filtered_stdout.log",
            filtered_stderr=f"{directory}/filtered_stderr.log",
        )
        for rank in range(len(envs)):
            if directory == os.devnull:
                _plan_nothing(dest, rank)
            else:
                own = f"{directory}/{rank}"
                os.mkdir(own)
                self._plan(dest, rank, own, redirects[rank], tee[rank])
            path = dest.error_files[rank]
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = "" if path == os.devnull else path
        return dest

    def _make_attempt(self, env: Mapping[str, str]) -> str:
        root = self.root_log_dir
        if root == os.devnull:
            return os.devnull
        if self._run_log_dir is None or not os.path.isdir(self._run_log_dir):
            os.makedirs(root, exist_ok=True)
            prefix = run_prefix(env.get("TORCHELASTIC_RUN_ID", "test_run_id"))
            self._run_log_dir = tempfile.mkdtemp(prefix=prefix, dir=root)
            logger.info("log directory set to: %s", self._run_log_dir)
        first = f"{self._run_log_dir}/attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        directory, number = first, 1
        while os.path.exists(directory):
            directory, number = f"{first}.{number}", number + 1
        os.mkdir(directory)
        return directory

    def _plan(self, dest: LogsDest, rank: int, directory: str, redirects: Std, tee: Std) -> None:
        is_muted = bool(self._local_ranks_filter) and rank not in (self._local_ranks_filter or ())
        for bit, name, paths, shown in (
            (Std.OUT, "stdout", dest.stdouts, dest.tee_stdouts),
            (Std.ERR, "stderr", dest.stderrs, dest.tee_stderrs),
        ):
            if (redirects | tee) & bit:
                paths[rank] = f"{directory}/{name}.log"
                if tee & bit and not is_muted:
                    shown[rank] = paths[rank]
            else:
                paths[rank] = os.devnull if is_muted else ""
        dest.error_files[rank] = f"{directory}/error.json"
        logger.info("Setting worker%s reply file to: %s", rank, dest.error_files[rank])

    def log_spec(self, **settings: Any) -> LogSpec:
        """Return the same layout as a `LogSpec`, with further settings."""
        return LogSpec(
            log_dir=self._root_log_dir,
            redirects=_streams(self._redirects),
            tee=_streams(self._tee),
            local_ranks_filter=self._local_ranks_filter or (),
            **settings,
        )

    def tidy(self) -> None:
        """Remove the empty parts of a temporary base directory."""
        if self._is_temporary and self._root_log_dir is not None:
            for directory, _, _ in os.walk(self._root_log_dir, topdown=False):
                try:
                    os.rmdir(directory)
                except OSError:
                    continue  # not empty


def _streams(value: Any) -> dict[int, int] | int:
    return {rank: int(mask) for rank, mask in value.items()} if isinstance(value, dict) else value


def _plan_nothing(dest: LogsDest, rank: int) -> None:
    dest.stdouts[rank] = dest.stderrs[rank] = ""
    dest.tee_stdouts[rank] = dest.tee_stderrs[rank] = dest.error_files[rank] = os.devnull


class ReifiedLayout(LogLayout):
    """A `LogsDest` as the layout of this library's own log files."""

    def __init__(
        self,
        dest: LogsDest,
        prefixes: Mapping[int, str] | None = None,
        stdout_filters: Iterable[str] = (),
        stderr_filters: Iterable[str] = (),
    ) -> None:
        """Keep the paths, the prefixes of shown lines by local rank, and filters of lines."""
        super().__init__(
            log_dir=os.devnull,
            duplicate_stdout_filters=stdout_filters,
            duplicate_stderr_filters=stderr_filters,
        )
        object.__setattr__(self, "_dest", dest)  # a frozen dataclass
        object.__setattr__(self, "_prefixes", dict(prefixes or {}))

    _dest: LogsDest
    _prefixes: dict[int, str]

    def filtered_paths(self) -> Mapping[str, str]:
        """Return the files for selected lines; none where nothing is kept."""
        dest = self._dest
        paths = {"stdout": dest.filtered_stdout, "stderr": dest.filtered_stderr}
        kept = {name: path for name, path in paths.items() if path}
        return {name: path for name, path in kept.items() if not path.startswith(os.devnull)}

    def plan(self, worker: LogLayoutContext) -> LogDestinations:
        rank = worker.local_rank
        return destinations_of(self._dest, rank, self._prefixes.get(rank))


# ---------------------------------------------------------- streams of this process


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """Redirect a standard stream of this process to a file, for a block.

    The descriptor itself goes there, so that C code and child processes write there too.

    Args:
        std: "stdout" or "stderr".
        to_file: path of the file, which is overwritten; its directory exists.

    Raises:
        ValueError: there is no such stream.
        OSError: the file cannot be written.
    """
    if std not in _STREAMS:
        raise ValueError(f"unknown standard stream <{std}>, must be one of {set(_STREAMS)}")
    stream: TextIO = getattr(sys, std)
    number = 1 + _STREAMS.index(std)
    with ExitStack() as stack:
        file = stack.enter_context(open(to_file, "w+b"))
        # Under a test runner, the stream of Python has a descriptor of its own.
        formers = {each: os.dup(each) for each in {number, stream.fileno()}}
        for former in formers.values():
            stack.callback(os.close, former)
        _flush(stream)
        for each in formers:
            os.dup2(file.fileno(), each)
        try:
            yield
        finally:
            _flush(stream)
            for each, former in formers.items():
                os.dup2(former, each)


def _flush(stream: TextIO) -> None:
    ctypes.CDLL(None).fflush(None)
    stream.flush()


def redirect_stdout(to_file: str) -> AbstractContextManager[None]:
    """Redirect stdout of this process to a file, for a block (see `redirect`)."""
    return redirect("stdout", to_file)


def redirect_stderr(to_file: str) -> AbstractContextManager[None]:
    """Redirect stderr of this process to a file, for a block (see `redirect`)."""
    return redirect("stderr", to_file)
