"""A key-value store over TCP: server and client of torch's TCPStore protocol, on asyncio.

`StoreServer` serves the clients of torch and of `connect`; `MemoryStore` is the same store without
a network.  Between processes of this package a `Store` also has leases (keys that are deleted when
their holder fails) and watches (the changes of keys).

Example::

    async with StoreServer("127.0.0.1") as server, connect(server.endpoint) as store:
        await store.set("model", "ready")
        await store.add("steps", 10)
        async with store.watch("nodes/", is_prefix=True) as watch:
            async with store.lease(5.0) as lease:
                await lease.set("nodes/0", "host-a")
            async for change in watch:
                print(change.kind, change.key, change.value)

The names load on first use: a launcher binds the port of a store for every job, but needs the rest
only when a client connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.store.base import Change as Change
    from elastic_aio.store.base import ChangeKind as ChangeKind
    from elastic_aio.store.base import Lease as Lease
    from elastic_aio.store.base import Store as Store
    from elastic_aio.store.base import Value as Value
    from elastic_aio.store.base import Watch as Watch
    from elastic_aio.store.client import RemoteStore as RemoteStore
    from elastic_aio.store.client import connect as connect
    from elastic_aio.store.limits import Dropped as Dropped
    from elastic_aio.store.limits import KeyspaceLimits as KeyspaceLimits
    from elastic_aio.store.limits import ServerLimits as ServerLimits
    from elastic_aio.store.memory import MemoryStore as MemoryStore
    from elastic_aio.store.server import StoreServer as StoreServer
    from elastic_aio.store.wire import WireLimits as WireLimits
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.store.base": "Change ChangeKind Lease Store Value Watch",
            "elastic_aio.store.client": "RemoteStore connect",
            "elastic_aio.store.limits": "Dropped KeyspaceLimits ServerLimits",
            "elastic_aio.store.memory": "MemoryStore",
            "elastic_aio.store.server": "StoreServer",
            "elastic_aio.store.wire": "WireLimits",
        },
    )
