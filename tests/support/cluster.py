"""The agents of one job as processes: start them, order their workers, wait for events.

Each agent is a node.  Its events come through a named pipe, the notes of its workers
(see `worker.py`) through another, so that a test waits for the event itself.  End-to-end
tests, soak test and benchmarks share this harness.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec

from elastic_aio import Event, NodeJoined, RoundFormed, RoundForming, event_from_json
from tests.support.children import DEADLINE_S, until
from tests.support.cli import Ended, to_options
from tests.support.leaks import leaked_processes
from tests.support.line_stream import LineStream
from tests.support.netns import Host
from tests.support.programs import Program
from tests.support.sockets import LOOPBACK, free_port, listening, sockets_of
from tests.support.worker_notes import Note, check_rounds, check_world, read_note

E = TypeVar("E", bound=Event)

# Seconds within which an immediate effect must be seen on a busy host.  The timeouts in CONF,
# which would bring it about too, are longer.
AT_ONCE_S = 10.0

# No test succeeds because one of these has passed, unless it sets its own.
CONF: Mapping[str, object] = {
    "join_timeout": 60,
    "last_call_timeout": 60,
    "scale_up_delay": 0,
    "heartbeat_timeout": 30,
    "close_timeout": 5,
    "read_timeout": 60,
}

WORKER = Path(__file__).with_name("worker.py")
COMMAND = [sys.executable, "-W", "default", "-m", "elastic_aio"]
RUN = [*COMMAND, "run"]

_WITH_POLICY = """
from elastic_aio import Backoff, RestartPolicy
from elastic_aio.cli import entry, run_options
parse = run_options.parse_run
def parse_with_policy(*args, **options):
    request = parse(*args, **options)
    return request.replace(spec=request.spec.replace(restart=POLICY))
run_options.parse_run = parse_with_policy
raise SystemExit(entry())
"""


def launcher_with(policy: str) -> list[str]:
    """Return the command of a launcher with a restart policy, which no option sets."""
    code = _WITH_POLICY.replace("POLICY", f"RestartPolicy({policy})")
    return [sys.executable, "-W", "default", "-c", code, "run"]


UNLIMITED_LOSSES = launcher_with("backoff=None, node_losses=None")

# Output that is a defect, whatever the test is about.
_FORBIDDEN_OUTPUT = re.compile(
    r"^(Traceback|Exception ignored|Task was destroyed|Task exception was never"
    r"|Future exception was never|Fatal Python)|\w+Warning: |was never awaited|InternalError",
    re.MULTILINE,
)


@contextlib.contextmanager
def within(seconds: float = AT_ONCE_S) -> Iterator[None]:
    """Check that the block, which may wait for longer, has ended after so many seconds."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


