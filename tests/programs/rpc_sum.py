"""Call functions of every other worker by torch RPC, in each of two attempts."""

import os

import torch
from torch.distributed import rpc


def add(left: torch.Tensor, right: int) -> torch.Tensor:
    """Return a sum, on the worker that is called."""
    return left + right + int(os.environ["RANK"])


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world)
others = [other for other in range(world) if other != rank]
calls = [rpc.rpc_async(f"worker{other}", add, args=(torch.ones(2), attempt)) for other in others]
sums = [int(call.wait()[0]) for call in calls]
assert sums == [1 + attempt + other for other in others], sums
remote = rpc.remote(f"worker{others[0]}", add, args=(torch.zeros(1), 5))
assert int(remote.to_here()) == 5 + others[0]
del remote  # its owner waits for it to be released
rpc.shutdown()
if attempt == 0 and rank == world - 1:
    raise SystemExit("fails once, so that RPC forms again")
print(f"rank {rank}: attempt {attempt}, {len(sums)} answers\n", end="", flush=True)
