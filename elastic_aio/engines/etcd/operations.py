"""The operations of a store as requests to etcd.

Each operation is a generator: it yields requests, is sent their replies, and returns the result.  A
change is one transaction, so it is made whole or not at all.  Keys, under the key prefix of the
store::

    /<key>                  a value: the key as in the wire protocol, with its slash
    \\0queue/<key>\\0f<id>    an item of a queue that was returned to its front
    \\0queue/<key>\\0i<id>    another item; the items are ordered by their create revisions
    \\0deleted               written by every transaction that deletes values
    \\0fence/<id>            the fence of a client: see `EtcdFence`

etcd does not say why a key was deleted.  A key whose lease expires is deleted at a revision at
which `deleted` was not written: so a watch tells a lost holder from a holder that deletes its key.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from msgspec import Struct

from elastic_aio.engines.etcd.wire import (
    MAX_OPS,
    RangeReply,
    Request,
    TxnReply,
    compare,
    delete_op,
    get,
    put,
    put_op,
    read_op,
    txn,
    txn_body,
    txn_op,
)
from elastic_aio.store import wire
from elastic_aio.store.keyspace import parse_counter, prefix_end, wrap

Operation = Generator[Request, Any, Any]


class ChangeUnknown(Exception):
    """It cannot be known whether the change has been made."""


class EtcdKeys(Struct, frozen=True):
    """Where the values and queues of a store are."""

    prefix: bytes

    def value(self, key: bytes) -> bytes:
        return self.prefix + key

    def values(self, begin: bytes = b"/") -> tuple[bytes, bytes]:
        """Return the range of the values whose keys begin with `begin`."""
        return self.prefix + begin, prefix_end(self.prefix + begin)

    def key(self, place: bytes) -> bytes:
        """Return the key of a value; the reverse of `value`."""
        return place[len(self.prefix) :]

    def queue(self, key: bytes, part: bytes = b"") -> tuple[bytes, bytes]:
        """Return the range of the items of a queue, or of one of its parts `f` and `i`."""
        begin = self.prefix + b"\0queue" + key + b"\0" + part
        return begin, prefix_end(begin)

    def fence(self, client: bytes) -> bytes:
        return self.prefix + b"\0fence/" + client

    @property
    def deleted(self) -> bytes:
        """Return the place of the note that keys were deleted on purpose."""
        return self.prefix + b"\0deleted"


class Operations:
    """The operations of one store; `lease` is the lease of its ordinary keys, or 0."""

    def __init__(self, keys: EtcdKeys) -> None:
        self.keys = keys
        self.lease = 0
        self._functions: dict[int, Callable[..., Operation]] = {
            wire.SET: self.set,
            wire.COMPARE_SET: self.compare_set,
            wire.ADD: self.add,
            wire.CHECK: self.check,
            wire.NUM_KEYS: self.num_keys,
            wire.DELETE_KEY: self.delete,
            wire.APPEND: self.append,
            wire.MULTI_SET: self.multi_set,
            wire.QUEUE_POP: self.queue_pop,
            wire.QUEUE_LEN: self.queue_len,
            wire.LIST_KEYS: self.list_keys,
            wire.PEEK: self.peek,
            wire.LEASED_SET: self.leased_set,
            wire.LEASED_COMPARE_SET: self.leased_compare_set,
        }

    def of(self, op: int, key: bytes, argument: Any) -> Operation:
        """Return the operation of a request that waits for nothing."""
        return self._functions[op](key, argument)

    # Values.

    def set(self, key: bytes, value: bytes) -> Operation:
        yield put(self.keys.value(key), value, self.lease)

    def leased_set(self, key: bytes, pair: Sequence[bytes]) -> Operation:
        yield put(self.keys.value(key), pair[0], int(pair[1]))

    def peek(self, key: bytes, _: None) -> Operation:
        reply: RangeReply = yield get(self.keys.value(key))
        return reply.kvs[0].value if reply.kvs else None

    def compare_set(self, key: bytes, pair: Sequence[bytes]) -> Operation:
        return self._compare_set(key, pair[0], pair[1], self.lease)

    def leased_compare_set(self, key: bytes, parts: Sequence[bytes]) -> Operation:
        return self._compare_set(key, parts[0], parts[1], int(parts[2]))

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes, lease: int) -> Operation:
        place = self.keys.value(key)
        put = put_op(place, desired, lease)
        equal = [compare(place, "value", expected)]
        if expected:
            reply: TxnReply = yield txn(equal, [put], [read_op(place)])
        else:
            other = txn_body(equal, [put], [read_op(place)])
            absent = [compare(place, "create_revision", 0)]
            reply = yield txn(absent, [put], [txn_op(other)])
        is_repeat = reply.is_repeat
        if not expected and not reply.succeeded:
            reply = reply.nested
        if reply.succeeded:
            return desired
        found = reply.ranges[0].kvs
        value: bytes = found[0].value if found else expected
        if is_repeat and value != desired:
            raise ChangeUnknown  # made by the first request, and replaced since
        return value

    def add(self, key: bytes, amount: int) -> Operation:
        def added(value: bytes | None) -> bytes:
            return b"%d" % wrap(parse_counter(value) + amount)

        return int((yield from self._modify(key, added)))

    def append(self, key: bytes, more: bytes) -> Operation:
        yield from self._modify(key, lambda value: (value or b"") + more)

    def _modify(self, key: bytes, change: Callable[[bytes | None], bytes]) -> Operation:
        """Replace a value by another that depends on it; return that."""
        place = self.keys.value(key)
        reply = yield get(place)
        while True:
            present = reply.kvs[0] if reply.kvs else None
            value = change(None if present is None else present.value)
            # The revision of an absent key is 0.
            revision = 0 if present is None else present.mod_revision
            same = [compare(place, "mod_revision", revision)]
            answer: TxnReply = yield txn(same, [put_op(place, value, self.lease)], [read_op(place)])
            if answer.succeeded:
                return value
            if answer.is_repeat:
                raise ChangeUnknown
            reply = answer.ranges[0]

    def delete(self, key: bytes, _: None = None) -> Operation:
        place = self.keys.value(key)
        note = put_op(self.keys.deleted, b"", self.lease)
        exists = [compare(place, "create_revision", 0, result="GREATER")]
        reply: TxnReply = yield txn(exists, [delete_op(place), note])
        return int(reply.succeeded)

    def multi_set(self, _: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> Operation:
        values = list(dict(pairs).items())  # a transaction sets a key once
        for part in _parts(values):
            yield txn([], [put_op(self.keys.value(key), value, self.lease) for key, value in part])

    def check(self, _: bytes, keys: Sequence[bytes]) -> Operation:
        for part in _parts(keys, MAX_OPS // 2):
            reads = [read_op(self.keys.value(key), count_only=True) for key in part]
            reads += [read_op(*self.keys.queue(key), count_only=True) for key in part]
            reply: TxnReply = yield txn([], reads)
            counts = [one.count for one in reply.ranges]
            if not all(map(max, zip(counts[: len(part)], counts[len(part) :], strict=True))):
                return 1
        return 0

    def num_keys(self, _: bytes, __: None) -> Operation:
        reply: RangeReply = yield get(*self.keys.values(), count_only=True)
        return reply.count

    def list_keys(self, _: bytes, __: None) -> Operation:
        reply: RangeReply = yield get(*self.keys.values(), keys_only=True)
        return [self.keys.key(found.key) for found in reply.kvs]

    def list_branches(self, begin: bytes) -> Operation:
        """Return the names between `begin` and a slash in the keys: one request for each."""
        names: list[bytes] = []
        place, end = self.keys.values(begin)
        while True:
            reply: RangeReply = yield get(place, end, keys_only=True, limit="1")
            if not reply.kvs:
                return names
            name, slash, _ = self.keys.key(reply.kvs[0].key)[len(begin) :].partition(b"/")
            branch = self.keys.value(begin + name + slash)
            place = prefix_end(branch) if slash else branch + b"\0"
            if slash:
                names.append(name)

    def remove_branch(
        self, begin: bytes, record_key: bytes, record: bytes, members: bytes
    ) -> Operation:
        """Delete a branch if its record is `record` and no key begins with `members`."""
        first, end = self.keys.values(members)
        conditions = [
            compare(self.keys.value(record_key), "value", record),
            # An empty range has the create revision 0, as an absent key.
            compare(first, "create_revision", 0, range_end=end),
        ]
        note = put_op(self.keys.deleted, b"", self.lease)
        reply: TxnReply = yield txn(conditions, [delete_op(*self.keys.values(begin)), note])
        return reply.succeeded

    def read_all(self, begin: bytes, end: bytes) -> Operation:
        """Return the revision and the values of a range of places."""
        reply: RangeReply = yield get(begin, end)
        pairs = tuple((self.keys.key(found.key), found.value) for found in reply.kvs)
        return reply.header.revision, pairs

    def read_each(self, keys: Sequence[bytes], *, with_queues: bool) -> Operation:
        """Return a revision and the values of `keys`; `with_queues`: also of non-empty queues."""
        values: dict[bytes, bytes] = {}
        revision = 0
        for part in _parts(keys, MAX_OPS // 2):
            reads = [read_op(self.keys.value(key)) for key in part]
            if with_queues:
                reads += [read_op(*self.keys.queue(key), limit="1") for key in part]
            reply: TxnReply = yield txn([], reads)
            # A change between two parts is seen by the watch that begins at the first one.
            revision = revision or reply.header.revision
            repeated = (*part, *part)
            for key, found in zip(repeated, reply.ranges, strict=False):
                if found.kvs:
                    values.setdefault(key, found.kvs[0].value)
        return revision, values

    def was_deleted(self, revision: int) -> Operation:
        """Return whether the keys deleted at a revision were deleted on purpose."""
        reply: RangeReply = yield get(self.keys.deleted, revision=str(revision), keys_only=True)
        return bool(reply.kvs) and reply.kvs[0].mod_revision == revision

    def delete_leased(self, lease: int, places: Sequence[bytes]) -> Operation:
        """Delete keys that are still under a lease."""
        for part in _parts(places):
            mine = [
                txn_op(txn_body([compare(place, "lease", lease)], [delete_op(place)]))
                for place in part
                if place != self.keys.deleted
            ]
            yield txn([], [*mine, put_op(self.keys.deleted, b"", self.lease)])

    # Queues.

    def queue_push(self, key: bytes, item: bytes, item_id: bytes, part: bytes = b"i") -> Operation:
        """Append an item; with the part `f`, put it in front of the others."""
        place = self.keys.queue(key, part)[0] + item_id
        yield txn([], [put_op(place, item, self.lease)], is_repeatable=False)

    def queue_pop(self, key: bytes, _: None) -> Operation:
        """Return the number of items before, and the oldest one."""
        first = read_op(*self.keys.queue(key, b"f"), sort_order="DESCEND", sort_target="CREATE")
        others = read_op(*self.keys.queue(key, b"i"), sort_order="ASCEND", sort_target="CREATE")
        while True:
            reply: TxnReply = yield txn([], [first, others])
            items = [found for one in reply.ranges for found in one.kvs]
            if not items:
                return 0, b""
            place = items[0].key
            same = [compare(place, "mod_revision", items[0].mod_revision)]
            taken: TxnReply = yield txn(same, [delete_op(place)])
            if taken.succeeded:
                return len(items), items[0].value
            if taken.is_repeat:
                raise ChangeUnknown

    def queue_len(self, key: bytes, _: None) -> Operation:
        reply: RangeReply = yield get(*self.keys.queue(key), count_only=True)
        return reply.count


def _parts(items: Sequence[Any], size: int = MAX_OPS - 1) -> list[Sequence[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
