"""The events of the nodes of a run: membership, rounds, the coordinator and the stores."""

from __future__ import annotations

from msgspec.structs import replace

from elastic_aio.status import Event, Level, StatusTracker
from elastic_aio.text import counted, one_line


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
    """Settings that differ from other nodes', with both values; each difference once."""

    @property
    def level(self) -> int:
        return Level.WARNING if self.differs else Level.INFO

    def _text(self) -> str:
        text = f"node {self.name} joined with {counted(self.nproc, 'worker')} ({self.address})"
        return "; ".join([text, *self.differs])


class NodeLeft(Event, frozen=True, kw_only=True):
    """A node left the rendezvous: its workers have finished, or it was stopped (`why`).

    `name` and `member` are as in `NodeJoined`.
    """

    name: str
    member: str
    why: str

    _level = Level.INFO

    def _text(self) -> str:
        return f"node {self.name} left: {self.why}"


class NodeLost(Event, frozen=True, kw_only=True):
    """The lease of a node expired (`why`): the node was killed, or is unreachable.

    `name` and `member` are as in `NodeJoined`.
    """

    name: str
    member: str
    why: str

    def _text(self) -> str:
        return f"node {self.name} is lost: {self.why}"


class NodeRefused(Event, frozen=True, kw_only=True):
    """A node was refused, temporarily or permanently; `why` gives the reason.

    `name` and `member` are as in `NodeJoined`.
    """

    name: str
    member: str
    why: str

    def _text(self) -> str:
        return f"node {self.name} was refused: {self.why}"


class NodeExcluded(Event, frozen=True, kw_only=True):
    """A node takes part in no round for a time, because of `why`; its launcher stays.

    `name` and `member` are as in `NodeJoined`.
    """

    name: str
    member: str
    why: str
    """Which worker has excluded it, and why, for example."""
    seconds: float | None = None
    """Seconds until it may take part again; None: as long as it runs, or another node knows."""
    is_own: bool = False
    """Whether the node that reports this is the one that is excluded."""

    def _change(self, status: StatusTracker) -> None:
        if self.is_own:
            status.enter("excluded", self.time, self.why)

    def _text(self) -> str:
        which = "this node" if self.is_own else f"node {self.name}"
        until = "" if self.seconds is None else f" for {self.seconds:g} s"
        return f"{which} is excluded{until}: {self.why}"


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

    @property
    def countdown(self) -> tuple[str, float | None, str]:
        return f"waiting for nodes: {self.joined} present, {self._ends} ", self.time_left, ""

    @property
    def _ends(self) -> str:
        return "starts in" if self.joined >= self.minimum else "fails in"

    def _change(self, status: StatusTracker) -> None:
        if not status.is_running:  # while workers run, other nodes may form the next round
            status.enter("forming", self.time)

    def _text(self) -> str:
        stopped = "workers stopped, " if self.round else ""
        text = f"{stopped}waiting for nodes: {counted(self.joined, 'node')} present"
        if self.present:
            ellipsis = ", ..." if len(self.present) < self.joined else ""
            text += f" ({', '.join(self.present)}{ellipsis})"
        text += f", minimum {self.minimum}, maximum {self.maximum}"
        if self.missing:
            text += f", missing {', '.join(self.missing)}"
        if self.time_left is not None:
            text += f", {self._ends} {self.time_left:.0f} s"
        if self.refused:
            text += f"; refused {', '.join(self.refused)}"
        if self.others:
            runs = ", ".join(map(one_line, self.others))
            text += f"; other runs that wait at this store: {runs}"
            text += " (is --rdzv-id the same everywhere?)"
        return text


class RoundWaiting(Event, frozen=True, kw_only=True):
    """The coordinator has been waiting, in a `phase`, for `what`."""

    phase: str
    """The phase of the coordinator, such as `stopping`, `deciding` or `running`."""
    what: str
    """Which nodes have not done what, or that `restart.decide` has not returned."""
    waited: float
    """Seconds so far."""
    time_left: float | None = None
    """Seconds until the nodes count as lost, or the job ends for want of a decision."""

    @property
    def countdown(self) -> tuple[str, float | None, str]:
        return f"{self.phase}: {self.what}, ", self.time_left, " left"

    def _text(self) -> str:
        left = "" if self.time_left is None else f", {self.time_left:.0f} s left"
        return f"{self.phase}: {self.what} (waited {self.waited:.0f} s{left})"


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

    _level = Level.INFO

    def _change(self, status: StatusTracker) -> None:
        status.job = replace(
            status.job,
            round=self.round,
            membership_changes=self.changes,
            group_rank=self.group_rank,
            group_world_size=self.group_world_size,
            world_size=self.world_size,
            master=f"{self.master_addr}:{self.master_port}",
        )
        status.enter("starting", self.time)

    def _text(self) -> str:
        nodes = counted(self.group_world_size, "node")
        if self.group_rank >= 0:  # else the event is about all nodes
            nodes = f"group rank {self.group_rank} of {self.group_world_size}"
        workers = counted(self.world_size, "worker")
        master = f"{self.master_addr}:{self.master_port}"
        return f"round {self.round}: {nodes}, {workers} in all, master at {master}"


