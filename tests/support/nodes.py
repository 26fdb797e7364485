"""Agents of one job as processes, each a node, and what they and their workers say.

Events come through a named pipe per agent, the notes of its workers through another, so
that a test waits for the thing itself.  See `trainee` for what the workers do.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import msgspec

from elastic_aio import Event, RoundFormed, event_from_json
from tests.support.children import DEADLINE_S, until
from tests.support.cli import Ended
from tests.support.journal import Journal
from tests.support.netns import Host
from tests.support.programs import Program
from tests.support.traces import strays
from tests.support.worlds import Note, check_rounds, check_world

E = TypeVar("E", bound=Event)

# Seconds within which happens what happens at once, on a machine that is busy with much else.
# What would bring it about otherwise takes longer: see CONF.
AT_ONCE_S = 10.0

# No test succeeds because one of these has passed, unless it sets its own.
CONF: Mapping[str, object] = {
    "join_timeout": 60,
    "last_call_timeout": 60,
    "heartbeat_timeout": 30,
    "close_timeout": 5,
    "read_timeout": 60,
}

TRAINEE = Path(__file__).with_name("trainee.py")
AGENT = [sys.executable, "-W", "default", "-m", "elastic_aio"]

# What nobody wants to see on a console, whatever the test is about.
_EMBARRASSMENTS = re.compile(
    r"^(Traceback|Exception ignored|Task was destroyed|Task exception was never"
    r"|Future exception was never|Fatal Python)|\w+Warning: |was never awaited|InternalError",
    re.MULTILINE,
)


def free_port() -> int:
    """Return a TCP port that nobody has, and that the kernel gives to nobody by itself."""
    while True:
        port = random.SystemRandom().randint(10_000, 30_000)
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind(("::", port))
            except OSError:
                continue
        return port


def options_of(given: Mapping[str, object]) -> list[str]:
    """Return command-line options: `{"max_restarts": 3}` is `--max-restarts 3`.

    True stands for a flag, and None for none at all.
    """
    words: list[str] = []
    for name, value in given.items():
        if value is not None:
            words.append(f"--{name.replace('_', '-')}")
        if value is not None and value is not True:
            words.append(str(value))
    return words


class Node(Program):
    """An agent, its events, and the notes of its workers."""

    def __init__(
        self, name: str, argv: Sequence[object], folder: Path, env: Mapping[str, str | None]
    ) -> None:
        events, notes = folder / "events", folder / "notes"
        os.mkfifo(events)
        os.mkfifo(notes)
        # Its only writer is the agent, and its end is the agent's.
        self.events = Journal(
            f"node {name}", os.open(events, os.O_RDONLY | os.O_NONBLOCK), event_from_json
        )
        # Workers come and go, so we hold the other end as well.
        self.notes = Journal(
            f"the workers of node {name}",
            os.open(notes, os.O_RDWR | os.O_NONBLOCK),
            msgspec.json.Decoder(Note).decode,
        )
        super().__init__(
            name, argv, folder, env={"NODE_FOLDER": str(folder), "TMPDIR": str(folder), **env}
        )

    async def event(
        self, kind: type[E], *, since: int = 0, seconds: float = DEADLINE_S, **fields: object
    ) -> E:
        """Wait for an event of a kind whose fields have these values.

        Args:
            kind: type of the event.
            since: position in `events` to look from; 0 looks at all of the past.
            seconds: how long to wait.
            fields: values, or conditions on values.
        """

        def is_wanted(event: Event) -> bool:
            return isinstance(event, kind) and _has(event, fields)

        what = f"{kind.__name__}({', '.join(f'{key}={value}' for key, value in fields.items())})"
        return cast("E", await self.events.wait_for(is_wanted, what, since=since, seconds=seconds))

    async def formed(self, **fields: Any) -> RoundFormed:
        """Wait until the node has a place in a round."""
        return await self.event(RoundFormed, **fields)

    def told(self, kind: type[E], **fields: object) -> list[E]:
        """Return the events of a kind that have come by now."""
        return [one for one in self.events.entries if isinstance(one, kind) and _has(one, fields)]

    async def up(self, *, since: int = 0, seconds: float = DEADLINE_S, **fields: Any) -> list[Note]:
        """Wait until all workers of one attempt have started; return them by local rank.

        Args:
            since: position in `notes` to look from.
            seconds: how long to wait.
            fields: what their notes must have, such as `attempt=1`.
        """
        first = await self.note("started", since=since, seconds=seconds, **fields)
        found = await self.notes.wait_for_several(
            lambda one: one.what == "started" and one.attempt == first.attempt,
            first.local_world_size,
            f"all of attempt {first.attempt} have started",
            since=since,
            seconds=seconds,
        )
        return sorted(found, key=lambda one: one.local_rank)

    async def note(
        self, what: str, *, since: int = 0, seconds: float = DEADLINE_S, **fields: object
    ) -> Note:
        """Wait for a note of one of the workers."""
        return await self.notes.wait_for(
            lambda one: one.what == what and _has(one, fields),
            f"{what} {fields}",
            since=since,
            seconds=seconds,
        )

    def tell(self, worker: Note, order: str) -> None:
        """Give an order to a worker (see `trainee`)."""
        pipe = os.open(self.folder / str(worker.pid), os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.closing(os.fdopen(pipe, "wb")) as file:
            file.write(order.encode() + b"\n")

    async def ask(self, worker: Note, order: str) -> str:
        """Give an order to a worker and return its answer."""
        since = len(self.notes)
        self.tell(worker, order)
        return (await self.note("answer", since=since, pid=worker.pid)).text

    async def ended(self, seconds: float = DEADLINE_S) -> Ended:
        """Wait for the agent's end and for its last event; return everything else."""
        ended = await super().ended(seconds)
        if not self.events.is_over and self.told(Event):  # it had opened the pipe
            await self.events.over()
        return ended

    def _exited(self) -> None:
        super()._exited()
        self.notes.finish()  # its workers are gone, or are being killed

    def story(self) -> Iterable[tuple[float, str]]:
        """Yield what happened here: times and lines."""
        for event in self.events.entries:
            fields = msgspec.structs.asdict(event)
            for name in ("seq", "time", "run_id", "node"):
                del fields[name]
            said = ", ".join(f"{name}={value!r}" for name, value in fields.items())
            yield event.time, f"{self.name}: {type(event).__name__}({said})"


