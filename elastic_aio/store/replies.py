"""Replies of the store's wire protocol as bytes; `wire.py` defines the requests.

In the plain dialect replies follow one another without tag or length, so a reader must know the
requests to separate them (`ReplyReader`).  In the tagged dialect `tag, status, length` precede the
same bytes, or the refusal as text.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from msgspec import Struct

from elastic_aio.store import wire
from elastic_aio.store.wire import I64, U32, U64, WireError

MAX_REPLY: Final = 256 << 20
"""The largest reply, in bytes, that a client accepts."""

LARGE: Final = 64 << 10
"""From this size on a value is not copied into its reply: see `Pieces`."""

Pieces = list[bytes]
"""A reply in parts, which are sent one after the other; made for large values."""

# Status of a tagged reply.
DONE: Final = 0
REFUSED: Final = 1
NOTIFY: Final = 2
"""A snapshot or change of a watch, or the end of a lease; more may follow with this tag."""
TOO_LARGE: Final = 3
"""Not on the wire: `TaggedReader` reports a reply above `MAX_REPLY`, the last that it reads."""


class ReplyTooLarge(WireError):
    """A reply is larger than `MAX_REPLY`: the connection cannot be used any more."""

    def __init__(self, size: int) -> None:
        super().__init__(f"has a reply of {size} bytes: the limit is {MAX_REPLY} bytes")


# Kinds of replies.
NONE, BYTE, WORD, NUMBER, VALUE, VALUES, NAMES, POPPED, MAYBE, HELLO_REPLY = range(10)

_OPCODES_OF_KIND: Final = (
    (NONE, (wire.SET, wire.APPEND, wire.MULTI_SET, wire.QUEUE_PUSH, wire.QUEUE_UNPOP)),
    (NONE, (wire.LEASED_SET,)),
    (BYTE, (wire.CHECK, wire.WAIT, wire.CANCEL_WAIT, wire.BARRIER, wire.CANCEL)),
    (BYTE, (wire.RESUME_LEASE, wire.RELEASE_LEASE)),
    (WORD, (wire.PING,)),
    (NUMBER, (wire.ADD, wire.NUM_KEYS, wire.DELETE_KEY, wire.QUEUE_LEN)),
    (VALUE, (wire.COMPARE_SET, wire.GET, wire.POP_WHEN_PUSHED)),
    (VALUE, (wire.AUTH, wire.GRANT_LEASE, wire.LEASED_COMPARE_SET)),
    (VALUES, (wire.MULTI_GET, wire.GET_WHEN_SET)),
    (NAMES, (wire.LIST_KEYS,)),
    (POPPED, (wire.QUEUE_POP,)),
    (MAYBE, (wire.PEEK,)),
    (HELLO_REPLY, (wire.HELLO,)),
)
KIND_OF: Final = {op: kind for kind, ops in _OPCODES_OF_KIND for op in ops}

READY: Final = 0
NOT_READY: Final = 1
WAIT_CANCELED: Final = 1

_HEAD: Final = struct.Struct("<IBI")
_HELLO_REPLY: Final = struct.Struct("<16s16s?")
_NOTIFICATION: Final = struct.Struct("<BqQ")
"""The kind, the revision, and the size of a change's key or the number of a snapshot's pairs."""


class HelloReply(NamedTuple):
    """The reply to HELLO.

    `instance` identifies the running server; a restart changes it.  If `needs_token`, the client
    must send an AUTH computed from `nonce`; the reply is the server's own proof.
    """

    instance: bytes
    nonce: bytes
    needs_token: bool


class RawChange(Struct, frozen=True, gc=False):
    """One change of a watched key; `value` is empty unless `kind` is SET."""

    kind: int
    revision: int
    key: bytes
    value: bytes


class WatchSnapshot(NamedTuple):
    """The first message of a watch.

    If `is_whole`, `pairs` are all watched keys as of `revision`.  Otherwise the watch continues
    without a gap after `revision`, the last one its reader has seen.
    """

    is_whole: bool
    revision: int
    pairs: Collection[tuple[bytes, bytes]]


# Kinds of changes; a snapshot is sent with one of two kinds of its own.
CHANGE_SET: Final = 0
CHANGE_DELETED: Final = 1
CHANGE_EXPIRED: Final = 2
CHANGE_CLOSED: Final = 3
"""It has expired because the kernel of its holder has closed the connection."""
_SNAPSHOT_CONTINUED: Final = 4
_SNAPSHOT_WHOLE: Final = 5


_pack_size: Final = U64.pack  # bound once: each GET calls it
_SIZES: Final = [_pack_size(size) for size in range(256)]


def _value(value: bytes) -> bytes | Pieces:
    size = len(value)
    if size < 256:
        return _SIZES[size] + value
    if size < LARGE:
        return _pack_size(size) + value
    return [_pack_size(size), value]


def _popped(popped: tuple[int, bytes]) -> bytes | Pieces:
    length, item = popped
    return _after(I64.pack(length), _value(item)) if length else I64.pack(0)


def _joined(items: Iterable[bytes]) -> bytes:
    """Return items, each preceded by its length; as `sized`, without calls for short ones."""
    sizes = _SIZES
    most = len(sizes)
    return b"".join(
        [
            part
            for item in items
            for part in (sizes[len(item)] if len(item) < most else _pack_size(len(item)), item)
        ]
    )


def _values(values: Sequence[bytes]) -> bytes | Pieces:
    if max(map(len, values), default=0) < LARGE:
        return _joined(values)
    return [piece for value in values for piece in (U64.pack(len(value)), value)]


def _names(names: Sequence[bytes]) -> bytes:
    return U64.pack(len(names)) + _joined(names)


def _maybe(value: bytes | None) -> bytes | Pieces:
    return b"\0" if value is None else _after(b"\1", _value(value))


def _after(head: bytes, rest: bytes | Pieces) -> bytes | Pieces:
    return [head, *rest] if isinstance(rest, list) else head + rest


_ENCODERS: Final[tuple[Callable[[Any], bytes | Pieces], ...]] = (
    lambda _: b"",
    (b"\0", b"\1").__getitem__,
    U32.pack,
    I64.pack,
    _value,
    _values,
    _names,
    _popped,
    _maybe,
    lambda hello_reply: _HELLO_REPLY.pack(*hello_reply),
)
_FIXED: Final = {BYTE: (struct.Struct("<B"), 1), WORD: (U32, 4), NUMBER: (I64, 8)}

ENCODER_OF: Final[tuple[Callable[[Any], bytes | Pieces], ...]] = tuple(
    _ENCODERS[KIND_OF.get(op, NONE)] for op in range(256)
)
"""The function that encodes the plain reply, by opcode; empty for requests without a reply."""


def tagged(tag: int, status: int, payload: bytes | Pieces) -> bytes | Pieces:
    if isinstance(payload, bytes):
        return _HEAD.pack(tag, status, len(payload)) + payload
    return [_HEAD.pack(tag, status, sum(map(len, payload))), *payload]


def encode_change(change: RawChange) -> bytes | Pieces:
    key, value = change.key, change.value
    head = _NOTIFICATION.pack(change.kind, change.revision, len(key)) + key
    return head + value if len(value) < LARGE else [head, value]


def encode_snapshot(snapshot: WatchSnapshot) -> bytes:
    """Return the payload of the first message of a watch."""
    return encode_head(wire.WATCH_KEY, snapshot) + encode_items(wire.WATCH_KEY, snapshot.pairs)


def encode_head(op: int, reply: Any) -> bytes:
    """Return the bytes before the items of a reply to LIST_KEYS or of a watch's first message."""
    if op == wire.LIST_KEYS:
        return U64.pack(len(reply))
    kind = _SNAPSHOT_WHOLE if reply.is_whole else _SNAPSHOT_CONTINUED
    return _NOTIFICATION.pack(kind, reply.revision, len(reply.pairs))