class AgentProcess(Program):
    """An agent, its events, and the notes of its workers, which `parse_note` reads.

    `name` is that of the node, `directory` for its pipes and its output.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[object],
        directory: Path,
        env: Mapping[str, str | None],
        parse_note: Callable[[bytes], Any] = read_note,
    ) -> None:
        events, notes = directory / "events", directory / "notes"
        os.mkfifo(events)
        os.mkfifo(notes)
        # The agent is its only writer, so that the end of the pipe is the end of the agent.
        self.events = LineStream(
            f"node {name}", os.open(events, os.O_RDONLY | os.O_NONBLOCK), event_from_json
        )
        # Workers come and go; open for writing too, the pipe has no end between them.
        self.notes: LineStream[Any] = LineStream(
            f"the workers of node {name}", os.open(notes, os.O_RDWR | os.O_NONBLOCK), parse_note
        )
        own = {"NODE_NAME": name, "NODE_DIRECTORY": str(directory), "TMPDIR": str(directory)}
        super().__init__(name, argv, directory, env={**own, **env})

    async def event(
        self, kind: type[E], *, since: int = 0, seconds: float = DEADLINE_S, **fields: object
    ) -> E:
        """Wait for an event of a kind, from position `since` of `events` on.

        Its fields have these values, or satisfy these conditions.
        """

        def is_wanted(event: Event) -> bool:
            return isinstance(event, kind) and _matches(event, fields)

        wanted = ", ".join(f"{key}={value}" for key, value in fields.items())
        event = await self.events.wait_for(
            is_wanted, f"{kind.__name__}({wanted})", since=since, seconds=seconds
        )
        return cast("E", event)

    async def round_formed(self, **fields: Any) -> RoundFormed:
        """Wait until the node has a placement in a round."""
        return await self.event(RoundFormed, **fields)

    def events_of(self, kind: type[E], **fields: object) -> list[E]:
        """Return the events of a kind that have arrived by now."""
        return [
            event
            for event in self.events.entries
            if isinstance(event, kind) and _matches(event, fields)
        ]

    async def workers(
        self, *, since: int = 0, seconds: float = DEADLINE_S, **fields: Any
    ) -> list[Note]:
        """Wait until all workers of one attempt have started; return them by local rank.

        The first of their notes from position `since` on has these values, such as `attempt=1`.
        """
        first = await self.note("started", since=since, seconds=seconds, **fields)
        started = await self.notes.wait_for_several(
            lambda note: note.what == "started" and note.attempt == first.attempt,
            first.local_world_size,
            f"all of attempt {first.attempt} have started",
            since=since,
            seconds=seconds,
        )
        return sorted(started, key=lambda note: note.local_rank)

    async def note(
        self, what: str, *, since: int = 0, seconds: float = DEADLINE_S, **fields: object
    ) -> Note:
        """Wait for a note of one of the workers."""
        note: Note = await self.notes.wait_for(
            lambda note: note.what == what and _matches(note, fields),
            f"{what} {fields}",
            since=since,
            seconds=seconds,
        )
        return note

    def order(self, worker: Note, order: str) -> None:
        """Give an order to a worker (see `worker.py`)."""
        pipe = os.open(self.directory / str(worker.pid), os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.closing(os.fdopen(pipe, "wb")) as file:
            file.write(order.encode() + b"\n")

    async def ask(self, worker: Note, order: str) -> str:
        """Give an order to a worker and return its answer."""
        since = len(self.notes)
        self.order(worker, order)
        return (await self.note("answer", since=since, pid=worker.pid)).text

    async def ended(self, seconds: float = DEADLINE_S) -> Ended:
        """Wait for the agent's end and for its last event; return its output."""
        ended = await super().ended(seconds)
        if not self.events.is_over and self.events_of(Event):  # it had opened the pipe
            await self.events.over()
        return ended

    async def fails(self, *words: str, code: int = 75, seconds: float = DEADLINE_S) -> None:
        """Wait for the end; check the exit code, and that the last line has these words."""
        ended = await self.ended(seconds)
        assert ended.code == code
        last = [line for line in ended.err.splitlines() if line.strip()][-1]
        assert [word for word in words if word not in last] == [], last

    async def stops(self, number: int = signal.SIGTERM, seconds: float = DEADLINE_S) -> Ended:
        """Send a stop signal, and check the exit code; return the output."""
        self.send(number)
        ended = await self.ended(seconds)
        assert ended.code == 128 + number
        return ended

    def holds_any(self, sockets: set[str]) -> bool:
        """Tell whether the agent has one of these sockets open (see `listening`)."""
        return not sockets.isdisjoint(sockets_of(self.pid))

    def timeline(self) -> Iterable[tuple[float, str]]:
        """Yield the time and a description of each event."""
        for event in self.events.entries:
            fields = msgspec.structs.asdict(event)
            for name in ("seq", "time", "run_id", "node"):
                del fields[name]
            text = ", ".join(f"{name}={value!r}" for name, value in fields.items())
            yield event.time, f"{self.name}: {type(event).__name__}({text})"

    def _exited(self) -> None:
        super()._exited()
        self.notes.finish()  # its workers are gone, or are being killed


def _matches(value: object, fields: Mapping[str, object]) -> bool:
    for name, wanted in fields.items():
        actual = getattr(value, name)
        if not (wanted(actual) if callable(wanted) else actual == wanted):
            return False
    return True


def _on(host: Host | None, argv: Sequence[object]) -> Sequence[object]:
    return host.argv(argv) if host else argv


