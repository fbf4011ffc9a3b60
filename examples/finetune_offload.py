"""Train with weights and optimizer states in files, within a memory limit that the script sets.

python examples/finetune_offload.py                 # trains from files
python examples/finetune_offload.py --in-memory     # runs out of memory

The limit leaves no room for the optimizer states. It applies to the process's private memory, not
to memory-mapped files, which the system keeps in its page cache as far as they fit.
"""

import argparse
import re
import resource
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeROStrategy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


class Denoiser(LightningModule):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = width, depth

    def configure_model(self) -> None:
        # On `meta`: units get their values one by one, so the model is never whole in memory.
        with torch.device("meta"):
            self.blocks = nn.Sequential(*[Block(self.width) for _ in range(self.depth)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (clean,) = batch
        loss = nn.functional.mse_loss(self.blocks(clean + 0.3 * torch.randn_like(clean)), clean)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more memory than it has now."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmData:\s+(\d+) kB", status)
    assert found is not None
    held = int(found[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + num_bytes, held + num_bytes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    seed_everything(0)
    model = Denoiser(arguments.width, arguments.depth)
    num_parameters = 8 * arguments.depth * arguments.width**2
    limit = 9 * num_parameters + 200 * 10**6
    print(
        f"{num_parameters / 1e6:.0f} million parameters, {16 * num_parameters / 1e9:.2f} GB of"
        f" weights, gradients and states; memory is limited to {limit / 1e9:.2f} GB"
    )
    limit_memory(limit)
    files = {} if arguments.in_memory else {"offload_optimizer": "nvme", "offload_weights": "nvme"}
    data = DataLoader(TensorDataset(torch.randn(256, arguments.width)), 16)
    trainer = Trainer(
        # Whole weights after `fit` would exceed the limit.
        strategy=ZeROStrategy(stage=3, restore_weights=False, **files),
        accelerator="cpu",
        devices=1,
        max_steps=arguments.steps,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, data)
    print(f"trained; the last loss is {trainer.callback_metrics['loss']:.3f}")
