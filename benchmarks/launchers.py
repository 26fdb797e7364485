"""Running launchers, and reading clocks and counters while they run.

Times are monotonic nanoseconds, so that those of workers and those read here compare.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from tests.support.cli import REPOSITORY, environment
from tests.support.leaks import SESSION_VARIABLE
from tests.support.sockets import free_port

__all__ = [
    "Finished",
    "Job",
    "Launcher",
    "Note",
    "Notes",
    "Torch",
    "children_of",
    "describe_host",
    "elastic_aio",
    "environment_changes",
    "find_torch",
    "new_notes",
    "run",
    "spawn_baseline",
    "torchrun",
    "wait_until",
    "worker",
]

_OURS = "elastic_aio"
_WORKERS = Path(__file__).parent / "workers"
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Torch:
    """A Python that has torchrun."""

    python: str
    version: str
    python_version: str


def find_torch(python: str) -> Torch | None:
    """Return the torch of an interpreter; None when it has none."""
    code = (
        "import importlib.metadata as m, json, platform;"
        "print(json.dumps([m.version('torch'), platform.python_version()]))"
    )
    process = subprocess.run([python, "-c", code], capture_output=True, check=False)
    if process.returncode:
        return None
    return Torch(python, *json.loads(process.stdout))


def describe_host(torch: Torch | None) -> str:
    """Return one line about the host that the figures come from."""
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
class Launcher:
    """A launcher: `command` runs it, followed by torchrun's options and a program.

    `root` is the directory with the packages elastic_aio and benchmarks that its processes import.
    """

    name: str
    command: Callable[[], list[str]]
    root: Path = REPOSITORY

    @property
    def is_ours(self) -> bool:
        """Whether it is a version of elastic_aio."""
        return self.name == _OURS

    def job(
        self,
        workers: int,
        program: Sequence[str],
        *options: str,
        out: int | IO[bytes] = subprocess.DEVNULL,
        before: Sequence[str] = (),
    ) -> Job:
        """Start a job of `workers` times the program, `before` it a command that executes it."""
        words = [*self.command(), f"--nproc-per-node={workers}", *options, "--no-python"]
        return Job([*before, *words, *program], out=out, root=self.root)


def elastic_aio(root: Path = REPOSITORY) -> Launcher:
    """Return our launcher, run by this interpreter, from this checkout or another version.

    An early version has no `--torchrun-defaults`: all its defaults are torchrun's.
    """
    # With -P the directory that it runs in is not searched for the package.
    command = [sys.executable, "-P", "-m", "elastic_aio", "run"]
    with Job([*command, "--help"], out=subprocess.PIPE, root=root) as job:
        if b"--torchrun-defaults" in job.read():
            command.append("--torchrun-defaults")
        job.succeed()
    return Launcher(_OURS, lambda: command, root)


def torchrun(torch: Torch) -> Launcher:
    """Return torchrun with a free master port: the default one may be in use."""
    module = "torch.distributed.run"
    return Launcher(
        "torchrun", lambda: [torch.python, "-m", module, f"--master-port={free_port()}"]
    )


def worker(notes: Notes, *behaviour: str, site: bool = True) -> list[str]:
    """Return the command of a worker in Python (see `workers/rank.py`)."""
    options = ["-u"] if site else ["-u", "-S"]
    return [sys.executable, *options, str(_WORKERS / "rank.py"), str(notes.path), *behaviour]


def spawn_baseline(
    command: Sequence[str],
    ranks: int,
    directory: Path | None = None,
    *,
    attempt: int = 0,
    last_attempt: int = 0,
) -> list[subprocess.Popen[bytes]]:
    """Start workers at once in the simplest way, without a supervisor.

    Args:
        command: of each worker.
        ranks: how many.
        directory: for a file with the output of each worker.
        attempt: number that the workers see.
        last_attempt: and that of the last one.
    """
    counts = {
        "TORCHELASTIC_RESTART_COUNT": f"{attempt}",
        "TORCHELASTIC_MAX_RESTARTS": f"{last_attempt}",
    }
    return [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=(directory / f"{rank}").open("wb") if directory else None,
            start_new_session=True,
            env={**os.environ, **counts, "WORLD_SIZE": str(ranks), "RANK": str(rank)},
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
        self,
        command: Sequence[str],
        *,
        out: int | IO[bytes] = subprocess.DEVNULL,
        root: Path = REPOSITORY,
    ) -> None:
        """Start `command` with its standard output in `out`; it imports elastic_aio from `root`."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._command = command
        self._finished: Finished | None = None
        self.started_at = time.monotonic_ns()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=self._errors,
            cwd=REPOSITORY,
            env=environment(environment_changes(root)),
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

    def read(self) -> bytes:
        """Return all its output, if that is a pipe."""
        return b"".join(iter(lambda: os.read(self.stdout, 1 << 16), b""))

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
            self._finished = Finished(code, at - self.started_at, cpu, at)
            if self._process.stdout is not None:
                self._process.stdout.close()
        return self._finished

    def succeed(self) -> Finished:
        """Wait for its end, with exit code 0.

        Raises:
            RuntimeError: it failed.
        """
        finished = self.wait()
        if finished.returncode:
            code = finished.returncode
            raise RuntimeError(f"{self._command} ended with {code}: {self.error_text()}")
        return finished

    def error_text(self) -> str:
        """Return the last 2000 bytes of its standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 2000, max(size - 2000, 0)).decode("utf-8", "replace")

    def cpu(self) -> int:
        """Return the processor time of the process itself so far, in nanoseconds."""
        # The clock of another process: see clock_getcpuclockid(3).
        return time.clock_gettime_ns((~self.pid << 3) | 2)


def run(command: Sequence[str]) -> Finished:
    """Run a command, which must succeed."""
    with Job(command) as job:
        return job.succeed()


class Note(NamedTuple):
    """A note of a worker: what happened to it, and when."""

    what: str
    rank: int
    attempt: int
    at: int  # monotonic nanoseconds


@dataclass(frozen=True, slots=True)
class Notes:
    """The file of the notes of the workers of one job."""

    path: Path

    def read(self, what: str) -> list[Note]:
        """Return the notes of one kind."""
        notes = []
        for line in self.path.read_text(encoding="ascii").splitlines():
            kind, rank, attempt, at = line.split()
            if kind == what:
                notes.append(Note(kind, int(rank), int(attempt), int(at)))
        return notes


@contextmanager
def new_notes() -> Iterator[Notes]:
    """Create a file for notes, in a directory of its own that may hold logs too."""
    directory = Path(tempfile.mkdtemp(prefix="elastic_aio-benchmark-"))
    try:
        path = directory / "notes"
        path.touch()
        yield Notes(path)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, of all its threads."""
    pids: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError):  # the thread has ended
            children = Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii")
            pids.extend(int(child) for child in children.split())
    return pids


def wait_until(condition: Callable[[], bool], what: str, seconds: float = _LIMIT_S) -> None:
    """Test a condition every few milliseconds until it holds.

    Raises:
        TimeoutError: it did not hold in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.005)


_FOREIGN = ("PET_", "TORCH", "ELASTIC_AIO", "PYTHON", "LOGLEVEL", "OMP_NUM_THREADS")
_NEEDED = ("PYTHONPATH", "PYTHONHOME")


def environment_changes(root: Path = REPOSITORY) -> dict[str, str | None]:
    """Return changes that remove settings of a launcher from our environment.

    Python finds elastic_aio in `root`.

    PYTHONUNBUFFERED and PYTHONDONTWRITEBYTECODE, which containers often set, are two of them:
    they change when a launcher prints and how long it takes to start.
    """
    removed: dict[str, str | None] = {
        name: None
        for name in os.environ
        if name.startswith(_FOREIGN) and name not in (*_NEEDED, SESSION_VARIABLE)
    }
    # torchrun would print a warning without OMP_NUM_THREADS.
    return {**removed, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
