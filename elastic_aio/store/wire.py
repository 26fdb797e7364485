"""Requests of the store's wire protocol as bytes: torch's TCPStore protocol and our extensions.

A connection starts in torch's *plain* dialect: one opcode byte, then the arguments, each preceded
by its length, little-endian.  Replies carry no request identifier; they come in the order of the
requests.  So a plain connection can have only one pending wait, and the server can refuse a request
only by closing the connection.

`HELLO` switches a connection to our *tagged* dialect: every request is preceded by a number that
its replies repeat.  So any number of waits and watches share one connection, and every refusal
names its request.  A client sends HELLO only to a peer that has answered READY to a CHECK of
`RESERVED_KEY`: a torch server closes the connection on an unknown opcode.

A request is a plain tuple `(opcode, key, argument, tag)`.  A frozen dataclass costs 0.6 us to make,
a third of the budget of a request.  The opcode determines the type of `argument`: see
`_OPCODES_OF_SHAPE`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final

from elastic_aio.text import os_bytes

Request = tuple[int, bytes, Any, int]

MAGIC: Final = 0x3C85F7CE
VERSION: Final = 3
NONCE_SIZE: Final = 16
CLIENT: Final = b"client"
SERVER: Final = b"server"
RESERVED_KEY: Final = b"\0elastic_aio"
"""No torch client can set it: torch's keys begin with `/`, or are `init/`."""

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
# Extensions.  HELLO is the last untagged request; the others exist only with a tag.
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

TLS_ALERT: Final = bytes((21, 3, 3, 0, 2, 2, 10))
"""A server with TLS sends to a client without: the fatal alert unexpected_message."""
TLS_HANDSHAKE: Final = bytes((22, 3))
"""How a client with TLS begins."""
NOT_TLS: Final = b"the store does not speak TLS\n"
"""The answer of a server without TLS: no record of TLS begins like this."""

# Shapes of requests.  KEY_n is a key and n values; from KEYS on the key itself is empty, and
# from NOTHING on the size is fixed.
UNKNOWN, KEY, KEY_1, KEY_2, KEY_3, KEY_NUMBER, KEYS, PAIRS, NOTHING, WORD, WORDS = range(11)

# The comment on each row is the `argument` of its requests.
_OPCODES_OF_SHAPE: Final = (
    (KEY, (GET, DELETE_KEY, QUEUE_POP, QUEUE_LEN, PEEK, POP_WHEN_PUSHED)),  # None
    (KEY, (AUTH, RESUME_LEASE, RELEASE_LEASE)),  # None; the key is nonce and proof, or a lease's id
    (KEY_1, (SET, APPEND, QUEUE_PUSH, QUEUE_UNPOP)),  # bytes: the value
    (KEY_2, (COMPARE_SET,)),  # [expected, desired]
    (KEY_2, (LEASED_SET,)),  # [value, lease id]
    (KEY_3, (LEASED_COMPARE_SET,)),  # [expected, desired, lease id]
    (KEY_NUMBER, (ADD, BARRIER)),  # int, signed: amount, world size
    (KEY_NUMBER, (WATCH_KEY, WATCH_PREFIX)),  # int, signed: last revision
    (KEYS, (CHECK, WAIT, MULTI_GET, GET_WHEN_SET)),  # tuple of keys
    (PAIRS, (MULTI_SET,)),  # tuple of pairs (key, value)
    (NOTHING, (NUM_KEYS, CANCEL_WAIT, LIST_KEYS, HEARTBEAT)),  # None
    (WORD, (PING, HELLO, CANCEL)),  # int, unsigned: nonce, version, tag
    (WORDS, (GRANT_LEASE,)),  # (ttl, linger) in milliseconds
)
SHAPE_OF: Final = {op: shape for shape, ops in _OPCODES_OF_SHAPE for op in ops}
PLAIN_OPCODES: Final = frozenset(op for op in SHAPE_OF if op <= HELLO)
TAGGED_OPCODES: Final = frozenset(SHAPE_OF) - {HELLO, CANCEL_WAIT}
_PLAIN: Final = tuple(SHAPE_OF[op] if op in PLAIN_OPCODES else UNKNOWN for op in range(256))
_TAGGED: Final = tuple(SHAPE_OF[op] if op in TAGGED_OPCODES else UNKNOWN for op in range(256))

