"""A member: its effects and its status after orders and reports."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elastic_aio.node_events import CoordinatorChanged, NodeStandby, RoundForming, StandbyPromoted
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.ranks import NodeSize, assign_node_ranks
from elastic_aio.rendezvous.base import (
    RENDEZVOUS_FAILED,
    ChangeAgreed,
    ChangePending,
    EndJob,
    PeersFinished,
    Placement,
    RestartCause,
    RestartPending,
    RoundFailing,
    RoundStarted,
    RoundStopped,
    RoundSucceeded,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import (
    MemberPhase,
    MembersDone,
    Order,
    OrderBody,
    ProbePeers,
    Reject,
    StandBy,
    WaitForNodes,
)
from elastic_aio.rendezvous.state import RoundSettings
from tests.support.coordinator_harness import failure, status

END = EndJob(JobOutcome(JobState.SUCCEEDED, "all is well", 0))


def place(round: int, group_rank: int = 1, formed_by: str = "1.c", **fields: object) -> Placement:
    """Return a placement in a round of three."""
    span = assign_node_ranks([NodeSize("default", 1)] * 3)[group_rank]
    return replace(
        Placement(round, formed_by, round, 0, 0, span, "a", 1 if not group_rank else 7), **fields
    )


class OrderedMember:
    """A member, with a coordinator that numbers its orders."""

    def __init__(self, *bodies: OrderBody) -> None:
        self.member = Member("a", status("a", RoundSettings(1, 4)))
        self.serial = 0
        for body in bodies:
            self.order(body)

    def order(self, body: OrderBody, term: int = 1) -> list[MemberEffect]:
        """Send the next order."""
        self.serial += 1
        return self.member.on_order(Order(term, self.serial, body))


def test_a_placement_is_taken() -> None:
    """The status says RUNNING at once: the workers are about to start."""
    ordered = OrderedMember()
    start = StartRound(place(0))
    assert ordered.order(start) == [start]
    assert ordered.member.status.phase is MemberPhase.RUNNING
    assert ordered.member.status.placement == start.placement
    assert ordered.member.status.acked == (1, 1)


def test_an_order_that_is_not_newer_is_dropped() -> None:
    ordered = OrderedMember(StartRound(place(0)))
    before = ordered.member.status
    for serial in (0, 1):
        assert ordered.member.on_order(Order(1, serial, StopRound(0, "late"))) == []
    assert ordered.member.status == before


def test_orders_of_a_former_coordinator_are_dropped() -> None:
    """Once a newer one is known, by its own order or by its record."""
    ordered = OrderedMember(StartRound(place(0)))
    assert ordered.member.on_coordinator("b", 3) == [CoordinatorChanged(name="b", term=3)]
    assert ordered.member.on_coordinator("b", 3) == []
    assert ordered.order(StopRound(0, "by the former"), term=2) == []
    assert ordered.order(StopRound(0, "by the present"), term=3) == [StopRound(0, "by the present")]
    assert ordered.member.on_order(Order(5, 1, StandBy(0, 3))) != []
    assert ordered.order(StopRound(0, "by the former"), term=3) == []
    assert ordered.member.on_coordinator("d", 5) == [CoordinatorChanged(name="d", term=5)]


def test_terms_begin_anew_at_another_store() -> None:
    """After a reconnection to the same store they do not."""
    ordered = OrderedMember()
    ordered.member.attend(b"first")
    ordered.member.on_coordinator("b", 3)
    ordered.order(StartRound(place(0)), term=3)
    ordered.member.attend(b"first")
    assert ordered.member.status.acked == (3, 1)
    assert ordered.order(StopRound(0, "by the former"), term=2) == []
    assert ordered.member.on_coordinator("b", 3) == []
    ordered.member.attend(b"second")
    assert ordered.member.status.acked == (0, 0)
    assert ordered.member.on_coordinator("c", 1) == [CoordinatorChanged(name="c", term=1)]
    assert ordered.member.on_order(Order(1, 1, StopRound(0, "why"))) == [StopRound(0, "why")]


@pytest.mark.parametrize("body", [StartRound(place(0)), StopRound(0, "why")])
def test_a_repeated_order_is_only_acknowledged(body: OrderBody) -> None:
    """Its coordinator waits for that; another one sends it for the first time."""
    ordered = OrderedMember(StartRound(place(0)), body)
    before = ordered.member.status
    assert ordered.order(body) == []
    serial = before.serial + 1
    assert ordered.member.status == replace(before, serial=serial, acked=(1, ordered.serial))


@pytest.mark.parametrize(
    "stale",
    [
        place(5, formed_by="2.other"),
        place(4),
        place(6, 0, master_port=99),
        place(6, 0, master_addr="elsewhere"),
    ],
)
def test_a_stale_start_order_is_acked_and_dropped(stale: Placement) -> None:
    """The round is not newer, or the port is not the reserved one."""
    ordered = OrderedMember(StartRound(place(5)))
    before = ordered.member.status
    assert ordered.order(StartRound(stale)) == []
    after = ordered.member.status
    assert after.serial == before.serial + 1
    assert after.acked == (1, 2)
    assert after.placement == before.placement


def test_reports_of_earlier_rounds_are_dropped() -> None:
    ordered = OrderedMember(StartRound(place(0)), StartRound(place(1)))
    before = ordered.member.status
    ordered.member.report(RoundStopped(0, (failure(),)))
    ordered.member.report(RoundFailing(0, "x"))
    ordered.member.report(RoundStarted(1))
    assert ordered.member.status == before


def test_a_failure_is_reported_in_two_steps() -> None:
    """First FAILING, then the failures once no worker is left."""
    ordered = OrderedMember(StartRound(place(0)))
    ordered.member.report(RoundFailing(0, "x"))
    assert ordered.member.status.phase is MemberPhase.FAILING
    ordered.member.report(RoundStopped(0, (failure(4),), runtime=3.5))
    last = ordered.member.status
    assert (last.phase, last.failures, last.runtime) == (MemberPhase.STOPPED, (failure(4),), 3.5)
    assert last.stopped_round == 0
    ordered.member.report(RoundStopped(0))
    assert ordered.member.status.failures == (failure(4),), "a second report takes nothing back"
    ordered.order(StartRound(place(1)))
    assert not ordered.member.status.failures


def test_a_stop_is_confirmed_once_no_worker_is_left() -> None:
    """Also for a later round, which was never started here."""
    ordered = OrderedMember(StartRound(place(0)))
    assert ordered.order(StopRound(2, "why")) == [StopRound(0, "why")]
    assert ordered.member.status.stopped_round == -1
    ordered.member.report(RoundStopped(0))
    assert ordered.member.status.stopped_round == 2


def test_a_stop_without_workers_is_confirmed_at_once() -> None:
    ordered = OrderedMember()
    assert ordered.order(StopRound(0, "why")) == []
    assert ordered.member.status.stopped_round == 0


def test_a_stop_of_an_earlier_round_is_dropped() -> None:
    ordered = OrderedMember(StartRound(place(3)))
    assert ordered.order(StopRound(2, "why")) == []
    assert ordered.member.status.is_busy


def test_a_stop_after_success_reaches_the_agent() -> None:
    """It waits at the exit barrier."""
    ordered = OrderedMember(StartRound(place(0)))
    ordered.member.report(RoundSucceeded(0))
    assert (ordered.member.status.phase, ordered.member.status.stopped_round) == (
        MemberPhase.SUCCEEDED,
        0,
    )
    assert ordered.order(StopRound(0, "why")) == [StopRound(0, "why")]
    ordered.member.report(RoundStopped(0))
    assert ordered.member.status.phase is MemberPhase.STOPPED


def test_a_probe_is_reported_until_the_next_round() -> None:
    ordered = OrderedMember()
    probe = ProbePeers(4, "b", 99)
    assert ordered.order(probe) == [probe]
    ordered.member.probed(4, "no route\udc80")
    assert (ordered.member.status.probed_round, ordered.member.status.probe_error) == (
        4,
        "no route\udc80",
    )
    ordered.order(StartRound(place(4)))
    assert (ordered.member.status.probed_round, ordered.member.status.probe_error) == (-1, "")


def test_standby_is_one_event_and_ends_with_a_promotion() -> None:
    ordered = OrderedMember()
    assert ordered.order(StandBy(0, 3)) == [NodeStandby(round=0, maximum=3)]
    assert ordered.order(StandBy(1, 3)) == []
    start = StartRound(place(2))
    assert ordered.order(start) == [StandbyPromoted(round=2, group_rank=1), start]
    assert ordered.order(StandBy(3, 3)) == [NodeStandby(round=3, maximum=3)]


def test_a_recorded_end_is_not_that_of_a_node_whose_rank_is_held() -> None:
    ordered = OrderedMember()
    ordered.order(StandBy(0, 3, "node rank 1 is held by b (pid 1)"))
    (end,) = ordered.member.on_end(JobOutcome(JobState.SUCCEEDED, "done", 0))
    assert isinstance(end, EndJob)
    assert end.outcome.why.endswith("refused this one: node rank 1 is held by b (pid 1)")


def test_a_node_that_has_got_its_rank_takes_the_end() -> None:
    ordered = OrderedMember()
    ordered.order(StandBy(0, 3, "node rank 1 is held by b (pid 1)"))
    ordered.order(StartRound(place(2)))
    end = EndJob(JobOutcome(JobState.SUCCEEDED, "done", 0))
    assert ordered.order(end) == [end]


def test_waiting_is_an_event() -> None:
    (event,) = OrderedMember().order(
        WaitForNodes(RoundForming(round=0, joined=1, minimum=2, maximum=3, time_left=4.0))
    )
    assert isinstance(event, RoundForming)
    assert (event.joined, event.time_left) == (1, 4.0)


def test_a_pending_restart_is_in_the_status_until_the_round_starts() -> None:
    pending = RestartPending(RestartCause(1, "restart 1 of 3", 1, 8.0, failure()))
    ordered = OrderedMember(StartRound(place(0)))
    assert ordered.order(pending) == [pending]
    assert ordered.order(pending) == [], "a repeated order"
    assert ordered.member.status.pending_restart == pending.cause
    ordered.order(StartRound(place(1)))
    assert ordered.member.status.pending_restart is None


def test_orders_after_the_end_are_dropped() -> None:
    ordered = OrderedMember(StartRound(place(0)))
    assert ordered.order(END) == [END]
    assert ordered.member.has_ended
    assert ordered.member.status.outcome == END.outcome
    assert ordered.order(StartRound(place(1))) == []
    assert ordered.member.fail("too late") == []


def test_a_rejected_member_fails() -> None:
    (end,) = OrderedMember().order(Reject("it is too old"))
    assert isinstance(end, EndJob)
    assert end.outcome.exit_code == RENDEZVOUS_FAILED
    assert end.outcome.is_rendezvous
    assert end.outcome.why == "the other nodes refused this one: it is too old"


def test_an_isolated_member_stops_its_workers() -> None:
    ordered = OrderedMember()
    assert ordered.member.isolate("no store") == []
    ordered.order(StartRound(place(0)))
    assert ordered.member.isolate("no store") == [StopRound(0, "no store")]
    cut_off = ordered.member.isolate("no store", is_cut_off=True)
    assert cut_off == [StopRound(0, "no store", is_cut_off=True)]
    ordered.member.report(RoundStopped(0))
    assert ordered.member.isolate("no store") == []


def test_every_change_has_a_new_serial() -> None:
    member = Member("a", status("a", RoundSettings(1, 4)))
    serials = [member.status.serial]
    member.set_address("b", is_host=True)
    serials.append(member.status.serial)
    member.set_port(5)
    serials.append(member.status.serial)
    member.attend(b"store")
    serials.append(member.status.serial)
    assert serials == sorted(set(serials))
    member.set_port(5)
    assert member.status.serial == serials[-1], "nothing has changed"


def test_a_pending_change_is_passed_on_until_it_is_withdrawn_or_begins() -> None:
    """The status shows that it was seen: the next coordinator may have to withdraw it."""
    ordered = OrderedMember(StartRound(place(0)))
    for change in (ChangePending(0, "d joined", 30.0), ChangePending(0, "d, e joined", 30.0)):
        assert ordered.order(change) == [change]
        assert ordered.order(change) == []
        assert ordered.member.status.is_change_pending
    assert ordered.order(ChangePending(0, "gone")) == [ChangePending(0, "gone")]
    assert not ordered.member.status.is_change_pending
    ordered.order(ChangePending(0, "f joined", 30.0))
    ordered.order(StartRound(place(1)))
    assert not ordered.member.status.is_change_pending


def test_the_success_of_others_is_passed_on_once() -> None:
    """The status shows that it was seen: the next coordinator need not repeat it."""
    ordered = OrderedMember(StartRound(place(0)))
    assert ordered.order(MembersDone(0, 0, 2, 1.0)) == [PeersFinished(0, 2, 1.0)]
    assert ordered.order(MembersDone(0, 1, 2, 9.0)) == []
    assert ordered.order(MembersDone(0, 2)) == []
    assert ordered.order(MembersDone(1, 0, 4, 1.0)) == []
    assert (ordered.member.status.members_done, ordered.member.status.peers_finished) == (2, 2)
    ordered.order(StartRound(place(1)))
    assert ordered.member.status.peers_finished == 0


def test_the_first_success_is_in_the_status_until_the_next_round() -> None:
    """It stays if the workers of other nodes fail after those of this one have succeeded."""
    ordered = OrderedMember(StartRound(place(0)))
    ordered.member.report(RoundSucceeded(0, (3, 50.0)))
    ordered.order(StopRound(0, "a worker on b has failed"))
    ordered.member.report(RoundStopped(0))
    kept = ordered.member.status
    assert (kept.phase, kept.first_success) == (MemberPhase.STOPPED, (3, 50.0))
    ordered.order(StartRound(place(1)))
    begun = ordered.member.status
    assert begun.first_success is None
    ordered.member.report(RoundStopped(1, first_success=(4, 60.0)))
    assert ordered.member.status.first_success == (4, 60.0)


def test_the_status_has_the_last_change_and_the_agreement_until_the_next_round() -> None:
    ordered = OrderedMember(StartRound(place(0)))
    ordered.order(ChangePending(0, "d joined", 30.0, number=2))
    ordered.member.report(ChangeAgreed(0, 2))
    status = ordered.member.status
    assert (status.change, status.agreed_change) == (2, 2)
    ordered.order(StartRound(place(1)))
    ordered.member.report(ChangeAgreed(0, 2))
    status = ordered.member.status
    assert (status.change, status.agreed_change) == (-1, -1)
