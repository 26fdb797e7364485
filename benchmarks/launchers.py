"""Running launchers, and reading clocks and counters while they run.

Times are monotonic nanoseconds, so those that a worker notes and those that are
read here compare.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, NoReturn, TypeVar

__all__ = [
    "Contender",
    "Finished",
    "Job",
    "Note",
    "Notes",
    "Torch",
    "children_of",
    "compare",
    "describe_machine",
    "elastic_aio",
    "find_torch",
    "new_notes",
    "run",
    "spawn_by_hand",
    "torchrun",
    "wait_until",
    "worker",
]

T = TypeVar("T")

_ROOT = Path(__file__).parent.parent
_WORKERS = Path(__file__).parent / "workers"
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Torch:
    """A Python that has torchrun."""

    python: str
    version: str
    python_version: str


def find_torch(python: str) -> Torch | None:
    """Ask an interpreter for its torch; None when it has none."""
    code = (
        "import importlib.metadata as m, json, platform;"
        "print(json.dumps([m.version('torch'), platform.python_version()]))"
    )
    asked = subprocess.run([python, "-c", code], capture_output=True, check=False)
    if asked.returncode:
        return None
    return Torch(python, *json.loads(asked.stdout))


def describe_machine(torch: Torch | None) -> str:
    """Return one line on what the numbers were measured on."""
    model = platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    parts = [
        f"{len(os.sched_getaffinity(0))} cores ({model})",
        f"Linux {platform.release()}",
        f"elastic_aio on Python {platform.python_version()}",
    ]
    if torch is not None:
        parts.append(f"torchrun {torch.version} on Python {torch.python_version}")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Contender:
    """One launcher: `command` runs it, followed by torchrun's options and a program."""

    name: str
    command: Callable[[], list[str]]

    def job(
        self,
        workers: int,
        program: Sequence[str],
        *options: str,
        out: int | IO[bytes] = subprocess.DEVNULL,
    ) -> Job:
        """Start a job of `workers` times the program."""
        words = [*self.command(), f"--nproc-per-node={workers}", *options, "--no-python"]
        return Job([*words, *program], out=out)


def elastic_aio() -> Contender:
    """Return ours, run from this checkout by this interpreter."""
    return Contender("elastic_aio", lambda: [sys.executable, "-m", "elastic_aio", "run"])


def torchrun(torch: Torch) -> Contender:
    """Return torchrun, with a port of its own: its default one may be in use."""
    module = "torch.distributed.run"
    return Contender(
        "torchrun", lambda: [torch.python, "-m", module, f"--master-port={_free_port()}"]
    )


def worker(notes: Notes, *behaviour: str, site: bool = True) -> list[str]:
    """Return the command of a worker in Python (see `workers/rank.py`)."""
    options = ["-u"] if site else ["-u", "-S"]
    return [sys.executable, *options, str(_WORKERS / "rank.py"), str(notes.path), *behaviour]


