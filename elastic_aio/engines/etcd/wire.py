"""Requests and replies of etcd v3's JSON gateway, and the fence of a client's changes.

The gateway (`/v3/...`) carries etcd's gRPC messages as JSON: keys and values in base64,
64-bit numbers as text, and fields that are zero or empty left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from elastic_aio.text import one_line

RANGE: Final = "kv/range"
TXN: Final = "kv/txn"
GRANT: Final = "lease/grant"
KEEP_ALIVE: Final = "lease/keepalive"
REVOKE: Final = "lease/revoke"
LEASE_KEYS: Final = "lease/timetolive"
AUTHENTICATE: Final = "auth/authenticate"
WATCH: Final = "watch"

MAX_OPS: Final = 100
"""Operations in one transaction; etcd's own default limit (`--max-txn-ops`) is 128."""

_REASON_MAX: Final = 200

Part = dict[str, Any]
"""A part of a request: an operation, a comparison, or the body of a transaction."""

_T = TypeVar("_T", bound="Reply")


class Request(Struct, frozen=True):
    """A request, and the type of its reply.

    `is_repeatable`: it may be sent again when it is unknown whether etcd has carried it out.
    """

    path: str
    body: dict[str, Any]
    kind: type[Reply]
    is_repeatable: bool = True
    operation: dict[str, Any] | None = None
    """The same in a transaction, of one key or range; None for a request that is sent alone."""

    @property
    def key(self) -> tuple[bytes, bytes]:
        """The key, or the range, of `operation`."""
        part = next(iter(self.operation.values())) if self.operation else {}
        return part["key"], part.get("range_end", b"")

    @property
    def size(self) -> int:
        """Bytes of the key and the value of `operation`."""
        part = next(iter(self.operation.values())) if self.operation else {}
        return len(part["key"]) + len(part.get("value", b""))

    @property
    def is_change(self) -> bool:
        """Whether it is a transaction that may change keys."""
        return self.path == TXN and any("request_range" not in op for op in self.body["success"])

    def fenced(self, key: bytes, revision: int) -> Request:
        """Return a transaction that does the same if `key` has this revision, and else nothing."""
        conditions, otherwise = self.body["compare"], self.body["failure"]
        same = compare(key, "mod_revision", revision)
        if conditions:
            otherwise = [_fenced_op(op, same) for op in otherwise]
            otherwise.append(read_op(key))
        body = txn_body([same, *conditions], self.body["success"], otherwise)
        return Request(TXN, body, TxnReply)

    def encode(self) -> bytes:
        return _encoder.encode(self.body)


class Header(Struct, frozen=True):
    """The header of a reply; `revision` is the revision of the whole etcd."""

    revision: int = 0


class KeyValue(Struct, frozen=True):
    """A key; `lease` is 0 for a key without a lease."""

    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class Reply(Struct, frozen=True, kw_only=True):
    """A reply; `is_repeat`: its request was sent before, and perhaps carried out then."""

    header: Header = Header()
    is_repeat: bool = False


class RangeReply(Reply, frozen=True, kw_only=True):
    """Keys of a range, and how many there are."""

    kvs: tuple[KeyValue, ...] = ()
    count: int = 0


class OperationReply(Struct, frozen=True):
    """The reply to one operation of a transaction that has one."""

    response_range: RangeReply = RangeReply()
    response_txn: TxnReply | None = None


class TxnReply(Reply, frozen=True, kw_only=True):
    """Which branch of a transaction was taken, and the replies to its operations."""

    succeeded: bool = False
    responses: tuple[OperationReply, ...] = ()

    @property
    def ranges(self) -> list[RangeReply]:
        """The replies to the reads of the branch."""
        return [response.response_range for response in self.responses]

    def is_fenced(self, revision: int) -> bool:
        """Whether the reply to `Request.fenced` means that the key has another revision."""
        # The reply to one with conditions ends with the key.
        found = self.responses[-1].response_range.kvs if self.responses else ()
        return not self.succeeded and (not found or found[0].mod_revision != revision)

    @property
    def nested(self) -> TxnReply:
        """The reply to the transaction that is the only operation of the branch."""
        return self.responses[0].response_txn or TxnReply()


class LeaseReply(Reply, frozen=True, kw_only=True):
    """A granted or renewed lease; `TTL` is 0 or less for one that has ended."""

    ID: int = 0
    TTL: int = 0
    keys: tuple[bytes, ...] = ()


class AuthReply(Reply, frozen=True, kw_only=True):
    """A token for the `Authorization` header."""

    token: str = ""


class WatchEvent(Struct, frozen=True):
    """A change; of a deleted key, `kv` has no value."""

    kv: KeyValue
    type: str = "PUT"


