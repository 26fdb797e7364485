"""CPU time of one operation at an engine: `python -m benchmarks.workers.engine_client KIND ...`.

KIND ENDPOINT COUNT: `redis` and `etcd` are the stores of this package, `redis-py` the package
redis, `grpc` the package grpcio.  Prints a line of JSON, microseconds of `set` and `peek`; `null`
without the package.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

_VALUE = b"v" * 100


async def main(kind: str, endpoint: str, count: int) -> dict[str, float] | None:
    """Measure one kind of client."""
    match kind:
        case "redis":
            from elastic_aio.engines.redis import RedisStore

            async with RedisStore(endpoint) as redis:
                return await _measure(
                    count, lambda: redis.set("k", _VALUE), lambda: redis.peek("k")
                )
        case "etcd":
            from elastic_aio.engines.etcd import EtcdStore

            async with EtcdStore(endpoint) as etcd:
                return await _measure(count, lambda: etcd.set("k", _VALUE), lambda: etcd.peek("k"))
        case "redis-py":
            from redis.asyncio import Redis

            async with Redis.from_url(f"redis://{endpoint}") as bare:
                return await _measure(count, lambda: bare.set("k", _VALUE), lambda: bare.get("k"))
        case "grpc":
            return await _measure_grpc(endpoint, count)
    raise SystemExit(f"unknown kind: {kind}")


async def _measure(
    count: int, change: Callable[[], Awaitable[Any]], read: Callable[[], Awaitable[Any]]
) -> dict[str, float]:
    figures = {}
    for name, call in (("set", change), ("peek", read)):
        for _ in range(count // 10):
            await call()
        began = time.process_time()
        for _ in range(count):
            await call()
        figures[name] = (time.process_time() - began) / count * 1e6
    return figures


async def _measure_grpc(endpoint: str, count: int) -> dict[str, float] | None:
    try:
        aio: Any = importlib.import_module("grpc.aio")
    except ImportError:
        return None
    # The messages of etcd by hand: field 1 is the key, and field 2 the value.
    put = b"\x0a\x01k\x12%c%b" % (len(_VALUE), _VALUE)
    async with aio.insecure_channel(endpoint) as channel:
        change = channel.unary_unary("/etcdserverpb.KV/Put")
        read = channel.unary_unary("/etcdserverpb.KV/Range")
        return await _measure(count, lambda: change(put), lambda: read(b"\x0a\x01k"))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
