"""The agents of one launcher as a cluster, and their workers without any launcher."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, NamedTuple, TypeVar

from benchmarks.launchers import Launcher, environment_changes
from tests.support.children import until
from tests.support.cli import environment
from tests.support.cluster import CONF, AgentProcess, Cluster
from tests.support.leaks import leaked_processes
from tests.support.line_stream import LineStream
from tests.support.netns import Host
from tests.support.sockets import LOOPBACK, free_port, listening

__all__ = [
    "LauncherCluster",
    "NodeNote",
    "baseline_failure",
    "baseline_start",
    "baseline_stop",
    "isolated",
]

T = TypeVar("T")

_POLL_S = 0.01
_LIMIT_S = 120.0
_STOP_S = 20.0
_WORKER = [sys.executable, "-u", "-S", str(Path(__file__).parent / "workers" / "node.py")]


class NodeNote(NamedTuple):
    """A note of a worker (see `workers/node.py`)."""

    what: str
    node: str
    pid: int
    rank: int
    size: int
    port: int  # master port of its round
    at: int  # monotonic nanoseconds

    @classmethod
    def parse(cls, line: bytes) -> NodeNote:
        """Read a line of the notes."""
        what, node, *numbers = line.decode("ascii").split()
        return cls(what, node, *map(int, numbers))


class LauncherCluster(Cluster):
    """The agents of one launcher, each with one worker that stays.

    Without an endpoint of the rendezvous, they get `endpoints` free ports of the loopback address.
    """

    def __init__(
        self,
        launcher: Launcher,
        directory: Path,
        nnodes: str,
        *,
        endpoint: str | None = None,
        endpoints: int = 1,
        conf: dict[str, object] | None = None,
        **options: Any,
    ) -> None:
        names = ("log_dir", "redirects", "events", "restart_delay")
        ours: dict[str, Any] = dict.fromkeys(names)  # torchrun lacks them, or has other values
        super().__init__(
            directory,
            nnodes,
            endpoint=endpoint or ",".join(f"{LOOPBACK}:{free_port()}" for _ in range(endpoints)),
            conf={**dict.fromkeys(CONF), **(conf or {})},
            can_split=True,
            parse_note=NodeNote.parse,
            env=environment_changes(launcher.root),
            **{**ours, "rdzv_id": secrets.token_hex(4), **options},
        )
        self._command = launcher.command

    def start_agent(
        self,
        *,
        env: dict[str, str] | None = None,
        host: Host | None = None,
        conf: dict[str, object] | None = None,
        **options: Any,
    ) -> AgentProcess:
        """Start the agent of one more node; see `Cluster.start`."""
        self._launcher = self._command()
        name = f"n{len(self.nodes)}"
        return self.start(name, *_WORKER, env=env, host=host, conf=conf, **options, no_python=True)

    def start_single(self) -> AgentProcess:
        """Start a job of one node, which has nothing to do with the others."""
        rendezvous = ("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
        return self.start_agent(**dict.fromkeys(rendezvous))

    async def start_together(self, count: int) -> None:
        """Start agents until all their workers are ready; node 0 serves the store."""
        self.start_agent()
        first = int(self.endpoint.partition(",")[0].rpartition(":")[2])
        await until(lambda: listening([first]), "the store")
        for _ in range(1, count):
            self.start_agent()
        await self.all_noted("ready", count, size=count)

    def kill(self, number: int) -> int:
        """Kill an agent with SIGKILL; return when, in monotonic nanoseconds."""
        at = time.monotonic_ns()
        self.nodes[number].send(signal.SIGKILL)
        return at

    def notes_of(self, what: str, *, since: int = 0, size: int = 0) -> list[NodeNote]:
        """Return notes of one kind, of workers in a world of `size` (0: of any)."""
        return [
            note
            for node in self.nodes
            for note in node.notes.entries
            if note.what == what and note.at >= since and size in (0, note.size)
        ]

    async def try_noted(
        self, what: str, count: int, *, since: int = 0, size: int = 0, seconds: float = _LIMIT_S
    ) -> list[NodeNote] | None:
        """Wait until the workers of `count` nodes have noted something.

        Returns:
            The last note of each, in order of time; None when it did not happen within
            `seconds`, or cannot happen any more because too few agents are left.
        """
        end = time.monotonic() + seconds
        while True:
            running = sum(node.is_running for node in self.nodes)
            is_over = time.monotonic() > end or running < count
            latest = {note.node: note for note in self.notes_of(what, since=since, size=size)}
            if len(latest) >= count:
                return sorted(latest.values(), key=lambda note: note.at)
            if is_over:
                return None
            await asyncio.sleep(_POLL_S)

    async def all_noted(
        self, what: str, count: int, *, since: int = 0, size: int = 0
    ) -> list[NodeNote]:
        """Wait like `try_noted`.

        Raises:
            RuntimeError: it did not happen.
        """
        notes = await self.try_noted(what, count, since=since, size=size)
        if notes is None:
            raise RuntimeError(f"no {count} workers {what}: {self.timeline()}")
        return notes

    async def since(self, at: int, size: int, seconds: float) -> float:
        """Return the milliseconds from `at` until a world of `size` nodes runs, if ever."""
        notes = await self.try_noted("started", size, since=at, size=size, seconds=seconds)
        return (notes[-1].at - at) / 1e6 if notes else math.inf

    def check(self) -> None:
        """Check nothing: torchrun's consoles show warnings."""

    async def _kill_all(self) -> None:
        await self.stop(_STOP_S)
        # torchrun's workers outlive an agent that is killed.
        for pid in leaked_processes(since=self._processes_before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await super()._kill_all()


def isolated(
    measure: Callable[[Launcher, Path], Coroutine[Any, Any, T]],
) -> Callable[[Launcher], T]:
    """Return the measure, run in a directory and an event loop of its own."""

    def run(launcher: Launcher) -> T:
        with tempfile.TemporaryDirectory(prefix="elastic_aio-benchmark-") as directory:
            return asyncio.run(measure(launcher, Path(directory)))

    return run


# The same without a launcher.


def baseline_start() -> float:
    """Return the milliseconds from the start of a worker to its first instruction."""

    async def measure() -> float:
        at = time.monotonic_ns()
        async with _baseline_workers(1) as (notes, _):
            return (notes.entries[0].at - at) / 1e6

    return asyncio.run(measure())


def baseline_stop() -> float:
    """Return the milliseconds from the SIGTERM of a worker to its end."""

    async def measure() -> float:
        async with _baseline_workers(1) as (_, (worker,)):
            at = time.monotonic_ns()
            worker.terminate()
            worker.wait()
            return (time.monotonic_ns() - at) / 1e6

    return asyncio.run(measure())


def baseline_failure() -> float:
    """Return the milliseconds from the kill of a worker to the SIGTERM of another."""

    async def measure() -> float:
        async with _baseline_workers(2) as (notes, (victim, other)):
            at = time.monotonic_ns()
            victim.kill()
            victim.wait()
            other.terminate()
            other.wait()
            note = await notes.wait_for(lambda note: note.what == "receives", "SIGTERM")
            return (note.at - at) / 1e6

    return asyncio.run(measure())


@asynccontextmanager
async def _baseline_workers(
    count: int,
) -> AsyncIterator[tuple[LineStream[NodeNote], list[Popen[bytes]]]]:
    """Start workers without a launcher, until they are ready."""
    with tempfile.TemporaryDirectory(prefix="elastic_aio-benchmark-") as directory:
        pipe = Path(directory, "notes")
        os.mkfifo(pipe)
        descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        notes = LineStream("the workers", descriptor, NodeNote.parse)
        changes = {**environment_changes(), "NODE_DIRECTORY": directory}
        workers = [
            Popen(
                _WORKER,
                stdin=DEVNULL,
                stdout=DEVNULL,
                start_new_session=True,
                env=environment({**changes, "NODE_NAME": f"n{number}"}),
            )
            for number in range(count)
        ]
        try:
            await notes.wait_for_several(lambda note: note.what == "ready", count, "ready")
            yield notes, workers
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            notes.close()
