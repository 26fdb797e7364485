"""Torch's client, PrefixStore and gloo on `StoreServer`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from elastic_aio.store import Dropped, RemoteStore, StoreServer
from tests.store.conftest import HAS_TORCH

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not HAS_TORCH, reason="needs torch"),
]

# The clients run in one child that imports torch once and forks for each program:
# some of torch's calls hold the GIL while they wait for the server of this process.
_CHILD = """
import json, os, sys, time, traceback
from datetime import timedelta
import torch
import torch.distributed as dist

def connect(**options):
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False,
                         timeout=timedelta(seconds=20), **options)

for line in sys.stdin:
    port, ranks, source = json.loads(line)
    children = []
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                names = dict(globals(), rank=rank, world=ranks)
                exec(source, names)
                result = names.get("result")
            except BaseException:
                result = {"error": traceback.format_exc()}
            os.write(write, json.dumps(result).encode())
            os._exit(0)
        os.close(write)
        children.append((pid, read))
    results = []
    for pid, read in children:
        with os.fdopen(read) as stream:
            results.append(json.loads(stream.read() or "null"))
        os.waitpid(pid, 0)
    print(json.dumps(results), flush=True)
"""


class Torch:
    """A process that runs torch programs."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def run(self, source: str, ranks: int = 1) -> list[Any]:
        """Run a program on each rank; return the `result` of each."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([self.port, ranks, source]).encode() + b"\n")
        async with asyncio.timeout(60):
            results = json.loads(await self.process.stdout.readline())
        for result in results:
            assert not (isinstance(result, dict) and "error" in result), result["error"]
        return list(results)


@pytest.fixture
async def torch(server: StoreServer) -> AsyncIterator[Torch]:
    """A child that runs torch programs against `server`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "ignore",
        "-c",
        _CHILD,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    yield Torch(process, server.port)
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            await process.wait()


async def test_torch_clients_do_everything(
    torch: Torch, store: RemoteStore, server: StoreServer, dropped: list[Dropped]
) -> None:
    """Each operation, PrefixStore, and gloo with 2, 4 and 8 ranks, in sequence.

    One test, because importing torch takes longer than the operations.
    """
    await every_operation(torch, store)
    await prefix_stores(torch, store)
    await waits_and_wakes(torch, store)
    for ranks in (2, 4, 8):
        await gloo(torch, ranks)
    assert dropped == []
    await refusals(torch, dropped)
    await closing_frees_waiters(torch, server)


async def every_operation(torch: Torch, store: RemoteStore) -> None:
    [result] = await torch.run("""
dist.TCPStore("127.0.0.1", port, 3, False)  # counts itself under init/
store = connect()
store.set("k", "v"); store.set("", "x"); store.set("b", b"\\0\\xff")
got = [store.get("k").decode(), store.get("").decode(), list(store.get("b"))]
counts = [store.add("n", 5), store.add("n", -7), store.get("n").decode()]
checks = [store.check(["k"]), store.check(["k", "nope"]), store.check([])]
swaps = [store.compare_set("c", e, d).decode() for e, d in
         [("", "one"), ("one", "two"), ("bad", "three")]]
swaps.append(store.compare_set("absent", "zzz", "new").decode())
store.append("ap", "ab"); store.append("ap", "cd")
store.multi_set(["m1", "m2"], ["x", "yy"])
many = [value.decode() for value in store.multi_get(["m1", "m2", "ap"])]
deleted = [store.delete_key("m1"), store.delete_key("m1")]
store.queue_push("q", "1"); store.queue_push("q", "2")
queue = [store.queue_len("q"), store.queue_pop("q").decode(), store.queue_pop("q").decode()]
try:
    store.queue_pop("q", False); queue.append("item")
except dist.QueueEmptyError:
    queue.append("empty")
big = b"x" * (8 << 20)
store.set("big", big)
large = store.get("big") == big
try:
    store.wait(["missing"], timedelta(milliseconds=100)); waited = "found"
except dist.DistStoreError:
    waited = "timeout"
after = store.add("n", 1)
clone = store.clone()
result = [got, counts, checks, swaps, many, deleted, queue, large, waited, after,
          sorted(store.list_keys()), store.num_keys(), clone.get("k").decode()]
""")
    assert result[:10] == [
        ["v", "x", [0, 255]],
        [5, -2, "-2"],
        [True, False, True],
        ["one", "two", "two", "zzz"],
        ["x", "yy", "abcd"],
        [True, False],
        [2, "1", "2", "empty"],
        True,
        "timeout",
        -1,
    ]
    assert result[10:] == [["", "ap", "b", "big", "c", "k", "m2", "n"], 9, "v"]
    assert await store.peek("k") == b"v"


