"""A network in virtual time, with the delays, partitions and broken connections of TCP.

The kernel sends again what a blocked direction has dropped, once it is open, after the pauses of
TCP; the rest of the connection waits for it: a stream has no gaps.  A connection of which the other
kernel acknowledges nothing ends by TCP_USER_TIMEOUT, tcp(7).  The kernel of a suspended host
answers; a kernel without power does not, and has forgotten all when it is back.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Final, cast

from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.sockets import Address
from elastic_aio.testing.event_loop import SimLoop
from elastic_aio.testing.virtual_time import SimHost, VirtualTime

_LOCAL_DELAY: Final = 0.0001
"""Seconds that a message takes within one host."""

_SYN_REPEAT: Final = 1.0
"""Seconds until the kernel repeats the first packet of a connection, then twice as many."""

_RESEND: Final = 0.2, 120.0
"""Seconds until the kernel repeats other packets, then twice as many; and the longest pause."""

_PORTS: Final = (32768, 61000)

Segment = bytes | OSError | None
"""A part of a stream: data, a reset, or its end."""


class Network:
    """Carries messages between hosts; each direction of each pair can be blocked."""

    def __init__(self, time: VirtualTime, random: Random, delay: tuple[float, float]) -> None:
        """Begin unblocked; messages take from `delay[0]` to `delay[1]` seconds."""
        self.time = time
        self.random = random
        self.hosts: dict[str, SimHost] = {}
        """By address."""
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.connections: dict[SimTransport, None] = {}
        """Both ends of all that may still carry something; ordered."""
        self.on_accepted: Callable[[Listener, object], None] = lambda listener, protocol: None
        """Called with the protocol of each connection that a server has accepted."""
        self.repaired_at = 0.0
        """When the last data that a partition has held back is sent again, or arrives."""
        self._delay = delay
        self._blocked: set[tuple[str, str]] = set()

    def host(self, name: str) -> SimHost:
        """Return a host by its name, or a new host with an address of its own."""
        for host in self.hosts.values():
            if host.name == name:
                return host
        number = len(self.hosts) + 1
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        host = SimHost(self.time, name, address, boot_time=1e6 * self.random.random())
        self.hosts[address] = host
        return host

    # ----------------------------------------------------------- the packets

    def is_open(self, sender: SimHost, receiver: SimHost) -> bool:
        """Return whether packets pass from one host to the other now."""
        are_up = sender.is_up and receiver.is_up
        return are_up and (sender.name, receiver.name) not in self._blocked

    def is_open_both_ways(self, one: SimHost, other: SimHost) -> bool:
        return self.is_open(one, other) and self.is_open(other, one)

    @property
    def is_calm(self) -> bool:
        """Whether all packets pass, no host is suspended, and none is slow."""
        return not self._blocked and not any(
            host.is_suspended or host.delay for host in self.hosts.values()
        )

    def block(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Drop all packets in this direction from now on; hosts by name."""
        receivers = set(receivers)
        self._blocked |= {(one, other) for one in senders for other in receivers if one != other}

    def heal(self) -> None:
        """Let all packets pass again; the kernels will soon repeat the dropped packets."""
        self._blocked.clear()
        for connection in list(self.connections):
            connection.send_again()

    def switch_off(self, host: SimHost) -> None:
        """Cut the power of a host: it sends nothing any more, not even an end."""
        host.is_up = host.is_suspended = False
        for connection in [one for one in self.connections if one.loop.host is host]:
            connection.lose_power()

    def arrival(self, sender: SimHost, receiver: SimHost) -> float:
        """Return when a packet that is sent now arrives."""
        if sender is receiver:
            return self.time.now + _LOCAL_DELAY
        low, high = self._delay
        delay = low + (high - low) * self.random.random()
        return self.time.now + delay + sender.delay + receiver.delay

    # ------------------------------------------------------------ connections

    def listen(self, loop: SimLoop, port: int, peer_timeout: float = 0.0) -> Listener:
        """Listen at a port of a process's host, 0 for a free one; raise `OSError` if it is used."""
        address = loop.host.address
        if port and (address, port) in self.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        while not port or (address, port) in self.listeners:
            port = self.random.randrange(*_PORTS)
        listener = self.listeners[address, port] = Listener(self, loop, port, peer_timeout)
        return listener

    async def connect(self, loop: SimLoop, address: str, port: int) -> SimTransport:
        """Connect, once packets pass; raise `OSError` if there is no such host, or no listener."""
        target = self.hosts.get(address)
        if target is None or loop.is_dead:
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        near = SimTransport(self, loop, (loop.host.address, self.random.randrange(*_PORTS)))
        connected: asyncio.Future[None] = loop.create_future()
        when = self.arrival(loop.host, target)
        self.time.at(when, self._on_syn, near, target, port, connected, _SYN_REPEAT)
        try:
            await connected
        except BaseException:  # a cancellation too: no connection stays open
            near.abort()
            raise
        return near

    def _on_syn(
        self, near: SimTransport, host: SimHost, port: int, done: asyncio.Future[None], wait: float
    ) -> None:
        loop = near.loop
        if near.is_closing():
            return
        if not self.is_open_both_ways(loop.host, host):
            when = self.time.now + wait
            self.time.at(when, self._on_syn, near, host, port, done, 2 * wait)
            return
        error: OSError | None = None
        listener = self.listeners.get((host.address, port))
        if listener is None:
            error = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        else:
            far = SimTransport(self, listener.loop, listener.name)
            near.peer, far.peer, far.listener = far, near, listener
            far.user_timeout = listener.peer_timeout
            listener.waiting.append(far)  # by the kernel, also of a suspended host
            listener.loop.receive(listener.on_connection)
        self.time.at(self.arrival(host, loop.host), loop.receive, _finish, done, error)


