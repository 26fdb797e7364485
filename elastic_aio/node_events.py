"""The events of the nodes of a run: membership, rounds, the coordinator and the stores."""

from __future__ import annotations

from elastic_aio.events import Event


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
    """A node left the rendezvous: its workers have finished, or it was stopped (`why`).

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
    others: tuple[str, ...] = ()
    """Ids of other runs that wait at the same store: some of them, seen by one node."""


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


class MembershipPending(Event, frozen=True, kw_only=True):
    """The job is about to go on with other nodes than those of `round`; its workers run on."""

    round: int
    why: str
    """Which nodes are about to take part, or why the round stays as it is."""
    time_left: float | None
    """Seconds until the workers are stopped, unless further nodes join; None: they are not."""


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
