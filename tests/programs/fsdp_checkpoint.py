"""Train a sharded model with FSDP2 on a DeviceMesh, and save it with distributed checkpoints.

Rank 1 is killed in step 3 of the first attempt; the next one loads the last checkpoint, and a
model that was never interrupted has the same parameters at the end.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 5


def train(directory: Path | None, crash_at: int | None) -> torch.Tensor:
    """Train from the last checkpoint to the last step; return the whole weight."""
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    first = 0
    saved = sorted(directory.glob("*/.metadata")) if directory else []
    if saved:
        first = int(saved[-1].parent.name)
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(parts, checkpoint_id=saved[-1].parent)
        set_state_dict(
            model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )
    for step in range(first, STEPS):
        if step == crash_at and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        features = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), features.sum(1, keepdim=True)).backward()
        optimizer.step()
        if directory:
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            checkpoint.save(parts, checkpoint_id=directory / str(step + 1))
    print(f"rank {distributed.get_rank()}: steps {first} to {STEPS}\n", end="", flush=True)
    return model[0].weight.full_tensor()


distributed.init_process_group("gloo")
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
resumed = train(Path(sys.argv[1]), 3 if is_first else None)
assert torch.equal(resumed, train(None, None))
distributed.destroy_process_group()
