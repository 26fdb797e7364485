"""`python -m benchmarks.workers.reloads RATE`: 8 servers, reloaded under load; prints JSON.

Three versions replace each other, and a broken one does not.  Two processes make the requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

from elastic_aio import Agent, LaunchSpec, LogSpec, RestartPolicy, StopPlan
from elastic_aio.child_events import ReadinessChanged
from elastic_aio.spec.probe import LogMatch
from tests.support.sockets import free_port

_SERVERS = 8
_LOADS = 2
_PAUSE_S = 1.0  # of full load between two reloads

_SERVER = """
import os, select, signal, socket, sys
listener = socket.socket(fileno=3)
listener.setblocking(False)
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
signal.signal(signal.SIGTERM, lambda *_: None)
poll = select.epoll()
poll.register(listener, select.EPOLLIN | select.EPOLLEXCLUSIVE)
poll.register(reader, select.EPOLLIN)
print("serving", flush=True)
while True:
    if any(fd == reader for fd, _ in poll.poll()):
        sys.exit(0)
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        continue
    connection.settimeout(5)
    if connection.recv(1000):
        connection.sendall(b"VERSION")
    connection.close()
"""


def _servers(port: int, code: str) -> LaunchSpec:
    return LaunchSpec(
        [sys.executable, "-S", "-c", code],
        nproc_per_node=_SERVERS,
        sockets=[f"tcp://127.0.0.1:{port}"],
        max_restarts=3,
        restart=RestartPolicy(scope="worker"),
        logs=LogSpec(redirects=3),
        ready=LogMatch("serving"),
        stop=StopPlan.within(5),
    )


async def _load(port: int, rate: float) -> asyncio.subprocess.Process:
    words = ["-m", "benchmarks.workers.load", str(port), str(rate)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe)


async def _main(rate: float) -> dict[str, Any]:
    port = free_port()
    specs = {
        name: _servers(port, _SERVER.replace("VERSION", name)) for name in ("v0", "v1", "v2", "v3")
    }
    async with Agent(specs["v0"]) as agent:
        async for event in agent.events():
            if isinstance(event, ReadinessChanged) and not event.child and event.is_ready:
                break
        loads = [await _load(port, rate / _LOADS) for _ in range(_LOADS)]
        reloaded = 0
        for name in ("v1", "v2", "v3"):
            await asyncio.sleep(_PAUSE_S)
            reloaded += await agent.reload(spec=specs[name])
        await asyncio.sleep(_PAUSE_S)
        kept = agent.pids()
        refused = not await agent.reload(spec=_servers(port, "raise SystemExit(3)"))
        is_kept = agent.pids() == kept
        await asyncio.sleep(2 * _PAUSE_S)
        found = [json.loads((await load.communicate(b""))[0]) for load in loads]
    total: Counter[str] = Counter()
    for each in found:
        total.update({name: each.get(name, 0) for name in ("answered", "refused", "broken")})
    return {
        **total,
        "rate": sum(each.get("answered", 0) / each["seconds"] for each in found),
        "longest": max(each["longest"] for each in found),
        "versions": sorted({version for each in found for version in each["versions"]}),
        "reloaded": reloaded,
        "is_kept": refused and is_kept,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_main(float(sys.argv[1])))))
