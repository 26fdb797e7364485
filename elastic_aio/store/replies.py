"""The replies of the store's wire protocol, as bytes; `wire.py` holds the requests.

In the plain dialect replies follow one another without names or lengths: only who
remembers the requests can cut them apart (`ReplyReader`).  In the tagged dialect
each is `tag, status, length` and then the same bytes as in the plain one, or the
refusal as text.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from elastic_aio.store import wire
from elastic_aio.store.wire import WireError

__all__ = ["Greeting", "ReplyReader", "TaggedReader", "decode", "encode_reply", "tagged"]

MAX_REPLY: Final = 256 << 20
"""Bytes of one reply that a client accepts; a longer one is not believed."""

# Status of a tagged reply.
DONE: Final = 0
REFUSED: Final = 1
NEWS: Final = 2
"""More replies with this tag may follow: a watch's changes."""

# Kinds of replies.
NONE: Final = 0
BYTE: Final = 1
WORD: Final = 2
NUMBER: Final = 3
VALUE: Final = 4
VALUES: Final = 5
NAMES: Final = 6
POPPED: Final = 7
MAYBE: Final = 8
GREETING: Final = 9

KIND_OF: Final[dict[int, int]] = {
    wire.SET: NONE,
    wire.COMPARE_SET: VALUE,
    wire.GET: VALUE,
    wire.ADD: NUMBER,
    wire.CHECK: BYTE,
    wire.WAIT: BYTE,
    wire.NUM_KEYS: NUMBER,
    wire.DELETE_KEY: NUMBER,
    wire.APPEND: NONE,
    wire.MULTI_GET: VALUES,
    wire.MULTI_SET: NONE,
    wire.CANCEL_WAIT: BYTE,
    wire.PING: WORD,
    wire.QUEUE_PUSH: NONE,
    wire.QUEUE_POP: POPPED,
    wire.QUEUE_LEN: NUMBER,
    wire.LIST_KEYS: NAMES,
    wire.BARRIER: BYTE,
    wire.HELLO: GREETING,
    wire.AUTH: NONE,
    wire.CANCEL: BYTE,
    wire.PEEK: MAYBE,
    wire.GET_WHEN_SET: VALUES,
    wire.POP_WHEN_PUSHED: VALUE,
    wire.QUEUE_UNPOP: NONE,
    wire.GRANT_LEASE: VALUE,
    wire.RESUME_LEASE: BYTE,
    wire.RELEASE_LEASE: BYTE,
    wire.LEASED_SET: NONE,
    wire.LEASED_COMPARE_SET: VALUE,
}

READY: Final = 0
NOT_READY: Final = 1
STOP_WAITING: Final = 0
WAIT_CANCELED: Final = 1

_U32: Final = struct.Struct("<I")
_I64: Final = struct.Struct("<q")
_U64: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<IBI")
_GREETING: Final = struct.Struct("<16s16s?")
_CHANGE: Final = struct.Struct("<BqQ")
_VIEW: Final = struct.Struct("<BqQ")


class Greeting(NamedTuple):
    """The answer to HELLO.

    `instance` names the running server: another one has other keys.  `nonce` is to
    be answered by AUTH when `needs_token` is true.
    """

    instance: bytes
    nonce: bytes
    needs_token: bool


class RawChange(NamedTuple):
    """One change of a watched key; `value` is empty unless `kind` is SET."""

    kind: int
    revision: int
    key: bytes
    value: bytes


class RawView(NamedTuple):
    """What a watch begins with.

    `is_whole`: `pairs` are all watched keys as of `revision`.  Otherwise the watch
    goes on after the revision that its holder has seen, without a gap.
    """

    is_whole: bool
    revision: int
    pairs: tuple[tuple[bytes, bytes], ...]


# Kinds of changes; a view travels in their place with its own two.
CHANGE_SET: Final = 0
CHANGE_DELETED: Final = 1
CHANGE_EXPIRED: Final = 2
_VIEW_CONTINUED: Final = 3
_VIEW_WHOLE: Final = 4


