"""Add up the ranks of all processes with accelerate."""

import os

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
rank, size = accelerator.process_index, accelerator.num_processes
total = accelerator.reduce(torch.tensor([rank + 1]), "sum").item()
launcher = "elastic_aio" if "ELASTIC_AIO_ATTEMPT" in os.environ else "another launcher"
print(f"rank {rank} of {size}: {total} by {launcher}\n", end="", flush=True)
accelerator.end_training()
