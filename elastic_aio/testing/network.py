"""A network with delays, partitions and broken connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from elastic_aio.testing.virtual_time import SimHost, VirtualTime

_HERE_S = 0.0001
"""Seconds that a message takes within one host."""


class Network:
    """Carries messages between hosts; each direction of each pair can be blocked."""

    def __init__(self, time: VirtualTime, random: Random, delay: tuple[float, float]) -> None:
        """Begin unblocked; messages take from `delay[0]` to `delay[1]` seconds."""
        self.time = time
        self._random = random
        self._delay = delay
        self._blocked: set[tuple[str, str]] = set()
        self.links: dict[SimLink, None] = {}
        """The connections that are not cut; ordered."""

    def is_open(self, sender: str, receiver: str) -> bool:
        """Return whether messages pass from one host to the other now."""
        return (sender, receiver) not in self._blocked

    def is_open_both_ways(self, one: str, other: str) -> bool:
        """Return whether messages pass in both directions now."""
        return self.is_open(one, other) and self.is_open(other, one)

    def block(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Hold back all messages in this direction from now on."""
        receivers = set(receivers)
        self._blocked |= {(one, other) for one in senders for other in receivers if one != other}

    def heal(self) -> None:
        """Unblock all directions, and deliver the messages that were held back."""
        self._blocked.clear()
        for link in list(self.links):
            link.flush()

    def arrival(self, sender: str, receiver: str) -> float:
        """Return when a message that is sent now arrives."""
        if sender == receiver:
            return self.time.now + _HERE_S
        low, high = self._delay
        return self.time.now + low + (high - low) * self._random.random()


class _Direction:
    """One direction of a connection."""

    def __init__(self, network: Network, sender: SimHost, receiver: SimHost) -> None:
        self._network = network
        self._sender = sender.name
        self._receiver = receiver
        self._last = 0.0
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def send(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._held or not self._network.is_open(self._sender, self._receiver.name):
            self._held.append((call, args))
        else:
            self._transmit(call, args)

    def flush(self) -> None:
        held, self._held = self._held, []
        for call, args in held:
            self._transmit(call, args)

    def _transmit(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        # Messages of one direction keep their order, as with TCP.
        self._last = max(self._network.arrival(self._sender, self._receiver.name), self._last)
        self._receiver.receive(self._last, call, *args)


class SimLink:
    """A connection: whole messages in order, both ways, until it is cut.

    A message that is sent while its direction is blocked arrives after `heal`.
    """

    def __init__(self, network: Network, near: SimHost, far: SimHost) -> None:
        """Connect `near` to `far`."""
        self.is_cut = False
        self.far = far
        self._network = network
        self._up = _Direction(network, near, far)
        self._down = _Direction(network, far, near)
        network.links[self] = None

    def up(self, call: Callable[..., None], *args: Any) -> None:
        """Call something at the far end."""
        self._up.send(self._deliver, (call, args))

    def down(self, call: Callable[..., None], *args: Any) -> None:
        """Call something at the near end."""
        self._down.send(self._deliver, (call, args))

    def cut(self) -> None:
        """End the connection; messages in flight are lost."""
        self.is_cut = True
        self._network.links.pop(self, None)

    def flush(self) -> None:
        """Deliver the messages that were held back."""
        self._up.flush()
        self._down.flush()

    def _deliver(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.is_cut:
            call(*args)