def _sized(data: bytes) -> bytes:
    return _U64.pack(len(data)) + data


def _names(names: Sequence[bytes]) -> bytes:
    return _U64.pack(len(names)) + b"".join(map(_sized, names))


def _popped(popped: tuple[int, bytes]) -> bytes:
    length, item = popped
    return _I64.pack(length) + _sized(item) if length else _I64.pack(0)


def _values(values: Iterable[bytes]) -> bytes:
    return b"".join(map(_sized, values))


def _maybe(value: bytes | None) -> bytes:
    return b"\0" if value is None else b"\1" + _sized(value)


_ENCODERS: Final[tuple[Callable[[Any], bytes], ...]] = (
    lambda _: b"",
    (b"\0", b"\1").__getitem__,
    _U32.pack,
    _I64.pack,
    _sized,
    _values,
    _names,
    _popped,
    _maybe,
    lambda greeting: _GREETING.pack(*greeting),
)
ENCODER_OF: Final[tuple[Callable[[Any], bytes], ...]] = tuple(
    _ENCODERS[KIND_OF.get(op, NONE)] for op in range(256)
)
"""By opcode: the function that turns the result into a plain reply."""


def encode_reply(op: int, result: Any) -> bytes:
    """Return the plain reply to `op`; empty for those that have none."""
    return ENCODER_OF[op](result)


def tagged(tag: int, status: int, payload: bytes) -> bytes:
    """Return a reply of the tagged dialect."""
    return _HEAD.pack(tag, status, len(payload)) + payload


def encode_change(change: RawChange) -> bytes:
    """Return the payload of one change."""
    kind, revision, key, value = change
    return _CHANGE.pack(kind, revision, len(key)) + key + value


def encode_view(view: RawView) -> bytes:
    """Return the payload that opens a watch."""
    kind = _VIEW_WHOLE if view.is_whole else _VIEW_CONTINUED
    items = b"".join(_sized(item) for pair in view.pairs for item in pair)
    return _VIEW.pack(kind, view.revision, len(view.pairs)) + items


def decode_news(payload: bytes) -> RawChange | RawView:
    """Read what a watch sent.

    Raises:
        WireError: it is malformed.
    """
    if len(payload) < _CHANGE.size:
        raise WireError("sent news that are too short")
    kind, revision, count = _CHANGE.unpack_from(payload)
    position = _CHANGE.size
    if kind <= CHANGE_EXPIRED:
        if position + count > len(payload):
            raise WireError("sent news that are too short")
        key = payload[position : position + count]
        return RawChange(kind, revision, key, payload[position + count :])
    if kind > _VIEW_WHOLE or count > len(payload):
        raise WireError("sent news of an unknown kind")
    found = _read_values(payload, position, 2 * count)
    if isinstance(found, int) or found[1] != len(payload):
        raise WireError("sent a view whose lengths do not add up")
    items = found[0]
    pairs = tuple(zip(items[::2], items[1::2], strict=True))
    return RawView(kind == _VIEW_WHOLE, revision, pairs)


def decode(op: int, count: int, payload: bytes) -> Any:
    """Read the payload of a tagged reply to `op`, which had `count` keys.

    Raises:
        WireError: it is malformed.
    """
    found = _read(KIND_OF[op], count, payload, 0)
    if isinstance(found, int) or found[1] != len(payload):
        raise WireError(f"answered request 0x{op:02x} with {len(payload)} bytes that make no sense")
    return found[0]


def _read(kind: int, count: int, data: bytes, position: int) -> tuple[Any, int] | int:
    """Read one reply; return it and the position after it, or how many bytes it needs."""
    left = len(data) - position
    if kind in _FIXED:
        form, size = _FIXED[kind]
        return (form.unpack_from(data, position)[0], position + size) if left >= size else size
    if kind == VALUE:
        if left < 8:
            return 8
        size = _checked(_U64.unpack_from(data, position)[0])
        stop = position + 8 + size
        return (data[position + 8 : stop], stop) if stop <= len(data) else 8 + size
    if kind == NONE:
        return None, position
    if kind == VALUES:
        return _read_values(data, position, count)
    if kind == GREETING:
        size = _GREETING.size
        if left < size:
            return size
        return Greeting(*_GREETING.unpack_from(data, position)), position + size
    return _read_counted(kind, data, position)


