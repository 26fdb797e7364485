"""A cluster whose nodes are killed, stopped, suspended and started, and its invariants."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_aio.rendezvous.base import RENDEZVOUS_FAILED
from tests.support.children import until
from tests.support.cluster import CONF, UNLIMITED_LOSSES, WORKER, AgentProcess, Cluster
from tests.support.etcd import EtcdProcess, etcd_cluster
from tests.support.leaks import alive, leaked_processes
from tests.support.line_stream import LineStream
from tests.support.redis import RedisProcess
from tests.support.sockets import LOOPBACK, free_port
from tests.support.worker_notes import Note, read_note

_POLL_S = 0.02
# An agent must have ended this long after SIGTERM: its workers end at once.
_STOP_S = 15.0


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round as its workers see it."""

    port: int
    """Master port; each round has its own."""
    nodes: int
    formed_at: float
    """When the last worker started, in seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Where the nodes meet: at the servers of an engine, or at a store that a node serves."""

    backend: str = "c10d"
    servers: Sequence[EtcdProcess | RedisProcess] = ()

    @property
    def endpoint(self) -> str:
        """The endpoints of the servers; empty without servers."""
        return ",".join(server.endpoint for server in self.servers)

    async def restart(self, server: EtcdProcess | RedisProcess, away: float) -> None:
        """Kill a server, and start it again with its data after some seconds."""
        server.kill()
        await asyncio.sleep(away)
        if isinstance(server, EtcdProcess):
            server.start([one.peer for one in self.servers if isinstance(one, EtcdProcess)])
            await asyncio.to_thread(server.wait_ready)
        else:
            await asyncio.to_thread(server.start)

    async def pause(self, server: EtcdProcess | RedisProcess, away: float) -> None:
        """Stop a server for some seconds."""
        server.send(signal.SIGSTOP)
        await asyncio.sleep(away)
        server.send(signal.SIGCONT)


@contextmanager
def open_engine(backend: str, directory: Path) -> Iterator[Engine]:
    """Start the servers of a backend: three of etcd, one of Redis."""
    match backend:
        case "etcd":
            directory.mkdir()
            with etcd_cluster(directory) as members:
                yield Engine(backend, members)
        case "redis":
            directory.mkdir()
            with RedisProcess(directory) as server:
                yield Engine(backend, [server])
        case _:
            yield Engine(backend)


