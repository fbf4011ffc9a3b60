"""A GAN with two optimizers under manual optimization: points learn to lie on a circle.

    python examples/gan.py
    python examples/gan.py --strategy ddp

Generator and discriminator are both sharded. Each has its own optimizer, and `toggle_optimizer`
keeps the other's parameters from getting gradients, as under DDP.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  (registers "zero1", "zero2" and "zero3" with Lightning)


def layers(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class GAN(LightningModule):
    """Two networks that play against each other.

    Args:
        width: the size of the hidden layers.
        noise: the number of random inputs to the generator.
        lr: the learning rate of both optimizers.
    """

    def __init__(self, width: int = 256, noise: int = 8, lr: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise = noise
        self.lr = lr
        self.generator = layers(noise, width, 2)
        self.discriminator = layers(2, width, 1)

    def sample(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.noise, device=self.device))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        of_generator, of_discriminator = self.optimizers()

        self.toggle_optimizer(of_discriminator)
        fake = self.sample(len(real)).detach()
        loss = F.softplus(-self.discriminator(real)).mean()
        loss = loss + F.softplus(self.discriminator(fake)).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        self.log("discriminator", loss, prog_bar=True)

        self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.discriminator(self.sample(len(real)))).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_generator, gradient_clip_val=1.0)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log("generator", loss, prog_bar=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        distance = (self.sample(len(batch[0])).norm(dim=1) - 1).abs().mean()
        self.log("distance", distance, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        distance = self.trainer.callback_metrics["distance"]
        self.print(f"step {self.global_step:5d}   distance from the circle {distance:.3f}")

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), self.lr, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), self.lr, betas=(0.5, 0.9)),
        ]


def circle(count: int) -> TensorDataset:
    angle = torch.rand(count) * 2 * torch.pi
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    seed_everything(0)
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=arguments.epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(GAN(), DataLoader(circle(8192), 64, shuffle=True), DataLoader(circle(512), 256))
