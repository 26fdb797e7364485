"""The interface between an agent and a rendezvous backend: instructions and reports.

The rendezvous instructs the agent to start a round, to stop one, or to end the job; the agent
reports the state of its workers.  Both send frozen values and never wait for each other.  Each
value names its round, so that a late value can be dropped.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable
from typing import Protocol

from msgspec import Struct

from elastic_aio.events import Event, Restarting
from elastic_aio.node_events import MembershipChanged, MembershipPending, RoundFormed
from elastic_aio.outcome import EndCause, Failure, JobOutcome, JobState
from elastic_aio.ranks import NodeRanks
from elastic_aio.spec.restart import Backoff, RestartAction

RENDEZVOUS_FAILED = 75
"""Exit code of a failed rendezvous: EX_TEMPFAIL of sysexits.h, "try again later"."""

NODES_NOT_REPLACED = 69
"""Exit code of a job that has lost nodes which were not replaced: EX_UNAVAILABLE."""

UNCHECKED = "its health check has not ended"
"""Why a node takes part in no round at first, which is not published."""

RECHECK = Backoff(initial=5.0, factor=2.0, cap=60.0, jitter=False)
"""Before a health check that has failed is repeated."""

CUT_OFF_GRACE = 0.1
"""Seconds between the first signal and SIGKILL on a cut-off node; bounds: see `formation`."""


def rendezvous_failure(why: str, cause: EndCause | None = None) -> JobOutcome:
    """Return the outcome of a job, or of one node, that does not find the nodes it needs."""
    is_loss = cause is EndCause.NODES_NOT_REPLACED
    code = NODES_NOT_REPLACED if is_loss else RENDEZVOUS_FAILED
    return JobOutcome(JobState.FAILED, why, code, is_rendezvous=True, cause=cause)


class NodeInfo(Struct, frozen=True, gc=False):
    """One node: its host's `name`, the agent's `pid`, `nproc` workers and their `role`."""

    name: str
    pid: int
    nproc: int
    role: str


class Placement(Struct, frozen=True, gc=False):
    """A node's ranks in a round; its size does not depend on the number of nodes.

    Attributes:
        formed_by: term, name and store of the coordinator that formed the round.  Two
            coordinators in a network partition may use one number for two rounds.
        restarts: restarts after failures so far, for TORCHELASTIC_RESTART_COUNT.
        changes: rounds so far that were formed because the membership changed.
        span: the ranks of the node's workers.
        master_addr, master_port: of the workers' store; group rank 0 has reserved the port.
        host_rank, host_name: of the node that hosts the nodes' store; -1 and empty for none.
    """

    round: int
    formed_by: str
    attempt: int
    restarts: int
    changes: int
    span: NodeRanks
    master_addr: str
    master_port: int
    host_rank: int = -1
    host_name: str = ""

    @property
    def round_id(self) -> tuple[int, str]:
        """The number of its round, and which coordinator formed it: no other round has both."""
        return self.round, self.formed_by


class RestartCause(Struct, frozen=True, gc=False):
    """Why another attempt follows.

    `attempt` is its number, `why` the rule that applies, `restarts` the number of restarts
    so far, and `delay` the seconds until it begins.  `root` is the failure that ended the
    previous attempt; None after a change of the membership, or a request (`is_requested`).
    `returned` restarts no longer count.  `excludes` is the member that is excluded because of
    `root`, or empty.
    """

    attempt: int
    why: str
    restarts: int
    delay: float = 0.0
    root: Failure | None = None
    is_requested: bool = False
    returned: int = 0
    excludes: str = ""


# ------------------------------------------------------------- instructions


class StartRound(Struct, frozen=True, tag=True, gc=False):
    """Stop the workers of an earlier round, then start those of `placement`'s round.

    `cause` is None for the first attempt.
    """

    placement: Placement
    cause: RestartCause | None = None


class StopRound(Struct, frozen=True, tag=True, gc=False):
    """Stop, because of `why`, the workers up to `round`, then report `RoundStopped`.

    `is_cut_off`: the other nodes may start another round soon, so that SIGKILL must follow
    the first signal within `CUT_OFF_GRACE`, even if a stop has begun already.
    """

    round: int
    why: str
    is_cut_off: bool = False


class RestartPending(Struct, frozen=True, tag=True, gc=False):
    """Another attempt follows because of `cause`, after its `delay`; nothing to do yet."""

    cause: RestartCause


class ChangePending(Struct, frozen=True, tag=True, gc=False):
    """Another round is to replace `round` in `time_left` seconds, because of `why`.

    The workers run on until then.  `time_left` None: the change is withdrawn.  The last instruction
    counts, until the round is stopped.  `number` stays the same until the change is withdrawn.

    `until` (else 0): no round follows, the job is about to be preempted then, in Unix seconds by
    the clock of the node that reads it.
    """

    round: int
    why: str
    time_left: float | None = None
    number: int = 0
    until: float = 0.0


class PeersFinished(Struct, frozen=True, tag=True, gc=False):
    """Other nodes of `round` have succeeded, the first `ago` seconds before; they had `workers`."""

    round: int
    workers: int
    ago: float


class EndJob(Struct, frozen=True, tag=True, gc=False):
    """End the job with `outcome`, after stopping the workers."""

    outcome: JobOutcome


Instruction = StartRound | StopRound | RestartPending | ChangePending | PeersFinished | EndJob
"""What a rendezvous gives to the agent of a node."""

# ------------------------------------------------------------------ reports


class RoundStarted(Struct, frozen=True, gc=False):
    """All workers of `round` have been spawned."""

    round: int


class RoundProgressed(Struct, frozen=True, gc=False):
    """A worker of `round` has reported a step, the first on this node."""

    round: int


class RoundFailing(Struct, frozen=True, gc=False):
    """A worker of `round` has failed (`why`); the node is stopping the others."""

    round: int
    why: str


class RoundStopped(Struct, frozen=True, gc=False):
    """No process of `round` is left on this node.

    `failures` are those of this node's workers, the root cause first; empty after a plain stop.
    `is_permanent`: another attempt cannot succeed, because of `permanent_reason` (a program that
    does not exist, a process that cannot be killed).  `exit_code`: of the launcher if the job ends.
    `runtime`: seconds that the workers ran.  `first_success`: rank of the first worker that exited
    with 0 by itself, and the time in Unix seconds; None without such a worker.
    """

    round: int
    failures: tuple[Failure, ...] = ()
    is_permanent: bool = False
    permanent_reason: str = ""
    exit_code: int = 1
    runtime: float = 0.0
    first_success: tuple[int, float] | None = None


class RoundSucceeded(Struct, frozen=True, gc=False):
    """All workers of `round` on this node exited with code 0; no process is left."""

    round: int
    first_success: tuple[int, float] | None = None


class RestartRequested(Struct, frozen=True, gc=False):
    """Another attempt is wanted in place of `round`, because of `why`."""

    round: int
    why: str


class ExclusionRequested(Struct, frozen=True, gc=False):
    """This node is to take part in no round after `round`, because of `why`.

    `seconds`: until it may again, once no worker runs there; None: the time that the spec says.
    """

    round: int
    why: str
    seconds: float | None = None


class NodeDraining(Struct, frozen=True, gc=False):
    """This node stops its workers, because of `why`, and leaves when they have ended."""

    why: str


class ChangeAgreed(Struct, frozen=True, gc=False):
    """All workers of `round` on this node agree to its pending change of this `number`."""

    round: int
    number: int


class PreemptionNoticed(Struct, frozen=True, gc=False):
    """This node was given notice that the job is about to be preempted: `change` says when."""

    change: ChangePending


Report = (
    RoundStarted
    | RoundProgressed
    | RoundFailing
    | RoundStopped
    | RoundSucceeded
    | RestartRequested
    | ExclusionRequested
    | NodeDraining
    | ChangeAgreed
    | PreemptionNoticed
)
"""What the agent of a node reports to the rendezvous."""


class AgentPort(Protocol):
    """The agent as the rendezvous sees it.  No method may block."""

    def on_instruction(self, instruction: Instruction) -> None:
        """Take an instruction."""

    def on_event(self, event: Event) -> None:
        """Publish an event on this node."""

    def decide(self, failure: Failure) -> Awaitable[RestartAction]:
        """Call the user's `restart.decide`; only on the node of the coordinator."""

    async def check_health(self) -> str:
        """Return why this host is not fit for workers by its health check; empty if it is.

        Cancellation: ends the check.
        """

    def reserve_master_port(self, address: str) -> int:
        """Return the port at `address` that is reserved for the next round's workers.

        `on_instruction` uses it up by a `StartRound` with group rank 0; then there is another one.
        """