class Cluster:
    """The agents of one job while the block is open; no process of theirs outlives it.

    At the end of the block the rounds are checked: no group rank of a round was given to
    two nodes, and all nodes of a round have the same description of it.

    Args:
        endpoint: of the rendezvous; None chooses a free port of the loopback address.
        launcher: command of an agent, without its options.
        conf: settings of the rendezvous, over `CONF`; None leaves a setting out.
        can_split: whether nodes may form different rounds of the same number, as they do
            when the network separates them for long.
        parse_note: reads the notes of workers other than `worker.py`.
        options: of every agent; None leaves an option out.
    """

    def __init__(
        self,
        directory: Path,
        nnodes: object,
        *,
        endpoint: str | None = None,
        launcher: Sequence[str] = RUN,
        conf: Mapping[str, object] | None = None,
        can_split: bool = False,
        parse_note: Callable[[bytes], Any] = read_note,
        env: Mapping[str, str | None] | None = None,
        **options: object,
    ) -> None:
        self.directory = directory
        self.endpoint = endpoint or f"{LOOPBACK}:{free_port()}"
        self.nnodes = nnodes
        self.nodes: list[AgentProcess] = []
        self.can_split = can_split
        self._launcher = launcher
        self._conf = {**CONF, **(conf or {})}
        self._parse_note = parse_note
        self._env = env or {}
        self._options = options
        self._programs: list[Program] = []
        self._streams: list[LineStream[Any]] = []

    async def __aenter__(self) -> Self:
        self._processes_before = leaked_processes().keys()
        self.directory.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            await self._kill_all()
            if error is None:
                self.check()
        except BaseException as problem:
            problem.add_note(self.timeline())
            raise
        finally:
            for stream in self._streams:
                stream.close()
        if error is not None:
            error.add_note(self.timeline())

    def start(
        self,
        name: str = "",
        *program: object,
        nproc: int = 1,
        host: Host | None = None,
        conf: Mapping[str, object] | None = None,
        env: Mapping[str, str | None] | None = None,
        **options: object,
    ) -> AgentProcess:
        """Start an agent, in a network namespace or on this host.

        `name` is that of the node and of its directory; `program`, by default `worker.py`, is
        what `nproc` workers run.  `conf` and `options` go over those of all agents.
        """
        count = len(self.nodes)
        name = f"{name or 'n'}.{count}" if not name or self._is_taken(name) else name
        directory = self.directory / name
        directory.mkdir()
        settings = {**self._conf, **(conf or {})}
        chosen: dict[str, object] = {
            "nnodes": self.nnodes,
            "nproc_per_node": nproc,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": self.endpoint,
            "rdzv_id": "job",
            "rdzv_conf": ",".join(f"{k}={v}" for k, v in settings.items() if v is not None) or None,
            "log_dir": directory / "logs",
            "redirects": 3,
            "events": directory / "events",
            "restart_delay": 0 if self._options.get("max_restarts") else None,
            **self._options,
            **options,
        }
        argv = [*self._launcher, *to_options(chosen), *(program or [WORKER])]
        changes = {**self._env, **(env or {})}
        node = AgentProcess(name, _on(host, argv), directory, changes, self._parse_note)
        self.nodes.append(node)
        self._programs.append(node)
        self._streams += [node.events, node.notes]
        return node

    async def start_first(self, name: str = "", **options: Any) -> AgentProcess:
        """Start an agent; return when it serves the store and waits for others."""
        node = self.start(name, **options)
        await node.event(RoundForming)
        return node

    async def start_all(self, count: int, **options: Any) -> tuple[AgentProcess, ...]:
        """Start the agent that serves the store, then the others; all workers have started."""
        host = await self.start_first("host", **options)
        nodes = host, *(self.start(**options) for _ in range(count - 1))
        await self.workers(*nodes)
        return nodes

    @staticmethod
    def split(nodes: Iterable[AgentProcess]) -> tuple[AgentProcess, list[AgentProcess]]:
        """Return the coordinator's node, the only one that reports who joins, and the others."""
        (first,) = [node for node in nodes if node.events_of(NodeJoined)]
        return first, [node for node in nodes if node is not first]

    async def workers(
        self, *nodes: AgentProcess, since: Mapping[AgentProcess, int] | None = None, **fields: Any
    ) -> list[Note]:
        """Wait until the workers of all these nodes have started; return them by rank.

        The nodes are those of one world: the environments of their workers must agree.
        """
        positions = since or {}
        started = [
            note
            for node in nodes
            for note in await node.workers(since=positions.get(node, 0), **fields)
        ]
        check_world(started)
        return sorted(started, key=lambda note: note.rank)

    def note_counts(self) -> dict[AgentProcess, int]:
        """Return how many notes have come from each node by now."""
        return {node: len(node.notes) for node in self.nodes}

    async def finish(self, *nodes: AgentProcess, **fields: Any) -> list[Ended]:
        """Let the workers of all these nodes succeed; wait until the agents have ended."""
        for node in nodes:
            for worker in await node.workers(**fields):
                node.order(worker, "exit 0")
        return [await node.ended() for node in nodes]

    async def succeed(self, *nodes: AgentProcess, **fields: Any) -> None:
        """Let the workers of all these nodes succeed, and check that their agents do."""
        assert {ended.code for ended in await self.finish(*nodes, **fields)} == {0}

    async def check_master(self, *nodes: AgentProcess, **fields: Any) -> None:
        """Check that the first worker of each node reaches the master address."""
        for node in nodes:
            assert await node.ask((await node.workers(**fields))[0], "connect") == "connected"

    async def stop(self, seconds: float = DEADLINE_S) -> list[AgentProcess]:
        """Send SIGTERM to all agents and wait; return those that are still running."""
        for node in self.nodes:
            node.send(signal.SIGTERM)
        end = time.monotonic() + seconds
        for node in self.nodes:
            with contextlib.suppress(AssertionError):
                await node.ended(max(end - time.monotonic(), 0))
        return [node for node in self.nodes if node.is_running]

    async def start_store(self) -> Program:
        """Start a store at the endpoint, in a process of its own; return when it listens."""
        address, _, port = self.endpoint.rpartition(":")
        argv = [*COMMAND, "store", "--host", address, "--port", port]
        store, lines = self._start_piped("store", argv, bytes.decode)
        await lines.wait_for(lambda line: "listening" in line, "that it listens")
        return store

    def follow_events(self, **options: object) -> LineStream[Event]:
        """Return all events of the job, as `aio-elastic events` prints them."""
        chosen = {"rdzv_endpoint": self.endpoint, "rdzv_id": "job", **options}
        argv = [*COMMAND, "events", *to_options(chosen), "--json"]
        _, events = self._start_piped("events", argv, event_from_json)
        return events

    def store_host(self) -> AgentProcess | None:
        """Return the node that serves the store."""
        sockets = listening([int(one.rpartition(":")[2]) for one in self.endpoint.split(",")])
        return next((node for node in self.nodes if node.holds_any(sockets)), None)

    def timeline(self) -> str:
        """Return the events of all nodes in order of time, and all consoles."""
        events = sorted(line for node in self.nodes for line in node.timeline())
        start = events[0][0] if events else 0.0
        lines = [f"{at - start:8.3f} {text}" for at, text in events]
        for program in self._programs:
            state = "is running" if program.is_running else "has ended"
            lines += [f"--- {program.name} (pid {program.pid}, {state}):", program.err.rstrip()]
        return "\n".join(lines)

    @staticmethod
    def check_console(program: Program) -> None:
        """Assert that a console shows no defect."""
        match = _FORBIDDEN_OUTPUT.search(program.err)
        assert not match, f"{match[0]!r} on the console of {program.name}"

    def check(self) -> None:
        """Assert that no console shows a defect and that the rounds agree."""
        for program in self._programs:
            self.check_console(program)
        formed = {node.name: node.events_of(RoundFormed) for node in self.nodes}
        for name, events in formed.items():
            rounds = [event.round for event in events]
            assert rounds == sorted(set(rounds)), f"rounds of {name}: {rounds}"
        if not self.can_split:
            check_rounds(formed)

    def _is_taken(self, name: str) -> bool:
        return (self.directory / name).exists()

    def _start_piped(
        self, name: str, argv: Sequence[object], parse: Any
    ) -> tuple[Program, LineStream[Any]]:
        if self._is_taken(name):
            name = f"{name}.{len(self._programs)}"
        reading, writing = os.pipe()
        try:
            program = Program(name, argv, self.directory / name, stdout=writing)
        finally:
            os.close(writing)
        lines = LineStream(name, reading, parse)
        self._programs.append(program)
        self._streams.append(lines)
        return program, lines

    async def _kill_all(self) -> None:
        for program in self._programs:
            program.send(signal.SIGKILL)
        for program in self._programs:
            await program.ended()
        try:
            await until(lambda: not self._leaked(), "the end of all workers")
        except AssertionError as problem:
            leaked = self._leaked()
            for pid in leaked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            problem.add_note(f"left behind: {leaked}")
            raise

    def _leaked(self) -> dict[int, str]:
        return leaked_processes(since=self._processes_before)
