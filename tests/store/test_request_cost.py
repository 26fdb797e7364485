"""What the server executes for one request: functions and lines of the store, which do not vary."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any, cast

import pytest

from elastic_aio.store import StoreServer, wire
from elastic_aio.store.connection import Connection
from elastic_aio.store.wire import encode

_MODULES = "elastic_aio/store/"

_SHARED_NAMES = 29
"""Attributes of an object without a dict of its own, at most; with one, each access costs more.
CPython's `SHARED_KEYS_MAX_SIZE` is 30, of which the first object of a class leaves one out."""

# Functions that are called and lines that are run: for a request alone in its segment, and for
# one of many.  A change of the server may lower them.
_COSTS = {
    "set": (encode(wire.SET, b"/key", b"value"), b"", (5, 57), (1, 25)),
    "get": (encode(wire.GET, b"/key", None), wire.sized(b"value"), (7, 67), (2, 26)),
    "add": (encode(wire.ADD, b"/counter", 0), wire.I64.pack(7), (7, 75), (2, 34)),
    "check": (encode(wire.CHECK, b"", (b"/key",)), b"\0", (6, 68), (1, 27)),
    "wait": (encode(wire.WAIT, b"", (b"/key",)), b"\0", (6, 70), (1, 29)),
}


class Transport:
    """Takes all that is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> Any:
        return "127.0.0.1", 1


def cost(connection: Connection, data: bytes) -> tuple[int, int]:
    """Return the functions that are called and the lines that are run to serve `data`."""
    events: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if _MODULES not in frame.f_code.co_filename:
            return None
        events[event] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        connection.data_received(data)
    finally:
        sys.settrace(before)
    return events["call"], events["line"]


@pytest.mark.parametrize("name", _COSTS)
async def test_a_request_costs_no_more_than_is_recorded(server: StoreServer, name: str) -> None:
    request, reply, alone, of_many = _COSTS[name]
    transport, connection = Transport(), Connection(server.service)
    connection.connection_made(cast("Any", transport))
    try:
        connection.data_received(wire.OPENING)
        for key, value in ((b"/key", b"value"), (b"/counter", b"7")):
            connection.data_received(encode(wire.SET, key, value))
        single = cost(connection, request)
        assert transport.written == reply
        few, many = cost(connection, request * 10), cost(connection, request * 110)
        assert transport.written == reply * 121
    finally:
        connection.connection_lost(None)
    each = tuple((more - less) / 100 for less, more in zip(few, many, strict=True))
    assert all(now <= most for now, most in zip(single + each, alone + of_many, strict=True))


async def test_a_connection_has_no_dict_of_its_own(server: StoreServer) -> None:
    connection = Connection(server.service)
    connection.connection_made(cast("Any", Transport()))
    connection.data_received(wire.OPENING + encode(wire.SET, b"/key", b"value"))
    try:
        assert len(vars(connection)) <= _SHARED_NAMES
    finally:
        connection.connection_lost(None)
