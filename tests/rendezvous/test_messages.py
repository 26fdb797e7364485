"""Statuses, orders and leader records: JSON, limits and truncation."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic_aio.outcome import Failure, JobOutcome, JobState, WorkerError
from elastic_aio.ranks import NodeSize, assign_node_ranks
from elastic_aio.rendezvous.base import (
    EndJob,
    NodeInfo,
    Placement,
    RestartCause,
    RoundStopped,
    StartRound,
)
from elastic_aio.rendezvous.member import Member
from elastic_aio.rendezvous.messages import (
    LeaderRecord,
    MemberStatus,
    MessageError,
    Order,
    RoundRecord,
    decode_order,
    decode_status,
    encode,
    truncate_failure,
    truncate_failures,
)
from elastic_aio.rendezvous.state import RoundSettings
from elastic_aio.spec.restart import RestartHistory
from tests.support.coordinator_harness import failure, status

PLAIN = status("a", RoundSettings(1, 2))
ROOM = 64 * 1024


def placement(nodes: int, group_rank: int) -> Placement:
    """Return a place in a round of so many nodes of eight workers."""
    spans = assign_node_ranks([NodeSize("default", 8)] * nodes)
    return Placement(3, "2.host-1", 3, 1, 2, spans[group_rank], "10.0.0.1", 40_000)


def test_defaults_are_not_written() -> None:
    """All nodes write their statuses at once; but which version wrote one is always there."""
    text = encode(replace(PLAIN, policy={}))
    assert len(text) < 256
    assert {"protocol", "serial", "node"} <= json.loads(text).keys()
    assert decode_status(text) == PLAIN


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
def test_garbage_raises_a_message_error(text: bytes) -> None:
    with pytest.raises(MessageError):
        decode_status(text)
    with pytest.raises(MessageError):
        decode_order(text)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_status_is_read_or_raises_a_message_error(position: int, byte: int) -> None:
    """With one wrong byte."""
    text = bytearray(encode(replace(PLAIN, placement=placement(3, 1), failures=(failure(),))))
    text[position % len(text)] = byte
    try:
        found = decode_status(bytes(text))
    except MessageError:
        return
    assert found.node.nproc > 0


def test_messages_are_decoded_as_they_were_encoded() -> None:
    outcome = JobOutcome(JobState.FAILED, "so", 3, 1, (failure(3),))
    full = replace(
        PLAIN,
        placement=placement(3, 1),
        failures=(failure(), failure(2)),
        acked=(3, 4),
        pending_restart=RestartCause(4, "why", 2, 1.5, failure()),
        outcome=outcome,
    )
    assert decode_status(encode(full)) == full
    for body in (StartRound(placement(3, 0), RestartCause(1, "x", 1)), EndJob(outcome)):
        order = Order(2, 9, body)
        assert decode_order(encode(order)) == order


def test_unknown_fields_are_ignored() -> None:
    said = {**json.loads(encode(PLAIN)), "favourite_colour": "blue"}
    assert decode_status(json.dumps(said).encode()) == PLAIN


def test_the_error_names_another_version() -> None:
    with pytest.raises(MessageError, match="it speaks version 1 of the protocol, not 2"):
        decode_status(b'{"protocol": 1, "all": "else"}')


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"node": NodeInfo("a", 1, 0, "r")}, "nproc is 0"),
        ({"minimum": 3, "maximum": 2}, "nnodes is 3:2"),
        ({"node": NodeInfo("a" * 256, 1, 1, "r")}, "more than 255 characters"),
        ({"stopped_round": 1 << 53}, "too large"),
        ({"acked": (0, 1 << 60)}, "too large"),
        ({"placement": replace(placement(2, 0), round=1 << 62)}, "too large"),
    ],
)
def test_impossible_values_raise_a_message_error(fields: dict[str, object], why: str) -> None:
    with pytest.raises(MessageError, match=why):
        decode_status(encode(replace(PLAIN, **fields)))


def test_too_long_messages_are_not_decoded() -> None:
    text = encode(PLAIN) + b" " * ROOM
    for read in (decode_status, decode_order):
        with pytest.raises(MessageError, match="are more than"):
            read(text)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a", "\x00", "ü", "\U0001f600", "\udc80", '"'])
def test_any_number_of_failures_fits(text: str) -> None:
    """With long texts, and with texts that JSON makes longer."""
    many = (huge(text),) * 100
    member = Member("a", replace(PLAIN, placement=placement(2, 0)))
    member.report(RoundStopped(3, many, permanent_reason=text * 100_000))
    decode_status(encode(member.status))
    cut = truncate_failures(many)
    outcome = JobOutcome(JobState.FAILED, "so", 1, 0, cut)
    decode_order(encode(Order(1, 1, EndJob(outcome))))
    begin = StartRound(placement(2, 0), RestartCause(1, "so", 1, 0.0, truncate_failure(many[0])))
    assert len(encode(Order(1, 1, begin))) < 4096
    assert len(cut) == 8
    assert truncate_failures(cut) == cut


def test_small_failures_are_not_truncated() -> None:
    whole = failure(3, message="m" * 1000, stderr_tail=("line",) * 20, notes=("note",))
    assert truncate_failures((whole,)) == (whole,)


def test_the_end_of_a_text_is_kept() -> None:
    cut = truncate_failures(
        (failure(message="x" * 100_000 + "the end", stderr_tail=("1", "2") * 30),)
    )[0]
    assert cut.message.endswith("the end")
    assert cut.stderr_tail[-1] == "2"


def test_orders_do_not_grow_with_the_number_of_nodes() -> None:
    """Apart from digits, from ten nodes to a thousand."""
    few, many = (
        len(encode(Order(1, 1, StartRound(placement(size, size - 1))))) for size in (10, 1000)
    )
    assert many - few < 20
    assert many < 500


def test_a_status_is_small() -> None:
    """A thousand take less than a megabyte."""
    full: MemberStatus = replace(PLAIN, placement=placement(1000, 999), acked=(10, 10_000))
    assert len(encode(full)) < 1000


# --------------------------------------------------------------- the leader record


def test_a_leader_record_is_decoded_as_it_was_encoded() -> None:
    """The form is that of every version so far."""
    record = LeaderRecord(term=3, member="host-1.7.ab", name="host-1")
    assert encode(record) == b'{"term":3,"member":"host-1.7.ab","name":"host-1"}'
    assert LeaderRecord.decode(encode(record)) == record


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"",
        b"x",
        b"{}",
        b'{"term":"3","member":"","name":""}',
        b'{"term":3,"member":"\xff","name":""}',
        b'{"x":' * 100_000,
    ],
)
def test_an_unreadable_leader_record_is_none(text: bytes | None) -> None:
    assert LeaderRecord.decode(text) is None


def test_a_round_record_is_decoded_as_it_was_encoded() -> None:
    history = RestartHistory(restarts=2, losses=1, restart_ages=(0.5, 3.0))
    record = RoundRecord(3, 7, 9, 1, is_open=True, history=history, written_at=1.8e9)
    assert RoundRecord.decode(encode(record)) == record


@pytest.mark.parametrize("number", [-1, 1 << 52, 1 << 64])
def test_an_unreadable_round_record_is_none(number: int) -> None:
    text = encode(RoundRecord(3, 7, 9, 1, is_open=True, history=RestartHistory(restarts=8)))
    for value in (b'"round":7', b'"attempt":9', b'"restarts":8'):
        name = value.partition(b":")[0]
        assert value in text
        assert RoundRecord.decode(text.replace(value, b"%b:%d" % (name, number))) is None
    assert RoundRecord.decode(b"") is None
