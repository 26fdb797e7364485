"""Every event of a run, and its JSON form.

An event is a frozen value that says what has happened.  The JSON form is one
object a line: `schema` is the version of the form, `event` the name of the type,
and the rest are its fields.  Readers must ignore fields that they do not know.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from elastic_aio.outcome import ExitStatus, Failure, JobState, ResourceUsage

__all__ = [
    "SCHEMA",
    "AttemptFailed",
    "ConsoleLost",
    "CoordinatorChanged",
    "Event",
    "EventsMissed",
    "GuardianReplaced",
    "JobFinished",
    "JobStarted",
    "MembershipChanged",
    "NodeJoined",
    "NodeLeft",
    "NodeLost",
    "NodeRefused",
    "Promoted",
    "RendezvousStoreLost",
    "RendezvousStoreRegained",
    "Restarting",
    "RoundFormed",
    "RoundForming",
    "SignalForwarded",
    "StandingBy",
    "StopEscalated",
    "StopRequested",
    "WorkerAbandoned",
    "WorkerExited",
    "WorkerStarted",
    "event_from_json",
    "event_to_json",
]

SCHEMA = 1
"""Version of the JSON form; it grows when a field changes its meaning."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """What every event has.

    Attributes:
        seq: position in the run's events, from 0; a cursor for `Agent.events()`.  Those
            of `follow_job` have numbers of their own.
        time: Unix seconds.
        run_id: the run.
        attempt: the incarnation of the group that this is about, from 0.
        node: name of the host that saw it.
    """

    seq: int = -1
    time: float = 0.0
    run_id: str = ""
    attempt: int = 0
    node: str = ""


class JobStarted(Event, frozen=True, kw_only=True):
    """The job begins; nothing has been spawned yet."""

    entrypoint: str
    nproc_per_node: int
    nnodes: str
    max_restarts: int
    agent_pid: int
    log_dir: str | None = None


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A worker's process exists."""

    rank: int
    local_rank: int
    pid: int


class WorkerExited(Event, frozen=True, kw_only=True):
    """A worker's own process (its leader) has ended.

    `is_victim` is true when the supervisor had asked it to stop; `duration` is in
    seconds; `usage` is there when the supervisor reaped it itself.
    """

    rank: int
    local_rank: int
    pid: int
    status: ExitStatus
    duration: float
    is_victim: bool = False
    usage: ResourceUsage | None = None


class AttemptFailed(Event, frozen=True, kw_only=True):
    """An attempt failed and all its processes are gone.

    `root` is the root cause; `failures` are all of them, the root first.
    """

    root: Failure
    failures: tuple[Failure, ...]


class Restarting(Event, frozen=True, kw_only=True):
    """Another attempt follows after `delay` seconds; `why` is the rule that fired.

    `attempt` is the number of the attempt to come, `restarts` counts restarts
    after failures, this one included.
    """

    why: str
    delay: float
    restarts: int


class StopRequested(Event, frozen=True, kw_only=True):
    """The workers are about to be stopped by `plan`, because of `reason`."""

    reason: str
    plan: str
    signal: int | None = None


class StopEscalated(Event, frozen=True, kw_only=True):
    """A grace has passed: `signal` goes to the processes `pids` that are left."""

    signal: int
    pids: tuple[int, ...]


class WorkerAbandoned(Event, frozen=True, kw_only=True):
    """A process could not be killed; `state` is what `/proc` says of it."""

    pid: int
    state: str


class SignalForwarded(Event, frozen=True, kw_only=True):
    """A signal was passed on to the leader of every live worker."""

    signal: int
    pids: tuple[int, ...]


class GuardianReplaced(Event, frozen=True, kw_only=True):
    """The guardian process died and a new one has taken its place."""

    pid: int


class ConsoleLost(Event, frozen=True, kw_only=True):
    """The console takes no more output (`why`); what is not shown is in the logs."""

    stream: str
    why: str


class NodeJoined(Event, frozen=True, kw_only=True):
    """A node has come to the rendezvous (told where the coordinator is).

    `name` is its host's name, `member` its unique name in this job, `address` where
    others reach it.
    """

    name: str
    member: str
    address: str
    nproc: int
    role: str


class NodeLeft(Event, frozen=True, kw_only=True):
    """A node has left by itself: it was stopped, or it is done (`why`)."""

    name: str
    member: str
    why: str


class NodeLost(Event, frozen=True, kw_only=True):
    """A node is no longer heard of: it died, or the network lost it (`why`)."""

    name: str
    member: str
    why: str