class FaultyCluster(Cluster):
    """Agents on this host that are to form one group of all that can run.

    All workers write their notes into one pipe, which outlives every agent.
    """

    def __init__(self, directory: Path, most: int, nproc: int, engine: Engine) -> None:
        self._ports = [free_port() for _ in range(2)]
        endpoint = ",".join(f"{LOOPBACK}:{port}" for port in self._ports)
        super().__init__(
            directory,
            f"1:{most}",
            launcher=UNLIMITED_LOSSES,
            endpoint=engine.endpoint or endpoint,
            rdzv_backend=engine.backend,
            conf={**dict.fromkeys(CONF), "last_call_timeout": 1, "heartbeat_timeout": 2},
            can_split=True,  # while a node is suspended
            env={"NODE_DIRECTORY": str(directory)},
            max_restarts=1_000_000,
            nproc_per_node=nproc,
        )
        self._nproc = nproc
        self._position = 0
        self._started = 0
        self._workers: dict[int, Note] = {}  # those that may be alive, by pid
        self._stopping: dict[AgentProcess, float] = {}  # until when they must have ended
        self.suspended: set[AgentProcess] = set()
        self.rounds: set[int] = set()
        self.cut_off = 0
        """Nodes that have left because another job had begun."""

    async def __aenter__(self) -> FaultyCluster:
        await super().__aenter__()
        pipe = self.directory / "notes"
        os.mkfifo(pipe)
        self._notes: LineStream[Note] = LineStream(
            "the workers", os.open(pipe, os.O_RDWR | os.O_NONBLOCK), read_note
        )
        self._streams.append(self._notes)
        return self

    @property
    def members(self) -> list[AgentProcess]:
        """The nodes that were not asked to stop."""
        return [node for node in self.nodes if node not in self._stopping]

    @property
    def active(self) -> list[AgentProcess]:
        """The members that are not suspended."""
        return [node for node in self.members if node not in self.suspended]

    # Faults.

    def start_one(self) -> None:
        """Start one more agent."""
        self.start(f"n{self._started}")
        self._started += 1

    async def kill(self, node: AgentProcess) -> None:
        """Kill an agent with SIGKILL."""
        await node.kill()
        self._forget(node)

    async def stop_one(self, node: AgentProcess) -> None:
        """Stop an agent with SIGTERM; the others are to go on without it."""
        node.send(signal.SIGTERM)
        self._stopping[node] = time.monotonic() + _STOP_S

    def suspend(self, node: AgentProcess) -> None:
        """Stop an agent with SIGSTOP, but not its workers."""
        node.send(signal.SIGSTOP)
        self.suspended.add(node)

    def resume(self, node: AgentProcess) -> None:
        """Let a suspended agent continue."""
        node.send(signal.SIGCONT)
        self.suspended.discard(node)

    async def kill_worker(self, choose: Callable[[Sequence[int]], int]) -> None:
        """Kill one of the workers."""
        self._update_workers()
        if self._workers:
            pid = choose(sorted(self._workers))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not _is_worker(pid), "the end of a worker")

    @asynccontextmanager
    async def dropping_packets(self, percent: int) -> AsyncIterator[None]:
        """Drop some packets to and from the stores; needs a network namespace of its own."""
        ports = ", ".join(map(str, self._ports))
        rule = f"numgen random mod 100 < {percent} drop"
        await _nft(
            "table ip soak { chain input { type filter hook input priority 0;"
            f" tcp dport {{ {ports} }} {rule}; tcp sport {{ {ports} }} {rule}; }}; }}"
        )
        try:
            yield
        finally:
            await _nft("delete table ip soak")

    # Invariants.

    async def settle(self, seconds: float) -> Round:
        """Wait until all active nodes form one group and no other worker is left.

        Raises:
            Violation: it did not happen in time, or an invariant does not hold.
        """
        end = time.monotonic() + seconds
        while True:
            self._check_now()
            if (formed := self._formed()) is not None:
                self.rounds.add(formed.port)
                return formed
            if time.monotonic() > end:
                raise Violation(f"not settled within {seconds:g} s: {self.describe()}")
            await asyncio.sleep(_POLL_S)

    async def shut_down(self) -> tuple[list[str], dict[int, str]]:
        """Stop all agents; return those that hang, and the processes that are left."""
        for node in list(self.suspended):
            self.resume(node)
        hung = [f"{node.name}: {node.err}" for node in await self.stop(_STOP_S)]
        agents = {node.pid for node in self.nodes if node.is_running}
        orphans: dict[int, str] = {}
        end = time.monotonic() + 2
        while time.monotonic() < end:
            orphans = leaked_processes(since={*self._processes_before, *agents})
            if not orphans:
                break
            await asyncio.sleep(_POLL_S)
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return hung, orphans

    def describe(self) -> str:
        """Return the present state, for people."""
        groups = {"active": self.active, "suspended": self.suspended, "stopping": self._stopping}
        names = (f"{key} {sorted(node.name for node in nodes)}" for key, nodes in groups.items())
        lines = [", ".join(names)]
        lines += [f"  {note}" for note in self._workers.values()]
        lines += [f"  {node.name}: {node.err[-500:]}" for node in self.members]
        return "\n".join(lines)

    def _check_now(self) -> None:
        self._update_workers()
        for node, end in list(self._stopping.items()):
            if not node.is_running:
                del self._stopping[node]
                self._forget(node)
            elif time.monotonic() > end:
                raise Violation(f"{node.name} did not end within {_STOP_S:g} s of SIGTERM")
        for node in self.members:
            if not node.is_running and self._is_cut_off(node):
                self._forget(node)
                self.cut_off += 1
                if not self.active:
                    self.start_one()
            elif not node.is_running:
                raise Violation(f"{node.name} ended by itself: {node.err[-2000:]}")

    @staticmethod
    def _is_cut_off(node: AgentProcess) -> bool:
        """Whether a node has ended since it was cut off while a new node began the next job.

        A node that starts where no store is left cannot know that a job runs (many-nodes.md).
        """
        return node.exit_code == RENDEZVOUS_FAILED and "another job with the id" in node.err

    def _update_workers(self) -> None:
        """Add the workers that have started, and remove those that have ended."""
        entries = self._notes.entries[self._position :]
        self._position += len(entries)
        for note in entries:
            if note.what == "started":
                self._workers[note.pid] = note
        for pid in [pid for pid in self._workers if not _is_worker(pid)]:
            del self._workers[pid]
        ranks = [(note.master_port, note.rank) for note in self._workers.values()]
        if len(set(ranks)) < len(ranks):
            raise Violation(f"two workers have the same rank: {self.describe()}")

    def _formed(self) -> Round | None:
        """Return the round of all active nodes, if there is one and no other worker."""
        suspended = {node.name for node in self.suspended}
        workers = [note for note in self._workers.values() if note.node not in suspended]
        size = len(self.active) * self._nproc
        if {note.world_size for note in workers} != {size}:
            return None
        if {note.node for note in workers} != {node.name for node in self.active}:
            return None
        if sorted(note.rank for note in workers) != list(range(size)):
            return None
        ports = {note.master_port for note in workers}
        if len(ports) > 1:
            return None
        return Round(ports.pop(), len(self.active), max(note.time for note in workers))

    def _forget(self, node: AgentProcess) -> None:
        """Check the console of a node that has ended, and release its pipes."""
        self.check_console(node)
        streams: list[LineStream[Any]] = [node.events, node.notes]
        for stream in streams:
            stream.close()
            self._streams.remove(stream)
        self.nodes.remove(node)
        self._programs.remove(node)


async def _nft(rules: str) -> None:
    process = await asyncio.create_subprocess_exec("nft", rules)
    if await process.wait():
        raise OSError(f"nft: exit code {process.returncode} (got {rules})")


def _is_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty: it has ended
    except OSError:
        return False
    return os.fsencode(WORKER) in command and alive(pid)