def _read_counted(kind: int, data: bytes, position: int) -> tuple[Any, int] | int:
    """Read a reply that begins by saying what follows: NAMES, POPPED or MAYBE."""
    begin = position + (1 if kind == MAYBE else 8)
    if begin > len(data):
        return begin - position
    first = data[position] if kind == MAYBE else _U64.unpack_from(data, position)[0]
    announced = _checked(first)
    found = _read_values(data, begin, announced if kind == NAMES else min(announced, 1))
    if isinstance(found, int):
        return begin - position + found
    values, stop = found
    if kind == NAMES:
        return values, stop
    if kind == MAYBE:
        return (values[0] if announced else None), stop
    return (announced, values[0] if announced else b""), stop


def _read_values(data: bytes, position: int, count: int) -> tuple[list[bytes], int] | int:
    start, values = position, []
    for _ in range(count):
        begin = position + 8
        if begin > len(data):
            return begin - start
        size = _checked(_U64.unpack_from(data, position)[0])
        position = begin + size
        if position > len(data):
            return position - start
        values.append(data[begin:position])
    return values, position


_FIXED: Final = {
    BYTE: (struct.Struct("<B"), 1),
    WORD: (_U32, 4),
    NUMBER: (_I64, 8),
}


def _checked(size: int) -> int:
    if size > MAX_REPLY:
        raise WireError(f"announced {size} bytes in one reply")
    return size


class ReplyReader:
    """Cut the replies of the plain dialect apart, in the order of the requests."""

    def __init__(self) -> None:
        """Begin with no request outstanding."""
        self._expected: deque[tuple[int, int]] = deque()
        self._held = bytearray()
        self._need = 0

    def expect(self, op: int, count: int = 0) -> None:
        """Tell that request `op`, with `count` keys, has been sent.  Only those with replies."""
        self._expected.append((KIND_OF[op], count))

    def read(self, data: bytes) -> list[Any]:
        """Take bytes in; return the replies that are whole now, oldest request first.

        Raises:
            WireError: more than was asked for, or absurd lengths.
        """
        self._held += data
        if len(self._held) < self._need:
            return []
        data, position = bytes(self._held), 0
        results: list[Any] = []
        self._need = 0
        while position < len(data):
            if not self._expected:
                raise WireError("answered a request that nobody made")
            found = _read(*self._expected[0], data, position)
            if isinstance(found, int):
                self._need = found
                break
            self._expected.popleft()
            result, position = found
            results.append(result)
        # Replies without a byte (a MULTI_GET of nothing) are whole at once.
        while self._expected and self._expected[0] == (VALUES, 0):
            self._expected.popleft()
            results.append([])
        self._held = bytearray(data[position:])
        return results


class TaggedReader:
    """Cut the replies of the tagged dialect apart."""

    def __init__(self) -> None:
        """Begin with nothing received."""
        self._held = bytearray()
        self._need = 0

    def read(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """Take bytes in; return `(tag, status, payload)` of each whole reply.

        Raises:
            WireError: an absurd length or an unknown status.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._need:
                return []
            data = bytes(self._held)
            self._held = bytearray()
        position, end = 0, len(data)
        replies = []
        need = 0
        while position < end:
            begin = position + 9
            if begin > end:
                need = 9
                break
            tag, status, size = _HEAD.unpack_from(data, position)
            if size > MAX_REPLY or status > NEWS:
                raise WireError(f"sent a reply with status {status} and {size} bytes")
            stop = begin + size
            if stop > end:
                need = stop - position
                break
            replies.append((tag, status, data[begin:stop]))
            position = stop
        if need:
            self._held, self._need = bytearray(data[position:]), need
        return replies
