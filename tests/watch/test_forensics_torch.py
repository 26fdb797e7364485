"""The dump of a job of torch that hangs."""

from __future__ import annotations

import sys

import pytest

from elastic_aio import Agent, LaunchSpec, WorkerReady

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

# Rank 3 waits for a batch that does not come, and the others for rank 3.
WORKER = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from elastic_aio.worker import ready
class Batches(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if dist.get_rank() == 3 and index == 4: time.sleep(99)
        return torch.ones(2)
dist.init_process_group("gloo")
def train():
    for step, batch in enumerate(DataLoader(Batches(), batch_size=2)):
        if step == 1:
            ready()
        dist.all_reduce(batch)
train()
"""


async def test_the_rank_that_differs_is_named() -> None:
    spec = LaunchSpec([sys.executable, "-c", WORKER], nproc_per_node=4)
    waiting = 4
    async with Agent(spec) as agent:
        async for event in agent.events():
            waiting -= isinstance(event, WorkerReady)
            if not waiting:
                break
        expected = "ranks 0-2 wait in all_reduce, rank 3 is in __getitem__ (<string>:8)"
        for _ in range(50):
            dump = await agent.dump()
            if dump.summary == expected:
                break  # each of them has gone as far as it can
        await agent.stop(signal="SIGKILL")
    assert dump.summary == expected
