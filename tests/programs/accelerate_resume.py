"""Train with accelerate; rank 1 is killed once, and the training is resumed from its state."""

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4

accelerator = Accelerator(cpu=True)
torch.manual_seed(7)
features = torch.randn(32, 8)
model, optimizer, loader = accelerator.prepare(
    layer := torch.nn.Linear(8, 1),
    torch.optim.SGD(layer.parameters(), lr=0.05),
    DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8),
)
saved = sorted(Path(sys.argv[1]).glob("*/done"))
first = int(saved[-1].parent.name) if saved else 0
if saved:
    accelerator.load_state(str(saved[-1].parent))
rank, attempt = accelerator.process_index, os.environ["TORCHELASTIC_RESTART_COUNT"]
launcher = "elastic_aio" if "ELASTIC_AIO_ATTEMPT" in os.environ else "torchrun"
print(
    f"rank {rank} of {accelerator.num_processes}: from epoch {first} by {launcher}\n",
    end="",
    flush=True,
)
for epoch in range(first, EPOCHS):
    if (rank, attempt, epoch) == (1, "0", 2):
        os.kill(os.getpid(), signal.SIGKILL)
    for batch, target in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(batch), target))
        optimizer.step()
    directory = Path(sys.argv[1], str(epoch + 1))
    accelerator.save_state(str(directory))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (directory / "done").touch()
print(f"rank {rank}: finished\n", end="", flush=True)
accelerator.end_training()