def next_attempt(since: float, now: float) -> float:
    """Return when a packet that was dropped at `since`, and ever since, is sent after `now`."""
    pause, longest = _RESEND
    when = since + pause
    while when <= now:
        pause = min(2 * pause, longest)
        when += pause
    return when


def _finish(connected: asyncio.Future[None], error: OSError | None) -> None:
    if not connected.done():
        connected.set_result(None) if error is None else connected.set_exception(error)


def _reset_error() -> OSError:
    return ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


class Listener:
    """A listening socket: connections wait in it until a server serves them."""

    def __init__(self, network: Network, loop: SimLoop, port: int, peer_timeout: float) -> None:
        """Listen from now on; accepted connections inherit `peer_timeout`."""
        self.loop = loop
        self.port = port
        self.name = loop.host.address, port
        self.peer_timeout = peer_timeout
        self.on_ready: Callable[[], object] | None = None
        """Called when a connection waits, while the process accepts."""
        self._network = network
        self.waiting: list[SimTransport] = []
        self.is_open = True
        self.closed_at = math.inf  # in virtual time
        loop.files[self] = None

    def getsockname(self) -> tuple[str, int]:
        return self.name

    def setblocking(self, flag: bool) -> None:
        """Do nothing: `accept` never blocks."""

    def listen(self, backlog: int) -> None:
        """Do nothing: it listens already."""

    def on_connection(self) -> None:
        """Take that a connection has arrived."""
        if self.waiting and self.on_ready is not None:
            self.on_ready()

    def accept(self) -> tuple[SimTransport, tuple[str, int]]:
        """Return the oldest connection that waits, and its address; or raise `BlockingIOError`."""
        if not self.waiting:
            raise BlockingIOError
        connection = self.waiting.pop(0)
        assert connection.peer is not None
        return connection, connection.peer.name

    def close(self) -> None:
        """Listen no more.  Idempotent."""
        if self.is_open:
            self.is_open, self.closed_at = False, self._network.time.now
            del self.loop.files[self]
            del self._network.listeners[self.name]
            for connection in self.waiting:
                connection.abort()

    async def aclose(self) -> None:
        """Close it, in place of the store of a round's workers."""
        self.close()


