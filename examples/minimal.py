"""The shortest training under ZeRO: a module, a data loader, and one argument of the Trainer.

python examples/minimal.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  (registers "zero3" with Lightning)


class Sine(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    x = torch.linspace(-3, 3, 1024)[:, None]
    data = DataLoader(TensorDataset(x, x.sin()), batch_size=32, shuffle=True)
    trainer = Trainer(strategy="zero3", accelerator="cpu", devices=2, max_epochs=5)
    trainer.fit(Sine(), data)
