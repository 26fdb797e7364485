"""Functions as workers: their values come back, whichever way they start.

python examples/functions.py
"""

from __future__ import annotations

import asyncio
import os
import random

from elastic_aio import JobFailed, LaunchSpec, launch
from elastic_aio.processes import ProcessRaisedException, spawn, start_processes


def estimate(points: int) -> float:
    """Estimate pi from random points, each rank from its own."""
    dice = random.Random(int(os.environ["RANK"]))
    inside = sum(dice.random() ** 2 + dice.random() ** 2 < 1 for _ in range(points))
    return 4 * inside / points


def divide(number: int) -> float:
    """Fail for rank 0."""
    return number / int(os.environ["RANK"])


def check(index: int, limit: int) -> None:
    """Fail when the index reaches the limit."""
    if index >= limit:
        raise ValueError(f"index {index} is too high")


async def main() -> None:
    """Launch, fail, spawn, and run a group."""
    for method in ("spawn", "fork", "forkserver"):
        spec = LaunchSpec(
            estimate,
            args=[20_000],
            nproc_per_node=4,
            start_method=method,
        )
        values = (await launch(spec)).return_values
        print(f"{method}: pi is about {sum(values.values()) / len(values):.2f}")

    try:
        await launch(LaunchSpec(divide, args=[1], nproc_per_node=2))
    except JobFailed as error:
        root = error.failures[0]
        print(f"failed: rank {root.rank}: {root.error and root.error.message}")

    try:
        await spawn(check, (1,), nprocs=2)
    except ProcessRaisedException as failed:
        print(f"process {failed.error_index} raised: {failed.msg.splitlines()[-1]}")

    args = {0: ("left",), 1: ("right",)}
    async with start_processes("hands", str.upper, args, {0: {}, 1: {}}) as group:
        result = await group.wait()
    print(f"group: {dict(result.return_values) if result else None}")


if __name__ == "__main__":
    asyncio.run(main())
