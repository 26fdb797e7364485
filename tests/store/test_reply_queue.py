"""Replies that a slow peer has not read: their order, their account, and their end."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_aio.store.connection import Buffers, ReplyQueue
from elastic_aio.store.replies import LARGE


class SlowTransport:
    """It takes `room` writes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.room -= 1
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the pieces that queues have given up, one by one."""
    sizes: list[int] = []
    release = Buffers.release

    def count(buffers: Buffers, piece: bytes) -> None:
        sizes.append(len(piece))
        release(buffers, piece)

    monkeypatch.setattr(Buffers, "release", count)
    return sizes


def write(queue: ReplyQueue, room: int) -> bytes:
    transport: Any = SlowTransport(room)
    queue.write_to(transport, lambda: transport.room == 0)
    return b"".join(transport.written)


def test_small_and_large_replies_stay_in_order() -> None:
    buffers = Buffers()
    queue = ReplyQueue(buffers)
    pieces = [b"a" * 10, b"b" * 30 * LARGE, b"c", b"d" * LARGE, b"e" * (LARGE - 1), b"f" * 2, b"g"]
    sent = b""
    for piece in pieces:
        queue.extend([piece])
        assert buffers.size == queue.size == queue.weight()
        sent += write(queue, room=1)
    assert queue.size
    assert sent + write(queue, room=100) == b"".join(pieces)
    assert buffers.size == queue.size == queue.weight() == 0


def test_many_small_replies_are_dropped_as_a_few(released: list[int]) -> None:
    buffers = Buffers()
    queue = ReplyQueue(buffers)
    for _ in range(20_000):
        queue.extend([bytes(10)])
    assert queue.size == buffers.size == 200_000
    queue.clear()
    assert queue.size == buffers.size == 0
    assert sum(released) == 200_000
    assert len(released) == 4


def test_a_large_value_for_many_peers_is_counted_once() -> None:
    buffers, value = Buffers(), bytes(LARGE)
    queues = [ReplyQueue(buffers) for _ in range(4)]
    for queue in queues:
        queue.extend([b"head", value])
    assert buffers.size == LARGE + 16
    assert queues[0].weight() == LARGE / 4 + 4
    for queue in queues:
        queue.clear()
    assert buffers.size == 0
