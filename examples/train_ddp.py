"""Train a small model with DistributedDataParallel on CPUs and recover from a crash.

Needs torch.  Rank 0 saves a snapshot after every epoch; on the first attempt rank 1
is killed in epoch 2, the worker group restarts, and training resumes from the snapshot.

Run it with:
    aio-elastic run --nproc-per-node 2 --max-restarts 1 examples/train_ddp.py
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train until the last epoch, from the snapshot if there is one."""
    parser = argparse.ArgumentParser(description="a small model that survives a crash")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--crash-at", type=int, default=2, help="epoch; -1 for never")
    parser.add_argument("--snapshot", type=Path, default=None, help="file to resume from")
    options = parser.parse_args()
    snapshot = options.snapshot or default_snapshot()

    distributed.init_process_group("gloo")
    rank, attempt = distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = load(snapshot, model, optimizer)
    if rank == 0:
        print(f"attempt {attempt}: training from epoch {first} of {options.epochs}")

    features = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank))
    targets = features.sum(dim=1, keepdim=True)
    for epoch in range(first, options.epochs):
        if epoch == options.crash_at and rank == 1 and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        if rank == 0:
            save(snapshot, model, optimizer, epoch + 1)
            print(f"epoch {epoch}: loss {loss.item():.4f}")

    distributed.barrier()
    distributed.destroy_process_group()
    if rank == 0:
        if options.snapshot is None:
            snapshot.unlink()
        print(f"finished after {options.epochs} epochs on attempt {attempt}")


def default_snapshot() -> Path:
    """Return the path that all workers and attempts of this run share."""
    run = os.environ["TORCHELASTIC_RUN_ID"]
    return Path(tempfile.gettempdir()) / f"train_ddp_{run}.pt"


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the snapshot, if there is one; return the epoch to start with."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write a snapshot atomically: a crash leaves the old or the new file."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)


if __name__ == "__main__":
    main()
