"""The bytes that a keyspace occupies, counted anew."""

from __future__ import annotations

from elastic_aio.store.keyspace import Keyspace
from elastic_aio.store.limits import ENTRY, TARGET


def counted(keyspace: Keyspace) -> int:
    """Return what `keyspace.usage` must say, from the contents."""
    values = sum(ENTRY + len(key) + len(value) for key, value in keyspace._values.items())
    queues = sum(
        TARGET + len(key) + sum(ENTRY + len(item) for item in queue)
        for key, queue in keyspace._queues.items()
    )
    tables = (keyspace.waits.by_key, keyspace.waits.by_queue)
    waiters = {waiter for table in tables for waiters in table.values() for waiter in waiters}
    targets = sum(TARGET + len(key) for key, _ in keyspace.watches.targets)
    return values + queues + sum(waiter.size for waiter in waiters) + targets


def occupied(keyspace: Keyspace) -> int:
    """Return what `keyspace.usage` says."""
    return keyspace.usage.limit - keyspace.usage.left