class WatchReply(Reply, frozen=True, kw_only=True):
    """A message of a watch."""

    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[WatchEvent, ...] = ()


class _StreamError(Struct, frozen=True):
    message: str = ""
    grpc_code: int = 0
    code: int = 0


class _StreamMessage(Struct, frozen=True):
    result: msgspec.Raw = msgspec.Raw(b"{}")
    error: _StreamError | None = None


class _Error(Struct, frozen=True):
    """The body of an error; the releases before 3.6 repeat the message as `error`."""

    message: str = ""
    error: msgspec.Raw = msgspec.Raw(b"null")
    code: int = 0


class Fault(Enum):
    """The meaning of an error of etcd for the request."""

    NOT_DONE = "etcd has not carried it out, and may do so later"
    UNKNOWN = "etcd may have carried it out"
    TOKEN = "the token has expired"
    LEASE_GONE = "the lease has ended"
    LEASE_EXISTS = "there is a lease of this number"
    COMPACTED = "the revision has been compacted"
    NO_AUTH = "etcd has no users"
    REFUSED = "etcd refuses it"


class EtcdError(Exception):
    """An error that etcd has reported, in one line."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(one_line(why, _REASON_MAX))
        self.fault = fault


_FAULTS: Final = (
    ("invalid auth token", Fault.TOKEN, ""),
    ("revision of auth store is old", Fault.TOKEN, ""),
    ("requested lease not found", Fault.LEASE_GONE, ""),
    ("lease already exists", Fault.LEASE_EXISTS, ""),
    ("has been compacted", Fault.COMPACTED, ""),
    ("authentication is not enabled", Fault.NO_AUTH, ""),
    ("no leader", Fault.NOT_DONE, "etcd has no leader: too few of its members can be reached"),
    ("too many requests", Fault.NOT_DONE, ""),
    ("user name is empty", Fault.REFUSED, "etcd asks for a user and a password"),
    (
        "invalid user ID or password",
        Fault.REFUSED,
        "etcd does not accept the user or the password",
    ),
    ("permission denied", Fault.REFUSED, "the etcd user has no permission for the keys"),
    (
        "database space exceeded",
        Fault.REFUSED,
        "the database of etcd is full (compact and defragment it, then clear its alarm)",
    ),
    ("request is too large", Fault.REFUSED, "the value is too large for etcd"),
    ("message larger than max", Fault.REFUSED, "the value is too large for etcd"),
    ("NOSPACE", Fault.REFUSED, "the database of etcd is full"),
)
_UNAVAILABLE: Final = (1, 2, 4, 10, 13, 14, 15)
"""gRPC's codes of errors that may go away: canceled, unknown, deadline, aborted, internal,
unavailable, data loss."""

_NO_GATEWAY: Final = (
    "HTTP 404: not etcd 3.4 or later, or its JSON gateway is switched off (--enable-grpc-gateway)"
)


def parse_reply(request: Request, status: int, body: bytes) -> Any:
    """Return the reply to a request, or raise EtcdError: it is an error, or another server's."""
    if status != 200:
        raise parse_error(status, body)
    if request.path == KEEP_ALIVE:  # a stream of one message
        return parse_message(body, request.kind)
    return _decode(body, request.kind)


def parse_message(text: bytes, kind: type[_T]) -> _T:
    """Return one message of a stream, or raise as `parse_reply`."""
    message = _decode(text, _StreamMessage)
    if message.error is not None:
        raise _known_error(message.error.grpc_code or message.error.code, message.error.message)
    reply: _T = _decode(bytes(message.result), kind)
    return reply


def parse_error(status: int, body: bytes) -> EtcdError:
    """Return the error that a reply with another HTTP status than 200 stands for."""
    try:
        error = msgspec.json.decode(body, type=_Error, strict=False)
    except (msgspec.DecodeError, RecursionError):
        if status == 404:
            return EtcdError(Fault.REFUSED, _NO_GATEWAY)
        text = body[:_REASON_MAX].decode("utf-8", "replace")
        # A proxy without a reply of etcd: the request may have been carried out.
        return EtcdError(
            Fault.UNKNOWN if status >= 500 else Fault.REFUSED, f"HTTP {status}: {text}"
        )
    return _known_error(error.code, error.message or bytes(error.error).decode("utf-8", "replace"))


def watch_error(reply: WatchReply) -> EtcdError:
    """Return why etcd has cancelled a watch."""
    if reply.compact_revision:
        return EtcdError(Fault.COMPACTED, "the watch is behind a compaction")
    return _known_error(14, reply.cancel_reason or "etcd has cancelled the watch")


