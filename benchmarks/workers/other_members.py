"""Members of other rendezvous: `python -m benchmarks.workers.other_members WAY COUNT`.

`bare`: COUNT connections; each sends a message, and is answered when all have sent one.
`torch`: members of torch's rendezvous in threads; one round is measured.

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
    """Measure one way."""
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
    def __init__(self, on_answer: Callable[[], None]) -> None:
        self._on_answer = on_answer

    def connection_made(self, transport: Any) -> None:
        transport.write(b"x" * _BARE_SIZE)

    def data_received(self, data: bytes) -> None:
        self._on_answer()


async def bare(count: int) -> None:
    """Send one message on each connection, and wait for one answer on each."""
    loop = asyncio.get_running_loop()
    arrived: list[asyncio.Transport] = []
    all_answered = asyncio.Event()
    waiting = [None] * count

    def on_answer() -> None:
        waiting.pop()
        if not waiting:
            all_answered.set()

    server = await loop.create_server(lambda: _Server(arrived, count), _HOST, 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    began = time.monotonic()
    await asyncio.gather(
        *(loop.create_connection(lambda: _Client(on_answer), _HOST, port) for _ in range(count))
    )
    await all_answered.wait()
    print(time.monotonic() - began, flush=True)
    os._exit(0)


def torch_members(count: int) -> None:
    """Let COUNT threads take part in one round of torch's rendezvous."""
    package = "torch.distributed.elastic.rendezvous"
    base = importlib.import_module(package)
    backends = importlib.import_module(f"{package}.c10d_rendezvous_backend")
    dynamic = importlib.import_module(f"{package}.dynamic_rendezvous")
    with socket.create_server((_HOST, 0)) as probe:
        endpoint = f"{_HOST}:{probe.getsockname()[1]}"
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
