"""Lost jobs of this host: their launcher and their guardian were killed, and processes are left.

The environment of each process of a job has the job's marker, whose value names the launcher (see
`descendants.marker_value`); the arguments of the guardian have the beginning of its name, which all
jobs of the launcher share.  A job is lost if neither of the two runs.  What cannot be decided
counts as alive: a launcher of another pid namespace or of an earlier version of this package, and
one that `hidepid` of proc(5) hides.

A process is a lost job's if all markers of its environment are (that of a job within a job has
two), and it is an orphan or below such an orphan: the marker alone proves nothing (`descendants`).
What is below a process of a live job, or in its session, is that job's.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from msgspec import Struct

from elastic_aio.process import descendants, proc
from elastic_aio.process.tree import Yielder
from elastic_aio.worker.context import ERROR_FILE, RUN_ID, TIMER_FILE

_NAME: Final = "ELASTIC_AIO_JOB_[0-9a-f]{32}"
_PREFIX: Final = "ELASTIC_AIO_JOB_[0-9a-f]{24,32}"  # a guardian of an earlier version names one job
_VARIABLES: Final = rf"\0({_NAME}|{RUN_ID}|{ERROR_FILE}|{TIMER_FILE}|SYSTEMD_EXEC_PID)=([^\0]*)"
_TEMPORARY: Final = r"/elastic_aio_[^/]*[0-9a-f]{8}(?:/attempt_\d+(?:/\d+)?)?\Z"


class LostJob(Struct, frozen=True):
    """What is left of a job; its oldest process has started `since`, in Unix seconds."""

    run_id: str
    pids: tuple[int, ...]
    since: float


class LostScanner(descendants.Scanner):
    """Finds the processes of this user's lost jobs, but for those that this process runs in."""

    def __init__(self) -> None:
        super().__init__(b"", 0, {}, frozenset)
        self.jobs: list[LostJob] = []
        """What the last scan has found."""
        self._paths: set[str] = set()
        self._found: set[tuple[int, int]] = set()

    def find(
        self, known: Mapping[int, int], snapshot: descendants.Snapshot | None = None
    ) -> Generator[float, None, list[proc.ProcEntry]]:
        """Read every process once; return those that this scan and the last one have found."""
        processes: dict[int, proc.ProcEntry] = {}
        environments: dict[int, dict[str, str]] = {}
        guardians: dict[int, str] = {}
        for name in [] if proc.is_foreign() else os.listdir("/proc"):
            yield 0.0
            process = proc.read_process(int(name)) if name.isdecimal() else None
            if process is None or process.is_dead:
                continue
            processes[process.pid] = process
            content = descendants.environment_of(process) or b""
            if b"\0ELASTIC_AIO_GUARDIAN=" in content:
                guardians[process.pid] = os.fsdecode(proc.read(process.pid, "cmdline") or b"")
            elif b"ELASTIC_AIO_JOB_" in content:
                environment = dict(re.findall(_VARIABLES, f"\0{os.fsdecode(content)}"))
                if any(map(_is_marker, environment)):
                    environments[process.pid] = environment
        # What has lost its parents in the stop, and its environment before.
        former = {one.pid for one in processes.values() if one.identity in self._found}
        found = _find_lost(processes, environments, guardians, former)
        runs: defaultdict[str, list[proc.ProcEntry]] = defaultdict(list)
        for pid, source in found.items():
            environment = environments.get(pid) or environments.get(source, {})
            runs[environment.get(RUN_ID, "")].append(processes[pid])
            self._paths |= {environment.get(name, "") for name in (ERROR_FILE, TIMER_FILE)}
        self.jobs = [_lost_job(*run) for run in runs.items()]
        self.jobs.sort(key=lambda job: job.since)
        self._found = {processes[pid].identity for pid in found}
        return [processes[pid] for pid in found if pid in former]

    def remove_files(self) -> None:
        """Remove the pipes and the empty temporary directories of the launchers."""
        for path in self._paths:
            with suppress(OSError):
                if "/watchdog_timer_" in path and stat.S_ISFIFO(os.lstat(path).st_mode):
                    os.unlink(path)
            while re.search(_TEMPORARY, path := os.path.dirname(path)):
                with suppress(OSError):  # it has logs
                    os.rmdir(path)


