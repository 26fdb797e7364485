"""What an agent and a rendezvous say to each other, whatever the backend.

The agent reports what became of its workers; the rendezvous instructs it to begin a
round, to halt, or to conclude.  Both sides speak in frozen values without waiting for
each other, and each value names the round it is about: what comes late is dropped.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable
from typing import Protocol

from msgspec import Struct

from elastic_aio.events import Event
from elastic_aio.outcome import Failure, JobState
from elastic_aio.policy import Action
from elastic_aio.ranks import Span

__all__ = [
    "RENDEZVOUS_FAILED",
    "Begin",
    "Cause",
    "Conclude",
    "Ended",
    "Ending",
    "Failing",
    "Halt",
    "Instruction",
    "Listener",
    "NodeCard",
    "Pause",
    "Placement",
    "Rendezvous",
    "Report",
    "Running",
    "Succeeded",
]


RENDEZVOUS_FAILED = 75
"""Exit code when the nodes do not come together: EX_TEMPFAIL, "try again later"."""


class NodeCard(Struct, frozen=True):
    """Who a node is: its host's `name`, the agent's pid, and what it brings."""

    name: str
    pid: int
    nproc: int
    role: str


class Placement(Struct, frozen=True):
    """A node's place in a round; its size does not depend on the number of nodes.

    Attributes:
        round: number of the round; it only grows.
        origin: who formed it; two coordinators that cannot hear of each other may give
            the same number to different rounds.
        attempt: number of the attempt, the same on all nodes.
        restarts: restarts after failures so far, for TORCHELASTIC_RESTART_COUNT.
        changes: rounds so far that a change of the membership brought about.
        span: the ranks of the node's workers.
        master_addr: address at which the workers meet.
        master_port: TCP port there; group rank 0's agent has it reserved.
    """

    round: int
    origin: str
    attempt: int
    restarts: int
    changes: int
    span: Span
    master_addr: str
    master_port: int


class Cause(Struct, frozen=True):
    """Why an attempt follows another one.

    `root` is the failure that ended the former, None after a change of the membership.
    """

    attempt: int
    why: str
    restarts: int
    delay: float = 0.0
    root: Failure | None = None


class Ending(Struct, frozen=True):
    """How the whole job has ended, the same for every node.

    `failures` are those that ended it, the root cause first.  With `is_rendezvous` it
    was not the workers that failed: the nodes did not come together.
    """

    state: JobState
    why: str
    exit_code: int
    restarts: int = 0
    failures: tuple[Failure, ...] = ()
    is_rendezvous: bool = False


# ------------------------------------------------- what the rendezvous says


class Begin(Struct, frozen=True, tag=True):
    """Start the workers of a round; those of an earlier one are stopped first."""

    placement: Placement
    cause: Cause | None = None


class Halt(Struct, frozen=True, tag=True):
    """Stop the workers of `round` and of earlier ones, and report `Ended`."""

    round: int
    why: str


class Pause(Struct, frozen=True, tag=True):
    """Another attempt will follow; nothing is to be done but to tell so."""

    cause: Cause


class Conclude(Struct, frozen=True, tag=True):
    """The job is over: stop what runs, and end in the same way as all nodes."""

    ending: Ending


Instruction = Begin | Halt | Pause | Conclude

# --------------------------------------------------------- what the agent says


class Running(Struct, frozen=True):
    """All workers of the round have been spawned."""

    round: int


class Failing(Struct, frozen=True):
    """A worker of the round has failed; the node is stopping the others."""

    round: int
    why: str


class Ended(Struct, frozen=True):
    """Nothing of the round is left on this node.

    `failures` are those seen here, the root cause first; none after a mere stop.
    With `is_final` another attempt would be of no use (a program that does not exist,
    a process that could not be killed); `ran` is how many seconds the workers lived.
    """

    round: int
    failures: tuple[Failure, ...] = ()
    is_final: bool = False
    final_why: str = ""
    exit_code: int = 1
    ran: float = 0.0


class Succeeded(Struct, frozen=True):
    """All workers of the round on this node have ended with code 0, and nothing is left."""

    round: int


Report = Running | Failing | Ended | Succeeded


class Listener(Protocol):
    """The agent as the rendezvous sees it.  Nothing here may block."""

    def instructed(self, instruction: Instruction) -> None:
        """Take an instruction."""

    def told(self, event: Event) -> None:
        """Take an event for this node's readers."""

    def decide(self, failure: Failure) -> Awaitable[Action]:
        """Ask the user's `restart.decide`; only on the node that coordinates."""

    def reserve_master(self, address: str) -> int:
        """Return the port that is reserved for the next round's workers at `address`.

        It is the same until a `Begin` that makes this node group rank 0 is given to
        `instructed`: from then on it is another one, for the round after that.
        """


class Rendezvous(abc.ABC):
    """One node's part in the rendezvous of one job; used once."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Begin to take part; instructions come from now on.

        Returns before other nodes have come.  What goes wrong later comes as a
        `Conclude`.  Cancelled when this node stops meanwhile; `leave` follows in any
        case.

        Raises:
            SurroundingsError: this machine lacks something, such as a port.
        """

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Tell the others what has become of this node's workers; never blocks."""

    @abc.abstractmethod
    async def leave(self, why: str) -> None:
        """Leave at once; the others go on without this node.

        Returns when they can know it and all that was reported, after a second at
        most.  May be started over after a cancellation.  After a `Conclude` the node
        that serves the others stays until they have heard of it too; asked again
        meanwhile, it stays for nobody.
        """