_ITEMS_AT_ONCE: Final = 4096
"""Keys and values of one request that one call of `RequestReader.read` parses."""

U32: Final = struct.Struct("<I")
I64: Final = struct.Struct("<q")
U64: Final = struct.Struct("<Q")
_2U32: Final = struct.Struct("<II")
_OP_U32: Final = struct.Struct("<BI")
_OP_2U32: Final = struct.Struct("<BII")
_OP_U64: Final = struct.Struct("<BQ")
_TAG_OP_U64: Final = struct.Struct("<IBQ")
# Bound once: each request calls some of them.
_read_u32, _read_u64, _read_i64 = U32.unpack_from, U64.unpack_from, I64.unpack_from
_read_op_u64, _read_tag_op_u64 = _OP_U64.unpack_from, _TAG_OP_U64.unpack_from


class WireError(Exception):
    """The peer violated the protocol; the message says how.  Close the connection."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The largest sizes that a peer may announce; the first three are torch's own limits.

    Args:
        key: bytes of a key, torch's leading `/` included.
        value: bytes of a value.
        count: keys or pairs in one request.
        request: bytes of all keys and values of one request.
    """

    key: int = 8192
    value: int = 8 << 20
    count: int = 131_072
    request: int = 64 << 20


def encode(op: int, key: bytes, argument: Any, tag: int | None = None) -> bytes:
    """Return the frame of one request; with `tag`, in the tagged dialect."""
    shape = SHAPE_OF[op]
    frame: bytes
    if shape == KEY_1:
        frame = _OP_U64.pack(op, len(key)) + key + U64.pack(len(argument)) + argument
    elif shape == KEY_NUMBER:
        frame = _OP_U64.pack(op, len(key)) + key + I64.pack(argument)
    elif shape == KEY:
        frame = _OP_U64.pack(op, len(key)) + key
    elif shape == KEYS:
        frame = _OP_U64.pack(op, len(argument)) + b"".join(map(sized, argument))
    elif shape == PAIRS:
        items = (sized(item) for pair in argument for item in pair)
        frame = _OP_U64.pack(op, len(argument)) + b"".join(items)
    elif shape == NOTHING:
        frame = bytes((op,))
    elif shape == WORD:
        frame = _OP_U32.pack(op, argument)
    elif shape == WORDS:
        frame = _OP_2U32.pack(op, *argument)
    else:
        frame = bytes((op,)) + b"".join(map(sized, (key, *argument)))
    return frame if tag is None else U32.pack(tag) + frame


def sized(data: bytes) -> bytes:
    """Return `data` preceded by its length."""
    return U64.pack(len(data)) + data


def token_proof(token: str, role: bytes, transcript: bytes) -> bytes:
    """Return the proof that one side knows `token`, without the token: HKDF-SHA256 (RFC 5869).

    The client makes its proof first: a stranger who connects to a server learns no proof to compare
    with guessed tokens.  `role` is the side's, so that neither proof can be sent back; `transcript`
    is the id of the server and the nonces of both sides.
    """
    import hmac  # tokens are rare, and it takes a millisecond

    secret = hmac.digest(b"elastic_aio store", os_bytes(token), "sha256")
    return hmac.digest(secret, role + transcript + b"\1", "sha256")


def is_proof(proof: bytes, token: str, role: bytes, transcript: bytes) -> bool:
    """Return, in constant time, whether `proof` is the result of `token_proof`."""
    import hmac

    return hmac.compare_digest(proof, token_proof(token, role, transcript))


@dataclass(slots=True)
class _PartialRequest:
    """A request with many keys that has arrived in part.

    Items are moved out of the buffer as they arrive.  Otherwise a peer that sends single bytes
    would make the reader parse a hundred thousand keys for each of them.
    """

    op: int
    tag: int
    item_count: int
    items: list[bytes] = field(default_factory=list)
    size: int = 0


