"""Train with DistributedDataParallel while nodes come and go; the result stays the same.

Needs torch.  Every step works on the same samples whatever the number of workers is:
they are divided among those that are there, and the gradient is summed over samples.
Rank 0 saves a checkpoint after every step, in a folder that all nodes share, and each
round goes on from it.

Start it on any of the nodes at any time, and stop or kill any of them:
    aio-elastic run --nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id JOB \
        --max-restarts 3 examples/train_elastic.py --checkpoint SHARED/train.pt

`python examples/train_elastic.py --checkpoint FILE` trains alone, to compare the loss.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 24  # samples of a step, all workers together
SAMPLES = 240
FEATURES = 8


def main() -> None:
    """Train until the last step, from the checkpoint if there is one."""
    parser = argparse.ArgumentParser(description="a small model on a changing number of nodes")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to save and resume")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds of a step")
    options = parser.parse_args()

    join_group()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(7)
    model = nn.Linear(FEATURES, 1, dtype=torch.float64)
    first = load(options.checkpoint, model)
    replica = DistributedDataParallel(model)  # all begin with the model of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    if rank == 0:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"world size {world}, restart {restarts}: from step {first}", flush=True)

    features, targets = samples()
    for step in range(first, options.steps):
        time.sleep(options.step_time)  # stands for a larger model
        begin = step * BATCH % SAMPLES
        mine = slice(begin + rank, begin + BATCH, world)
        errors = replica(features[mine]) - targets[mine]
        optimizer.zero_grad()
        # The replicas' gradients are averaged: what is wanted is their sum, over BATCH.
        (errors.square().sum() * world / BATCH).backward()
        optimizer.step()
        if rank == 0:
            save(options.checkpoint, model, step + 1)

    distributed.barrier()
    distributed.destroy_process_group()
    if rank == 0:
        loss = nn.functional.mse_loss(model(features), targets)
        print(f"final loss {loss.item():.17g}", flush=True)


def join_group() -> None:
    """Meet the other workers, if a launcher has started us."""
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all samples and what is to be learnt of them, the same everywhere."""
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    return features, features.sum(dim=1, keepdim=True) + 0.1 * noise


def load(path: Path, model: nn.Module) -> int:
    """Take up rank 0's checkpoint; return the step to go on with, the same for all."""
    step = torch.zeros(1, dtype=torch.int64)
    # A node that is being replaced may still write: what rank 0 has read counts for all.
    if distributed.get_rank() == 0 and path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        step[0] = state["step"]
    distributed.broadcast(step, src=0)
    return int(step)


def save(path: Path, model: nn.Module, step: int) -> None:
    """Write a checkpoint in one step: a crash leaves the old one or the new one."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    torch.save({"model": model.state_dict(), "step": step}, unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