def _known_error(code: int, message: str) -> EtcdError:
    for part, fault, text in _FAULTS:
        if part in message:
            return EtcdError(fault, text or message)
    return EtcdError(Fault.UNKNOWN if code in _UNAVAILABLE else Fault.REFUSED, message)


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EtcdError(Fault.REFUSED, "the answer is not that of etcd's JSON gateway") from None


_encoder = msgspec.json.Encoder()


# Parts of requests.


def read(key: bytes, end: bytes = b"", **options: Any) -> Part:
    """Return the range `key` to `end`, or only the key."""
    return {"key": key, **({"range_end": end} if end else {}), **options}


def get(key: bytes, end: bytes = b"", **options: Any) -> Request:
    """Return the request to read the range `key` to `end`, or only the key."""
    body = read(key, end, **options)
    return Request(RANGE, body, RangeReply, operation={"request_range": body})


def read_op(key: bytes, end: bytes = b"", **options: Any) -> Part:
    """Return the same as an operation of a transaction."""
    return {"request_range": read(key, end, **options)}


def put_op(key: bytes, value: bytes, lease: int = 0) -> Part:
    """Return the operation that puts a key, under a lease unless that is 0."""
    put: Part = {"key": key, "value": value}
    if lease:
        put["lease"] = str(lease)
    return {"request_put": put}


def put(key: bytes, value: bytes, lease: int = 0) -> Request:
    operation = put_op(key, value, lease)
    return Request(TXN, txn_body([], [operation]), TxnReply, operation=operation)


def delete_op(key: bytes, end: bytes = b"") -> Part:
    """Return the operation that deletes the range `key` to `end`, or only the key."""
    return {"request_delete_range": read(key, end)}


def txn_op(body: Part) -> Part:
    """Return a transaction as an operation of another one."""
    return {"request_txn": body}


def _fenced_op(op: Part, same: Part) -> Part:
    body = op.get("request_txn")
    return txn_op({**body, "compare": [same, *body["compare"]]}) if body else op


def compare(key: bytes, target: str, value: Any, **options: Any) -> Part:
    """Return a comparison; `target` is `value`, `lease`, `create_revision` or `mod_revision`."""
    name = target.partition("_")[0].upper()
    operand = value if isinstance(value, bytes) else str(value)
    return {"key": key, "target": name, target: operand, **options}


def txn_body(conditions: list[Part], then: list[Part], otherwise: Sequence[Part] = ()) -> Part:
    return {"compare": conditions, "success": then, "failure": [*otherwise]}


def txn(
    conditions: list[Part],
    then: list[Part],
    otherwise: Sequence[Part] = (),
    *,
    is_repeatable: bool = True,
) -> Request:
    return Request(TXN, txn_body(conditions, then, otherwise), TxnReply, is_repeatable)


def watch_body(begin: bytes, end: bytes, revision: int) -> bytes:
    """Return the body that opens a watch of the range `begin` to `end`, from a revision on."""
    request = read(begin, end, start_revision=str(revision), progress_notify=True)
    return _encoder.encode({"create_request": request})


_FENCE_TTL: Final = 3600
"""Seconds after which the key of a killed client is gone; others write theirs anew so often."""


class EtcdFence:
    """The fence of a client: a change that etcd holds back never replaces a later one.

    A suspended member of etcd keeps the requests that it was sent, and carries them out when it
    goes on.  By then the client has repeated them at another member, and has made later changes.
    So each change compares the revision of a key of the client's own.  A change that got no reply
    lowers the fence: before its next request the client writes the key, at any member, and then no
    request that was sent before has an effect any more.

    The key is under a lease, which no client renews.  When it has gone, changes are not made until
    it is written anew, with another revision: no revision is used twice.

    It is up while each change that compares `revision` has a reply or waits for it.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.lease = self.revision = 0
        self.is_up = False

    def lower(self, revision: int) -> None:
        """Note that a change which compares `revision` has no reply, or was not made."""
        if revision == self.revision:
            self.is_up = False

    def next_request(self) -> Request:
        """Return the next request that raises the fence; it may be sent again."""
        if not self.lease:
            return Request(GRANT, {"TTL": str(_FENCE_TTL)}, LeaseReply)
        # Compared too: held back, it must not lower a fence raised since.
        same = [compare(self.key, "mod_revision", self.revision)]
        return txn(same, [put_op(self.key, b"", self.lease)], [read_op(self.key)])

    def on_reply(self, reply: LeaseReply | TxnReply) -> None:
        """Take the reply to that request."""
        if isinstance(reply, LeaseReply):
            self.lease = reply.ID
        elif reply.succeeded:
            self.revision, self.is_up = reply.header.revision, True
        else:
            # Written by a former attempt, which nothing has compared; or gone with its lease.
            found = reply.ranges[0].kvs
            self.revision = found[0].mod_revision if found else 0
            self.is_up = bool(found)