def encode_items(op: int, items: Iterable[Any]) -> bytes:
    """Return some names of a reply to LIST_KEYS, or some pairs of a watch's first message."""
    return _joined(items if op == wire.LIST_KEYS else [item for pair in items for item in pair])


def decode_notification(payload: bytes) -> RawChange | WatchSnapshot:
    """Decode the payload of a watch's message, or raise `WireError`."""
    if len(payload) < _NOTIFICATION.size:
        raise WireError("sent a notification that is too short")
    kind, revision, count = _NOTIFICATION.unpack_from(payload)
    position = _NOTIFICATION.size
    if kind <= CHANGE_CLOSED:
        if position + count > len(payload):
            raise WireError("sent a notification that is too short")
        key = payload[position : position + count]
        return RawChange(kind, revision, key, payload[position + count :])
    if kind > _SNAPSHOT_WHOLE or count > len(payload):
        raise WireError("sent a notification of an unknown kind")
    values = _read_values(payload, position, 2 * count)
    if isinstance(values, int) or values[1] != len(payload):
        raise WireError("sent a snapshot whose lengths do not add up")
    items = values[0]
    pairs = tuple(zip(items[::2], items[1::2], strict=True))
    return WatchSnapshot(kind == _SNAPSHOT_WHOLE, revision, pairs)


def decode(op: int, count: int, payload: bytes) -> Any:
    """Decode the payload of a tagged reply to `op`, a request with `count` keys."""
    reply = _read(KIND_OF[op], count, payload, 0)
    if isinstance(reply, int) or reply[1] != len(payload):
        raise WireError(f"sent a malformed reply of {len(payload)} bytes to request 0x{op:02x}")
    return reply[0]


