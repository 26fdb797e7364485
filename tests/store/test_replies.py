"""Encoding and parsing of replies in both dialects, with any split of the bytes."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.store import replies, wire
from elastic_aio.store.replies import (
    ENCODER_OF,
    LARGE,
    HelloReply,
    RawChange,
    ReplyReader,
    ReplyTooLarge,
    TaggedReader,
    WatchSnapshot,
    decode,
    decode_notification,
    encode_change,
    encode_snapshot,
    tagged,
)
from elastic_aio.store.wire import OPENING, RequestReader, WireError, WireLimits

VECTORS = Path(__file__).with_name("vectors.txt")

values = st.binary(max_size=30)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)

RESULTS: dict[int, st.SearchStrategy[Any]] = {
    replies.BYTE: st.sampled_from([0, 1]),
    replies.WORD: st.integers(0, (1 << 32) - 1),
    replies.NUMBER: int64,
    replies.VALUE: values,
    replies.VALUES: st.lists(values, max_size=4),
    replies.NAMES: st.lists(values, max_size=4),
    replies.POPPED: st.one_of(
        st.just((0, b"")), st.tuples(st.integers(1, 1 << 20), st.binary(max_size=30))
    ),
    replies.MAYBE: st.none() | values,
    replies.HELLO_REPLY: st.builds(
        HelloReply,
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=16, max_size=16),
        st.booleans(),
    ),
}


@st.composite
def a_reply(draw: st.DrawFn) -> tuple[int, Any]:
    op = draw(st.sampled_from([op for op, kind in replies.KIND_OF.items() if kind in RESULTS]))
    return op, draw(RESULTS[replies.KIND_OF[op]])


def count_of(op: int, result: Any) -> int:
    return len(result) if replies.KIND_OF[op] == replies.VALUES else 0


def whole(reply: bytes | replies.Pieces) -> bytes:
    return reply if isinstance(reply, bytes) else b"".join(reply)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)] or [b""]


@given(st.lists(a_reply(), max_size=8), st.lists(st.integers(0, 1000), max_size=10))
def test_plain_replies_round_trip(sent: list[tuple[int, Any]], places: list[int]) -> None:
    """Replies are matched with the requests by their order."""
    reader = ReplyReader()
    for op, result in sent:
        reader.expect(op, count_of(op, result))
    data = b"".join(whole(ENCODER_OF[op](result)) for op, result in sent)
    found = [result for chunk in cut(data, places) for result in reader.read(chunk)]
    assert found == [result for _, result in sent]
    with pytest.raises(WireError, match="sent an unexpected reply"):
        reader.read(b"x")


@given(st.lists(a_reply(), max_size=8), st.lists(st.integers(0, 1000), max_size=10))
def test_tagged_replies_round_trip(sent: list[tuple[int, Any]], places: list[int]) -> None:
    """Each reply has its tag and status."""
    data = b"".join(
        whole(tagged(tag, replies.DONE, ENCODER_OF[op](result)))
        for tag, (op, result) in enumerate(sent)
    )
    reader = TaggedReader()
    found = [reply for chunk in cut(data, places) for reply in reader.read(chunk)]
    assert [tag for tag, _, _ in found] == list(range(len(sent)))
    for (op, result), (_, status, payload) in zip(sent, found, strict=True):
        assert status == replies.DONE
        assert decode(op, count_of(op, result), payload) == result


@given(a_reply(), st.binary(max_size=20))
def test_malformed_payloads_are_refused(sent: tuple[int, Any], garbage: bytes) -> None:
    """Trailing garbage is a WireError; a payload of garbage is one or a result."""
    op, result = sent
    encoded = whole(ENCODER_OF[op](result))
    with pytest.raises(WireError, match="malformed reply"):
        decode(op, count_of(op, result), encoded + garbage + b"x" * (not garbage))
    try:
        decode(op, 2, garbage)
        decode_notification(garbage)
    except WireError:
        pass


def test_recorded_replies_round_trip() -> None:
    """Replies recorded from torch's server are parsed, and encoded to the same bytes."""
    reader = RequestReader(WireLimits())
    asked: list[wire.Request] = []
    checked = 0
    for line in VECTORS.read_text().splitlines():
        if line.startswith(">"):
            asked += reader.read(bytes.fromhex(line[1:].strip()))
        elif line.startswith("< ") or line == "<":
            data = bytes.fromhex(line[1:].strip())
            op, _, argument, _ = asked[-1]
            answers = ReplyReader()
            answers.expect(op, len(argument) if op == wire.MULTI_GET else 0)
            [result] = answers.read(data)
            assert ENCODER_OF[op](result) == data
            checked += 1
    assert checked > 25
    assert bytes.fromhex("00cef7853c") == OPENING


