"""`python -m benchmarks.workers.load PORT RATE`: requests at a rate until its input is closed.

Each request is a connection of its own.  It prints as JSON what became of them: `answered`,
`refused`, `broken` (a reset, or an end without an answer), the `longest` answer in seconds, the
`seconds` of all, and the `versions` of the last second.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import Counter, deque

_REQUEST = b"GET / HTTP/1.0\r\n\r\n"
_CLIENTS = 64
_TICK_S = 0.005
_DEADLINE_S = 30


class _Load:
    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self.counts = Counter[str]()
        self.longest = 0.0
        self.answers: deque[tuple[float, str]] = deque()
        self.queue: asyncio.Queue[float] = asyncio.Queue()

    async def client(self) -> None:
        """Make the requests of the queue; the time of each counts from when it was due."""
        while True:
            due = await self.queue.get()
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    answer = await self._request()
                what = "answered" if answer else "broken"
            except ConnectionRefusedError:
                what = "refused"
            except (OSError, TimeoutError):
                what = "broken"
            self.counts[what] += 1
            self.queue.task_done()
            now = time.monotonic()
            self.longest = max(self.longest, now - due)
            if what == "answered":
                self.answers.append((now, answer.decode()))
                while self.answers[0][0] < now - 1:
                    self.answers.popleft()

    async def _request(self) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            await loop.sock_connect(connection, self._address)
            await loop.sock_sendall(connection, _REQUEST)
            return await loop.sock_recv(connection, 100)

    async def pace(self, rate: float) -> None:
        """Make so many requests due in a second, whatever became of the former ones."""
        began, made = time.monotonic(), 0
        while True:
            now = time.monotonic()
            while made < (now - began) * rate:
                self.queue.put_nowait(now)
                made += 1
            await asyncio.sleep(_TICK_S)


async def _main(port: int, rate: float) -> None:
    load = _Load(port)
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    loop.add_reader(0, closed.set)
    began = time.monotonic()
    clients = [loop.create_task(load.client()) for _ in range(_CLIENTS)]
    pace = loop.create_task(load.pace(rate))
    await closed.wait()
    loop.remove_reader(0)
    pace.cancel()
    seconds = time.monotonic() - began
    async with asyncio.timeout(_DEADLINE_S):
        await load.queue.join()
    for client in clients:
        client.cancel()
    versions = sorted({version for _, version in load.answers})
    found = {**load.counts, "longest": load.longest, "seconds": seconds, "versions": versions}
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
