"""Encoding and parsing of requests, with any split of the bytes, and the limits."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.store import wire
from elastic_aio.store.wire import OPENING, Request, RequestReader, WireError, WireLimits, encode

VECTORS = Path(__file__).with_name("vectors.txt")

keys = st.binary(max_size=20)
values = st.binary(max_size=40)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
uint32 = st.integers(0, (1 << 32) - 1)

ARGUMENTS: dict[int, st.SearchStrategy[Any]] = {
    wire.KEY: st.none(),
    wire.KEY_1: values,
    wire.KEY_2: st.lists(values, min_size=2, max_size=2),
    wire.KEY_3: st.lists(values, min_size=3, max_size=3),
    wire.KEY_NUMBER: int64,
    wire.KEYS: st.lists(keys, max_size=5).map(tuple),
    wire.PAIRS: st.lists(st.tuples(keys, values), max_size=5).map(tuple),
    wire.NOTHING: st.none(),
    wire.WORD: uint32,
    wire.WORDS: st.tuples(uint32, uint32),
}
KEYED = {wire.KEY, wire.KEY_1, wire.KEY_2, wire.KEY_3, wire.KEY_NUMBER}


@st.composite
def a_request(draw: st.DrawFn, opcodes: frozenset[int], tag: int) -> Request:
    op = draw(st.sampled_from(sorted(opcodes)))
    shape = wire.SHAPE_OF[op]
    key = draw(keys) if shape in KEYED else b""
    return op, key, draw(ARGUMENTS[shape]), draw(uint32) if tag else 0


plain_requests = st.lists(a_request(wire.PLAIN_OPCODES - {wire.HELLO}, 0), max_size=8)
tagged_requests = st.lists(a_request(wire.TAGGED_OPCODES, 1), max_size=8)


def read_all(reader: RequestReader, chunks: list[bytes], most: int = 1024) -> list[Request]:
    found = []
    for chunk in chunks:
        found += reader.read(chunk, most)
        while reader.has_more:
            found += reader.read(b"", most)
    return found


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def stream_of(plain: list[Request], tagged: list[Request]) -> bytes:
    frames = [OPENING]
    frames += [encode(op, key, argument) for op, key, argument, _ in plain]
    frames.append(encode(wire.HELLO, b"", wire.VERSION))
    frames += [encode(op, key, argument, tag) for op, key, argument, tag in tagged]
    return b"".join(frames)


HELLO = (wire.HELLO, b"", wire.VERSION, 0)


@given(plain_requests, tagged_requests, st.lists(st.integers(0, 10_000), max_size=12))
def test_any_split_gives_the_same_requests(
    plain: list[Request], tagged: list[Request], places: list[int]
) -> None:
    """Requests of both dialects round-trip."""
    reader = RequestReader(WireLimits())
    found = read_all(reader, cut(stream_of(plain, tagged), places))
    assert found == [*plain, HELLO, *tagged]
    assert reader.is_idle
    assert not reader.is_partial
    assert reader.partial_size == 0


@given(plain_requests, tagged_requests, st.integers(1, 3))
def test_single_bytes_and_one_segment(
    plain: list[Request], tagged: list[Request], most: int
) -> None:
    """One byte at a time, or all at once and returned in small portions."""
    data = stream_of(plain, tagged)
    expected = [*plain, HELLO, *tagged]
    single = [data[at : at + 1] for at in range(len(data))]
    assert read_all(RequestReader(WireLimits()), single) == expected
    assert read_all(RequestReader(WireLimits()), [data], most) == expected


@given(plain_requests, st.lists(st.integers(0, 10_000), max_size=6), st.binary(max_size=20))
def test_requests_before_garbage_are_returned(
    plain: list[Request], places: list[int], garbage: bytes
) -> None:
    """Before the unknown opcode after them is refused."""
    data = stream_of(plain, [])[:-5] + b"\x7f" + garbage
    reader = RequestReader(WireLimits())
    found: list[Request] = []

    def read() -> None:
        for chunk in cut(data, places):
            found.extend(reader.read(chunk))
            while reader.has_more:
                found.extend(reader.read(b""))

    with pytest.raises(WireError, match="unknown opcode, 0x7f"):
        read()
    assert found == plain
    with pytest.raises(WireError, match="unknown opcode"):
        reader.read(b"")


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_arbitrary_bytes_give_requests_or_a_wire_error(data: bytes, places: list[int]) -> None:
    """No other error is raised, and no more is held than was sent."""
    reader = RequestReader(WireLimits())
    try:
        read_all(reader, cut(OPENING + data, places))
    except WireError:
        pass
    assert reader.partial_size <= len(data) + 5


def test_recorded_requests_round_trip() -> None:
    """Requests recorded from torch's client are parsed, and encoded to the same bytes."""
    lines = VECTORS.read_text().splitlines()
    sent = [bytes.fromhex(line[1:].strip()) for line in lines if line.startswith(">")]
    assert sent[0].startswith(OPENING)
    found = read_all(RequestReader(WireLimits()), sent)
    assert len(found) == len(sent) - 1
    opening, rest = b"".join(sent)[:5], b"".join(sent)[5:]
    assert opening == OPENING
    assert b"".join(encode(op, key, argument) for op, key, argument, _ in found) == rest


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x01", "does not begin like"),
        (b"GET / HTTP/1.1\r\n", "does not begin like"),
        (b"\x00\xce\xf7\x85\x3d", "does not begin like"),
        (OPENING + OPENING, "unknown opcode, 0x00"),
        (OPENING + b"\x81", "unknown opcode, 0x81"),
        (OPENING + struct.pack("<BQ", wire.SET, 8193), "a key of 8193 bytes"),
        (OPENING + struct.pack("<BQ", wire.GET, 1 << 63), "a key of"),
        (OPENING + struct.pack("<BQ1sQ", wire.SET, 1, b"k", (8 << 20) + 1), "a value of 8388609"),
        (OPENING + struct.pack("<BQQ", wire.COMPARE_SET, 0, 1 << 40), "where 8388608 are"),
        (OPENING + struct.pack("<BQ", wire.WAIT, 131_073), "131073 items"),
        (OPENING + struct.pack("<BQQ", wire.WAIT, 1, 8193), "announced 8193 bytes where 8192"),
        (OPENING + struct.pack("<BQQ", wire.MULTI_SET, 2, 9000), "where 8192 are"),
        (OPENING + struct.pack("<BQQQ", wire.MULTI_SET, 2, 0, 1 << 30), "where 8388608 are"),
        (OPENING + b"\x80\x01\0\0\0" + b"\0\0\0\0\x0c", "unknown opcode, 0x0c"),
    ],
)
def test_invalid_lengths_and_opcodes_are_refused_at_once(data: bytes, message: str) -> None:
    """As soon as they are readable, before the announced bytes arrive."""
    with pytest.raises(WireError, match=message):
        read_all(RequestReader(WireLimits()), [data])
    with pytest.raises(WireError, match=message):
        read_all(RequestReader(WireLimits()), [data[at : at + 1] for at in range(len(data))])


