"""The event loops and the network of a simulation, below the package's own code."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from elastic_aio.testing.network import Network, SimProcess, next_attempt
from elastic_aio.testing.virtual_time import VirtualTime


class Line(asyncio.Protocol):
    """Records what arrives on a connection."""

    def __init__(self) -> None:
        self.received = b""
        self.ended: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.append(error)


class Pair:
    """Two hosts, and a connection from the first to the second."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.network = Network(VirtualTime(), Random(1), (0.01, 0.02))
        self.near, self.far = (self.process(name) for name in "ab")
        self.client, self.server = Line(), Line()
        listener = self.network.listen(self.far, 80, 5.0)
        listener.on_ready = lambda: listener.accept()[0].attach(self.server)
        self.do(self.near.create_connection(lambda: self.client, self.far.host.address, 80))

    def process(self, name: str) -> SimProcess:
        host = self.network.host(name)
        return SimProcess(self.network, host, self.errors.append)  # type: ignore[abstract]

    def run(self, seconds: float) -> None:
        until = self.network.time.now + seconds
        while self.network.time.step(until):
            pass

    def do(self, work: Coroutine[Any, Any, Any], seconds: float = 1.0) -> asyncio.Task[Any]:
        tasks: list[asyncio.Task[Any]] = []
        self.near.run(lambda: tasks.append(self.near.create_task(work)))
        self.run(seconds)
        return tasks[0]

    def write(self, data: bytes) -> None:
        self.near.run(self.client.transport.write, data)


def test_data_keeps_its_order() -> None:
    pair = Pair()
    for number in range(10):
        pair.write(b"%d" % number)
    pair.run(1)
    assert pair.server.received == b"0123456789"


def test_a_partition_holds_data_back() -> None:
    pair = Pair()
    pair.network.block("a", "b")
    pair.write(b"late")
    pair.run(3)
    assert pair.server.received == b""
    pair.network.heal()
    pair.run(10)
    assert pair.server.received == b"late"


def test_a_connection_that_lingers_not_drops_what_it_has_not_sent() -> None:
    pair = Pair()
    pair.network.block("a", "b")
    pair.write(b"late")
    transport = pair.client.transport
    pair.near.run(transport.abort)
    transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"")
    pair.network.heal()
    pair.run(10)
    assert pair.server.received == b""


def test_a_packet_that_was_dropped_is_repeated_after_the_pauses_of_tcp() -> None:
    """0.2 s, then twice as many each time; two minutes at most."""
    attempts = [next_attempt(10.0, now) for now in (10.0, 10.2, 10.5, 11.3, 13.0)]
    assert attempts == pytest.approx([10.2, 10.6, 10.6, 11.4, 16.2])
    assert next_attempt(0.0, 1000.0) - next_attempt(0.0, 880.0) == pytest.approx(120.0)


def test_a_stream_has_no_gap() -> None:
    """What is written after the end of a partition waits for what the partition has dropped."""
    pair = Pair()
    pair.network.block("a", "b")
    pair.write(b"dropped,")
    pair.run(10)
    pair.network.heal()
    pair.write(b"then written")
    pair.run(1)
    assert pair.server.received == b""
    pair.network.block("a", "b")  # the next attempt is dropped too
    pair.run(10)
    assert pair.server.received == b""
    pair.network.heal()
    pair.run(20)
    assert pair.server.received == b"dropped,then written"


def test_a_connection_that_is_discarded_delivers_nothing_after_a_gap() -> None:
    pair = Pair()
    pair.network.block("a", "b")
    pair.write(b"dropped")
    pair.run(10)
    pair.network.heal()
    pair.write(b"then written")
    pair.run(0.001)
    transport = pair.client.transport
    transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"")
    pair.near.run(transport.abort)
    pair.run(20)
    assert pair.server.received == b""
    assert [type(error) for error in pair.server.ended] == [ConnectionResetError]


def test_a_connection_may_time_out_between_a_partition_and_the_next_attempt() -> None:
    """The server's end has a limit of 5 s, and repeats at 3 and at 6.2 s."""
    pair = Pair()
    pair.network.block("b", "a")
    pair.far.run(pair.server.transport.write, b"hello")
    pair.run(3.5)
    pair.network.heal()
    pair.run(2)
    assert pair.client.received == b""
    assert [type(error) for error in pair.server.ended] == [TimeoutError]


def test_data_for_a_connection_that_has_ended_is_answered_with_a_reset() -> None:
    """The first reset was dropped; a kernel does not repeat one."""
    pair = Pair()
    pair.network.block("a", "b")
    pair.near.run(pair.client.transport.abort)
    pair.client.transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"")
    pair.network.heal()
    pair.run(1)
    assert not pair.server.ended
    pair.far.run(pair.server.transport.write, b"hello")
    pair.run(1)
    assert [type(error) for error in pair.server.ended] == [ConnectionResetError]


