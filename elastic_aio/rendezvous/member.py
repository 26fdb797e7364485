"""A member's part in a rendezvous: orders and reports in, tickets and instructions out.

Pure.  It is level-triggered like the coordinator: an order that is older than the
last one is dropped, and the present ticket says everything.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.events import (
    CoordinatorChanged,
    Event,
    Promoted,
    StandingBy,
)
from elastic_aio.outcome import JobState
from elastic_aio.rendezvous.base import (
    RENDEZVOUS_FAILED,
    Begin,
    Cause,
    Conclude,
    Ended,
    Ending,
    Failing,
    Halt,
    Instruction,
    Pause,
    Placement,
    Report,
    Running,
    Succeeded,
)
from elastic_aio.rendezvous.bulletin import forming
from elastic_aio.rendezvous.tickets import (
    Departed,
    Order,
    Prepare,
    Refuse,
    StandBy,
    Standing,
    Stay,
    Ticket,
    bounded,
    clean,
    sketched,
)

__all__ = ["Member", "Probe", "Reaction"]


class Probe(Struct, frozen=True):
    """Find out whether `address` and `port` can be reached; answer with `probed`."""

    round: int
    address: str
    port: int


Reaction = Instruction | Event | Probe
"""What is to be done about what a member has heard."""


class Member:
    """One member; `ticket` is what the others should know now."""

    def __init__(self, ticket: Ticket) -> None:
        """Begin with a first ticket, which says who this is."""
        self.ticket = ticket
        self._seen = (0, 0)
        self._halting = -1
        self._is_standing_by = False
        self._has_ended = False

    def __repr__(self) -> str:
        return f"<Member {self.ticket.card.name}: {self.ticket.standing}, {self._seen}>"

    @property
    def held(self) -> Placement | None:
        """The last place taken."""
        return self.ticket.held

    @property
    def has_ended(self) -> bool:
        """Whether the job is over for this member."""
        return self._has_ended

    @property
    def has_succeeded(self) -> bool:
        """Whether the workers of the last round have all succeeded here."""
        return self.ticket.standing is Standing.SUCCEEDED

    # -------------------------------------------------------------- what it hears

    def found(self, address: str, *, is_host: bool) -> None:
        """Take in where the others reach this member, at the store it has found."""
        self._now(address=address, is_host=is_host)

    def reserved(self, port: int) -> None:
        """Take in the port that is reserved for the next round's workers."""
        if port != self.ticket.port:
            self._now(port=port)

    def again(self) -> None:
        """Write the ticket anew, for a store that may not know it."""
        self._now()

    def coordinated(self, name: str, epoch: int) -> list[Reaction]:
        """Take in who coordinates now; an epoch that is not newer changes nothing."""
        if epoch <= self.ticket.epoch:
            return []
        self._now(epoch=epoch)
        return [CoordinatorChanged(name=name, epoch=epoch)]

    def order(self, order: Order) -> list[Reaction]:
        """Take in an order; return what is to be done about it."""
        seen = (order.epoch, order.serial)
        if seen <= self._seen or order.epoch < self.ticket.epoch or self._has_ended:
            return []
        self._seen = seen
        if order.epoch > self.ticket.epoch:
            self._now(epoch=order.epoch)
        match order.body:
            case Begin(placement):
                return self._begin(order.body, placement)
            case Halt(round, why):
                return self._halt(round, why)
            case Prepare():
                return [Probe(order.body.round, order.body.address, order.body.port)]
            case Stay(gathering):
                return [forming(gathering)]
            case StandBy(round, maximum):
                return self._stand_by(round, maximum)
            case Refuse(why):
                return self.give_up(f"the other nodes refused this one: {why}")
            case Conclude(ending):
                self._has_ended = True
                # A coordinator that comes after this one has to know it from somebody.
                slight = tuple(sketched(one) for one in ending.failures[:1])
                self._now(ending=replace(ending, failures=slight))
                return [order.body]
            case Pause(cause):
                return self._pause(order.body, cause)
            case Departed(round, count):
                if round == self.ticket.round and count != self.ticket.departed:
                    self._now(departed=count)
                return []

    def give_up(self, why: str) -> list[Reaction]:
        """Let the job end for this node alone: it cannot meet the others."""
        if self._has_ended:
            return []
        self._has_ended = True
        ending = Ending(JobState.FAILED, why, RENDEZVOUS_FAILED, is_rendezvous=True)
        return [Conclude(ending)]

    def cut_off(self, why: str) -> list[Reaction]:
        """Stop what runs: the others must be taken to have gone on without this node."""
        if not self.ticket.is_busy:
            return []
        return self._halt(self.ticket.round, why)

    def report(self, report: Report) -> None:
        """Take in what has become of this node's workers."""
        if report.round != self.ticket.round:
            return
        match report:
            case Running():
                return
            case Failing():
                if self.ticket.standing is Standing.RUNNING:
                    self._now(standing=Standing.FAILING)
            case Ended(round, failures, is_final, final_why, exit_code, ran):
                self._now(
                    standing=Standing.ENDED,
                    quiet=max(round, self._halting),
                    failures=bounded(failures) or self.ticket.failures,
                    is_final=is_final or self.ticket.is_final,
                    final_why=clean(final_why) or self.ticket.final_why,
                    exit_code=exit_code,
                    ran=ran,
                )
            case Succeeded(round):
                self._now(standing=Standing.SUCCEEDED, quiet=max(round, self._halting))

    def probed(self, round: int, trouble: str) -> None:
        """Take in whether the others could be reached; `trouble` is empty if so."""
        self._now(reached=round, trouble=clean(trouble))

    # ------------------------------------------------------------------- changes

    def _begin(self, begin: Begin, placement: Placement) -> list[Reaction]:
        ticket = self.ticket
        if placement == ticket.held:
            return []  # told again
        master = placement.master_addr, placement.master_port
        is_stale = placement.span.group_rank == 0 and master != (ticket.address, ticket.port)
        if placement.round <= ticket.round or is_stale:
            # It was given by somebody who did not know where we are by now.  Our
            # present ticket tells, and that the order has been seen.
            self._now()
            return []
        self._halting = -1
        self._now(
            standing=Standing.RUNNING,
            held=placement,
            reached=-1,
            trouble="",
            failures=(),
            is_final=False,
            final_why="",
            exit_code=1,
            ran=0.0,
            departed=0,
            granted=None,
        )
        if not self._is_standing_by:
            return [begin]
        self._is_standing_by = False
        promoted = Promoted(round=placement.round, group_rank=placement.span.group_rank)
        return [promoted, begin]

    def _halt(self, round: int, why: str) -> list[Reaction]:
        if round < self.ticket.round:
            return []
        self._halting = max(round, self._halting)
        if self.ticket.is_busy or self.ticket.standing is Standing.SUCCEEDED:
            return [Halt(self.ticket.round, why)]
        if self.ticket.quiet < round:
            self._now(quiet=round)
        return []

    def _pause(self, pause: Pause, cause: Cause) -> list[Reaction]:
        if cause == self.ticket.granted:
            return []  # told again
        self._now(granted=cause)
        return [pause]

    def _stand_by(self, round: int, maximum: int) -> list[Reaction]:
        if self._is_standing_by:
            return []
        self._is_standing_by = True
        return [StandingBy(round=round, maximum=maximum)]

    def _now(self, **changes: object) -> None:
        serial = self.ticket.serial + 1
        self.ticket = replace(self.ticket, serial=serial, seen=self._seen, **changes)
