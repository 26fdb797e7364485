"""A member: which orders it obeys, and what its ticket says then."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elastic_aio.events import CoordinatorChanged, Promoted, RoundForming, StandingBy
from elastic_aio.outcome import JobState
from elastic_aio.ranks import NodeSize, assign_spans
from elastic_aio.rendezvous.base import (
    RENDEZVOUS_FAILED,
    Begin,
    Cause,
    Conclude,
    Ended,
    Ending,
    Failing,
    Halt,
    Pause,
    Placement,
    Running,
    Succeeded,
)
from elastic_aio.rendezvous.member import Member, Probe, Reaction
from elastic_aio.rendezvous.state import Rules
from elastic_aio.rendezvous.tickets import (
    Body,
    Gathering,
    Order,
    Prepare,
    Refuse,
    StandBy,
    Standing,
    Stay,
)
from tests.support.stage import failure, ticket

END = Conclude(Ending(JobState.SUCCEEDED, "all is well", 0))


def place(round: int, group_rank: int = 1, origin: str = "1.c", **fields: object) -> Placement:
    """Return a place in a round of three."""
    span = assign_spans([NodeSize("default", 1)] * 3)[group_rank]
    return replace(
        Placement(round, origin, round, 0, 0, span, "a", 1 if not group_rank else 7), **fields
    )


class Told:
    """A member, and a coordinator that numbers its orders."""

    def __init__(self, *bodies: Body) -> None:
        self.member = Member(ticket("a", Rules(1, 4)))
        self.serial = 0
        for body in bodies:
            self.tell(body)

    def tell(self, body: Body, epoch: int = 1) -> list[Reaction]:
        """Give the next order."""
        self.serial += 1
        return self.member.order(Order(epoch, self.serial, body))


def test_a_place_is_taken() -> None:
    """The ticket says so at once: workers are about to run."""
    told = Told()
    begin = Begin(place(0))
    assert told.tell(begin) == [begin]
    assert told.member.ticket.standing is Standing.RUNNING
    assert told.member.held == begin.placement
    assert told.member.ticket.seen == (1, 1)


def test_an_order_counts_once() -> None:
    """Neither the same again nor an older one does anything."""
    told = Told(Begin(place(0)))
    before = told.member.ticket
    for serial in (0, 1):
        assert told.member.order(Order(1, serial, Halt(0, "late"))) == []
    assert told.member.ticket == before


def test_orders_of_a_former_coordinator_are_dropped() -> None:
    """Once a newer one is known, by its own order or by its announcement."""
    told = Told(Begin(place(0)))
    assert told.member.coordinated("b", 3) == [CoordinatorChanged(name="b", epoch=3)]
    assert told.member.coordinated("b", 3) == []
    assert told.member.ticket.epoch == 3
    assert told.tell(Halt(0, "by the former"), epoch=2) == []
    assert told.tell(Halt(0, "by the present"), epoch=3) == [Halt(0, "by the present")]
    assert told.member.order(Order(5, 1, StandBy(0, 3))) != []
    assert told.member.ticket.epoch == 5


def test_a_place_told_again_is_no_news() -> None:
    """A successor repeats what its members hold."""
    told = Told(Begin(place(0)))
    before = told.member.ticket
    assert told.tell(Begin(place(0))) == []
    assert told.member.ticket == before


@pytest.mark.parametrize(
    "stale",
    [
        place(5, origin="2.other"),
        place(4),
        place(6, 0, master_port=99),
        place(6, 0, master_addr="elsewhere"),
    ],
)
def test_a_stale_place_is_not_taken_but_answered(stale: Placement) -> None:
    """A round that is not newer, or a port that is not reserved: the ticket says what is."""
    told = Told(Begin(place(5)))
    before = told.member.ticket
    assert told.tell(Begin(stale)) == []
    after = told.member.ticket
    assert after.serial == before.serial + 1
    assert after.seen == (1, 2)
    assert after.held == before.held


def test_reports_of_earlier_rounds_are_dropped() -> None:
    """They come late, when the next has been begun."""
    told = Told(Begin(place(0)), Begin(place(1)))
    before = told.member.ticket
    told.member.report(Ended(0, (failure(),)))
    told.member.report(Failing(0, "x"))
    told.member.report(Running(1))
    assert told.member.ticket == before


def test_a_failure_is_told_in_two_steps() -> None:
    """At once that there is one, and with all that is known when nothing is left."""
    told = Told(Begin(place(0)))
    told.member.report(Failing(0, "x"))
    assert told.member.ticket.standing is Standing.FAILING
    told.member.report(Ended(0, (failure(4),), ran=3.5))
    last = told.member.ticket
    assert (last.standing, last.failures, last.ran) == (Standing.ENDED, (failure(4),), 3.5)
    assert last.quiet == 0
    told.member.report(Ended(0))
    assert told.member.ticket.failures == (failure(4),), "a second report takes nothing back"
    told.tell(Begin(place(1)))
    assert not told.member.ticket.failures


def test_a_halt_is_answered_when_nothing_is_left() -> None:
    """For a round that was never begun here, too."""
    told = Told(Begin(place(0)))
    assert told.tell(Halt(2, "why")) == [Halt(0, "why")]
    assert told.member.ticket.quiet == -1
    told.member.report(Ended(0))
    assert told.member.ticket.quiet == 2


def test_a_halt_of_one_that_runs_nothing_is_answered_at_once() -> None:
    """Nothing is to be done."""
    told = Told()
    assert told.tell(Halt(0, "why")) == []
    assert told.member.ticket.quiet == 0


def test_a_halt_of_an_earlier_round_is_nothing() -> None:
    """The member is further on."""
    told = Told(Begin(place(3)))
    assert told.tell(Halt(2, "why")) == []
    assert told.member.ticket.is_busy


def test_a_success_that_is_halted_is_told_to_the_agent() -> None:
    """It waits for the others, in vain."""
    told = Told(Begin(place(0)))
    told.member.report(Succeeded(0))
    assert (told.member.ticket.standing, told.member.ticket.quiet) == (Standing.SUCCEEDED, 0)
    assert told.tell(Halt(0, "why")) == [Halt(0, "why")]
    told.member.report(Ended(0))
    assert told.member.ticket.standing is Standing.ENDED


def test_newcomers_look_whether_they_reach_the_others() -> None:
    """What they find stands in the ticket until they are given a place."""
    told = Told()
    assert told.tell(Prepare(4, "b", 99)) == [Probe(4, "b", 99)]
    told.member.probed(4, "no route\udc80")
    assert (told.member.ticket.reached, told.member.ticket.trouble) == (4, "no route\\udc80")
    told.tell(Begin(place(4)))
    assert (told.member.ticket.reached, told.member.ticket.trouble) == (-1, "")


def test_standing_by_is_told_once_and_ends_with_a_promotion() -> None:
    """However often the order is given."""
    told = Told()
    assert told.tell(StandBy(0, 3)) == [StandingBy(round=0, maximum=3)]
    assert told.tell(StandBy(1, 3)) == []
    begin = Begin(place(2))
    assert told.tell(begin) == [Promoted(round=2, group_rank=1), begin]
    assert told.tell(StandBy(3, 3)) == [StandingBy(round=3, maximum=3)]


def test_waiting_is_an_event() -> None:
    """With all that is known."""
    (event,) = Told().tell(Stay(Gathering(0, 1, 2, 3, time_left=4.0)))
    assert isinstance(event, RoundForming)
    assert (event.joined, event.time_left) == (1, 4.0)


def test_a_granted_restart_is_remembered_until_it_happens() -> None:
    """A next coordinator hears of it from the ticket."""
    pause = Pause(Cause(1, "restart 1 of 3", 1, 8.0, failure()))
    told = Told(Begin(place(0)))
    assert told.tell(pause) == [pause]
    assert told.tell(pause) == [], "told again"
    assert told.member.ticket.granted == pause.cause
    told.tell(Begin(place(1)))
    assert told.member.ticket.granted is None


def test_the_end_is_the_end() -> None:
    """Nothing is obeyed after it, and the ticket says what it was."""
    told = Told(Begin(place(0)))
    assert told.tell(END) == [END]
    assert told.member.has_ended
    assert told.member.ticket.ending == END.ending
    assert told.tell(Begin(place(1))) == []
    assert told.member.give_up("too late") == []


def test_a_refusal_ends_the_job_for_this_member() -> None:
    """With the others' reason."""
    (end,) = Told().tell(Refuse("it is too old"))
    assert isinstance(end, Conclude)
    assert end.ending.exit_code == RENDEZVOUS_FAILED
    assert end.ending.is_rendezvous
    assert end.ending.why == "the other nodes refused this one: it is too old"


def test_one_that_is_cut_off_stops() -> None:
    """But only if there is something to be stopped."""
    told = Told()
    assert told.member.cut_off("no store") == []
    told.tell(Begin(place(0)))
    assert told.member.cut_off("no store") == [Halt(0, "no store")]
    told.member.report(Ended(0))
    assert told.member.cut_off("no store") == []


def test_every_change_is_a_newer_ticket() -> None:
    """Serials only grow."""
    member = Member(ticket("a", Rules(1, 4)))
    serials = [member.ticket.serial]
    for change in (
        lambda: member.found("b", is_host=True),
        lambda: member.reserved(5),
        member.again,
        lambda: member.coordinated("c", 1),
    ):
        change()
        serials.append(member.ticket.serial)
    assert serials == sorted(set(serials))
    member.reserved(5)
    assert member.ticket.serial == serials[-1], "nothing has changed"