def _has(value: object, fields: Mapping[str, object]) -> bool:
    for name, wanted in fields.items():
        found = getattr(value, name)
        if not (wanted(found) if callable(wanted) else found == wanted):
            return False
    return True


class Nodes:
    """A job's agents while the block is open; nothing of them outlives it.

    At the end of the block all rounds that were formed are checked: no place was given
    twice, and all who took part in a round had been told the same.

    Args:
        folder: for all that is written.
        nnodes: `N` or `MIN:MAX`.
        endpoint: where they meet; None is a free port here.
        launcher: the command line to start agents with.
        conf: settings of the rendezvous, over `CONF`; None leaves one out.
        options: further options of every agent; None leaves one out.
        can_split: whether the nodes may form different rounds of the same number, as
            they do when the network divides them for long.
    """

    def __init__(
        self,
        folder: Path,
        nnodes: object,
        *,
        endpoint: str | None = None,
        launcher: Sequence[str] = AGENT,
        conf: Mapping[str, object] | None = None,
        can_split: bool = False,
        **options: object,
    ) -> None:
        self.folder = folder
        self.endpoint = endpoint or f"127.0.0.1:{free_port()}"
        self.nnodes = nnodes
        self.nodes: list[Node] = []
        self._launcher = launcher
        self._conf = {**CONF, **(conf or {})}
        self._options = options
        self.can_split = can_split
        self._programs: list[Program] = []
        self._journals: list[Journal[Any]] = []

    async def __aenter__(self) -> Self:
        self._before = strays().keys()
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._end_all()
            if error is None:
                self._check()
        except BaseException as problem:
            problem.add_note(self.story())
            raise
        finally:
            for journal in self._journals:
                journal.close()
        if error is not None:
            error.add_note(self.story())

    def start(
        self,
        name: str = "",
        *program: object,
        nproc: int = 1,
        host: Host | None = None,
        conf: Mapping[str, object] | None = None,
        env: Mapping[str, str | None] | None = None,
        **options: object,
    ) -> Node:
        """Start an agent.

        Args:
            name: what to call it; its own options and folder have it too.
            program: what its workers run; the trainee if there is none.
            nproc: workers on this node.
            host: where to start it; None is this very machine.
            conf: settings of the rendezvous for this agent.
            env: changes of its environment.
            options: further options, such as `node_rank=1`; None leaves one out.
        """
        count = len(self.nodes)
        name = f"{name or 'n'}.{count}" if not name or self._is_taken(name) else name
        folder = self.folder / name
        folder.mkdir()
        settings = {**self._conf, **(conf or {})}
        chosen: dict[str, object] = {
            "nnodes": self.nnodes,
            "nproc_per_node": nproc,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": self.endpoint,
            "rdzv_id": "job",
            "rdzv_conf": ",".join(
                f"{key}={value}" for key, value in settings.items() if value is not None
            ),
            "log_dir": folder / "logs",
            "redirects": 3,
            "events": folder / "events",
            **self._options,
            **options,
        }
        argv = [*self._launcher, "run", *options_of(chosen), *(program or [TRAINEE])]
        node = Node(name, host.argv(argv) if host else argv, folder, env or {})
        self.nodes.append(node)
        self._programs.append(node)
        self._journals += [node.events, node.notes]
        return node

    async def up(
        self, *nodes: Node, since: Mapping[Node, int] | None = None, **fields: Any
    ) -> list[Note]:
        """Wait until the workers of all these nodes have started; return them by rank.

        All nodes are those of one world: what their workers were told must fit together.
        """
        places = since or {}
        found = [
            note for node in nodes for note in await node.up(since=places.get(node, 0), **fields)
        ]
        check_world(found)
        return sorted(found, key=lambda one: one.rank)

    def marks(self) -> dict[Node, int]:
        """Return how many notes have come from each node by now."""
        return {node: len(node.notes) for node in self.nodes}

    async def finish(self, *nodes: Node, **fields: Any) -> list[Ended]:
        """Let the workers of all these nodes succeed; wait until the agents have ended."""
        for node in nodes:
            for worker in await node.up(**fields):
                node.tell(worker, "exit 0")
        return [await node.ended() for node in nodes]

    async def serve(
        self,
        port: int,
        name: str = "store",
        *,
        host: Host | None = None,
        address: str = "127.0.0.1",
    ) -> Program:
        """Start a store of its own; return when it listens."""
        argv = [*AGENT, "store", "--host", address, "--port", port]
        store, said = self._piped(name, host.argv(argv) if host else argv, bytes.decode)
        await said.wait_for(lambda line: "listening" in line, "that it listens")
        return store

    def follow(self, *, host: Host | None = None, **options: object) -> Journal[Event]:
        """Return all events of the job, as `aio-elastic events` tells them."""
        chosen = {"rdzv_endpoint": self.endpoint, "rdzv_id": "job", **options}
        argv = [*AGENT, "events", *options_of(chosen), "--json"]
        _, said = self._piped("events", host.argv(argv) if host else argv, event_from_json)
        return said

    def story(self) -> str:
        """Return all that happened, in order of time, and what stands on the consoles."""
        told = sorted(line for node in self.nodes for line in node.story())
        began = told[0][0] if told else 0.0
        lines = [f"{time - began:8.3f} {line}" for time, line in told]
        for program in self._programs:
            state = "runs" if program.is_running else "has ended"
            lines += [f"--- {program.name} (pid {program.pid}, {state}):", program.err.rstrip()]
        return "\n".join(lines)

    def _is_taken(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _piped(self, name: str, argv: Sequence[object], parse: Any) -> tuple[Program, Journal[Any]]:
        if self._is_taken(name):
            name = f"{name}.{len(self._programs)}"
        reading, writing = os.pipe()
        try:
            program = Program(name, argv, self.folder / name, stdout=writing)
        finally:
            os.close(writing)
        journal = Journal(name, reading, parse)
        self._programs.append(program)
        self._journals.append(journal)
        return program, journal

    async def _end_all(self) -> None:
        self._running_at_end = {node for node in self.nodes if node.is_running}
        for program in self._programs:
            program.send(signal.SIGKILL)
        for program in self._programs:
            await program.ended()
        try:
            await until(lambda: not strays().keys() - self._before, "the end of all workers")
        except AssertionError as problem:
            left = {pid: what for pid, what in strays().items() if pid not in self._before}
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            problem.add_note(f"left behind: {left}")
            raise

    def _check(self) -> None:
        for program in self._programs:
            found = _EMBARRASSMENTS.search(program.err)
            assert not found, f"{found[0]!r} on the console of {program.name}"
        for node in self.nodes:
            rounds = [one.round for one in node.told(RoundFormed)]
            assert rounds == sorted(set(rounds)), f"rounds of {node.name}: {rounds}"
        if not self.can_split:
            check_rounds({node.name: node.told(RoundFormed) for node in self.nodes})
