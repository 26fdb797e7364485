"""Look into a job that runs in another process, change it, and wait for its end.

Run it with:  python examples/control.py
"""

import asyncio
import sys

from elastic_aio import WorkerStarted
from elastic_aio.control import connect, list_jobs

COMMAND = ("run", "--rdzv-id=demo", "--nproc-per-node=2", "--no-python", "sleep", "600")


async def main() -> None:
    """Start `aio-elastic run` as another program does, and use its control socket."""
    argv = [sys.executable, "-m", "elastic_aio", *COMMAND]
    launcher = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    while not await list_jobs():  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # its control socket appears with its workers
    async with connect("demo") as job:
        async for event in job.events(follow=True):
            if isinstance(event, WorkerStarted):
                print(f"rank {event.rank} runs as pid {event.pid}")
                if event.rank == 1:
                    break
        print(f"restarted: {await job.restart('new data')}")
        status = await job.status()
        print(f"attempt {status.attempt} is {status.phase}")
        end = await job.stop("enough")
        print(f"{end.state}, exit code {end.exit_code}: {end.why}" if end else "")
    await launcher.wait()


asyncio.run(main())
