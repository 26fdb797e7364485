"""Tickets and orders: whatever is read or written, it fits and means something."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic_aio.outcome import Failure, JobState, WorkerError
from elastic_aio.ranks import NodeSize, assign_spans
from elastic_aio.rendezvous.base import (
    Begin,
    Cause,
    Conclude,
    Ended,
    Ending,
    NodeCard,
    Placement,
)
from elastic_aio.rendezvous.member import Member
from elastic_aio.rendezvous.state import Rules
from elastic_aio.rendezvous.tickets import (
    Order,
    Ticket,
    Unreadable,
    bounded,
    in_our_time,
    read_order,
    read_ticket,
    sketched,
    written,
)
from tests.support.stage import failure, ticket

PLAIN = ticket("a", Rules(1, 2))
ROOM = 64 * 1024


def placement(nodes: int, group_rank: int) -> Placement:
    """Return a place in a round of so many nodes of eight workers."""
    spans = assign_spans([NodeSize("default", 8)] * nodes)
    return Placement(3, "2.host-1", 3, 1, 2, spans[group_rank], "10.0.0.1", 40_000)


def huge(text: str) -> Failure:
    """Return a failure with much text of one kind."""
    error = WorkerError(text * 30_000, text * 300_000, 1.0, text * 5000)
    return failure(
        host=text * 300,
        error=error,
        message=text * 100_000,
        stderr_tail=(text * 50_000,) * 40,
        stderr_path=text * 5000,
        notes=(text * 20_000,) * 50,
    )


@given(st.binary(max_size=300))
def test_garbage_is_unreadable(text: bytes) -> None:
    """No bytes do more than raise one error."""
    with pytest.raises(Unreadable):
        read_ticket(text)
    with pytest.raises(Unreadable):
        read_order(text)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_damaged_tickets_are_read_or_unreadable(position: int, byte: int) -> None:
    """One wrong byte anywhere raises nothing else, and no round is decided by nonsense."""
    text = bytearray(written(replace(PLAIN, held=placement(3, 1), failures=(failure(),))))
    text[position % len(text)] = byte
    try:
        found = read_ticket(bytes(text))
    except Unreadable:
        return
    assert found.card.nproc > 0


def test_what_is_written_is_read() -> None:
    """Both forms, with everything in them."""
    ending = Ending(JobState.FAILED, "so", 3, 1, (failure(3),))
    full = replace(
        PLAIN,
        held=placement(3, 1),
        failures=(failure(), failure(2)),
        seen=(3, 4),
        granted=Cause(4, "why", 2, 1.5, failure()),
        ending=ending,
    )
    assert read_ticket(written(full)) == full
    for body in (Begin(placement(3, 0), Cause(1, "x", 1)), Conclude(ending)):
        order = Order(2, 9, body)
        assert read_order(written(order)) == order


def test_fields_that_nobody_knows_are_passed_over() -> None:
    """A later version may say more."""
    said = {**json.loads(written(PLAIN)), "favourite_colour": "blue"}
    assert read_ticket(json.dumps(said).encode()) == PLAIN


def test_another_version_is_named() -> None:
    """Though nothing else of it can be read."""
    with pytest.raises(Unreadable, match="it speaks version 2 of the protocol, not 1"):
        read_ticket(b'{"protocol": 2, "all": "else"}')


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"card": NodeCard("a", 1, 0, "r")}, "nproc is 0"),
        ({"card": NodeCard("a" * 256, 1, 1, "r")}, "more than 255 characters"),
        ({"epoch": 1 << 53}, "too large"),
        ({"seen": (0, 1 << 60)}, "too large"),
        ({"held": replace(placement(2, 0), round=1 << 62)}, "too large"),
    ],
)
def test_nonsense_is_unreadable(fields: dict[str, object], why: str) -> None:
    """What no member of ours could write decides nothing."""
    with pytest.raises(Unreadable, match=why):
        read_ticket(written(replace(PLAIN, **fields)))


def test_what_is_too_long_is_not_even_looked_at() -> None:
    """Neither a ticket nor an order."""
    text = written(PLAIN) + b" " * ROOM
    for read in (read_ticket, read_order):
        with pytest.raises(Unreadable, match="are more than"):
            read(text)


@pytest.mark.parametrize("text", ["a", "\x00", "ü", "\U0001f600", "\udc80", '"'])
def test_any_number_of_failures_fits(text: str) -> None:
    """Whatever texts they carry: long ones, and such that JSON has to write longer still."""
    many = (huge(text),) * 100
    member = Member(replace(PLAIN, held=placement(2, 0)))
    member.report(Ended(3, many, final_why=text * 100_000))
    read_ticket(written(member.ticket))
    cut = bounded(many)
    ending = Ending(JobState.FAILED, "so", 1, 0, cut)
    read_order(written(Order(1, 1, Conclude(ending))))
    begin = Begin(placement(2, 0), Cause(1, "so", 1, 0.0, sketched(many[0])))
    assert len(written(Order(1, 1, begin))) < 4096
    assert len(cut) == 8
    assert bounded(cut) == cut


def test_small_failures_are_not_cut() -> None:
    """What fits is told whole."""
    whole = failure(3, message="m" * 1000, stderr_tail=("line",) * 20, notes=("note",))
    assert bounded((whole,)) == (whole,)


def test_the_end_of_a_text_is_kept() -> None:
    """It says what happened."""
    cut = bounded((failure(message="x" * 100_000 + "the end", stderr_tail=("1", "2") * 30),))[0]
    assert cut.message.endswith("the end")
    assert cut.stderr_tail[-1] == "2"


def test_orders_do_not_grow_with_the_number_of_nodes() -> None:
    """A place among a thousand nodes takes as much as one among ten, but for digits."""
    few, many = (len(written(Order(1, 1, Begin(placement(size, size - 1))))) for size in (10, 1000))
    assert many - few < 20
    assert many < 500


def test_a_ticket_is_small() -> None:
    """A thousand of them are less than a megabyte."""
    full: Ticket = replace(PLAIN, held=placement(1000, 999), seen=(10, 10_000))
    assert len(written(full)) < 1000


def test_failures_are_put_into_the_coordinators_time() -> None:
    """A host whose clock is hours behind does not look like the first to fail."""
    behind = replace(PLAIN, failures=(failure(time=1000.0),), sent_at=1000.5)
    (seen,) = in_our_time(behind, 8200.75).failures
    assert seen.time == 8200.25
    assert in_our_time(PLAIN, 8200.75) is PLAIN
