"""Stores on engines, at the endpoints in ETCD and REDIS."""

# %%
import asyncio
import os

from elastic_aio.engines.etcd import EtcdStore


async def at_etcd() -> None:
    async with EtcdStore(os.environ["ETCD"], key_prefix="/example") as store:
        await store.set("answer", b"42")
        print(await store.get("answer"))  # b'42'


asyncio.run(at_etcd())

# %%
import asyncio
import os

from elastic_aio.engines.redis import RedisStore


async def at_redis() -> None:
    async with RedisStore(os.environ["REDIS"], key_prefix="/example") as store:
        await store.set("answer", b"42")
        print(await store.get("answer"))  # b'42'


asyncio.run(at_redis())
