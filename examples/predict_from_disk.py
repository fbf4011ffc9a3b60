"""Predict with weights that stay in their checkpoint, within a memory limit that the script sets.

python examples/predict_from_disk.py                # predicts from the file
python examples/predict_from_disk.py --in-memory    # runs out of memory

It first writes a checkpoint of 1.2 GB, also from files. The limit leaves no room for the weights:
they are read from the checkpoint layer by layer, each while the previous one computes.
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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


class Predictor(LightningModule):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.blocks: nn.Module | None = None

    def configure_model(self) -> None:
        if self.blocks is None:
            # On `meta`: no values are made only to be overwritten.
            with torch.device("meta"):
                self.blocks = nn.Sequential(*[Block(self.width) for _ in range(self.depth)])

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.blocks(batch[0])


class Writer(Predictor):
    """A predictor with random weights that saves them to a checkpoint."""

    def on_predict_start(self) -> None:
        self.trainer.save_checkpoint(self.path)


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
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--batches", type=int, default=2)
    arguments = parser.parse_args()
    seed_everything(0)
    block = 32 * arguments.width**2  # bytes
    size = arguments.depth * block
    limit = 3 * block + 150 * 10**6
    print(f"{size / 1e9:.2f} GB of weights; memory is limited to {limit / 1e9:.2f} GB")
    limit_memory(limit)
    data = DataLoader(TensorDataset(torch.randn(8 * arguments.batches, arguments.width)), 8)

    def trainer(**files: str) -> Trainer:
        # Whole weights after a run would exceed the limit.
        strategy = ZeROStrategy(stage=3, restore_weights=False, **files)
        return Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)

    files = {"offload_optimizer": "nvme", "offload_weights": "nvme"}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        writer = Writer(arguments.width, arguments.depth)
        writer.path = f"{folder}/weights.ckpt"
        expected = trainer(**files).predict(writer, data)
        model = Predictor(arguments.width, arguments.depth)
        reading = trainer(**({} if arguments.in_memory else files))
        begin = time.perf_counter()
        found = reading.predict(model, data, ckpt_path=writer.path)
        print(f"predicted {len(found)} batches in {time.perf_counter() - begin:.1f} s")
        assert all(map(torch.equal, found, expected))
