"""Injuries to one process of a job: what the chaos run does to a launcher.

Each family has one kind of injury; `Family.why_impossible` says what it lacks on this host.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

Profile = Callable[[], list[str]]
"""Returns the names of the system calls of an uninjured launcher, in order."""


@dataclass
class Injury:
    """One injury: how the launcher is started, and what is done to it.

    Attributes:
        text: what it is, to reproduce it.
        argv: words before the launcher's command.
        kills: whether it may end the launcher by SIGKILL.
        disk: size and inodes of the file system for logs and temporary files; None is the disk.
        pids: limit of processes and threads of the job; None is no limit.
        strike: called with the pids of the job's processes, once, at a random moment.
        delay: seconds until `strike`.
    """

    text: str
    argv: list[str] = field(default_factory=list)
    kills: bool = False
    disk: str | None = None
    pids: int | None = None
    strike: Callable[[dict[int, str]], None] | None = None
    delay: float = 0.0


def strace_missing() -> str:
    """Return why strace cannot be used; "" if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = ["strace", "-D", "-qq", "-o", "/dev/null", "-e", "inject=getppid:error=EPERM", "true"]
    done = subprocess.run(probe, capture_output=True, check=False)
    return "" if done.returncode == 0 else f"strace does not work: {done.stderr.decode()[-200:]}"


def _inject(names: str, what: str) -> list[str]:
    # -D: the launcher stays a child of the test, and the tracer becomes a grandchild.
    trace = ["-e", f"trace={names}", "-e", "signal=none", "-e", f"inject={names}:{what}"]
    return ["strace", "-D", "-qq", "-o", "/dev/null", *trace]


def _pick(chance: random.Random, profile: Profile, names: Sequence[str] = ()) -> tuple[str, int]:
    """Return a random system call of a launcher: its name, and the how manyth of that name.

    Nine of ten come after the start of the interpreter, which makes most of the calls.
    """
    calls = profile()
    start = calls.index("epoll_create1") if chance.random() < 0.9 else 0
    places = [place for place in range(start, len(calls)) if not names or calls[place] in names]
    if not places:
        return chance.choice(list(names)), 1
    # By name first: rare calls are as interesting as frequent ones.
    name = chance.choice(sorted({calls[place] for place in places}))
    place = chance.choice([place for place in places if calls[place] == name])
    return name, Counter(calls[: place + 1])[name]


def _when(chance: random.Random, name: str, count: int) -> str:
    """Return once, a few times, or from then on.

    A policy that forbids pidfds forbids them from the start, and a descriptor for one is not
    harder to get than another.
    """
    first = 1 if name.startswith("pidfd") else count
    return chance.choice([f"{count}", f"{count}..{count + 3}", f"{first}+"])


def kill_at_call(chance: random.Random, profile: Profile) -> Injury:
    """SIGKILL for the launcher at a random system call."""
    name, count = _pick(chance, profile)
    what = f"signal=KILL:when={count}"
    return Injury(f"SIGKILL at {name} {count}", _inject(name, what), kills=True)


def kill_any(chance: random.Random, profile: Profile) -> Injury:
    """SIGKILL for a random process of the job at a random moment."""
    share = chance.random()

    def strike(commands: Mapping[int, str]) -> None:
        pids = sorted(commands)
        if pids:
            _kill(pids[int(share * len(pids))])

    return Injury("SIGKILL for any process", kills=True, strike=strike,
                  delay=chance.uniform(0.05, 1.0))  # fmt: skip


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended


def few_descriptors(chance: random.Random, profile: Profile) -> Injury:
    """A limit of descriptors, or EMFILE from random system calls."""
    if chance.random() < 0.4:
        limit = chance.randint(6, 48)
        shell = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash"]
        return Injury(f"ulimit -n {limit}", shell)
    names = ("openat", "dup", "dup3", "pipe2", "socket", "socketpair", "pidfd_open",
             "epoll_create1", "eventfd2", "memfd_create", "inotify_init1", "accept4")  # fmt: skip
    name, count = _pick(chance, profile, names)
    what = f"error={chance.choice(['EMFILE', 'ENFILE'])}:when={_when(chance, name, count)}"
    return Injury(f"{name} {what}", _inject(name, what))


