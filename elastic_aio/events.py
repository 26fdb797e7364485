"""Every event of a run, and its JSON form.

An event is a frozen value.  Its JSON form is one object per line: `schema` is its version, `event`
the name of the type, and the rest are fields.  Readers must ignore fields that they do not know.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import msgspec

from elastic_aio.outcome import ExitStatus, Failure, JobState, ResourceUsage
from elastic_aio.text import jsonable

SCHEMA = 1
"""Version of the JSON form; incremented when a field changes its meaning."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """What every event has."""

    seq: int = -1
    """Position in the stream, from 0: the cursor of `Agent.events()` and of `follow_job()`.

    The two streams of one run number their events independently.
    """
    time: float = 0.0
    """Unix seconds."""
    run_id: str = ""
    """Identifier of the run."""
    attempt: int = 0
    """The attempt that the event is about, from 0."""
    node: str = ""
    """Name of the host that reports the event."""


class JobStarted(Event, frozen=True, kw_only=True):
    """The job begins; no process has been started yet.

    `nproc_per_node`, `max_restarts` and `has_timers` are the spec's; `agent_pid` is this process.
    """

    entrypoint: str
    """What the workers run, as in `LaunchSpec.name`."""
    nproc_per_node: int
    nnodes: str
    """`N` or `MIN:MAX`."""
    max_restarts: int
    agent_pid: int
    node_losses: str = ""
    """The limit of `RestartPolicy.node_losses` for a job of several nodes; empty for none."""
    log_dir: str | None = None
    """Directory of this run's logs; None if nothing is captured."""
    role: str = "default"
    """Name of the workers of this node."""
    rdzv_backend: str = ""
    """Name of the rendezvous backend, which one node does not use."""
    has_timers: bool = False


class WorkerStarted(Event, frozen=True, kw_only=True):
    """The process `pid` of the worker `rank` (on this node `local_rank`) exists."""

    rank: int
    local_rank: int
    pid: int
    role_rank: int = -1
    """Rank among the workers of the same role."""
    role_world_size: int = -1
    """How many workers have the role."""


class WorkerExited(Event, frozen=True, kw_only=True):
    """The process `pid` of a worker has exited as `status` says; its children may still run.

    `rank` is the worker's global rank, `local_rank` the one on this node.
    """

    rank: int
    local_rank: int
    pid: int
    status: ExitStatus
    duration: float
    """Seconds since the worker was started."""
    is_victim: bool = False
    """Whether the supervisor had signalled the worker to stop."""
    usage: ResourceUsage | None = None
    """None where the event loop reaped the process instead of the supervisor."""


class AttemptFailed(Event, frozen=True, kw_only=True):
    """An attempt failed and all its processes are gone."""

    root: Failure
    """The root cause."""
    failures: tuple[Failure, ...]
    """All failures of the attempt, the root cause first."""


class Restarting(Event, frozen=True, kw_only=True):
    """Another attempt follows after a failure; `attempt` is its number."""

    why: str
    """The rule of the restart policy that applies."""
    delay: float
    """Seconds until the attempt begins."""
    restarts: int
    """Restarts after failures so far, this one included."""


class StopRequested(Event, frozen=True, kw_only=True):
    """The workers are about to be stopped; `reason` says why."""

    reason: str
    plan: str
    """The signals and graces in order, such as `SIGTERM 30 s, SIGKILL`."""
    signal: int | None = None
    """The signal that the launcher received, if that is the reason."""


class StopEscalated(Event, frozen=True, kw_only=True):
    """The grace period expired, or `reason` cut it short; the plan's next `signal` is sent."""

    signal: int
    pids: tuple[int, ...]
    """The processes that remain; empty if `/proc` could not be read, and no worker remains."""
    reason: str = ""


class WorkerAbandoned(Event, frozen=True, kw_only=True):
    """The process `pid` did not exit after SIGKILL and is left behind."""

    pid: int
    """0 if `/proc` could not be read; then processes may be left that are not known."""
    state: str
    """Its state in `/proc`, such as `D in nfs_wait`: an uninterruptible system call."""


class SignalForwarded(Event, frozen=True, kw_only=True):
    """`signal` was forwarded to the leader (`pids`) of each live worker."""

    signal: int
    pids: tuple[int, ...]


