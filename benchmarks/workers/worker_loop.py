"""`python -m benchmarks.workers.worker_loop NUMBER COMMAND...`: restart each worker by itself.

The shortest loop that does so, with the watcher of the kernel where Python has a choice.
"""

from __future__ import annotations

import asyncio
import os
import sys


async def _keep(rank: int, command: list[str]) -> None:
    environment = {**os.environ, "RANK": str(rank)}
    while True:
        worker = await asyncio.create_subprocess_exec(
            *command, env=environment, start_new_session=True
        )
        await worker.wait()


async def _main(number: int, command: list[str]) -> None:
    if sys.version_info < (3, 12):  # the default there is a thread for each process
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)
    await asyncio.gather(*(_keep(rank, command) for rank in range(number)))


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2:]))
