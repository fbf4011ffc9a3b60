"""Train, and predict, with less memory than the model needs: a limit that the script sets.

python examples/beyond_memory.py train                  # weights and optimizer states in files
python examples/beyond_memory.py predict                # weights in files
python examples/beyond_memory.py train --in-memory      # runs out of memory

The limit applies to the process's private memory, not to memory-mapped files, which the system
keeps in its page cache as far as they fit. It leaves no room for optimizer states, or for weights,
which predictions read layer by layer, each while the previous one computes.
"""

import argparse
import re
import resource
import tempfile
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeROStrategy

FILES = {"offload_optimizer": "nvme", "offload_weights": "nvme"}


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
        self.blocks: nn.Module | None = None

    def configure_model(self) -> None:
        # On `meta`: units get their values one by one, so the model is never whole in memory.
        if self.blocks is None:
            with torch.device("meta"):
                self.blocks = nn.Sequential(*[Block(self.width) for _ in range(self.depth)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (clean,) = batch
        loss = nn.functional.mse_loss(self.blocks(clean + 0.3 * torch.randn_like(clean)), clean)
        self.log("loss", loss, prog_bar=True)
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.blocks(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Writer(Denoiser):
    """Saves its random weights to a checkpoint when it begins to predict."""

    path = ""

    def on_predict_start(self) -> None:
        self.trainer.save_checkpoint(self.path)


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more memory than it has now."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmData:\s+(\d+) kB", status)
    assert found is not None
    held = int(found[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + num_bytes, held + num_bytes))


def make_trainer(files: dict[str, str], **options: int) -> Trainer:
    # Whole weights after a run would exceed the limit.
    return Trainer(
        strategy=ZeROStrategy(stage=3, restore_weights=False, **files),
        accelerator="cpu",
        devices=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )


def train(arguments: argparse.Namespace) -> None:
    num_parameters = 8 * arguments.depth * arguments.width**2
    limit = 9 * num_parameters + 200 * 10**6
    print(
        f"{num_parameters / 1e6:.0f} million parameters, {16 * num_parameters / 1e9:.2f} GB of"
        f" weights, gradients and states; memory is limited to {limit / 1e9:.2f} GB"
    )
    limit_memory(limit)
    data = DataLoader(TensorDataset(torch.randn(16 * arguments.batches, arguments.width)), 16)
    trainer = make_trainer({} if arguments.in_memory else FILES, max_epochs=1)
    trainer.fit(Denoiser(arguments.width, arguments.depth), data)
    print(f"trained; the last loss is {trainer.callback_metrics['loss']:.3f}")


def predict(arguments: argparse.Namespace) -> None:
    block = 32 * arguments.width**2  # bytes
    limit = 3 * block + 150 * 10**6
    size = arguments.depth * block
    print(f"{size / 1e9:.2f} GB of weights; memory is limited to {limit / 1e9:.2f} GB")
    # The checkpoint is mapped to memory: it takes none, but the system counts what may be changed.
    limit_memory(limit + size)
    data = DataLoader(TensorDataset(torch.randn(8 * arguments.batches, arguments.width)), 8)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        writer = Writer(arguments.width, arguments.depth)
        writer.path = f"{folder}/weights.ckpt"
        expected = make_trainer(FILES).predict(writer, data)
        model = Denoiser(arguments.width, arguments.depth)
        reading = make_trainer({} if arguments.in_memory else FILES)
        begin = time.perf_counter()
        found = reading.predict(model, data, ckpt_path=writer.path)
        print(f"predicted {len(found)} batches in {time.perf_counter() - begin:.1f} s")
        assert all(map(torch.equal, found, expected))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["train", "predict"])
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--width", type=int, help="default: 1024 to train, 1536 to predict")
    parser.add_argument("--depth", type=int, help="default: 8 to train, 16 to predict")
    parser.add_argument("--batches", type=int, default=2)
    arguments = parser.parse_args()
    trains = arguments.what == "train"
    arguments.width = arguments.width or (1024 if trains else 1536)
    arguments.depth = arguments.depth or (8 if trains else 16)
    seed_everything(0)
    (train if trains else predict)(arguments)
