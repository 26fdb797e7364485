"""The nodes of one job that are killed, stopped and started, and what must be true of them."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agents import LOOPBACK, NodeNote, free_ports, node_worker
from benchmarks.measure import Contender, Job, Notes, wait_until

__all__ = ["Herd", "Round", "Violation"]

_LOOK_S = 0.02
# A node that was told to stop must have ended by then: its workers end at once.
_LEAVE_S = 15.0
_TOKEN = "SOAK_TOKEN"


class Violation(Exception):
    """Something was seen that must never be."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round as its workers see it.

    Attributes:
        port: at which they meet; each round has its own.
        nodes: how many there are.
        at: when the last worker began, in monotonic nanoseconds.
    """

    port: int
    nodes: int
    at: int


class Herd:
    """Agents on this machine that form a group of all that run; each has a few workers."""

    def __init__(self, contender: Contender, folder: Path, most: int, nproc: int) -> None:
        """Start nothing yet.

        Args:
            contender: the launcher.
            folder: takes notes and events.
            most: nodes at most.
            nproc: workers of each.
        """
        self._contender = contender
        self._folder = folder
        self._most = most
        self._nproc = nproc
        self._ports = free_ports(2)
        self._run_id = secrets.token_hex(4)
        self._token = f"{_TOKEN}={secrets.token_hex(8)}"
        self._notes = Notes(folder / "notes")
        self._notes.path.touch()
        self._read_to = 0
        self._number = 0
        self._leaving: dict[str, tuple[Job, float]] = {}
        self._workers: dict[int, NodeNote] = {}  # those that may be alive, by pid
        self.agents: dict[str, Job] = {}
        self.frozen: set[str] = set()
        self.rounds: set[int] = set()

    @property
    def awake(self) -> list[str]:
        """The nodes that run and are not frozen."""
        return [name for name in self.agents if name not in self.frozen]

    # What is done to them.

    def start(self) -> None:
        """Start one more agent."""
        name = f"n{self._number}"
        self._number += 1
        meeting = ",".join(f"{LOOPBACK}:{port}" for port in self._ports)
        self.agents[name] = Job(
            [
                *("env", self._token, *self._contender.command()),
                *(f"--nnodes=1:{self._most}", f"--nproc-per-node={self._nproc}"),
                *("--max-restarts=1000000", "--rdzv-backend=c10d"),
                *(f"--rdzv-endpoint={meeting}", f"--rdzv-id={self._run_id}"),
                *("--rdzv-conf=last_call_timeout=1,heartbeat_timeout=2",),
                *(f"--events={self._folder / name}.jsonl", "--no-python"),
                *node_worker(self._notes, name),
            ]
        )

    def kill(self, name: str) -> None:
        """Kill an agent with SIGKILL."""
        job = self.agents.pop(name)
        job.send_signal(signal.SIGKILL)
        job.wait()
        job.__exit__(None, None, None)

    def leave(self, name: str) -> None:
        """Ask an agent to stop; the others are to go on without it."""
        job = self.agents.pop(name)
        job.send_signal(signal.SIGTERM)
        self._leaving[name] = (job, time.monotonic() + _LEAVE_S)

    def freeze(self, name: str) -> None:
        """Stop an agent, not its workers, as a machine does that is out of memory."""
        self.agents[name].send_signal(signal.SIGSTOP)
        self.frozen.add(name)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        self.agents[name].send_signal(signal.SIGCONT)
        self.frozen.discard(name)

    def kill_worker(self, choose: Callable[[list[int]], int]) -> None:
        """Kill one of the workers."""
        self._look()
        if not self._workers:
            return
        pid = choose(sorted(self._workers))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self._is_ours(pid), "the end of a worker")

    def host(self) -> str | None:
        """Return the node that serves the store."""
        listening = _listening(self._ports)
        for name in self.awake:
            with suppress(OSError):
                for entry in os.scandir(f"/proc/{self.agents[name].pid}/fd"):
                    if os.readlink(entry) in listening:
                        return name
        return None

    # What must be true of them.

    def settle(self, seconds: float) -> Round:
        """Wait until all that are awake form one group, and nothing else is left.

        Raises:
            Violation: it did not happen in time, or something forbidden did.
        """
        end = time.monotonic() + seconds
        while True:
            self._check()
            if (formed := self._formed()) is not None:
                self.rounds.add(formed.port)
                return formed
            if time.monotonic() > end:
                raise Violation(f"not settled within {seconds:g} s: {self.describe()}")
            time.sleep(_LOOK_S)

    def finish(self) -> tuple[list[str], list[int]]:
        """Ask all to stop; return the agents that hang, and the pids of orphans."""
        for name in list(self.frozen):
            self.thaw(name)
        for name in list(self.agents):
            self.leave(name)
        end = time.monotonic() + _LEAVE_S
        while self._leaving and time.monotonic() < end:
            self._reap()
            time.sleep(_LOOK_S)
        hung = [f"{name}: {job.said()}" for name, (job, _) in self._leaving.items()]
        for job, _ in self._leaving.values():
            job.send_signal(signal.SIGKILL)
            job.wait()
            job.__exit__(None, None, None)
        end = time.monotonic() + 2
        while (orphans := list(self._marked())) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return hung, orphans

    def describe(self) -> str:
        """Return what is there, for people."""
        lines = [f"awake {self.awake}, frozen {sorted(self.frozen)}, leaving {[*self._leaving]}"]
        lines += [f"  {note}" for note in self._workers.values()]
        lines += [f"  {name} says: {job.said()[-500:]}" for name, job in self.agents.items()]
        return "\n".join(lines)

    def _check(self) -> None:
        self._look()
        self._reap()
        for name, (_, end) in self._leaving.items():
            if time.monotonic() > end:
                raise Violation(f"{name} did not end within {_LEAVE_S:g} s of SIGTERM")
        for name, job in self.agents.items():
            if not job.is_running:
                raise Violation(f"{name} ended by itself: {job.said()}")

    def _look(self) -> None:
        """Take note of workers that have come and gone."""
        with self._notes.path.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.decode("ascii").splitlines():
            note = NodeNote.parse(line)
            if note.what == "born":
                self._workers[note.pid] = note
        for pid in [pid for pid in self._workers if not self._is_ours(pid)]:
            del self._workers[pid]
        places = [(note.port, note.rank) for note in self._workers.values()]
        if len(set(places)) < len(places):
            raise Violation(f"two workers have the same place: {self.describe()}")

    def _formed(self) -> Round | None:
        """Return the round of all that are awake, if there is one and nothing else."""
        left = [note for note in self._workers.values() if note.node not in self.frozen]
        size = len(self.awake) * self._nproc
        if len(left) != size or {note.size for note in left} != {size}:
            return None
        if {note.node for note in left} != set(self.awake) or len({one.port for one in left}) > 1:
            return None
        if {note.rank for note in left} != set(range(size)):
            return None
        return Round(left[0].port, len(self.awake), max(note.at for note in left))

    def _reap(self) -> None:
        for name, (job, _) in list(self._leaving.items()):
            if not job.is_running:
                del self._leaving[name]
                job.__exit__(None, None, None)

    def _is_ours(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty: it has ended
        except OSError:
            return False
        return os.fsencode(self._notes.path) in command

    def _marked(self) -> Iterator[int]:
        """Yield the processes that come from our agents, whatever they are."""
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal():
                with suppress(OSError):
                    if self._token.encode() in Path(entry.path, "environ").read_bytes():
                        yield int(entry.name)


def _listening(ports: list[int]) -> set[str]:
    """Return the sockets that listen at these ports, as links in `/proc` name them."""
    wanted = {f"{port:04X}" for port in ports}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[1].rpartition(":")[2] in wanted:
                found.add(f"socket:[{words[9]}]")
    return found
