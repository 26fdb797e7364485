"""The requests of the store's wire protocol, as bytes: torch's TCPStore and our extensions.

A connection starts in torch's *plain* dialect: one opcode byte, then arguments
whose lengths precede them, little-endian.  Replies bear no name; they come in the
order of the requests.  So a plain connection can have only one wait at a time,
and a refusal can only be told by closing it.

`HELLO` switches a connection to our *tagged* dialect: every request is preceded by
a number that its replies bear, so that any number of waits and watches share the
connection and every refusal names its request.  Only a peer that has answered
READY to a CHECK of `RESERVED_KEY` is sent a HELLO; a torch server would close on
an unknown opcode.

A request is a plain tuple `(opcode, key, argument, tag)`.  A frozen dataclass costs
0.6 us to make, a third of what a request may cost in all.  What `argument` is
follows from the opcode:

=================================  ===========================================
opcodes                            argument
=================================  ===========================================
GET DELETE_KEY QUEUE_POP QUEUE_LEN PEEK POP_WHEN_PUSHED  None
AUTH RESUME_LEASE RELEASE_LEASE    None; the key is the code or the lease's name
SET APPEND QUEUE_PUSH QUEUE_UNPOP  bytes: the value
COMPARE_SET                        [expected, desired]
LEASED_SET                         [value, lease]
LEASED_COMPARE_SET                 [expected, desired, lease]
ADD BARRIER WATCH_KEY WATCH_PREFIX int, signed: amount, world size, revision seen
CHECK WAIT MULTI_GET GET_WHEN_SET  tuple of keys; the key itself is empty
MULTI_SET                          tuple of pairs (key, value); the key is empty
PING HELLO CANCEL                  int, unsigned: nonce, version, tag
GRANT_LEASE                        (ttl, linger) in milliseconds
the others                         None; the key is empty
=================================  ===========================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "OPENING",
    "RESERVED_KEY",
    "Request",
    "RequestReader",
    "WireError",
    "WireLimits",
    "encode",
    "token_code",
]

Request = tuple[int, bytes, Any, int]

MAGIC: Final = 0x3C85F7CE
VERSION: Final = 1
RESERVED_KEY: Final = b"\0elastic_aio"
"""No torch client can set it: theirs begin with `/`, or are `init/`."""

VALIDATE: Final = 0x00
SET: Final = 0x01
COMPARE_SET: Final = 0x02
GET: Final = 0x03
ADD: Final = 0x04
CHECK: Final = 0x05
WAIT: Final = 0x06
NUM_KEYS: Final = 0x07
DELETE_KEY: Final = 0x08
APPEND: Final = 0x09
MULTI_GET: Final = 0x0A
MULTI_SET: Final = 0x0B
CANCEL_WAIT: Final = 0x0C
PING: Final = 0x0D
QUEUE_PUSH: Final = 0x0E
QUEUE_POP: Final = 0x0F
QUEUE_LEN: Final = 0x10
LIST_KEYS: Final = 0x11
BARRIER: Final = 0x12
# Ours.  HELLO is the last untagged request; the others exist only with a tag.
HELLO: Final = 0x80
AUTH: Final = 0x81
CANCEL: Final = 0x82
HEARTBEAT: Final = 0x83
PEEK: Final = 0x84
GET_WHEN_SET: Final = 0x85
POP_WHEN_PUSHED: Final = 0x86
QUEUE_UNPOP: Final = 0x87
GRANT_LEASE: Final = 0x88
RESUME_LEASE: Final = 0x89
RELEASE_LEASE: Final = 0x8A
LEASED_SET: Final = 0x8B
LEASED_COMPARE_SET: Final = 0x8C
WATCH_KEY: Final = 0x8D
WATCH_PREFIX: Final = 0x8E

OPENING: Final = struct.pack("<BI", VALIDATE, MAGIC)

# Shapes of the arguments.  KEY + n is a key and n values.
UNKNOWN: Final = 0
KEY: Final = 1
KEY_1: Final = 2
KEY_2: Final = 3
KEY_3: Final = 4
KEY_NUMBER: Final = 5
KEYS: Final = 6
PAIRS: Final = 7
NOTHING: Final = 8
WORD: Final = 9
WORDS: Final = 10

_SHAPE_OF: Final = {
    SET: KEY_1,
    COMPARE_SET: KEY_2,
    GET: KEY,
    ADD: KEY_NUMBER,
    CHECK: KEYS,
    WAIT: KEYS,
    NUM_KEYS: NOTHING,
    DELETE_KEY: KEY,
    APPEND: KEY_1,
    MULTI_GET: KEYS,
    MULTI_SET: PAIRS,
    CANCEL_WAIT: NOTHING,
    PING: WORD,
    QUEUE_PUSH: KEY_1,
    QUEUE_POP: KEY,
    QUEUE_LEN: KEY,
    LIST_KEYS: NOTHING,
    BARRIER: KEY_NUMBER,
    HELLO: WORD,
    AUTH: KEY,
    CANCEL: WORD,
    HEARTBEAT: NOTHING,
    PEEK: KEY,
    GET_WHEN_SET: KEYS,
    POP_WHEN_PUSHED: KEY,
    QUEUE_UNPOP: KEY_1,
    GRANT_LEASE: WORDS,
    RESUME_LEASE: KEY,
    RELEASE_LEASE: KEY,
    LEASED_SET: KEY_2,
    LEASED_COMPARE_SET: KEY_3,
    WATCH_KEY: KEY_NUMBER,
    WATCH_PREFIX: KEY_NUMBER,
}
PLAIN_OPCODES: Final = frozenset(op for op in _SHAPE_OF if op <= HELLO)
TAGGED_OPCODES: Final = frozenset(_SHAPE_OF) - {HELLO, CANCEL_WAIT}
_PLAIN: Final = bytes(_SHAPE_OF[op] if op in PLAIN_OPCODES else UNKNOWN for op in range(256))
_TAGGED: Final = bytes(_SHAPE_OF[op] if op in TAGGED_OPCODES else UNKNOWN for op in range(256))

_U32: Final = struct.Struct("<I")
_I64: Final = struct.Struct("<q")
_U64: Final = struct.Struct("<Q")
_2U32: Final = struct.Struct("<II")
_OP_U32: Final = struct.Struct("<BI")
_OP_2U32: Final = struct.Struct("<BII")
_OP_U64: Final = struct.Struct("<BQ")


class WireError(Exception):
    """The peer broke the protocol; the message says how.  The connection must be closed."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What a peer may announce; the first three are torch's own limits.

    Args:
        key: bytes of a key, torch's leading `/` included.
        value: bytes of a value.
        count: keys or pairs in one request.
        request: bytes of the keys and values of one request with many.
    """

    key: int = 8192
    value: int = 8 << 20
    count: int = 131_072
    request: int = 64 << 20


def encode(op: int, key: bytes, argument: Any, tag: int | None = None) -> bytes:
    """Return the frame of one request; with a `tag`, in the tagged dialect."""
    shape = _SHAPE_OF[op]
    frame: bytes
    if shape == KEY_1:
        frame = _OP_U64.pack(op, len(key)) + key + _U64.pack(len(argument)) + argument
    elif shape == KEY_NUMBER:
        frame = _OP_U64.pack(op, len(key)) + key + _I64.pack(argument)
    elif shape == KEY:
        frame = _OP_U64.pack(op, len(key)) + key
    elif shape == KEYS:
        frame = _OP_U64.pack(op, len(argument)) + b"".join(map(_sized, argument))
    elif shape == PAIRS:
        items = (_sized(item) for pair in argument for item in pair)
        frame = _OP_U64.pack(op, len(argument)) + b"".join(items)
    elif shape == NOTHING:
        frame = bytes((op,))
    elif shape == WORD:
        frame = _OP_U32.pack(op, argument)
    elif shape == WORDS:
        frame = _OP_2U32.pack(op, *argument)
    else:
        frame = bytes((op,)) + b"".join(map(_sized, (key, *argument)))
    return frame if tag is None else _U32.pack(tag) + frame


def _sized(data: bytes) -> bytes:
    return _U64.pack(len(data)) + data


def token_code(token: str, nonce: bytes) -> bytes:
    """Return the proof that one knows `token`, good for one connection."""
    import hmac  # tokens are rare, and it takes a millisecond

    return hmac.digest(token.encode(), nonce, "sha256")


class _Group:
    """A request with many keys of which some have arrived.

    Its items are taken out of the buffer as they come: a peer that sends byte by
    byte must not make us parse a hundred thousand keys at each of them.
    """

    __slots__ = ("items", "op", "size", "tag", "wanted")

    def __init__(self, op: int, tag: int, count: int) -> None:
        self.op = op
        self.tag = tag
        self.wanted = 2 * count if op == MULTI_SET else count
        self.items: list[bytes] = []
        self.size = 0


class RequestReader:
    """Cut a stream of bytes into requests, however it arrives.

    Feed it with `read`; after a `WireError` it must not be used again.
    """

    __slots__ = (
        "_failure",
        "_group",
        "_held",
        "_limits",
        "_need",
        "_opened",
        "_tagged",
        "has_more",
        "is_partial",
    )

    def __init__(self, limits: WireLimits) -> None:
        """Begin before the opening (VALIDATE), in the plain dialect."""
        self._limits = limits
        self._held = bytearray()
        self._need = 0
        self._group: _Group | None = None
        self._opened = False
        self._tagged = False
        self._failure: WireError | None = None
        self.has_more = False
        """Whether the last `read` has stopped early: call `read(b"")`."""
        self.is_partial = False
        """Whether an unfinished request is held."""

    @property
    def partial(self) -> int:
        """How many bytes of an unfinished request are held."""
        return len(self._held) + (self._group.size if self._group else 0)

    @property
    def is_opened(self) -> bool:
        """Whether the peer has sent its opening."""
        return self._opened

    def read(self, data: bytes, most: int = 512) -> list[Request]:
        """Take bytes in; return the requests that are whole now, `most` at most.

        A HELLO switches to the tagged dialect by itself.

        Raises:
            WireError: something that no peer of ours sends, as soon as its length or
                opcode is readable, and after the requests before it were returned.
        """
        if self._failure is not None:
            raise self._failure
        self.has_more = False
        if self._held:
            self._held += data
            if len(self._held) < self._need:
                return []
            data = bytes(self._held)
            self._held = bytearray()
        self.is_partial = False
        position, end = 0, len(data)
        if not self._opened:
            if not OPENING.startswith(data[:5]):
                raise WireError("does not begin like a TCPStore client")
            if end < 5:
                self._hold(data, 0, 5)
                return []
            self._opened, position = True, 5
        requests: list[Request] = []
        try:
            if self._group is not None:
                position = self._read_group(self._group, data, position, requests)
            if self._group is None and position < end:
                self._read_whole(data, position, requests, most)
        except WireError as error:
            self._failure, self._group = error, None
            if not requests:
                raise
            self.has_more = True
        return requests

    def _read_whole(self, data: bytes, position: int, requests: list[Request], most: int) -> None:
        """Append the requests of `data` to `requests`; hold what is left over.

        Long and without helpers, since every request of every worker passes here.
        """
        end = len(data)
        u64 = _U64.unpack_from
        max_key, max_value = self._limits.key, self._limits.value
        shapes = _TAGGED if self._tagged else _PLAIN
        append = requests.append
        tag, at = 0, position
        need = 0
        for _ in range(most):
            if position >= end:
                return
            if shapes is _TAGGED:
                at = position + 4
                if at >= end:
                    need = 5
                    break
                (tag,) = _U32.unpack_from(data, position)
            else:
                at = position
            op = data[at]
            shape = shapes[op]
            body = at + 9
            if shape == KEY_1 and body <= end:
                # The shortest way for what comes most often and without a reply.
                (size,) = u64(data, at + 1)
                begin = body + size + 8
                if begin <= end and size <= max_key:
                    (size,) = u64(data, begin - 8)
                    stop = begin + size
                    if stop <= end and size <= max_value:
                        append((op, data[body : begin - 8], data[begin:stop], tag))
                        position = stop
                        continue
            if shape == UNKNOWN:
                raise WireError(f"sent an unknown opcode, 0x{op:02x}")
            if shape >= NOTHING:
                stop = at + (1, 5, 9)[shape - NOTHING]
                if stop > end:
                    need = stop - position
                    break
                position = stop
                append((op, b"", _words(data, at + 1, shape), tag))
                if op == HELLO:
                    self._tagged = True
                    shapes = _TAGGED
                continue
            if body > end:
                need = body - position
                break
            (size,) = u64(data, at + 1)
            if shape >= KEYS:
                if size == 1 and shape == KEYS and body + 8 <= end:
                    (size,) = u64(data, body)
                    stop = body + 8 + size
                    if stop <= end and size <= max_key:
                        append((op, b"", (data[body + 8 : stop],), tag))
                        position = stop
                        continue
                    size = 1
                if size > self._limits.count:
                    raise WireError(f"announced {size} items in one request")
                group = self._group = _Group(op, tag, size)
                position = self._read_group(group, data, body, requests)
                continue
            if size > max_key:
                raise WireError(f"announced a key of {size} bytes")
            stop = body + size
            if stop > end:
                need = stop - position
                break
            key = data[body:stop]
            if shape == KEY:
                append((op, key, None, tag))
            elif shape == KEY_1:
                begin = stop + 8
                if begin > end:
                    need = begin - position
                    break
                (size,) = u64(data, stop)
                if size > max_value:
                    raise WireError(f"announced a value of {size} bytes")
                stop = begin + size
                if stop > end:
                    need = stop - position
                    break
                append((op, key, data[begin:stop], tag))
            elif shape == KEY_NUMBER:
                if stop + 8 > end:
                    need = stop + 8 - position
                    break
                append((op, key, _I64.unpack_from(data, stop)[0], tag))
                stop += 8
            else:
                values: list[bytes] = []
                for _ in range(shape - KEY):
                    need = _read_item(data, stop, max_value, values)
                    if need:
                        need += stop - position
                        break
                    stop += 8 + len(values[-1])
                if need:
                    break
                append((op, key, values, tag))
            position = stop
        if position < end:
            self.has_more = not need
            self._hold(data, position, need)

    def _read_group(
        self, group: _Group, data: bytes, position: int, requests: list[Request]
    ) -> int:
        """Take the items of a request with many; return the position after the last."""
        limits, items = self._limits, group.items
        is_pairs = group.op == MULTI_SET
        while len(items) < group.wanted:
            limit = limits.value if is_pairs and len(items) % 2 else limits.key
            need = _read_item(data, position, limit, items)
            if need:
                self._hold(data, position, need)
                return len(data)
            size = len(items[-1])
            position += 8 + size
            group.size += size
            if group.size > limits.request:
                raise WireError(f"sent more than {limits.request} bytes in one request")
        self._group = None
        argument: tuple[Any, ...] = tuple(items)
        if is_pairs:
            argument = tuple(zip(items[::2], items[1::2], strict=True))
        requests.append((group.op, b"", argument, group.tag))
        return position

    def _hold(self, data: bytes, position: int, need: int) -> None:
        self._held = bytearray(data[position:])
        self._need = need
        self.is_partial = True


def _read_item(data: bytes, position: int, limit: int, items: list[bytes]) -> int:
    """Append one sized item to `items` and return 0.

    When it is not whole, append nothing and return the bytes it needs.
    """
    begin = position + 8
    if begin > len(data):
        return 8
    (size,) = _U64.unpack_from(data, position)
    if size > limit:
        raise WireError(f"announced {size} bytes where {limit} are accepted")
    stop: int = begin + size
    if stop > len(data):
        return stop - position
    items.append(data[begin:stop])
    return 0


def _words(data: bytes, position: int, shape: int) -> Any:
    if shape == WORD:
        return _U32.unpack_from(data, position)[0]
    return None if shape == NOTHING else _2U32.unpack_from(data, position)
