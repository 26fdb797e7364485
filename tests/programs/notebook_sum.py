"""Launch a function with accelerate, as a cell of a notebook does: an event loop runs."""

import asyncio
import os
import sys

from elastic_aio.compat.torch import install

install()

import torch  # noqa: E402  # after `install`, as the guide says
from accelerate import notebook_launcher  # noqa: E402
from torch import distributed  # noqa: E402


def add(base: int) -> None:
    """Print the sum of all ranks, with the base for each."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    total = torch.tensor(base + rank)
    distributed.all_reduce(total)
    launcher = "elastic_aio" if "ELASTIC_AIO_ATTEMPT" in os.environ else "torch"
    print(f"rank {rank}: {int(total)} by {launcher}\n", end="", flush=True)
    distributed.destroy_process_group()


async def cell() -> None:
    """Block the event loop until the job has ended."""
    notebook_launcher(add, (10,), num_processes=2, use_port=sys.argv[1])


asyncio.run(cell())
