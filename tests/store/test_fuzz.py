"""Mutated requests: the server neither fails nor grows.

`ELASTIC_AIO_FUZZ=1000000` sets their number, and `ELASTIC_AIO_FUZZ_SEED` the seed; by default each
test runs 2.5 s.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import resource
import time
from pathlib import Path

import pytest

from elastic_aio.store import Dropped, KeyspaceLimits, ServerLimits, StoreServer, connect
from elastic_aio.store.wire import (
    OPENING,
    SHAPE_OF,
    TAGGED_OPCODES,
    RequestReader,
    WireError,
    WireLimits,
    encode,
)
from tests.support.children import until
from tests.support.usage import counted, occupied

VECTORS = Path(__file__).with_name("vectors.txt")
COUNT = int(os.environ.get("ELASTIC_AIO_FUZZ", "0"))
SEED = int(os.environ.get("ELASTIC_AIO_FUZZ_SEED", "1"))
SECONDS = 2.5
BATCH = 10

NASTY = [
    b"\0" * 8,
    b"\xff" * 8,
    b"\x01" + b"\0" * 7,
    b"\x01\x20" + b"\0" * 6,
    b"\0\0\x80\0\0\0\0\0",
    b"\0" * 7 + b"\x80",
]


def seeds() -> list[bytes]:
    """Return the recorded requests, and one of each opcode of the tagged dialect."""
    lines = VECTORS.read_text().splitlines()
    plain = [bytes.fromhex(line[1:].strip()) for line in lines if line.startswith(">")][1:]
    hello = encode(0x80, b"", 1)
    argument_of = {
        1: None,
        2: b"value",
        3: [b"a", b"lease"],
        4: [b"a", b"b", b"lease"],
        5: 3,
        6: (b"/k", b"/m"),
        7: ((b"/k", b"v"),),
        8: None,
        9: 4,
        10: (2000, 0),
    }
    ours = [
        hello + encode(op, b"/k", argument_of[SHAPE_OF[op]], 9) for op in sorted(TAGGED_OPCODES)
    ]
    return plain + ours


def mutated(seed: bytes, dice: random.Random) -> bytes:
    """Return `seed` with up to four random edits, in one of three cases none."""
    data = bytearray(seed)
    for _ in range(dice.choice((0, 0, 1, 1, 2, 4))):
        place = dice.randrange(len(data) + 1)
        match dice.randrange(6):
            case 0 if place < len(data):
                data[place] ^= 1 << dice.randrange(8)
            case 1 if place < len(data):
                data[place] = dice.randrange(256)
            case 2:
                del data[place : place + dice.randrange(1, 9)]
            case 3:
                data[place:place] = dice.choice(NASTY)
            case 4:
                data[place : place + 8] = dice.choice(NASTY)
            case _:
                data += dice.randbytes(dice.randrange(9))
    return bytes(data)


def batches(dice: random.Random) -> list[bytes]:
    """Return the bytes of one connection, split at random."""
    corpus = seeds()
    data = OPENING + b"".join(mutated(dice.choice(corpus), dice) for _ in range(BATCH))
    edges = sorted({0, len(data), *(dice.randrange(len(data)) for _ in range(dice.randrange(4)))})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# So low that random requests meet each of them.
SMALL = ServerLimits(
    keyspace=KeyspaceLimits(
        stored=12_000, reply=300, waits=3, watches=2, leases=2, grown=60, history=8
    ),
    unsent=2_000,
    buffered=20_000,
)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [ServerLimits(), SMALL])
async def test_mutated_requests_over_the_network(limits: ServerLimits) -> None:
    """Afterwards the server still serves, keeps no request, and uses no more memory."""
    dropped: list[Dropped] = []
    async with StoreServer("127.0.0.1", limits=limits, on_drop=dropped.append) as server:
        await fuzz(server, dropped)
        if limits is SMALL:
            refused = {
                drop.reason.partition(": ")[2] for drop in dropped if "refused" in drop.reason
            }
            assert any(why.startswith("the store is full") for why in refused)


async def fuzz(server: StoreServer, dropped: list[Dropped]) -> None:
    """Send mutated requests, and check what is left of them."""
    dice = random.Random(SEED)
    loop = asyncio.get_running_loop()
    failures: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    sent, began, first = 0, time.monotonic(), 0
    while sent < COUNT or (not COUNT and (time.monotonic() - began < SECONDS or sent < 20_000)):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            for chunk in batches(dice):
                if not writer.is_closing():
                    writer.write(chunk)
                await asyncio.sleep(0)
            if not writer.is_closing():
                writer.write_eof()
            while await reader.read(65_536):
                pass
        except OSError:
            pass  # dropped by the server, as expected
        writer.close()
        sent += BATCH
        if sent == 4000 or (sent > 4000 and not first):
            first = memory()
    await until(lambda: not server.connection_count)
    keyspace = server.keyspace
    assert occupied(keyspace) == counted(keyspace)
    assert keyspace.usage.left >= 0
    for key in list(keyspace._values):  # `list_keys` is limited
        keyspace.delete(key)
    async with connect(server.endpoint) as store:
        assert await store.add("fuzz/alive") == 1
    gc.collect()
    assert failures == []
    assert dropped
    assert server.service.buffers.size == 0
    assert keyspace.waits.count == 0
    # Values that the requests have stored remain; their size is bounded.
    assert memory() - (first or memory()) < 40 << 20


@pytest.mark.slow
def test_mutated_requests_to_the_reader() -> None:
    """Without a network, which is faster: the reader raises only `WireError`."""
    dice = random.Random(SEED + 1)
    done, began = 0, time.monotonic()
    while done < COUNT or (not COUNT and time.monotonic() - began < SECONDS):
        reader = RequestReader(WireLimits())
        total = 0
        try:
            for chunk in batches(dice):
                total += len(chunk)
                reader.read(chunk)
                while reader.has_more:
                    reader.read(b"")
                assert reader.partial_size <= total
        except WireError:
            pass
        done += BATCH