def test_a_connection_without_acknowledgement_times_out() -> None:
    """The server's end has a limit of 5 s; its data arrives, but no acknowledgement does."""
    pair = Pair()
    pair.network.block("a", "b")
    pair.far.run(pair.server.transport.write, b"hello")
    pair.run(4.9)
    assert pair.client.received == b"hello"
    assert not pair.server.ended
    pair.run(0.2)
    assert [type(error) for error in pair.server.ended] == [TimeoutError]


def test_a_killed_process_closes_its_connections() -> None:
    pair = Pair()
    pair.near.kill()
    pair.run(1)
    assert pair.server.ended == [None]
    assert not pair.near.files


def test_a_connection_that_is_reset_before_it_is_accepted_ends() -> None:
    pair = Pair()
    listener = pair.network.listen(pair.far, 81)
    line = Line()
    dialled = pair.do(pair.network.connect(pair.near, pair.far.host.address, 81))
    dialled.result().reset()
    pair.run(1)
    pair.far.run(lambda: listener.accept()[0].attach(line))
    assert [type(error) for error in line.ended] == [ConnectionResetError]


def test_a_host_without_power_says_nothing() -> None:
    pair = Pair()
    pair.network.switch_off(pair.near.host)
    pair.near.kill()
    pair.run(4.9)
    assert not pair.server.ended
    pair.run(0.2)
    assert [type(error) for error in pair.server.ended] == [TimeoutError]


def test_a_suspended_host_catches_up() -> None:
    """Its kernel accepts data; timers that were due run late."""
    pair = Pair()
    pair.far.host.is_suspended = True
    fired: list[float] = []
    pair.far.run(lambda: pair.far.call_later(1.0, lambda: fired.append(pair.network.time.now)))
    pair.write(b"while it was suspended")
    pair.run(3)
    assert (pair.server.received, fired) == (b"", [])
    pair.far.host.is_suspended = False
    pair.far.catch_up(timers_first=False)
    pair.run(0)
    assert (pair.server.received, fired) == (b"while it was suspended", [pair.network.time.now])


@pytest.mark.parametrize(("port", "error"), [(81, ConnectionRefusedError)])
def test_a_port_without_a_listener_refuses(port: int, error: type[Exception]) -> None:
    pair = Pair()
    dialled = pair.do(pair.network.connect(pair.near, pair.far.host.address, port))
    assert isinstance(dialled.exception(), error)


def test_a_process_that_was_suspended_leaves_no_connection_behind() -> None:
    """What its kernel has accepted meanwhile ends with the listener."""
    pair = Pair()
    (listener,) = pair.network.listeners.values()
    before = list(pair.far.files)
    left: list[object] = []

    def end() -> None:
        listener.close()
        pair.far.call_soon(lambda: left.extend(pair.far.files))

    pair.far.host.is_suspended = True
    pair.far.receive(end)
    client = Line()
    pair.do(pair.near.create_connection(lambda: client, *listener.name))
    pair.far.host.is_suspended = False
    pair.far.catch_up(timers_first=False)
    pair.run(1)
    assert left == [file for file in before if file is not listener]
    assert [type(error) for error in client.ended] == [ConnectionResetError]


def test_a_connection_waits_for_the_end_of_a_partition() -> None:
    pair = Pair()
    pair.network.block("b", "a")
    dialled = pair.do(pair.network.connect(pair.near, pair.far.host.address, 80), 2.0)
    assert not dialled.done()
    pair.network.heal()
    pair.run(4)
    assert dialled.done()


def test_clocks_run_at_their_rates() -> None:
    pair = Pair()
    pair.near.host.rate = 2.0
    begin = pair.near.time()
    pair.do(asyncio.sleep(10), 4.9)
    assert pair.near.time() - begin == pytest.approx(9.8)
    pair.run(0.2)
    assert pair.near.time() - begin == pytest.approx(10.2)


def test_a_process_that_spins_is_an_error() -> None:
    pair = Pair()

    def spin() -> None:
        pair.near.call_soon(spin)

    pair.near.run(spin)
    assert "spins" in pair.errors[0]


def test_the_end_of_a_process_runs_its_clean_up() -> None:
    """Its time passes at once, and nothing that it sends leaves the host."""
    pair = Pair()
    story: list[str] = []

    async def work(note: Callable[[str], None]) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(60)
            pair.client.transport.write(b"after the end")
            note("cleaned up")

    pair.do(work(story.append))
    pair.near.kill()
    pair.run(1)
    assert story == ["cleaned up"]
    assert not pair.server.received