def spawn_by_hand(
    command: Sequence[str], ranks: int, folder: Path | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start workers at once and in the simplest way; nobody watches them.

    Args:
        command: the worker's.
        ranks: how many.
        folder: takes a file of each worker's output.
    """
    place = {"WORLD_SIZE": str(ranks)}
    place.update(TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0")
    return [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=(folder / f"{rank}").open("wb") if folder else None,
            start_new_session=True,
            env={**os.environ, **place, "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


class Finished(NamedTuple):
    """A process that has ended."""

    returncode: int
    wall: int  # nanoseconds from start to exit
    cpu: int  # nanoseconds, its waited-for children included
    at: int  # monotonic nanoseconds


class Job:
    """A running process; a context manager that leaves nothing behind."""

    def __init__(
        self, command: Sequence[str], *, out: int | IO[bytes] = subprocess.DEVNULL
    ) -> None:
        """Start `command` with its standard output in `out`."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._command = command
        self._finished: Finished | None = None
        self.began = time.monotonic_ns()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=self._errors,
            cwd=_ROOT,
            env=_environment(),
            start_new_session=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._finished is None:
            self.send_signal(signal.SIGTERM)
            try:
                self.wait(10)
            except TimeoutError:
                self.send_signal(signal.SIGKILL)
                self.wait(10)
        self._errors.close()

    @property
    def stdout(self) -> int:
        """Descriptor of its standard output, if that is a pipe."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        if self._finished is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)  # not reaped yet: see __exit__

    def wait(self, seconds: float = _LIMIT_S) -> Finished:
        """Wait for its end.

        Raises:
            TimeoutError: it did not end in time.
        """
        if self._finished is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                ended = poll.poll(seconds * 1000)
                at = time.monotonic_ns()
            finally:
                os.close(pidfd)
            if not ended:
                raise TimeoutError(f"{self._command} did not end within {seconds:g} s")
            _, status, used = os.wait4(self.pid, 0)
            self._process.returncode = code = os.waitstatus_to_exitcode(status)
            cpu = int((used.ru_utime + used.ru_stime) * 1e9)
            self._finished = Finished(code, at - self.began, cpu, at)
            if self._process.stdout is not None:
                self._process.stdout.close()
        return self._finished

    def succeed(self) -> Finished:
        """Wait for its end, which must be a good one.

        Raises:
            RuntimeError: it failed.
        """
        finished = self.wait()
        if finished.returncode:
            code = finished.returncode
            raise RuntimeError(f"{self._command} ended with {code}: {self.said()}")
        return finished

    def said(self) -> str:
        """Return the end of what stands in its standard error by now."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 2000, max(size - 2000, 0)).decode("utf-8", "replace")

    def cpu(self) -> int:
        """Return the processor time of the process itself so far, in nanoseconds."""
        # The clock of another process: see clock_getcpuclockid(3).
        return time.clock_gettime_ns((~self.pid << 3) | 2)


def run(command: Sequence[str]) -> Finished:
    """Run a command to its good end."""
    with Job(command) as job:
        return job.succeed()


class Note(NamedTuple):
    """What a worker has noted."""

    what: str
    rank: int
    attempt: int
    at: int  # monotonic nanoseconds


@dataclass(frozen=True, slots=True)
class Notes:
    """The file in which the workers of one job note what happens."""

    path: Path

    def read(self, what: str) -> list[Note]:
        """Return the notes of one kind."""
        found = []
        for line in self.path.read_text(encoding="ascii").splitlines():
            kind, rank, attempt, at = line.split()
            if kind == what:
                found.append(Note(kind, int(rank), int(attempt), int(at)))
        return found


@contextmanager
def new_notes() -> Iterator[Notes]:
    """Make a file for notes, in a folder of its own that may take logs too."""
    folder = Path(tempfile.mkdtemp(prefix="elastic_aio-benchmark-"))
    try:
        path = folder / "notes"
        path.touch()
        yield Notes(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, of all its threads."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        children = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii")
        found.extend(int(child) for child in children.split())
    return found


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = _LIMIT_S) -> None:
    """Look every few milliseconds until something is so.

    Raises:
        TimeoutError: it was not in time.
    """
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"waited for {what} in vain")
        time.sleep(0.005)


def compare(
    rounds: int,
    measure: Callable[[Contender], T],
    ours: Contender,
    theirs: Contender | None,
    *limits: Callable[[], T],
) -> list[list[T]]:
    """Measure in turns, so that a machine that slows down does so for all.

    One round more is made first and not counted: it fills the caches.

    Returns:
        What was measured in each round: of ours, of theirs (nothing when there is
        no such contender), and of each limit.
    """
    turns: list[Callable[[], T]] = [lambda: measure(ours)]
    turns.append((lambda: measure(theirs)) if theirs else _nothing)
    turns.extend(limits)
    results: list[list[T]] = [[] for _ in turns]
    for number in range(rounds + 1):
        for result, turn in zip(results, turns, strict=True):
            if turn is not _nothing:
                value = turn()
                if number:
                    result.append(value)
    return results


def _nothing() -> NoReturn:
    raise AssertionError("nobody takes this turn")


_FOREIGN = ("PET_", "TORCH", "ELASTIC_AIO", "PYTHON", "LOGLEVEL", "OMP_NUM_THREADS")
_NEEDED = ("PYTHONPATH", "PYTHONHOME")


def _environment() -> dict[str, str]:
    """Return our environment without what would change a launcher's ways.

    PYTHONUNBUFFERED and PYTHONDONTWRITEBYTECODE, which containers like to set, for
    two: they decide when a launcher prints and what it costs to start.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if name in _NEEDED or not name.startswith(_FOREIGN)
    }
    return {**env, "OMP_NUM_THREADS": "1"}  # spares torchrun a warning


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
