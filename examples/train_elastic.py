"""Train with DistributedDataParallel on a changing number of nodes, with the same result.

Needs torch.  Every step uses the same samples with any number of workers: they are
divided among the workers, and the gradient is summed over the samples.  Rank 0 saves a
checkpoint after every step in a directory that all nodes share, and each round starts
from it.

Start it on any node at any time, and stop or kill any node:
    aio-elastic run --nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id JOB \
        --max-restarts 3 examples/train_elastic.py --checkpoint SHARED/train.pt

`python examples/train_elastic.py --checkpoint FILE` trains in one process, to compare the loss.
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
    replica = DistributedDataParallel(model)  # all ranks start with the model of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    if rank == 0:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"world size {world}, restart {restarts}: from step {first}", flush=True)

    features, targets = samples()
    for step in range(first, options.steps):
        time.sleep(options.step_time)  # simulates a larger model
        begin = step * BATCH % SAMPLES
        mine = slice(begin + rank, begin + BATCH, world)
        errors = replica(features[mine]) - targets[mine]
        optimizer.zero_grad()
        # DDP averages the gradients of the ranks; the step needs their sum over BATCH.
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
    """Join the other workers; without a launcher, form a group of one."""
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features and targets of all samples, the same in every worker."""
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    return features, features.sum(dim=1, keepdim=True) + 0.1 * noise


def load(path: Path, model: nn.Module) -> int:
    """Load rank 0's checkpoint; return the step to start with, the same for all ranks."""
    step = torch.zeros(1, dtype=torch.int64)
    # A lost node may still write the file: all ranks use the step that rank 0 has read.
    if distributed.get_rank() == 0 and path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        step[0] = state["step"]
    distributed.broadcast(step, src=0)
    return int(step)


def save(path: Path, model: nn.Module, step: int) -> None:
    """Write a checkpoint atomically: a crash leaves the old or the new file."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    torch.save({"model": model.state_dict(), "step": step}, unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