class Rendezvous(abc.ABC):
    """One node's part in the rendezvous of one job; used once."""

    @property
    def job(self) -> str:
        """The id of this job on all nodes, but of no other job of its run id; empty until known."""
        return ""

    @abc.abstractmethod
    async def open(self) -> None:
        """Begin to take part; instructions are sent from now on.

        Returns before other nodes have joined.  Later errors are sent as `EndJob`.

        Cancellation: happens when this node stops; `leave` follows in any case.

        Raises:
            HostError: this host lacks something, such as a port.
        """

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Send the state of this node's workers to the other nodes; never blocks."""

    def abandoned(self) -> Awaitable[None] | None:
        """Return an awaitable that ends once the other nodes are known to go on without this node.

        Called after this node's success, where it waits for them without a limit.  None, the
        default: that is never known.

        Cancellation: happens when an instruction follows, or this node stops.
        """
        return None

    async def wait_unneeded(self) -> None:  # noqa: B027  # not every backend serves a store
        """Wait while other nodes' workers still need a service of this node; by default not at all.

        Called after this node's success, once it waits no longer for its own sake, and when its
        workers have ended by a stop.

        Cancellation: happens when an instruction follows, or this node stops; after a stop, when
        its grace is over.
        """

    @abc.abstractmethod
    async def leave(self, why: str) -> None:
        """Leave; the other nodes go on.

        Returns once the last report has been written, within one second.  After `EndJob` the node
        that hosts the store also waits (`close_timeout`) until the other nodes have read it;
        calling `leave` again ends that wait.

        Idempotent; safe to call again after cancellation.
        """


