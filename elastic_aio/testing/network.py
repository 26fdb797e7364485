"""A network with delays, partitions and broken connections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from elastic_aio.testing.timeline import Machine, Timeline

__all__ = ["Link", "Network"]

_HERE_S = 0.0001
"""How long a message takes inside of one machine."""


class Network:
    """Carries messages between machines, each direction of each pair by itself."""

    def __init__(self, timeline: Timeline, random: Random, delay: tuple[float, float]) -> None:
        """Begin whole; messages take from `delay[0]` to `delay[1]` seconds."""
        self.timeline = timeline
        self._random = random
        self._delay = delay
        self._blocked: set[tuple[str, str]] = set()
        self._links: dict[Link, None] = {}

    def is_open(self, sender: str, receiver: str) -> bool:
        """Whether messages get from one machine to the other now."""
        return (sender, receiver) not in self._blocked

    def is_open_both_ways(self, one: str, other: str) -> bool:
        """Whether both can talk with each other now."""
        return self.is_open(one, other) and self.is_open(other, one)

    def block(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Hold back all messages in this direction from now on."""
        receivers = set(receivers)
        self._blocked |= {(one, other) for one in senders for other in receivers if one != other}

    def heal(self) -> None:
        """Let all messages through again, those held back first."""
        self._blocked.clear()
        for link in list(self._links):
            link.flush()

    def arrival(self, sender: str, receiver: str) -> float:
        """Return when a message that is sent now arrives."""
        if sender == receiver:
            return self.timeline.now + _HERE_S
        low, high = self._delay
        return self.timeline.now + low + (high - low) * self._random.random()

    def opened(self, link: Link) -> None:
        """Take in a new connection."""
        self._links[link] = None

    def closed(self, link: Link) -> None:
        """Forget a connection."""
        self._links.pop(link, None)


class _Way:
    """One direction of a connection."""

    def __init__(self, network: Network, sender: Machine, receiver: Machine) -> None:
        self._network = network
        self._sender = sender.name
        self._receiver = receiver
        self._last = 0.0
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def send(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._held or not self._network.is_open(self._sender, self._receiver.name):
            self._held.append((call, args))
        else:
            self._pass(call, args)

    def flush(self) -> None:
        held, self._held = self._held, []
        for call, args in held:
            self._pass(call, args)

    def _pass(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        # Never overtaken by a later one.
        self._last = max(self._network.arrival(self._sender, self._receiver.name), self._last)
        self._receiver.receive(self._last, call, *args)


class Link:
    """A connection: whole messages in order, both ways, until it is cut.

    What is sent while its way is blocked arrives after the network has healed.
    """

    def __init__(self, network: Network, near: Machine, far: Machine) -> None:
        """Connect `near` to `far`."""
        self.is_cut = False
        self.far = far
        self._network = network
        self._up = _Way(network, near, far)
        self._down = _Way(network, far, near)
        network.opened(self)

    def up(self, call: Callable[..., None], *args: Any) -> None:
        """Send something to the far end, which then calls it."""
        self._up.send(self._deliver, (call, args))

    def down(self, call: Callable[..., None], *args: Any) -> None:
        """Send something to the near end, which then calls it."""
        self._down.send(self._deliver, (call, args))

    def cut(self) -> None:
        """End the connection; what is under way is lost."""
        self.is_cut = True
        self._network.closed(self)

    def flush(self) -> None:
        """Send what was held back."""
        self._up.flush()
        self._down.flush()

    def _deliver(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.is_cut:
            call(*args)
