"""Two programs that meet: each waits for the other's name, then they count together.

Run it alone and it plays both parts, or run a store and the two programs apart::

    aio-elastic store --port 29400
    python examples/store.py localhost:29400 alice bob
    python examples/store.py localhost:29400 bob alice
"""

from __future__ import annotations

import asyncio
import sys

from elastic_aio.store import StoreServer, connect


async def meet(endpoint: str, name: str, other: str) -> None:
    """Come as `name`, wait for `other`, and notice when it leaves."""
    async with connect(endpoint) as store:
        nodes = store.prefixed("meeting")
        # The lease lives as long as this program: nobody has to clean up after it.
        async with nodes.lease(ttl=5) as lease, nodes.watch(other) as watch:
            await lease.set(name, f"hello from {name}")
            print(f"{name}: {(await nodes.get(other)).decode()}")
            number = await nodes.add("visitors")
            print(f"{name}: I am number {number}")
            both_met = f"met/{(number + 1) // 2}"
            if number % 2:
                # Not before the other has read our name, which leaves with us.
                await nodes.wait([both_met])
                return
            await nodes.set(both_met, b"")
            async for change in watch:
                if change.value is None:
                    print(f"{name}: {other} has left")
                    return


async def main() -> None:
    if len(sys.argv) == 4:
        await meet(*sys.argv[1:])
        return
    async with StoreServer("127.0.0.1") as server, asyncio.TaskGroup() as programs:
        programs.create_task(meet(server.endpoint, "alice", "bob"))
        programs.create_task(meet(server.endpoint, "bob", "alice"))


if __name__ == "__main__":
    asyncio.run(main())