class SimTransport(asyncio.Transport):
    """One end of a connection: the transport of a protocol, and the kernel below it."""

    def __init__(self, network: Network, loop: SimLoop, name: tuple[str, int]) -> None:
        super().__init__()
        self.loop = loop
        self.name = name
        self.peer: SimTransport | None = None
        """The other end, once it is connected."""
        self.listener: Listener | None = None
        """Where it has arrived, at the server's end."""
        self.user_timeout = 0.0
        """Seconds without an acknowledgement until the connection ends; 0: without limit."""
        self._network = network
        self._protocol: asyncio.BaseProtocol | None = None
        self._is_reading = True
        self._is_closing = False
        self._has_ended = False
        self._has_power = True
        self._received: list[Segment] = []
        self._unsent: list[bytes] = []
        self._held: list[Segment] = []
        self._last_arrival = 0.0
        self._stuck_since: float | None = None
        network.connections[self] = None
        loop.files[self] = None

    # -------------------------------------------------------------- the kernel

    def _send(self, segment: Segment) -> None:
        peer = self.peer
        if peer is None:
            return
        network, near, far = self._network, self.loop.host, peer.loop.host
        is_answered = network.is_open_both_ways(near, far)
        if not peer._has_power and is_answered:
            # The other kernel has booted since, and knows no such connection.
            network.time.at(network.arrival(far, near), self.loop.receive, self._lose, None)
            return
        if self._held or not network.is_open(near, far) or not peer._has_power:
            self._held.append(segment)
        else:
            self._transmit(peer, segment)
        if not is_answered:
            self._time_out()

    def _transmit(self, peer: SimTransport, segment: Segment) -> None:
        # Segments of one direction keep their order.
        arrival = self._network.arrival(self.loop.host, peer.loop.host)
        self._last_arrival = max(arrival, self._last_arrival)
        self._network.time.at(self._last_arrival, peer.loop.receive, peer._on_segment, segment)

    def _time_out(self) -> None:
        """End the connection unless the other kernel answers in time."""
        if self._stuck_since is None:
            time = self._network.time
            self._stuck_since = since = time.now
            if self.user_timeout:
                time.at(since + self.user_timeout, self._on_unacknowledged, since)

    def _on_unacknowledged(self, since: float) -> None:
        if self._stuck_since == since:
            error = TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            self.loop.receive(self._lose, error)

    def send_again(self) -> None:
        """Let the kernel send all dropped packets, at its next attempt."""
        since, network = self._stuck_since, self._network
        if since is None or self.peer is None:
            return
        if self._held:
            when = next_attempt(since, network.time.now)
            network.repaired_at = max(when, network.repaired_at)
            network.time.at(when, self._on_attempt, self.peer, since)
        elif self.peer._has_power:
            self._stuck_since = None

    def _on_attempt(self, peer: SimTransport, since: float) -> None:
        network, near, far = self._network, self.loop.host, peer.loop.host
        if self._stuck_since != since or not network.is_open(near, far):
            return  # the connection has timed out, or this packet was dropped too
        if network.is_open(far, near):
            self._stuck_since = None
        held, self._held = self._held, []
        for segment in held:
            self._send(segment)
        network.repaired_at = max(self._last_arrival, network.repaired_at)
        if self._is_closing:
            self._forget()

    def reset(self) -> None:
        """Break the connection: both ends notice, if the network lets them."""
        for end in filter(None, (self, self.peer)):
            end.loop.host.disturbed_at = self._network.time.now
        self._send(_reset_error())
        self.loop.receive(self._lose, _reset_error())

    def lose_power(self) -> None:
        """Forget the connection without a word to the other end."""
        self._has_power = False
        self._is_closing = True
        self._held.clear()
        self._forget()
        if self.peer is not None:
            self.peer._time_out()  # by keepalive probes, if nothing is sent

    def _forget(self) -> None:
        self.loop.files.pop(self, None)
        if not self._held:
            self._network.connections.pop(self, None)

    def _on_segment(self, segment: Segment) -> None:
        if self._is_closing:
            self._refuse(segment)
            return
        protocol = cast("asyncio.Protocol | None", self._protocol)
        if isinstance(segment, OSError):
            self._lose(segment)
        elif protocol is None or not self._is_reading:
            self._received.append(segment)
        elif segment is not None:
            protocol.data_received(segment)
        elif not protocol.eof_received():
            self.close()

    def _refuse(self, segment: Segment) -> None:
        """Answer data with a reset: the kernel knows no such connection any more."""
        peer, network, near = self.peer, self._network, self.loop.host
        if peer is None or not isinstance(segment, bytes):
            return
        if network.is_open(near, peer.loop.host):
            when = network.arrival(near, peer.loop.host)
            network.time.at(when, peer.loop.receive, peer._lose, None)

    def _lose(self, error: OSError | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._held.clear()
            self.loop.call_soon(self._on_ended, error or _reset_error())

    def _on_ended(self, error: OSError | None) -> None:
        self._has_ended = True
        self._forget()
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    # ----------------------------------------------------------- the transport

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._take_received()
        if self._has_ended:  # while it waited in the listener
            self.loop.call_soon(protocol.connection_lost, _reset_error())

    def _take_received(self) -> None:
        received, self._received = self._received, []
        for segment in received:
            self._on_segment(segment)

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        if not self._unsent:
            self.loop.unsent.append(self._flush)
        self._unsent.append(bytes(data))

    def _flush(self) -> None:
        if self._unsent:
            data, self._unsent = b"".join(self._unsent), []
            if not self.loop.is_dead:
                self._send(data)

    def close(self) -> None:
        if not self._is_closing:
            self._flush()
            self._hang_up(None)

    def abort(self) -> None:
        if not self._is_closing:
            self._unsent.clear()
            self._hang_up(_reset_error())

    def getsockname(self) -> tuple[str, int]:
        return self.name

    def setblocking(self, flag: bool) -> None:
        """Do nothing: it never blocks."""

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Set TCP_USER_TIMEOUT, in milliseconds, or SO_LINGER to 0; no other has an effect."""
        match level, option:
            case socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT:
                self.user_timeout = value / 1000
            case socket.SOL_SOCKET, socket.SO_LINGER:  # and it is closed now
                self._held.clear()

    def _hang_up(self, segment: OSError | None) -> None:
        self._is_closing = True
        self._send(segment)
        self.loop.call_soon(self._on_ended, None)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.loop.call_soon(self._take_received)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        peer = None if self.peer is None else self.peer.name
        return {"sockname": self.name, "peername": peer, "socket": self}.get(name, default)


# ------------------------------------------------------------------- processes

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class SimProcess(SimLoop, StoreNetwork):
    """The loop of one process; asyncio's functions and the store's work on it unchanged."""

    def __init__(self, network: Network, host: SimHost, on_error: Callable[[str], object]) -> None:
        super().__init__(network.time, host, on_error)
        self.network = network

    def random_bytes(self, size: int) -> bytes:
        """Return bytes that repeat with the seed of the simulation."""
        return self.network.random.randbytes(size)

    async def create_connection(  # type: ignore[override]  # fewer arguments
        self,
        protocol_factory: ProtocolFactory,
        host: str | None = None,
        port: int | None = None,
        *,
        sock: Any = None,
        **_: object,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        if sock is None:
            transport = await self.network.connect(self, host or "", port or 0)
        else:
            transport = sock
        protocol = protocol_factory()
        transport.attach(protocol)
        return transport, protocol

    def add_reader(  # type: ignore[override]  # fewer types
        self, fd: Any, callback: Callable[..., object], *args: Any
    ) -> None:
        """Call `callback` when a connection waits at the listener `fd`."""
        fd.on_ready = lambda: self.call_soon(callback, *args)
        if fd.waiting:
            fd.on_ready()

    def remove_reader(self, fd: Any) -> bool:
        fd.on_ready = None
        return True

    async def connect_accepted_socket(  # type: ignore[override]  # fewer arguments
        self, protocol_factory: ProtocolFactory, sock: Any, **_: object
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        protocol = protocol_factory()
        self.network.on_accepted(sock.listener, protocol)
        sock.attach(protocol)
        return sock, protocol

    # ------------------------------------------------------ as a `StoreNetwork`

    def is_local(self, address: Address) -> bool:
        return bool(address[1][0] == self.host.address)

    async def dial(self, address: Address) -> socket.socket:
        host, port = address[1][:2]
        return cast("socket.socket", await self.network.connect(self, host, port))

    def listen(self, addresses: Sequence[Address], peer_timeout: float) -> list[socket.socket]:
        ports = dict.fromkeys(address[1][1] for address in addresses)
        files = [self.network.listen(self, port, peer_timeout) for port in ports]
        return cast("list[socket.socket]", files)

    async def port_owner(self, port: int) -> str | None:
        return "a process" if (self.host.address, port) in self.network.listeners else None
