"""Replies as bytes: cut apart in both dialects, whatever the splits."""

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
    Greeting,
    RawChange,
    RawView,
    ReplyReader,
    TaggedReader,
    decode,
    decode_news,
    encode_change,
    encode_reply,
    encode_view,
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
    replies.GREETING: st.builds(
        Greeting,
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


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)] or [b""]


@given(st.lists(a_reply(), max_size=8), st.lists(st.integers(0, 1000), max_size=10))
def test_plain_replies_come_back(sent: list[tuple[int, Any]], places: list[int]) -> None:
    """Cut anywhere, replies are matched with the requests by their order alone."""
    reader = ReplyReader()
    for op, result in sent:
        reader.expect(op, count_of(op, result))
    data = b"".join(encode_reply(op, result) for op, result in sent)
    found = [result for chunk in cut(data, places) for result in reader.read(chunk)]
    assert found == [result for _, result in sent]
    with pytest.raises(WireError, match="nobody made"):
        reader.read(b"x")


@given(st.lists(a_reply(), max_size=8), st.lists(st.integers(0, 1000), max_size=10))
def test_tagged_replies_come_back(sent: list[tuple[int, Any]], places: list[int]) -> None:
    """Cut anywhere, replies carry their tags."""
    data = b"".join(
        tagged(tag, replies.DONE, encode_reply(op, result)) for tag, (op, result) in enumerate(sent)
    )
    reader = TaggedReader()
    found = [reply for chunk in cut(data, places) for reply in reader.read(chunk)]
    assert [tag for tag, _, _ in found] == list(range(len(sent)))
    for (op, result), (_, status, payload) in zip(sent, found, strict=True):
        assert status == replies.DONE
        assert decode(op, count_of(op, result), payload) == result


@given(a_reply(), st.binary(max_size=20))
def test_replies_that_make_no_sense_are_refused(sent: tuple[int, Any], garbage: bytes) -> None:
    """A payload with garbage behind it, or of garbage, is a wire error or a result."""
    op, result = sent
    with pytest.raises(WireError, match="make no sense"):
        decode(op, count_of(op, result), encode_reply(op, result) + garbage + b"x" * (not garbage))
    try:
        decode(op, 2, garbage)
        decode_news(garbage)
    except WireError:
        pass


def test_the_vectors_are_read() -> None:
    """What torch's server was seen to answer is understood, and encoded to the same bytes."""
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
            assert encode_reply(op, result) == data
            checked += 1
    assert checked > 25
    assert bytes.fromhex("00cef7853c") == OPENING


@given(
    st.builds(RawChange, st.sampled_from([0, 1, 2]), int64, values, values)
    | st.builds(
        RawView, st.booleans(), int64, st.lists(st.tuples(values, values), max_size=4).map(tuple)
    )
)
def test_news_come_back(news: RawChange | RawView) -> None:
    """Changes and views survive the wire."""
    payload = encode_change(news) if isinstance(news, RawChange) else encode_view(news)
    assert decode_news(payload) == news


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IBI", 1, 0, (256 << 20) + 1),
        struct.pack("<IBI", 1, 7, 0),
    ],
)
def test_absurd_tagged_replies_are_refused(data: bytes) -> None:
    """Lengths and statuses that no server of ours sends end the connection."""
    with pytest.raises(WireError, match="sent a reply with status"):
        TaggedReader().read(data)


def test_absurd_plain_replies_are_refused() -> None:
    """A length is not believed before its bytes have come."""
    reader = ReplyReader()
    reader.expect(wire.GET)
    with pytest.raises(WireError, match="announced 1099511627776 bytes"):
        reader.read(struct.pack("<Q", 1 << 40))


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"\0" * 5, "too short"),
        (struct.pack("<BqQ", 0, 1, 9) + b"k", "too short"),
        (struct.pack("<BqQ", 9, 1, 0), "unknown kind"),
        (struct.pack("<BqQ", 4, 1, 1), "unknown kind|do not add up"),
        (encode_view(RawView(True, 1, ((b"a", b"b"),))) + b"x", "do not add up"),
    ],
)
def test_malformed_news_are_refused(payload: bytes, complaint: str) -> None:
    """News whose lengths do not fit are a wire error."""
    with pytest.raises(WireError, match=complaint):
        decode_news(payload)
