"""Sum the ranks with Lightning Fabric, launched by its command."""

import os

import torch
from lightning.fabric import Fabric

fabric = Fabric()
total = fabric.all_reduce(torch.tensor(float(fabric.global_rank + 1)), reduce_op="sum")
launcher = "elastic_aio" if "ELASTIC_AIO_ATTEMPT" in os.environ else "torchrun"
print(f"rank {fabric.global_rank}: {int(total)} by {launcher}\n", end="", flush=True)
