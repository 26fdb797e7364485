"""How long a request of one client waits while another does the worst within its limits."""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from benchmarks.launchers import Launcher
from benchmarks.table import Line
from benchmarks.workers.store_load import LOOPS, running
from elastic_aio.store import wire
from elastic_aio.store.limits import KeyspaceLimits

__all__ = ["store_neighbours"]

_BOUND = 20.0  # milliseconds
_MOST = 30.0  # seconds for one pattern
_AFTER = 0.5  # seconds of measuring after the end
_KEYS = 100_000
_END = b"/end"
_LIMITS = KeyspaceLimits()
_MANY = wire.WireLimits().count


def store_neighbours(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Measure a GET while another client does what costs the server the most."""
    lines = []
    for loop in LOOPS:
        for what, attack in _ATTACKS.items():
            waits: list[float] = []
            worst = []
            for _ in range(max(rounds // 5, 1)):
                with running(f"serve-{loop}", python=sys.executable) as (port, _):
                    more = _measure(port, attack)
                waits += more
                worst.append(max(more))
            name = f"store on {loop}, {what}: a neighbour's GET"
            p99 = statistics.quantiles(waits, n=100)[-1]
            lines += [
                Line(f"{name}, p99", "ms", p99 * 1e3, bound=_BOUND),
                Line(f"{name}, worst", "ms", statistics.median(worst) * 1e3, bound=_BOUND),
            ]
    return lines


class _Client:
    """A raw client of the tagged dialect, whose replies a thread reads and discards."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._tags = iter(range(1 << 31))
        hello = wire.encode(wire.HELLO, b"", wire.VERSION)
        self._socket.sendall(wire.OPENING + hello)
        self.lease_id = b""
        self._receive(struct.calcsize("<16s16s?"))
        self._thread: threading.Thread | None = None

    def grant(self) -> None:
        self._socket.sendall(wire.encode(wire.GRANT_LEASE, b"", (60_000, 0), 1 << 31))
        self.lease_id = self._receive(9 + 8 + 16)[17:]

    def frames(self, requests: Iterable[tuple[int, bytes, object]]) -> bytes:
        return b"".join(wire.encode(*request, next(self._tags)) for request in requests)

    def send(self, data: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, daemon=True)
            self._thread.start()
        with contextlib.suppress(OSError):
            self._socket.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._socket.close()

    def _drain(self) -> None:
        buffer = bytearray(1 << 20)
        with contextlib.suppress(OSError):
            while self._socket.recv_into(buffer):
                pass

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._socket.recv(size - len(data))
        return data


class _Neighbour:
    """A client of the plain dialect with one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(wire.OPENING)

    def get(self, key: bytes) -> bytes:
        self._socket.sendall(wire.encode(wire.GET, key, None))
        data = b""
        while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
            data += self._socket.recv(4096)
        return data[8:]

    def close(self) -> None:
        self._socket.close()


_Attack = Callable[[_Client, int], Iterator[Callable[[], object]]]
"""Prepares a client at a port; yields first when it is prepared, then what it does."""


def _measure(port: int, attack: _Attack) -> list[float]:
    """Return the seconds that each GET of a neighbour took during an attack."""
    client, neighbour = _Client(port), _Neighbour(port)
    waits = []
    try:
        steps = attack(client, port)
        prepare, act = next(steps), next(steps)
        prepare()
        client.send(client.frames([(wire.SET, b"/prepared", b"1")]))
        _until(lambda: neighbour.get(b"/prepared"))
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        stop = time.monotonic() + _MOST
        while (began := time.monotonic()) < stop:
            is_end = neighbour.get(_END)
            waits.append(time.monotonic() - began)
            if is_end:
                stop = min(stop, began + _AFTER)
            time.sleep(0.0005)
    finally:
        client.close()
        neighbour.close()
    thread.join()
    return waits


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _MOST
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not serve the preparation")
        time.sleep(0.01)


_Requests = Iterable[tuple[int, bytes, object]]


def _attack(
    before: Callable[[_Client], _Requests],
    then: Callable[[_Client], _Requests],
    client: _Client,
    port: int,
    *,
    leaves: bool = False,
    has_lease: bool = False,
) -> Iterator[Callable[[], object]]:
    if has_lease:
        client.grant()
    first = client.frames(before(client))
    burst = client.frames([*then(client), (wire.SET, _END, b"1")])

    def act() -> None:
        client.send(burst)
        if leaves:
            client.close()
            last = _Client(port)
            last.send(last.frames([(wire.SET, _END, b"1")]))
            time.sleep(0.1)
            last.close()

    yield partial(client.send, first)
    yield act


def _keys(count: int) -> list[bytes]:
    return [b"/many/%d" % number for number in range(count)]


def _all_waits(op: int, argument: object) -> _Requests:
    return [(op, b"/k" if op == wire.POP_WHEN_PUSHED else b"", argument)] * _LIMITS.waits_each


def _many_set(count: int) -> _Requests:
    return [(wire.MULTI_SET, b"", tuple((key, b"v") for key in _keys(count)))]


def _nothing(_: _Client) -> _Requests:
    return []


def _everything(client: _Client) -> Iterator[tuple[int, bytes, object]]:
    yield from _all_waits(wire.GET_WHEN_SET, (b"/never",))
    for number in range(_LIMITS.watches_each):
        yield wire.WATCH_PREFIX, b"/" * number, -1
    for _ in range(_LIMITS.leases_each - 1):
        yield wire.GRANT_LEASE, b"", (60_000, 0)
    for key in _keys(_KEYS):
        yield wire.LEASED_SET, key, (b"v", client.lease_id)


def _leased(client: _Client) -> _Requests:
    return [(wire.LEASED_SET, key, (b"v", client.lease_id)) for key in _keys(_KEYS)]


def _connect_often(client: _Client, port: int) -> Iterator[Callable[[], object]]:
    def act() -> None:
        for _ in range(10):
            clients = [_Client(port) for _ in range(100)]
            for one in clients:
                one.close()
        client.send(client.frames([(wire.SET, _END, b"1")]))

    yield lambda: None
    yield act


_BIG = bytes(8 << 20)
_WATCHES = _LIMITS.watches_each
_MISSING = tuple(b"/missing/%d" % number for number in range(_LIMITS.waits_each))
_ATTACKS: dict[str, _Attack] = {
    f"{_WATCHES:,} watches of a key, 300 SETs": partial(
        _attack,
        lambda _: [(wire.WATCH_KEY, b"/k", -1)] * _WATCHES,
        lambda _: [(wire.SET, b"/k", b"v")] * 300,
    ),
    f"{_WATCHES:,} watched prefixes, MULTI_SET of 20,000 keys": partial(
        _attack,
        lambda _: [(wire.WATCH_PREFIX, b"/" + b"m" * (n % 2), -1) for n in range(_WATCHES)],
        lambda _: _many_set(20_000),
    ),
    f"{_LIMITS.waits_each:,} GET_WHEN_SET, 2,000 pushes": partial(
        _attack,
        lambda _: _all_waits(wire.GET_WHEN_SET, (b"/k",)),
        lambda _: [(wire.QUEUE_PUSH, b"/k", b"v")] * 2_000,
    ),
    f"{_LIMITS.waits_each:,} GET_WHEN_SET end at once": partial(
        _attack,
        lambda _: _all_waits(wire.GET_WHEN_SET, (b"/k",)),
        lambda _: [(wire.SET, b"/k", b"v")],
    ),
    f"{_LIMITS.waits_each:,} queue waiters, as many pushes": partial(
        _attack,
        lambda _: _all_waits(wire.POP_WHEN_PUSHED, None),
        lambda _: [(wire.QUEUE_PUSH, b"/k", b"v")] * _LIMITS.waits_each,
    ),
    f"WAIT for {_LIMITS.waits_each:,} keys, again and again": partial(
        _attack,
        _nothing,
        lambda _: [
            (wire.WAIT, b"", _MISSING),
            (wire.SET, _MISSING[0], b"v"),
            (wire.CANCEL, b"", 0),
            (wire.WAIT, b"", _MISSING),
        ],
    ),
    f"MULTI_SET, MULTI_GET, CHECK, LIST of {_MANY:,} keys": partial(
        _attack,
        _nothing,
        lambda _: [
            *_many_set(_MANY - 2),
            (wire.MULTI_GET, b"", tuple(_keys(_MANY - 2))),
            (wire.CHECK, b"", tuple(_keys(_MANY - 2))),
            (wire.LIST_KEYS, b"", None),
        ],
    ),
    f"{_KEYS:,} watched keys deleted": partial(
        _attack,
        lambda _: [*_many_set(_KEYS), *[(wire.WATCH_PREFIX, b"/", -1)] * 10],
        lambda _: [(wire.DELETE_KEY, key, None) for key in _keys(_KEYS)],
    ),
    f"a lease with {_KEYS:,} keys is released": partial(
        _attack,
        _leased,
        lambda client: [(wire.RELEASE_LEASE, client.lease_id, None)],
        has_lease=True,
    ),
    "a client with all its waits, watches and leases leaves": partial(
        _attack, _everything, _nothing, leaves=True, has_lease=True
    ),
    f"APPEND to a value of {_LIMITS.grown >> 20} MiB": partial(
        _attack,
        lambda _: [(wire.APPEND, b"/a", _BIG[1000:])],
        lambda _: [(wire.APPEND, b"/a", b"v")] * 500,
    ),
    "COMPARE_SET of 8 MiB": partial(
        _attack,
        lambda _: [(wire.SET, b"/c", _BIG)],
        lambda _: [(wire.COMPARE_SET, b"/c", (_BIG, _BIG))] * 20,
    ),
    "8 MiB set and read 100 times": partial(
        _attack,
        lambda _: [(wire.SET, b"/c", _BIG)],
        lambda _: [(wire.SET, b"/c", _BIG)] * 10 + [(wire.GET, b"/c", None)] * 100,
    ),
    "1,000 connections come and go": _connect_often,
}