class NodeRefused(Event, frozen=True, kw_only=True):
    """A node may not take part, for the time being or at all; `why` tells."""

    name: str
    member: str
    why: str


class RoundForming(Event, frozen=True, kw_only=True):
    """Nodes are waiting for a round: `joined` of `minimum` to `maximum`.

    `present` and `missing` name some of them (those that are missing are known when
    they took part before); `time_left` is how many seconds this can go on, and
    `refused` says who was turned away, and why.
    """

    round: int
    joined: int
    minimum: int
    maximum: int
    present: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    time_left: float | None = None


class RoundFormed(Event, frozen=True, kw_only=True):
    """This node has a place in a round; its workers are about to start.

    `attempt` is the one that begins, and `group_rank` this node's place; -1 where the
    event is about all nodes, as `follow_job` tells it.  `changes` counts the rounds so
    far that a change of the membership brought about.
    """

    round: int
    group_rank: int
    group_world_size: int
    world_size: int
    master_addr: str
    master_port: int
    changes: int = 0


class MembershipChanged(Event, frozen=True, kw_only=True):
    """Other nodes than before take part from now on; `why` says who came or went.

    `attempt` is the number of the attempt to come.  No restart is counted.
    """

    why: str
    round: int
    nodes: int


class StandingBy(Event, frozen=True, kw_only=True):
    """The job is full: this node waits to take the place of another."""

    round: int
    maximum: int


class Promoted(Event, frozen=True, kw_only=True):
    """This node was standing by and has a place now."""

    round: int
    group_rank: int


class CoordinatorChanged(Event, frozen=True, kw_only=True):
    """Another node decides about rounds: `name`, in `epoch`."""

    name: str
    epoch: int


class RendezvousStoreLost(Event, frozen=True, kw_only=True):
    """The store at which the nodes meet is lost (`why`); workers run on for a while."""

    endpoint: str
    why: str


class RendezvousStoreRegained(Event, frozen=True, kw_only=True):
    """The nodes meet again, at the store at `endpoint`; `is_host`: this node serves it."""

    endpoint: str
    is_host: bool


class EventsMissed(Event, frozen=True, kw_only=True):
    """Stands for `count` events that this reader came too late for."""

    count: int


class JobFinished(Event, frozen=True, kw_only=True):
    """The job is over; nothing of it is left.  Always the last event.

    `why` is the rule that ended it, `duration` is in seconds, and `exit_code` is
    what a command-line launcher exits with.
    """

    state: JobState
    why: str
    exit_code: int
    duration: float
    restarts: int


AnyEvent: TypeAlias = (
    JobStarted
    | WorkerStarted
    | WorkerExited
    | AttemptFailed
    | Restarting
    | StopRequested
    | StopEscalated
    | WorkerAbandoned
    | SignalForwarded
    | GuardianReplaced
    | ConsoleLost
    | NodeJoined
    | NodeLeft
    | NodeLost
    | NodeRefused
    | RoundForming
    | RoundFormed
    | MembershipChanged
    | StandingBy
    | Promoted
    | CoordinatorChanged
    | RendezvousStoreLost
    | RendezvousStoreRegained
    | EventsMissed
    | JobFinished
)

_encoder = msgspec.json.Encoder()


def event_to_json(event: Event) -> bytes:
    """Return an event as one JSON object, without a newline."""
    try:
        body = _encoder.encode(event)
    except UnicodeEncodeError:  # a path or an argument that is not UTF-8
        body = _encoder.encode(_printable(msgspec.to_builtins(event)))
    return b'{"schema":%d,' % SCHEMA + body[1:]


def event_from_json(line: bytes | str) -> Event:
    """Read what `event_to_json` wrote.

    Raises:
        ValueError: the line is no event, or its schema is newer than `SCHEMA`.
    """
    head: Any = msgspec.json.decode(line, type=_Head)
    if head.schema > SCHEMA:
        raise ValueError(f"events of schema {head.schema} are newer than this reader ({SCHEMA})")
    decoded: Event = _decoder().decode(line)
    return decoded


def _printable(value: Any) -> Any:
    """Return a copy in which text holds no lone surrogates, which JSON cannot carry."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {key: _printable(one) for key, one in value.items()}
        case list() | tuple():
            return [_printable(one) for one in value]
    return value


class _Head(msgspec.Struct):
    schema: int


def _decoder() -> msgspec.json.Decoder[Any]:
    # Made on first use: a launcher only writes, and the union takes a while to build.
    global _made_decoder
    if _made_decoder is None:
        _made_decoder = msgspec.json.Decoder(AnyEvent)
    return _made_decoder


_made_decoder: msgspec.json.Decoder[Any] | None = None