class TimerExpired(Event, frozen=True, kw_only=True):
    """The worker `rank` (on this node `local_rank`) has not released a timer in time.

    The process `pid`, which acquired it, and the worker get `signal`; 0 leaves both alone.
    """

    rank: int
    """-1 if the process belongs to no worker any more."""
    local_rank: int
    pid: int
    scope: str
    """Name of the timer."""
    age: float
    """Seconds since it was acquired."""
    limit: float
    """Seconds for which it was acquired."""
    signal: int


class TimerRejected(Event, frozen=True, kw_only=True):
    """The pipe of the timers got something that is no request (`why`); reported once."""

    why: str


class GuardianRestarted(Event, frozen=True, kw_only=True):
    """The guardian process exited and was replaced."""

    pid: int
    """The new guardian."""


class GuardianLost(Event, frozen=True, kw_only=True):
    """The guardian process exited, and `why` another one does not start.

    Attempts go on, up to a minute apart; `GuardianRestarted` reports success.  Until then
    nothing ends the job if the launcher is killed.
    """

    why: str


class ConsoleLost(Event, frozen=True, kw_only=True):
    """The console accepts no more output (`why`); the logs still receive all of it."""

    stream: str
    """`stdout` or `stderr`."""
    why: str
    unshown: int | None = None
    """Bytes in the log files that the console did not take; None while workers run."""


class LogDiskFull(Event, frozen=True, kw_only=True):
    """A disk takes no more output into log files, most often for lack of space.

    `is_shown`: the console shows what they lack (`LogSpec.on_full`).
    """

    mount_point: str
    """Where the disk is mounted."""
    is_shown: bool
    why: str = "no space left on device"
    """The error of a write."""


class OutputLost(Event, frozen=True, kw_only=True):
    """Output of the worker `rank` (on this node `local_rank`) is not shown or kept (`why`)."""

    rank: int
    local_rank: int
    stream: str
    """`stdout` or `stderr`."""
    path: str
    """Its log file."""
    why: str
    lost: int | None = None
    """Bytes; None if their number is not known."""


class NodeJoined(Event, frozen=True, kw_only=True):
    """A node of `nproc` workers with a `role` joined the rendezvous, says the coordinator."""

    name: str
    """Name of the node's host."""
    member: str
    """Unique name of the node within the run."""
    address: str
    """Where the other nodes reach the node."""
    nproc: int
    role: str
    differs: tuple[str, ...] = ()
    """Settings that are others on other nodes, with both values; each difference once."""


class NodeLeft(Event, frozen=True, kw_only=True):
    """A node left the rendezvous: it was stopped, or its workers are done (`why`).

    `name` and `member` are as in `NodeJoined`.
    """

    name: str
    member: str
    why: str


class NodeLost(Event, frozen=True, kw_only=True):
    """The lease of a node expired (`why`): the node was killed, or is unreachable.

    `name` and `member` are as in `NodeJoined`.
    """

    name: str
    member: str
    why: str


class NodeRefused(Event, frozen=True, kw_only=True):
    """A node was refused, temporarily or permanently; `why` gives the reason.

    `name` and `member` are as in `NodeJoined`.
    """

    name: str
    member: str
    why: str


class RoundForming(Event, frozen=True, kw_only=True):
    """The job waits for `minimum` to `maximum` nodes to form the round number `round`."""

    round: int
    joined: int
    """How many nodes are there."""
    minimum: int
    maximum: int
    present: tuple[str, ...] = ()
    """Names of some of the nodes that are there."""
    missing: tuple[str, ...] = ()
    """Names of some nodes that took part before and are not there."""
    refused: tuple[str, ...] = ()
    """Nodes that were refused, each with the reason."""
    time_left: float | None = None
    """Seconds until the wait ends; None if it has no end."""


class RoundWaiting(Event, frozen=True, kw_only=True):
    """The coordinator has been waiting, in a `phase`, for `what`."""

    phase: str
    """What it is doing, such as `stopping`, `deciding` or `running`."""
    what: str
    """Which nodes have not done what, or that `restart.decide` has not returned."""
    waited: float
    """Seconds so far."""
    time_left: float | None = None
    """Seconds until the nodes count as lost, or the job ends for want of a decision."""


