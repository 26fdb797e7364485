"""The agents of one job of many nodes, all on this machine, and what their workers note."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Contender, Job, Notes, new_notes, spawn_by_hand, wait_until

__all__ = [
    "LOOPBACK",
    "NodeNote",
    "Nodes",
    "born_by_hand",
    "free_ports",
    "is_listening",
    "new_nodes",
    "node_worker",
    "singles",
    "start_together",
]

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.01
_PATIENCE_S = 120.0
_STOP_S = 20.0
_WORKER = str(Path(__file__).parent / "workers" / "node.py")


class NodeNote(NamedTuple):
    """What a worker has noted."""

    what: str
    node: str
    pid: int
    rank: int
    size: int
    port: int  # at which the workers of its round meet
    at: int  # monotonic nanoseconds

    @classmethod
    def parse(cls, line: str) -> NodeNote:
        """Read a line of the notes."""
        what, node, *numbers = line.split()
        return cls(what, node, *map(int, numbers))


@dataclass(slots=True)
class Nodes:
    """The agents of one job; each starts one worker, which stays.

    Attributes:
        contender: the launcher.
        notes: the file in which all workers note what happens.
        nnodes: N or MIN:MAX.
        endpoint: where they meet.
        conf: settings of the rendezvous.
        options: more options of every agent.
        agents: those that were started, by the name of their node.
    """

    contender: Contender
    notes: Notes
    nnodes: str
    endpoint: str
    conf: Mapping[str, object]
    options: Sequence[str] = ()
    agents: dict[str, Job] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))

    def start(
        self,
        node: str,
        *options: str,
        prefix: Sequence[str] = (),
        endpoint: str = "",
        conf: Mapping[str, object] | None = None,
    ) -> Job:
        """Start the agent of one node.

        Args:
            node: its name.
            options: more options of this one.
            prefix: words before the command, such as `ip netns exec NAME`.
            endpoint: where it meets the others; empty: where all do.
            conf: more settings of its rendezvous.
        """
        settings = {**self.conf, **(conf or {})}
        words = [
            *prefix,
            *self.contender.command(),
            f"--nnodes={self.nnodes}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint or self.endpoint}",
            f"--rdzv-id={self.run_id}",
            *([f"--rdzv-conf={_joined(settings)}"] if settings else []),
            *self.options,
            *options,
            "--no-python",
            *node_worker(self.notes, node),
        ]
        self.agents[node] = job = Job(words)
        return job

    def kill(self, node: str) -> int:
        """Kill an agent with SIGKILL; return when, in monotonic nanoseconds."""
        at = time.monotonic_ns()
        self.agents[node].send_signal(signal.SIGKILL)
        return at

    def read(self, what: str, *, since: int = 0, size: int = 0) -> list[NodeNote]:
        """Return notes of one kind, of workers in a world of `size` (0: of any)."""
        return [
            note
            for note in _read(self.notes)
            if note.what == what and note.at >= since and size in (0, note.size)
        ]

    def seen(
        self,
        what: str,
        count: int,
        *,
        since: int = 0,
        size: int = 0,
        seconds: float = _PATIENCE_S,
    ) -> list[NodeNote] | None:
        """Wait until `count` nodes have noted something.

        Returns:
            The last note of each; None when it did not happen within `seconds`, or
            cannot happen any more because too few agents are left.
        """
        end = time.monotonic() + seconds
        while True:
            is_over = time.monotonic() > end or self._running() < count
            latest = {note.node: note for note in self.read(what, since=since, size=size)}
            if len(latest) >= count:
                return sorted(latest.values(), key=lambda note: note.at)
            if is_over:
                return None
            time.sleep(_LOOK_S)

    def must_see(self, what: str, count: int, *, since: int = 0, size: int = 0) -> list[NodeNote]:
        """Wait like `seen` for what has to happen.

        Raises:
            RuntimeError: it did not.
        """
        notes = self.seen(what, count, since=since, size=size)
        if notes is None:
            said = "\n".join(f"{name}: {job.said()}" for name, job in self.agents.items())
            raise RuntimeError(f"{self.contender.name}: no {count} workers {what}: {said}")
        return notes

    def stop(self) -> None:
        """End all agents, together, and whatever of their workers is left."""
        running = [job for job in self.agents.values() if job.is_running]
        for number, seconds in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 10.0)):
            for job in running:
                job.send_signal(number)
            end = time.monotonic() + seconds
            for job in running:
                with suppress(TimeoutError):
                    job.wait(max(end - time.monotonic(), 0.01))
            running = [job for job in running if job.is_running]
        for job in self.agents.values():
            job.__exit__(None, None, None)
        for note in _read(self.notes):
            _kill_orphan(note, self.notes)

    def _running(self) -> int:
        return sum(job.is_running for job in self.agents.values())


@contextmanager
def new_nodes(
    contender: Contender,
    nnodes: str,
    *options: str,
    endpoints: int = 1,
    **conf: object,
) -> Iterator[Nodes]:
    """Give a job whose agents are still to be started; nothing is left of it.

    Args:
        contender: the launcher.
        nnodes: N or MIN:MAX.
        options: more options of every agent.
        endpoints: at how many ports they can meet.
        conf: settings of the rendezvous.
    """
    endpoint = ",".join(f"{LOOPBACK}:{port}" for port in free_ports(endpoints))
    with new_notes() as notes:
        nodes = Nodes(contender, notes, nnodes, endpoint, conf, options)
        try:
            yield nodes
        finally:
            nodes.stop()


@contextmanager
def singles(contender: Contender, count: int) -> Iterator[Nodes]:
    """Start as many jobs of one node, which have nothing to do with each other."""
    with new_notes() as notes:
        nodes = Nodes(contender, notes, "1", "", {})
        try:
            for number in range(count):
                node = f"n{number}"
                nodes.agents[node] = contender.job(1, node_worker(notes, node))
            yield nodes
        finally:
            nodes.stop()


def start_together(nodes: Nodes, count: int) -> None:
    """Start agents until all their workers are there; that of node 0 serves the store."""
    nodes.start("n0")
    first = nodes.endpoint.partition(",")[0]
    wait_until(lambda: is_listening(first), f"a store at {first}")
    for number in range(1, count):
        nodes.start(f"n{number}")
    nodes.must_see("ready", count, size=count)


def node_worker(notes: Notes, node: str) -> list[str]:
    """Return the command of a worker (see `workers/node.py`)."""
    return [sys.executable, "-u", "-S", _WORKER, str(notes.path), node]


def born_by_hand() -> float:
    """Start one worker in the simplest way; return the milliseconds to its first instruction."""
    with new_notes() as notes:
        began = time.monotonic_ns()
        (process,) = spawn_by_hand(node_worker(notes, "alone"), 1)
        try:
            wait_until(lambda: bool(_read(notes)), "the worker")
            return (_read(notes)[0].at - began) / 1e6
        finally:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Return TCP ports that are free on the loopback address."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def is_listening(endpoint: str) -> bool:
    """Tell whether somebody listens at an endpoint, without connecting to it."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
            for line in file:
                words = line.split()
                if words[1].endswith(port) and words[3] == "0A":
                    return True
    return False


def _read(notes: Notes) -> list[NodeNote]:
    return [NodeNote.parse(line) for line in notes.path.read_text(encoding="ascii").splitlines()]


def _kill_orphan(note: NodeNote, notes: Notes) -> None:
    """Kill a worker that has outlived its agent, as torchrun's do."""
    with suppress(OSError):
        command = Path(f"/proc/{note.pid}/cmdline").read_bytes()
        if os.fsencode(notes.path) in command:
            os.kill(note.pid, signal.SIGKILL)


def _joined(conf: Mapping[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in conf.items())