class RequestReader:
    """Incremental parser: bytes in, whole requests out; not to be used after a `WireError`."""

    def __init__(self, limits: WireLimits) -> None:
        """Expect the opening (VALIDATE), then requests of the plain dialect."""
        self.limits = limits
        self._held = bytearray()
        self._need = 0
        self._partial: _PartialRequest | None = None
        self._tagged = False
        self._failure: WireError | None = None
        self.is_opened = False
        """Whether the peer has sent its opening."""
        self.is_idle = False
        """Whether it is opened and everything that was received has been returned."""
        self.has_more = False
        """Whether the last `read` stopped early: call `read(b"")`."""
        self.is_partial = False
        """Whether an unfinished request is held."""

    @property
    def partial_size(self) -> int:
        """The size, in bytes, of the unfinished request that is held."""
        return len(self._held) + (self._partial.size if self._partial else 0)

    def read(self, data: bytes, most: int = 512) -> list[Request]:
        """Add received bytes; return the requests that are complete now.

        A HELLO switches the reader to the tagged dialect.  If there may be more than `most`,
        `has_more` is true.  Long: the most frequent requests of every worker pass here, and are
        parsed without calls if they are complete and valid.

        Raises:
            WireError: an invalid opcode or length, as soon as it is readable; the requests before
                it are returned first.
        """
        requests: list[Request] = []
        position = tag = 0
        try:
            if not self.is_idle:
                data, position = self._continue(data, requests)
            end, max_key, max_value = len(data), self.limits.key, self.limits.value
            is_tagged, shapes = self._tagged, _TAGGED if self._tagged else _PLAIN
            for _ in repeat(None, most):
                body = position + 13 if is_tagged else position + 9
                # The longer branch is last: CPython 3.11 compares without a call only before a
                # jump of less than 256 instructions.
                if body > end:
                    if position >= end:
                        return requests
                    shape = UNKNOWN  # too short for those below
                else:
                    if is_tagged:
                        tag, op, size = _read_tag_op_u64(data, position)
                    else:
                        op, size = _read_op_u64(data, position)
                    shape, stop = shapes[op], body + size
                if shape == KEY_1:
                    begin = stop + 8
                    if begin <= end and size <= max_key:
                        (size,) = _read_u64(data, stop)
                        last = begin + size
                        if last <= end and size <= max_value:
                            requests.append((op, data[body:stop], data[begin:last], tag))
                            position = last
                            continue
                elif shape == KEY:
                    if stop <= end and size <= max_key:
                        requests.append((op, data[body:stop], None, tag))
                        position = stop
                        continue
                elif shape == KEY_NUMBER:
                    last = stop + 8
                    if last <= end and size <= max_key:
                        requests.append((op, data[body:stop], _read_i64(data, stop)[0], tag))
                        position = last
                        continue
                elif shape == KEYS and size == 1 and body + 8 <= end:
                    (size,) = _read_u64(data, body)
                    stop = body + 8 + size
                    if stop <= end and size <= max_key:
                        requests.append((op, b"", (data[body + 8 : stop],), tag))
                        position = stop
                        continue
                position = self._read_other(data, position, requests)
                is_tagged, shapes = self._tagged, _TAGGED if self._tagged else _PLAIN
            if position < end:
                self.has_more = True
                self._hold(data, position, 0)
        except WireError as error:
            self._failure, self._partial, self.is_idle = error, None, False
            if not requests:
                raise
            self.has_more = True
        return requests

    def _continue(self, data: bytes, requests: list[Request]) -> tuple[bytes, int]:
        """Go on where the last `read` stopped; return the bytes to parse and where to begin."""
        if self._failure is not None:
            raise self._failure
        self.has_more = False
        if self._held:
            self._held += data
            if len(self._held) < self._need:
                return b"", 0
            data = bytes(self._held)
            self._held = bytearray()
        self.is_partial = False
        position = 0
        if not self.is_opened:
            if not OPENING.startswith(data[:5]):
                raise WireError("does not begin like a TCPStore client")
            if len(data) < 5:
                self._hold(data, 0, 5)
                return b"", 0
            self.is_opened, position = True, 5
        self.is_idle = True
        if self._partial is not None:
            position = self._read_items(self._partial, data, position, requests)
        return data, position

    def _read_other(self, data: bytes, position: int, requests: list[Request]) -> int:
        """Read the request at `position`, or hold it; return where the next one begins.

        Requests that `read` parses itself come here only if they are incomplete or invalid.
        """
        end, shapes, tag = len(data), _TAGGED if self._tagged else _PLAIN, 0
        at = position
        if self._tagged:
            at += 4
            if at < end:
                (tag,) = _read_u32(data, position)
        if at >= end:
            return self._hold(data, position, 5)
        op, body = data[at], at + 9
        shape = shapes[op]
        if shape == UNKNOWN:
            raise WireError(f"sent an unknown opcode, 0x{op:02x}")
        if shape >= NOTHING:
            stop = at + (1, 5, 9)[shape - NOTHING]
            if stop > end:
                return self._hold(data, position, stop - position)
            requests.append((op, b"", _words(data, at + 1, shape), tag))
            self._tagged = self._tagged or op == HELLO
            return stop
        if body > end:
            return self._hold(data, position, body - position)
        size: int = _read_u64(data, at + 1)[0]
        if shape >= KEYS:
            if size > self.limits.count:
                raise WireError(f"announced {size} items in one request")
            pending = _PartialRequest(op, tag, 2 * size if shape == PAIRS else size)
            self._partial = pending
            return self._read_items(pending, data, body, requests)
        if size > self.limits.key:
            raise WireError(f"announced a key of {size} bytes")
        stop = body + size
        if stop > end:
            return self._hold(data, position, stop - position)
        if shape in (KEY_1, KEY_NUMBER):
            need = stop + 8 - position
            if stop + 8 <= end:
                (size,) = _read_u64(data, stop)
                if size > self.limits.value:
                    raise WireError(f"announced a value of {size} bytes")
                need += size
            return self._hold(data, position, need)
        values: list[bytes] = []
        for _ in range(shape - KEY):
            need = _read_item(data, stop, self.limits.value, values)
            if need:
                return self._hold(data, position, need + stop - position)
            stop += 8 + len(values[-1])
        requests.append((op, data[body : body + size], values, tag))
        return stop

    def _read_items(
        self, pending: _PartialRequest, data: bytes, position: int, requests: list[Request]
    ) -> int:
        """Read the remaining items of `pending`; return the position after the last."""
        limits, items = self.limits, pending.items
        is_pairs = pending.op == MULTI_SET
        pause_at = len(items) + _ITEMS_AT_ONCE
        while len(items) < pending.item_count:
            if len(items) == pause_at:
                self.has_more = True
                return self._hold(data, position, 0)
            limit = limits.value if is_pairs and len(items) % 2 else limits.key
            need = _read_item(data, position, limit, items)
            if need:
                return self._hold(data, position, need)
            size = len(items[-1])
            position += 8 + size
            pending.size += size
            if pending.size > limits.request:
                raise WireError(f"sent more than {limits.request} bytes in one request")
        self._partial = None
        argument: tuple[Any, ...] = tuple(items)
        if is_pairs:
            argument = tuple(zip(items[::2], items[1::2], strict=True))
        requests.append((pending.op, b"", argument, pending.tag))
        return position

    def _hold(self, data: bytes, position: int, need: int) -> int:
        """Keep what follows `position` until there are `need` bytes; return the end of `data`."""
        self._held = bytearray(data[position:])
        self._need = need
        self.is_partial, self.is_idle = True, False
        return len(data)


def _read_item(data: bytes, position: int, limit: int, items: list[bytes]) -> int:
    """Append the item at `position`; return 0, or the bytes that an incomplete one needs."""
    begin = position + 8
    if begin > len(data):
        return 8
    (size,) = U64.unpack_from(data, position)
    if size > limit:
        raise WireError(f"announced {size} bytes where {limit} are accepted")
    stop: int = begin + size
    if stop > len(data):
        return stop - position
    items.append(data[begin:stop])
    return 0


def _words(data: bytes, position: int, shape: int) -> Any:
    if shape == WORD:
        return U32.unpack_from(data, position)[0]
    return None if shape == NOTHING else _2U32.unpack_from(data, position)