@given(
    st.builds(RawChange, st.sampled_from([0, 1, 2]), int64, values, values)
    | st.builds(
        WatchSnapshot,
        st.booleans(),
        int64,
        st.lists(st.tuples(values, values), max_size=4).map(tuple),
    )
)
def test_notifications_round_trip(message: RawChange | WatchSnapshot) -> None:
    """Changes and snapshots."""
    payload = encode_change(message) if isinstance(message, RawChange) else encode_snapshot(message)
    assert decode_notification(whole(payload)) == message


def test_an_invalid_tagged_reply_is_refused() -> None:
    """An unknown status."""
    with pytest.raises(WireError, match="sent a reply with status"):
        TaggedReader().read(struct.pack("<IBI", 1, 7, 0))


def test_a_tagged_reply_that_is_too_large_is_reported() -> None:
    """Before its bytes arrive, and after the replies before it."""
    reply = whole(tagged(1, replies.DONE, b"\0"))
    found = TaggedReader().read(reply + struct.pack("<IBI", 2, 0, (256 << 20) + 1))
    assert found[0] == (1, replies.DONE, b"\0")
    assert found[1][:2] == (2, replies.TOO_LARGE)
    assert b"a reply of 268435457 bytes" in found[1][2]


def test_a_plain_reply_that_is_too_large_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its bytes arrive, and after the replies before it, even if only the sum is."""
    reader = ReplyReader()
    reader.expect(wire.CHECK)
    reader.expect(wire.GET)
    ready, too_large = reader.read(b"\0" + struct.pack("<Q", 1 << 40))
    assert ready == 0
    assert isinstance(too_large, ReplyTooLarge)
    assert "a reply of 1099511627776 bytes" in str(too_large)
    monkeypatch.setattr(replies, "MAX_REPLY", 1000)
    reader = ReplyReader()
    reader.expect(wire.MULTI_GET, 2)
    value = bytes(600)
    assert reader.read(struct.pack("<Q", len(value))) == []
    assert reader.read(value) == []
    [too_large] = reader.read(struct.pack("<Q", len(value)))
    assert isinstance(too_large, ReplyTooLarge)


@pytest.mark.parametrize(
    "result", [b"v" * LARGE, (2, b"v" * LARGE), [b"v" * LARGE, b""], [b"a", b"b" * LARGE]]
)
def test_large_values_are_not_copied(result: Any) -> None:
    """The reply is the same bytes in pieces, one of which is the value itself."""
    op = {"bytes": wire.PEEK, "tuple": wire.QUEUE_POP, "list": wire.MULTI_GET}[
        type(result).__name__
    ]
    reply = ENCODER_OF[op](result)
    large = max(result, key=len) if isinstance(result, list) else result
    large = large[1] if isinstance(large, tuple) else large
    assert any(piece is large for piece in reply)
    assert decode(op, count_of(op, result), whole(reply)) == result
    framed = tagged(7, replies.DONE, reply)
    assert any(piece is large for piece in framed)
    assert TaggedReader().read(whole(framed)) == [(7, replies.DONE, whole(reply))]


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"\0" * 5, "too short"),
        (struct.pack("<BqQ", 0, 1, 9) + b"k", "too short"),
        (struct.pack("<BqQ", 9, 1, 0), "unknown kind"),
        (struct.pack("<BqQ", 4, 1, 1), "unknown kind|do not add up"),
        (encode_snapshot(WatchSnapshot(True, 1, ((b"a", b"b"),))) + b"x", "do not add up"),
    ],
)
def test_malformed_notifications_are_refused(payload: bytes, complaint: str) -> None:
    """Lengths that do not match, and unknown kinds."""
    with pytest.raises(WireError, match=complaint):
        decode_notification(payload)
