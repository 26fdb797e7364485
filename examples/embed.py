"""An async program that runs two jobs side by side, follows their events, cancels one.

Run it with:  python examples/embed.py
"""

import asyncio
import sys

from elastic_aio import Agent, LaunchSpec, LogSpec, StopPlan, WorkerExited, WorkerStarted

WORKER = "import os, time; print('working as rank', os.environ['RANK'], flush=True); time.sleep({})"


def job(name: str, seconds: float) -> LaunchSpec:
    """Return a job of two workers that sleep."""
    return LaunchSpec(
        [sys.executable, "-c", WORKER.format(seconds)],
        nproc_per_node=2,
        role=name,
        logs=LogSpec(tee=3),
        stop=StopPlan.within(5),
    )


async def follow(agent: Agent) -> None:
    """Print what happens to the workers of one job."""
    async for event in agent.events():
        match event:
            case WorkerStarted(rank=rank, pid=pid):
                print(f"{agent.spec.role}: rank {rank} started as pid {pid}")
            case WorkerExited(rank=rank, status=status):
                print(f"{agent.spec.role}: rank {rank} ended: {status}")


async def run_to_the_end() -> None:
    """Run a short job and show its result."""
    async with Agent(job("short", 0.2)) as agent:
        await follow(agent)
        result = await agent.wait()
    print(f"short: {result.state} after {result.duration:.1f} s")


async def run_until_cancelled(started: asyncio.Event) -> None:
    """Run a job that would take an hour; say when its workers are there."""
    async with Agent(job("endless", 3600)) as agent:
        workers = 0
        async for event in agent.events():
            workers += isinstance(event, WorkerStarted)
            if workers == agent.spec.nproc_per_node:
                started.set()


async def main() -> None:
    """Run both; cancel the endless one when the short one is done."""
    started = asyncio.Event()
    endless = asyncio.create_task(run_until_cancelled(started))
    await run_to_the_end()
    await started.wait()
    endless.cancel()
    try:
        await endless
    except asyncio.CancelledError:
        print("endless: cancelled, and nothing of it is left")


if __name__ == "__main__":
    asyncio.run(main())
