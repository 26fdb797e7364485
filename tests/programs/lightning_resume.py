"""Fit a model with Lightning's Trainer; rank 1 is killed once, and the fit is resumed."""

import os
import signal
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class Regression(lightning.LightningModule):  # type: ignore[misc]  # it has no stubs
    """One linear layer, whose process dies in the middle of epoch 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and self.current_epoch == 2 and index == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def on_train_epoch_start(self) -> None:
        print(
            f"rank {self.global_rank} of {self.trainer.world_size}: epoch {self.current_epoch}\n",
            end="",
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


lightning.seed_everything(7)
features = torch.randn(64, 8)
loader = DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=EPOCHS,
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(sys.argv[1], save_last=True)],
)
trainer.fit(Regression(), loader, ckpt_path="last")
print(
    f"rank {trainer.global_rank}: finished after {trainer.current_epoch} epochs\n",
    end="",
    flush=True,
)