def _read(kind: int, count: int, data: bytes, position: int) -> tuple[Any, int] | int:
    """Return the reply at `position` and its end; if incomplete, the bytes it needs."""
    left = len(data) - position
    if kind in _FIXED:
        form, size = _FIXED[kind]
        return (form.unpack_from(data, position)[0], position + size) if left >= size else size
    if kind == VALUE:
        if left < 8:
            return 8
        size = _checked(U64.unpack_from(data, position)[0])
        stop = position + 8 + size
        return (data[position + 8 : stop], stop) if stop <= len(data) else 8 + size
    if kind == NONE:
        return None, position
    if kind == VALUES:
        return _read_values(data, position, count)
    if kind == HELLO_REPLY:
        size = _HELLO_REPLY.size
        if left < size:
            return size
        return HelloReply(*_HELLO_REPLY.unpack_from(data, position)), position + size
    return _read_counted(kind, data, position)


def _read_counted(kind: int, data: bytes, position: int) -> tuple[Any, int] | int:
    """Read a reply that begins with a count or a flag: NAMES, POPPED or MAYBE."""
    begin = position + (1 if kind == MAYBE else 8)
    if begin > len(data):
        return begin - position
    first = data[position] if kind == MAYBE else U64.unpack_from(data, position)[0]
    announced = _checked(first)
    items = _read_values(data, begin, announced if kind == NAMES else min(announced, 1))
    if isinstance(items, int):
        return begin - position + items
    values, stop = items
    if kind == NAMES:
        return values, stop
    if kind == MAYBE:
        return (values[0] if announced else None), stop
    return (announced, values[0] if announced else b""), stop


def _read_values(data: bytes, position: int, count: int) -> tuple[list[bytes], int] | int:
    start, values = position, []
    most = position + MAX_REPLY + 8 * count
    for _ in range(count):
        begin = position + 8
        if begin > len(data):
            return begin - start
        size = _checked(U64.unpack_from(data, position)[0])
        position = begin + size
        if position > most:
            raise ReplyTooLarge(position - start)
        if position > len(data):
            return position - start
        values.append(data[begin:position])
    return values, position


def _checked(size: int) -> int:
    if size > MAX_REPLY:
        raise ReplyTooLarge(size)
    return size


class ReplyReader:
    """Incremental parser of the plain dialect: bytes in, replies out, in request order."""

    def __init__(self) -> None:
        self._expected: deque[tuple[int, int]] = deque()
        self._held = bytearray()
        self._need = 0

    def expect(self, op: int, count: int = 0) -> None:
        """Expect the reply to `op`, a request with `count` keys and a reply."""
        self._expected.append((KIND_OF[op], count))

    def read(self, data: bytes) -> list[Any]:
        """Add received bytes; return the replies that are complete now, in request order.

        A too large reply is returned as a `ReplyTooLarge`, after which nothing can be read; an
        unexpected or invalid reply raises `WireError`.
        """
        self._held += data
        if len(self._held) < self._need:
            return []
        data, position = bytes(self._held), 0
        results: list[Any] = []
        self._need = 0
        while position < len(data):
            if not self._expected:
                raise WireError("sent an unexpected reply")
            try:
                reply = _read(*self._expected[0], data, position)
            except ReplyTooLarge as error:
                return [*results, error]
            if isinstance(reply, int):
                self._need = reply
                break
            self._expected.popleft()
            result, position = reply
            results.append(result)
        # A reply of no bytes (a MULTI_GET of no keys) is complete at once.
        while self._expected and self._expected[0] == (VALUES, 0):
            self._expected.popleft()
            results.append([])
        self._held = bytearray(data[position:])
        return results


class TaggedReader:
    """Incremental parser of the tagged dialect: bytes in, replies out."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._need = 0

    def read(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """Add received bytes; return `(tag, status, payload)` of each complete reply.

        After the status `TOO_LARGE`, whose payload is a text, nothing can be read; an unknown
        status raises `WireError`.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._need:
                return []
            data = bytes(self._held)
            self._held = bytearray()
        position, end = 0, len(data)
        replies: list[tuple[int, int, bytes]] = []
        need = 0
        while position < end:
            begin = position + 9
            if begin > end:
                need = 9
                break
            tag, status, size = _HEAD.unpack_from(data, position)
            if status > NOTIFY:
                raise WireError(f"sent a reply with status {status} and {size} bytes")
            if size > MAX_REPLY:
                return [*replies, (tag, TOO_LARGE, str(ReplyTooLarge(size)).encode())]
            stop = begin + size
            if stop > end:
                need = stop - position
                break
            replies.append((tag, status, data[begin:stop]))
            position = stop
        if need:
            self._held, self._need = bytearray(data[position:]), need
        return replies