def full_disk(chance: random.Random, profile: Profile) -> Injury:
    """A small file system for the logs and the temporary files."""
    size = chance.choice([4, 8, 12, 16, 20, 24, 32, 48])
    inodes = chance.choice([0, 0, chance.randint(2, 12)])
    disk = f"size={size}k" + (f",nr_inodes={inodes}" if inodes else "")
    return Injury(f"a disk of {disk}", disk=disk)


def not_permitted(chance: random.Random, profile: Profile) -> Injury:
    """EPERM from random system calls that a security policy may forbid."""
    names = ("pidfd_send_signal", "kill", "pidfd_open", "prlimit64", "prctl", "inotify_init1",
             "inotify_add_watch", "memfd_create", "setsockopt", "bind", "mkdir", "vfork",
             "clone3", "waitid", "ioctl", "readlink")  # fmt: skip
    name, count = _pick(chance, profile, names)
    what = f"error=EPERM:when={_when(chance, name, count)}"
    return Injury(f"{name} {what}", _inject(name, what))


def full_process_table(chance: random.Random, profile: Profile) -> Injury:
    """A limit of processes and threads for the whole job."""
    pids = chance.randint(1, 8)
    return Injury(f"pids.max of {pids}", pids=pids)


# ------------------------------------------------------------------- the surroundings


def tmpfs_missing() -> str:
    """Return why no file system can be mounted; "" if one can."""
    return "" if os.geteuid() == 0 else "only root can mount a file system"


@contextmanager
def mounted(directory: Path, options: str | None) -> Iterator[None]:
    """Mount a small file system at a directory, unless `options` is None."""
    if options is None:
        yield
        return
    mount = ["mount", "-t", "tmpfs", "-o", options, "chaos", str(directory)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _pids_directory() -> Path | None:
    """Return a cgroup in which groups with a limit of processes can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "pids" in controllers.split(","):
            return Path("/sys/fs/cgroup/pids" + path)
        if not controllers and "pids" in _read(f"/sys/fs/cgroup{path}/cgroup.subtree_control"):
            return Path("/sys/fs/cgroup" + path)
    root = Path("/sys/fs/cgroup")
    return root if "pids" in _read(f"{root}/cgroup.subtree_control") else None


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def pids_missing() -> str:
    """Return why no limit of processes can be set; "" if one can."""
    directory = _pids_directory()
    if directory is None:
        return "no cgroup with the pids controller"
    try:
        with _group(directory):
            return ""
    except OSError as error:
        return f"cgroups cannot be made: {error}"


@contextmanager
def _group(parent: Path) -> Iterator[Path]:
    group = parent / f"chaos-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        yield group
    finally:
        end = time.monotonic() + 10
        while True:
            try:
                group.rmdir()
                break
            except OSError:  # a process of it is just ending
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)


@contextmanager
def process_limit(pids: int | None) -> Iterator[list[str]]:
    """Yield the words before a command that give it a limit of processes."""
    parent = _pids_directory()
    if pids is None or parent is None:
        yield []
        return
    with _group(parent) as group:
        (group / "pids.max").write_text(str(pids))
        # The shell enters the group and becomes the command.
        yield ["bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "bash"]


def _none() -> str:
    return ""


@dataclass(frozen=True)
class Family:
    """One kind of injury."""

    make: Callable[[random.Random, Profile], Injury]
    why_impossible: Callable[[], str] = _none


FAMILIES = {
    "kill -9 at a system call": Family(kill_at_call, strace_missing),
    "kill -9 of any process": Family(kill_any),
    "EMFILE": Family(few_descriptors, strace_missing),
    "ENOSPC": Family(full_disk, tmpfs_missing),
    "EPERM": Family(not_permitted, strace_missing),
    "full process table": Family(full_process_table, pids_missing),
}


@contextmanager
def surroundings(injury: Injury, directory: Path) -> Iterator[list[str]]:
    """Make the disk and the process table of an injury; yield the words before a command."""
    with ExitStack() as stack:
        stack.enter_context(mounted(directory, injury.disk))
        limit = stack.enter_context(process_limit(injury.pids))
        yield [*limit, *injury.argv]