async def prefix_stores(torch: Torch, store: RemoteStore) -> None:
    await store.prefixed("in").prefixed("out/").set("ours", b"1")
    [result] = await torch.run("""
store = connect()
inner = dist.PrefixStore("out/", dist.PrefixStore("in", store))
inner.set("x", "2")
result = [store.get("in/out//x").decode(), inner.get("ours").decode(), sorted(inner.list_keys())]
""")
    assert result == ["2", "1", ["ours", "x"]]
    assert await store.prefixed("in").prefixed("out/").get("x") == b"2"


async def waits_and_wakes(torch: Torch, store: RemoteStore) -> None:
    running = asyncio.ensure_future(
        torch.run(
            """
store = connect()
store.add("arrived", 1)
value = store.get("go").decode()
store.wait(["a", "b"])
store.barrier("meet", world) if hasattr(store, "barrier") else store.add("meet", 1)
item = store.queue_pop("work").decode()
result = [value, item]
""",
            ranks=4,
        )
    )
    await store.wait(["arrived"])
    await store.set("go", b"now")
    await store.set("b", b"")
    await store.set("a", b"")
    for item in range(4):
        await store.queue_push("work", str(item))
    results = await running
    assert [value for value, _ in results] == ["now"] * 4
    assert sorted(item for _, item in results) == ["0", "1", "2", "3"]


async def gloo(torch: Torch, ranks: int) -> None:
    results = await torch.run(
        """
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                  WORLD_SIZE=str(world), TORCHELASTIC_USE_AGENT_STORE="True")
store = dist.PrefixStore(f"job{world}", connect())
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
tensor = torch.ones(3) * (rank + 1)
dist.all_reduce(tensor)
dist.barrier()
dist.monitored_barrier()
group = dist.new_group(list(range(world)))
dist.all_reduce(tensor, group=group)
gathered = [None] * world
dist.all_gather_object(gathered, rank)
dist.destroy_process_group()
result = [tensor.tolist(), gathered]
""",
        ranks,
    )
    total = float(sum(range(1, ranks + 1)) * ranks)
    assert results == [[[total] * 3, list(range(ranks))]] * ranks


async def refusals(torch: Torch, dropped: list[Dropped]) -> None:
    [result] = await torch.run("""
store = connect()
store.set("text", "abc")
try:
    store.add("text", 1); first = "added"
except dist.DistNetworkError:
    first = "closed"
result = [first, connect().get("text").decode()]
""")
    assert result == ["closed", "abc"]
    assert [drop.reason for drop in dropped] == [
        "sent a request that is refused: the value is not a 64-bit number"
    ]


async def closing_frees_waiters(torch: Torch, server: StoreServer) -> None:
    before = server.keyspace.waits.count
    running = asyncio.ensure_future(
        torch.run("""
store = connect()
store.add("here", 1)
try:
    store.wait(["never"]); result = "found"
except dist.DistNetworkError:
    result = "lost"
""")
    )
    while server.keyspace.waits.count == before:
        await asyncio.sleep(0.01)  # a poll: the child is another process
    await server.aclose()
    assert await running == ["lost"]


async def test_env_init_on_a_fresh_server(torch: Torch) -> None:
    """`env://` with the agent's variables, as torchrun's workers begin."""
    results = await torch.run(
        """
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                  WORLD_SIZE=str(world), TORCHELASTIC_USE_AGENT_STORE="True")
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
dist.barrier()
result = tensor.item()
""",
        ranks=4,
    )
    assert results == [4.0] * 4