async def find_lost_jobs() -> list[LostJob]:
    """Return the lost jobs of this user on this host; none if there is no descriptor left."""
    scanner, yielder = LostScanner(), Yielder()
    with suppress(OSError):
        for _ in scanner.find({}):
            await yielder.maybe_yield()
    return scanner.jobs


def _lost_job(run_id: str, entries: Sequence[proc.ProcEntry]) -> LostJob:
    age = max(proc.seconds_since(one.start) for one in entries)
    return LostJob(run_id, tuple(sorted(one.pid for one in entries)), time.time() - age)


def _find_lost(
    processes: Mapping[int, proc.ProcEntry],
    environments: Mapping[int, dict[str, str]],
    guardians: Mapping[int, str],
    former: set[int],
) -> dict[int, int]:
    """Return the processes of lost jobs, each with the orphan above it, by pid.

    `former` are those of an earlier scan that still run.
    """
    since: dict[tuple[str, str], int] = {}
    for pid in sorted(environments, key=lambda pid: processes[pid].start):
        for variable in environments[pid].items():
            since.setdefault(variable, processes[pid].start)
    prefixes = (*re.findall(_PREFIX, " ".join(guardians.values())),)
    live_names = {name for name, _ in since if name.startswith(prefixes)}
    live = {*guardians, *(processes[pid].parent for pid in guardians)}
    for (name, value), start in since.items():
        launcher = descendants.launcher_of(value)
        if _is_marker(name) and (launcher is None or _runs(launcher, start)):
            live_names.add(name)
            live.add(launcher or 0)
    lost = {pid for pid, names in environments.items() if not names.keys() & live_names}
    orphans = {pid for pid in lost if _is_adopter(processes[pid].parent)}
    # systemd.exec(5): a service, whose manager has imported the environment of a worker.
    orphans -= {pid for pid in lost if environments[pid].get("SYSTEMD_EXEC_PID") == str(pid)}
    orphans |= former
    if not orphans:
        return {}
    live |= environments.keys() - lost
    # Process 1 may be a launcher, and is the parent of other orphans.
    kept = _with_relatives(processes, dict.fromkeys(live - {0, 1}, 0), ())
    me = proc.own_pid()
    spared = {me} | descendants.may_adopt(me) | kept.keys()
    found = _with_relatives(processes, {pid: pid for pid in orphans - spared}, spared)
    return {pid: source for pid, source in found.items() if _is_own(pid)}


def _is_marker(name: str) -> bool:
    return name.startswith("ELASTIC_AIO_JOB_")


def _runs(pid: int, start: int) -> bool:
    """Whether a process may run that is not younger than a child of it, which has this start."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    process = proc.read_process(pid)
    return process is None or (process.start <= start and not process.is_dead)


def _with_relatives(
    processes: Mapping[int, proc.ProcEntry], found: dict[int, int], spared: Collection[int]
) -> dict[int, int]:
    """Add the children and the sessions of what is found, and theirs, but for the spared."""
    while new := {
        one.pid: found.get(one.parent, found.get(one.session, 0))
        for one in processes.values()
        if not (one.pid in found or one.pid in spared)
        and (one.parent in found or one.session in found)
    }:
        found = found | new
    return found


def _is_adopter(pid: int) -> bool:
    """Whether a process adopts the orphans of others, as process 1 and a user's systemd do."""
    return pid == 1 or proc.read(pid, "comm") == b"systemd\n"


def _is_own(pid: int) -> bool:
    # All of its user ids: another user may have started a set-user-ID program of this one.
    return {*proc.read_status(pid, b"Uid").get(b"Uid", b"").split()} == {b"%d" % os.geteuid()}