# ------------------------------------------------------------------- events


def restarting_event(cause: RestartCause) -> Restarting:
    """Return the event of a restart after a failure, or by request."""
    return Restarting(
        attempt=cause.attempt,
        why=cause.why,
        delay=cause.delay,
        restarts=cause.restarts,
        returned=cause.returned,
    )


def cause_event(cause: RestartCause, placement: Placement) -> Event:
    """Return the event with the reason for a later attempt."""
    if cause.root is not None or cause.is_requested:
        return restarting_event(cause)
    return MembershipChanged(
        attempt=placement.attempt,
        why=cause.why,
        round=placement.round,
        nodes=placement.span.group_world_size,
    )


def pending_event(change: ChangePending, attempt: int) -> MembershipPending:
    """Return the event of a round that is about to be replaced, or is not."""
    return MembershipPending(
        attempt=attempt, round=change.round, why=change.why, time_left=change.time_left
    )


def round_formed_event(placement: Placement, group_rank: int) -> RoundFormed:
    """Return the event of a new round; `group_rank` -1 stands for all nodes."""
    return RoundFormed(
        attempt=placement.attempt,
        round=placement.round,
        group_rank=group_rank,
        group_world_size=placement.span.group_world_size,
        world_size=placement.span.world_size,
        master_addr=placement.master_addr,
        master_port=placement.master_port,
        changes=placement.changes,
    )
