"""Fit a model by LightningCLI, whose options are those of the Trainer and of the model."""

import os

import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):  # type: ignore[misc]  # it has no stubs
    """One linear layer with an option."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        features = torch.randn(16, self.layer.in_features)
        return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=8)

    def on_fit_end(self) -> None:
        launcher = "elastic_aio" if "ELASTIC_AIO_ATTEMPT" in os.environ else "another launcher"
        size = self.trainer.world_size
        text = f"{self.layer.in_features} features by {launcher}"
        print(f"rank {self.global_rank} of {size}: {text}\n", end="", flush=True)


if __name__ == "__main__":
    LightningCLI(Regression, save_config_callback=None)
