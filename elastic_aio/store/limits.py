"""Limits on what the clients of a store may occupy, and the account of their work.

Sizes are estimates from above: each entry counts for more than its bytes (`ENTRY` and the
like), because a million small keys occupy far more memory than their text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from elastic_aio.store.wire import WireLimits

ENTRY: Final = 160
"""Bytes that a key or an item occupies beside its text."""
WAIT: Final = 800
"""The same for a pending wait, and for each key that it waits for."""
TARGET: Final = 700
"""The same for a watched key and for an empty queue."""

KEYS_AT_ONCE: Final = 2048
"""Keys that are handled before other connections are served: a millisecond or two."""
BYTES_AT_ONCE: Final = 1 << 20
"""The same for the bytes of values."""
WORK_AT_ONCE: Final = 1024
"""Notifications, and work that takes as long, before other connections are served: 5 ms."""


def in_parts(
    items: Iterable[Any], size_of: Callable[[Any], int] = lambda _: 0
) -> Iterator[list[Any]]:
    """Yield the items in lists of at most `KEYS_AT_ONCE`, which end after `BYTES_AT_ONCE`."""
    part, size = [], 0
    for item in items:
        part.append(item)
        size += size_of(item)
        if len(part) == KEYS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


class OperationRefused(Exception):
    """The keyspace refuses an operation and is unchanged; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class KeyspaceLimits:
    """Limits on what all clients together may occupy, and on one reply.

    Args:
        stored: bytes of all keys, values, queues, waits and watches.
        reply: bytes of a reply with several keys or values.
        items: keys in the reply to LIST_KEYS, and in the first message of a watch.
        waits: pairs of a pending wait and a missing key.
        watches: open watches.
        leases: leases that have not ended.
        waits_each, watches_each, leases_each: the same, of one client.
        departed: leases whose holder has disconnected; above it, the oldest of them ends.
        grown: bytes to which APPEND may extend a value.
        history: recent changes of watched keys, kept for clients that reconnect.
        history_size: bytes of keys and values in those changes.
    """

    stored: int = 1 << 30
    reply: int = 64 << 20
    items: int = 131_072
    waits: int = 1_000_000
    watches: int = 100_000
    leases: int = 100_000
    waits_each: int = 32_768
    watches_each: int = 1_024
    leases_each: int = 1_024
    departed: int = 16_384
    grown: int = 8 << 20
    history: int = 65_536
    history_size: int = 16 << 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on the clients of a server; a client that exceeds one is disconnected.

    Args:
        wire: sizes in one request.
        keyspace: what all clients together may occupy.
        connections: open connections; never more than the process may open files.
        handshake_timeout: seconds to send the opening, and the token if there is one.
        stall_timeout: seconds to complete a request once begun, and to read replies.
        peer_timeout: seconds without a packet of the client's kernel.
        unsent: bytes of notifications for a client that does not read.
        buffered: bytes of unfinished requests and unsent replies of all clients together;
            above it, the client that holds the most is disconnected.
    """

    wire: WireLimits = field(default_factory=WireLimits)
    keyspace: KeyspaceLimits = field(default_factory=KeyspaceLimits)
    connections: int = 16_384
    handshake_timeout: float = 10.0
    stall_timeout: float = 60.0
    peer_timeout: float = 60.0
    unsent: int = 16 << 20
    buffered: int = 512 << 20


@dataclass(frozen=True, slots=True)
class Dropped:
    """The server closed the connection from `peer`; `reason` says what the peer did.

    `is_refusal`: it sent a valid request of torch's protocol, which has no other way to refuse
    one; the store is full, for example.
    """

    peer: str
    reason: str
    is_refusal: bool = False

    def __str__(self) -> str:
        return f"dropped {self.peer}: it {self.reason}"


class Usage:
    """The bytes that a keyspace may still occupy, of `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def take(self, size: int) -> None:
        """Occupy `size` bytes more, or refuse; a negative size frees some."""
        if size > self.left:
            self.refuse()
        self.left -= size

    def refuse(self) -> NoReturn:
        raise OperationRefused(f"the store is full: its limit is {self.limit} bytes")


class Work:
    """The work of operations beside replies; counted, not timed: equal requests divide alike."""

    def __init__(self, at_once: int = WORK_AT_ONCE) -> None:
        """Carry out `at_once` units before the rest is left for later."""
        self.at_once = at_once
        self.on_spent: Callable[[], None] | None = None
        self.left = at_once
        """Units until other connections should be served."""
        self.later: deque[Iterator[int]] = deque()
        """Work left for `step`; each part yields its units."""

    def begin(self, on_spent: Callable[[], None] | None = None) -> None:
        """Begin a new account; `on_spent` is called, maybe repeatedly, once nothing is left."""
        self.left, self.on_spent = self.at_once, on_spent

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left <= 0 and self.on_spent is not None:
            self.on_spent()

    def run(self, parts: Iterator[int]) -> None:
        """Carry out parts, each of which yields its units; leave the rest for later."""
        if self.left <= 0 and self.on_spent is not None:
            self.later.append(parts)
            return
        # What the parts themselves spend counts too.
        least = self.left - self.at_once
        for part in parts:
            self.left -= part
            if self.left <= least:
                self.later.append(parts)
                break
        self.spend(0)

    def step(self) -> bool:
        """Carry out some of the work left for later, all in turn; return whether more is left."""
        self.begin()
        while self.later and self.left > 0:
            self.run(self.later.popleft())
        return bool(self.later)
