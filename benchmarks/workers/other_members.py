"""Many that meet in other ways than ours: `python -m benchmarks.workers.meetings WAY COUNT`.

`bare`: as many connections; each sends a little, and is answered when all have.
`torch`: members of torch's rendezvous, in threads; it is their round that is measured.

Prints the seconds.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_HOST = "127.0.0.1"
_BARE_SIZE = 300


def main() -> None:
    """Let them meet."""
    way, count = sys.argv[1], int(sys.argv[2])
    if way == "bare":
        asyncio.run(bare(count))
    else:
        torch_members(count)


class _Server(asyncio.Protocol):
    def __init__(self, arrived: list[asyncio.Transport], count: int) -> None:
        self._arrived, self._count = arrived, count

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrived.append(self._transport)
        if len(self._arrived) == self._count:
            for transport in self._arrived:
                transport.write(data)


class _Client(asyncio.Protocol):
    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard

    def connection_made(self, transport: Any) -> None:
        transport.write(b"x" * _BARE_SIZE)

    def data_received(self, data: bytes) -> None:
        self._heard()


async def bare(count: int) -> None:
    """Let as many connections speak once and be answered once."""
    loop = asyncio.get_running_loop()
    arrived: list[asyncio.Transport] = []
    all_heard = asyncio.Event()
    waiting = [None] * count

    def heard() -> None:
        waiting.pop()
        if not waiting:
            all_heard.set()

    server = await loop.create_server(lambda: _Server(arrived, count), _HOST, 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    began = time.monotonic()
    await asyncio.gather(
        *(loop.create_connection(lambda: _Client(heard), _HOST, port) for _ in range(count))
    )
    await all_heard.wait()
    print(time.monotonic() - began, flush=True)
    os._exit(0)


def torch_members(count: int) -> None:
    """Let as many threads take part in one round of torch's rendezvous."""
    package = "torch.distributed.elastic.rendezvous"
    base = importlib.import_module(package)
    backends = importlib.import_module(f"{package}.c10d_rendezvous_backend")
    dynamic = importlib.import_module(f"{package}.dynamic_rendezvous")
    with socket.create_server((_HOST, 0)) as one:
        endpoint = f"{_HOST}:{one.getsockname()[1]}"
    handlers = []
    for number in range(count):
        parameters = base.RendezvousParameters(
            "c10d", endpoint, "members", count, count, local_addr=_HOST, is_host=number == 0
        )
        backend, store = backends.create_backend(parameters)
        handlers.append(dynamic.create_handler(store, backend, parameters))
    threads = [threading.Thread(target=handler.next_rendezvous) for handler in handlers]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.monotonic() - began, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
