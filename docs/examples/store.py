"""The key-value store: leases, watches, limits, engines."""

# %%
import asyncio

from elastic_aio.store import Change, ChangeKind, Lease, MemoryStore, Store, Value, Watch


async def meet(store: Store, name: str, value: Value) -> None:
    """Write a key that exists as long as this program, and wait until it is there."""
    lease: Lease
    watch: Watch
    async with store.lease(ttl=5) as lease, store.watch("members/", is_prefix=True) as watch:
        await lease.set(f"members/{name}", value)
        change: Change
        async for change in watch:
            if change.kind is ChangeKind.SET:
                print(change.key, change.value)  # members/me b'here'
                break


async def in_memory() -> None:
    async with MemoryStore() as store:
        await meet(store, "me", "here")


asyncio.run(in_memory())

# %%
import asyncio

from elastic_aio.store import (
    Dropped,
    KeyspaceLimits,
    RemoteStore,
    ServerLimits,
    StoreServer,
    WireLimits,
    connect,
)

limits = ServerLimits(
    wire=WireLimits(value=1 << 20), keyspace=KeyspaceLimits(items=1000), connections=10
)


def dropped(client: Dropped) -> None:
    print("dropped", client.peer, client.reason)


async def serve() -> None:
    async with StoreServer("127.0.0.1", limits=limits, on_drop=dropped) as server:
        store: RemoteStore
        async with connect(server.endpoint) as store:
            await store.set("answer", b"42")
            print(await store.get("answer"))  # b'42'


asyncio.run(serve())