def test_the_total_size_of_a_request_is_limited() -> None:
    """Ten values of 100 bytes with a limit of 1000 for the request."""
    limits = WireLimits(value=100, request=1000)
    frame = encode(wire.MULTI_SET, b"", tuple((b"k", b"v" * 100) for _ in range(10)))
    with pytest.raises(WireError, match="more than 1000 bytes in one request"):
        RequestReader(limits).read(OPENING + frame)
    data = OPENING + frame
    with pytest.raises(WireError, match="more than 1000"):
        read_all(RequestReader(limits), [data[at : at + 1] for at in range(len(data))])


def test_the_size_of_a_partial_request() -> None:
    """It is 0 again once the request is complete."""
    reader = RequestReader(WireLimits())
    frame = encode(wire.MULTI_SET, b"", ((b"a", b"b" * 1000), (b"c", b"d")))
    assert reader.read(OPENING) == []
    assert reader.is_opened
    assert reader.read(frame[:-3]) == []
    assert reader.is_partial
    assert 1000 < reader.partial_size < len(frame)
    assert reader.read(frame[-3:]) == [
        (wire.MULTI_SET, b"", ((b"a", b"b" * 1000), (b"c", b"d")), 0)
    ]
    assert (reader.is_partial, reader.partial_size) == (False, 0)