class RoundFormed(Event, frozen=True, kw_only=True):
    """This node is part of `round`; the workers of `attempt` are about to start.

    They meet at `master_addr` and `master_port`.
    """

    round: int
    group_rank: int
    """Rank of this node; -1 in the events of `follow_job()`, which are about all nodes."""
    group_world_size: int
    """Number of nodes."""
    world_size: int
    """Number of workers."""
    master_addr: str
    master_port: int
    changes: int = 0
    """Rounds so far that a membership change caused, not a failure."""


class MembershipChanged(Event, frozen=True, kw_only=True):
    """The job goes on with other nodes in `round`, as `attempt`; no restart is counted."""

    why: str
    """Which nodes joined, left or were lost."""
    round: int
    nodes: int
    """Number of nodes from now on."""


class NodeStandby(Event, frozen=True, kw_only=True):
    """`round` has its `maximum` of nodes: this one replaces the next that is lost."""

    round: int
    """-1 before the first one."""
    maximum: int
    why: str = ""
    """Which node holds the fixed rank of this one, if it waits for that."""


class StandbyPromoted(Event, frozen=True, kw_only=True):
    """This node was on standby and is part of `round` now, with `group_rank`."""

    round: int
    group_rank: int


class CoordinatorChanged(Event, frozen=True, kw_only=True):
    """Another node is the coordinator."""

    name: str
    """Name of the node's host."""
    term: int
    """The term of its election; at one store, a higher term replaces a lower one."""


class RendezvousStoreAwaited(Event, frozen=True, kw_only=True):
    """This node has found no rendezvous store that it can use, and goes on searching."""

    why: str
    """Each endpoint, and why its store cannot be used."""
    time_left: float | None
    """Seconds until the search ends; None for a search without a limit."""


class RendezvousStoreLost(Event, frozen=True, kw_only=True):
    """The store at `endpoint` is unreachable (`why`); workers run on for `store_grace`."""

    endpoint: str
    why: str


class RendezvousStoreRecovered(Event, frozen=True, kw_only=True):
    """The nodes are connected to a rendezvous store again, at `endpoint`."""

    endpoint: str
    is_host: bool
    """Whether this node serves the store."""


class WorkerStoreRefused(Event, frozen=True, kw_only=True):
    """The store of the workers closed the connection of a client (`peer`), as `why` says.

    torch's protocol has no other way to refuse a request; the store is full, for example.
    """

    peer: str
    why: str


class EventsMissed(Event, frozen=True, kw_only=True):
    """Stands for events that are no longer kept, or have not arrived, for this reader."""

    count: int
    """How many; 0 if that is unknown."""


class JobFinished(Event, frozen=True, kw_only=True):
    """The job is over (`state`) and no process of it is left; always the last event."""

    state: JobState
    why: str
    """The rule or request that ended the job."""
    exit_code: int
    """What a command-line launcher exits with."""
    duration: float
    """Seconds."""
    restarts: int
    """Restarts after failures."""


_encoder = msgspec.json.Encoder()


def event_to_json(event: Event) -> bytes:
    """Return an event as one JSON object, without a newline."""
    try:
        body = _encoder.encode(event)
    except UnicodeEncodeError:  # a path or an argument that is not UTF-8
        body = _encoder.encode(jsonable(msgspec.to_builtins(event)))
    return b'{"schema":%d,' % SCHEMA + body[1:]


def event_from_json(line: bytes | str) -> Event:
    """Read what `event_to_json` wrote.

    Raises:
        ValueError: the line is not an event, or its schema is newer than `SCHEMA`.
    """
    head: Any = msgspec.json.decode(line, type=_Head)
    if head.schema > SCHEMA:
        raise ValueError(f"events of schema {head.schema} are newer than this reader ({SCHEMA})")
    decoded: Event = _decoder().decode(line)
    return decoded


class _Head(msgspec.Struct):
    schema: int


@functools.cache
def _decoder() -> msgspec.json.Decoder[Any]:
    # Built on first use: a launcher only encodes, and the union takes milliseconds to build.
    kinds = [kind for kind in Event.__subclasses__() if kind.__module__ == __name__]
    return msgspec.json.Decoder(functools.reduce(operator.or_, kinds))
