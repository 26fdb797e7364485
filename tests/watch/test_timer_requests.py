"""Timers: requests in, expired timers out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.watch import timer_pipe
from elastic_aio.watch.deadlines import DeadlineTable, WorkerTimer
from elastic_aio.watch.timer_pipe import TimerRequests

WALL = 1_700_000_000.0


def request(pid: Any = 7, scope: Any = "s", after: Any = 5.0, signal: Any = 9) -> bytes:
    expiration = WALL + after if isinstance(after, float) else after
    content = {"version": 1, "pid": pid, "scope_id": scope, "signal": signal}
    return json.dumps({**content, "expiration_time": expiration}).encode() + b"\n"


class Timers:
    """The requests of one pipe, and the table that they fill."""

    def __init__(self) -> None:
        self.requests = TimerRequests()
        self.table = DeadlineTable(LivenessSpec())
        self.is_full = False

    def feed(self, data: bytes, now: float = 100.0, wall: float = WALL) -> None:
        for timer in self.requests.feed(data, now, wall):
            self.is_full |= not self.table.take(timer)

    @property
    def rejected(self) -> str:
        return self.requests.rejected

    @property
    def next_deadline(self) -> float | None:
        return self.table.next_deadline

    def expire(self, now: float, **limit: int) -> list[WorkerTimer]:
        return self.table.expire_timers(now, **limit)


def table_of(*requests: bytes) -> Timers:
    timers = Timers()
    timers.feed(b"".join(requests))
    return timers


def test_a_timer_expires_once() -> None:
    """With the time of its request and its end."""
    table = table_of(request(after=5.0))
    assert table.next_deadline == pytest.approx(105.0)
    assert table.expire(104.9) == []
    (timer,) = table.expire(106.0)
    assert (timer.pid, timer.scope, timer.signal) == (7, "s", 9)
    assert [timer.acquired, timer.until] == pytest.approx([100.0, 105.0])
    assert table.next_deadline is None
    assert table.expire(200.0) == []


def test_the_age_of_a_request_that_is_read_late() -> None:
    """A time that cannot be true is that of the reading."""
    table = Timers()
    for pid, acquired in enumerate([WALL - 3.0, WALL + 3.0, WALL - 1000.0, "x"], 1):
        line = json.loads(request(pid)) | {"acquired": acquired}
        table.feed(json.dumps(line).encode() + b"\n")
    ages = [round(105.0 - timer.acquired, 3) for timer in table.expire(105.0)]
    assert ages == [8.0, 5.0, 5.0, 5.0]
    assert not table.rejected


def test_a_release_ends_a_timer() -> None:
    """That of the same process and scope; a release of nothing has no effect."""
    table = table_of(request(scope="a"), request(scope="b"), request(8, "a"))
    table.feed(request(scope="a", after=-1) + request(scope="c", after=-1))
    assert [timer.pid for timer in table.expire(200.0)] == [7, 8]
    assert not table.rejected


def test_a_timer_is_acquired_again() -> None:
    """The last request counts."""
    table = table_of(request(after=5.0), request(after=50.0))
    assert table.expire(110.0) == []
    assert table.next_deadline == pytest.approx(150.0)


def test_one_timer_of_each_process_expires() -> None:
    """The earliest that has a signal; then the process has no timers."""
    table = table_of(
        request(scope="late", after=3.0, signal=15),
        request(scope="early", after=2.0),
        request(scope="mute", after=1.0, signal=0),
        request(scope="pending", after=90.0),
        request(8, "mute", 1.0, -1),
        request(8, "pending", 90.0),
    )
    first, second = table.expire(110.0)
    assert (first.pid, first.scope, first.signal) == (7, "early", 9)
    assert (second.pid, second.scope, second.signal) == (8, "mute", -1)
    assert table.next_deadline == pytest.approx(190.0)
    assert [timer.pid for timer in table.expire(200.0)] == [8]


def test_many_timers_expire_in_parts() -> None:
    table = table_of(*(request(pid, after=float(pid)) for pid in range(1, 9)))
    assert [timer.pid for timer in table.expire(200.0, limit=3)] == [1, 2, 3]
    assert table.next_deadline == pytest.approx(104.0)
    assert [timer.pid for timer in table.expire(200.0)] == [4, 5, 6, 7, 8]


def test_the_begin_of_a_line_is_dropped_with_its_attempt() -> None:
    table = table_of()
    for unfinished in (b'{"pid": 7, "sco', b"x" * 5000):
        table.feed(unfinished)
        table.requests.forget()
        table.feed(request(8))
        assert [timer.pid for timer in table.expire(200.0)] == [8]


def test_timers_go_on_while_the_workers_are_stopped() -> None:
    table = table_of(request())
    table.table.is_stopping = True
    assert table.next_deadline is not None
    assert [timer.pid for timer in table.expire(200.0)] == [7]


@pytest.mark.parametrize(
    "line",
    [
        b"x\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"7\n",
        b"{}\n",
        b"[" * 3000 + b"\n",
        request(pid=0),
        request(pid=-1),
        request(pid=True),
        request(pid=1 << 40),
        request(scope=3),
        request(after="soon"),
        request(after=1e300),
        request(signal=65),
        request(signal="9"),
        b'{"pid":7,"scope_id":"s","expiration_time":NaN,"signal":9}\n',
        b"x" * 5000 + b"\n",
    ],
)
def test_what_is_no_request_is_left_out(line: bytes) -> None:
    """And reported; the next request counts."""
    table = table_of(line)
    assert table.rejected
    assert table.next_deadline is None
    table.feed(request())
    assert table.next_deadline is not None


def test_a_flood_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text is made of all lines that are no request; short ones are not decoded."""
    texts, decoded = [], []
    decode = json.loads

    def format_value(value: object) -> str:
        texts.append(value)
        return "text"

    def loads(line: bytes) -> Any:
        decoded.append(line)
        return decode(line)

    monkeypatch.setattr(timer_pipe, "format_value", format_value)
    monkeypatch.setattr(json, "loads", loads)
    table = table_of(b"\n" * 1000, b"{}\n" * 1000, b"x" * 60 + b"\n", request(signal=65))
    assert (table.rejected, texts) == ("no timer request: text", [b""])
    assert len(decoded) == 2
    shortest = b'{"pid":7,"signal":9,"scope_id":"","expiration_time":9}\n'
    table.feed(shortest, 100.0, 8.0)
    assert table.next_deadline == 101.0


@pytest.mark.slow
def test_limits() -> None:
    """A long line costs no memory, and so do many timers and many releases."""
    table = table_of()
    for _ in range(1000):
        table.feed(b"x" * 4000)
    table.feed(b"\n" + request())
    assert [timer.pid for timer in table.expire(200.0)] == [7]
    assert table.rejected == "a line of more than 4096 bytes"
    table = table_of()
    for pid in range(1, 20_000):
        table.feed(request(pid))
    assert table.is_full
    assert repr(table.table) == "<DeadlineTable of 0 workers, 16384 timers>"
    assert len(table.expire(200.0)) == 16384


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from([request(scope="a"), request(scope="b", after=1.0), request(after=-1)])
        | st.binary(max_size=30),
        max_size=8,
    ),
    st.integers(1, 40),
)
def test_any_cut_of_the_bytes_is_the_same(parts: list[bytes], size: int) -> None:
    whole, cut = Timers(), Timers()
    stream = b"\n".join(parts)
    whole.feed(stream)
    for start in range(0, len(stream), size):
        cut.feed(stream[start : start + size])
    assert whole.expire(200.0) == cut.expire(200.0)
    assert bool(whole.rejected) == bool(cut.rejected)