class MembershipPending(Event, frozen=True, kw_only=True):
    """The job is about to go on with other nodes than in `round`; its workers run on."""

    round: int
    why: str
    """Which nodes are about to take part, or why the round stays as it is."""
    time_left: float | None
    """Seconds until the workers are stopped, unless further nodes join; None: they are not."""

    @property
    def level(self) -> int:
        return Level.INFO if self.time_left is None else Level.WARNING

    def _text(self) -> str:
        if self.time_left is None:
            return f"the membership stays as it is: {self.why}"
        when = f"in {self.time_left:.0f} s, unless others join"
        return f"the membership is about to change {when}: {self.why}"


class MembershipChanged(Event, frozen=True, kw_only=True):
    """The job goes on with other nodes in `round`, as `attempt`; no restart is counted."""

    why: str
    """Which nodes joined, left or were lost."""
    round: int
    nodes: int
    """Number of nodes from now on."""

    def _change(self, status: StatusTracker) -> None:
        status.enter("restarting", self.time, self.why)

    def _text(self) -> str:
        change = f"attempt {self.attempt} has {counted(self.nodes, 'node')}"
        return f"membership changed, {change}: {self.why}"


class NodeStandby(Event, frozen=True, kw_only=True):
    """`round` has its `maximum` of nodes: this node replaces the next node that is lost."""

    round: int
    """-1 before the first round."""
    maximum: int
    why: str = ""
    """Which node holds the fixed rank of this node, if it waits for that."""

    def _change(self, status: StatusTracker) -> None:
        if not status.is_running:
            status.enter("standby", self.time, self.why)

    def _text(self) -> str:
        return f"on standby: {self.why or f'the job has its maximum of {self.maximum} nodes'}"


class StandbyPromoted(Event, frozen=True, kw_only=True):
    """This node was on standby and is part of `round` now, with `group_rank`."""

    round: int
    group_rank: int

    _level = Level.INFO

    def _text(self) -> str:
        return f"promoted from standby to group rank {self.group_rank}"


class CoordinatorChanged(Event, frozen=True, kw_only=True):
    """Another node is the coordinator."""

    name: str
    """Name of the node's host."""
    term: int
    """The term of its election; at one store, a higher term replaces a lower one."""

    _level = Level.INFO

    def _text(self) -> str:
        return f"node {self.name} is the coordinator (term {self.term})"


class RendezvousStoreAwaited(Event, frozen=True, kw_only=True):
    """This node has found no rendezvous store that it can use, and goes on searching."""

    why: str
    """Each endpoint, and why its store cannot be used."""
    time_left: float | None
    """Seconds until the search ends; None for a search without a limit."""

    @property
    def countdown(self) -> tuple[str, float | None, str]:
        return "waiting for the rendezvous store, ", self.time_left, " left"

    def _text(self) -> str:
        left = "" if self.time_left is None else f", {max(self.time_left, 0):.0f} s left"
        return f"waiting for the rendezvous store{left}: {self.why}"


class RendezvousStoreLost(Event, frozen=True, kw_only=True):
    """The store at `endpoint` is unreachable (`why`); workers run on for `store_grace`."""

    endpoint: str
    why: str

    def _text(self) -> str:
        return f"rendezvous store at {self.endpoint} lost: {self.why}"


class RendezvousStoreRecovered(Event, frozen=True, kw_only=True):
    """The nodes are connected to a rendezvous store again, at `endpoint`."""

    endpoint: str
    is_host: bool
    """Whether this node serves the store."""

    def _text(self) -> str:
        server = ", served by this node" if self.is_host else ""
        return f"rendezvous store recovered at {self.endpoint}{server}"
