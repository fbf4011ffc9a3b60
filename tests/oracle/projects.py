"""Small Lightning projects with no word of ZeRO in them, and how they are run under a strategy.

run = fit(Regression(), 3, max_epochs=2)     # on every rank of the pool
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeROStrategy
from lightning_zero.comm import Communicator, communicator
from lightning_zero.comm.process_groups import backend_for
from tests.oracle.models import Block, Blocks

WAYS = {
    "windows": "SharedMemory",
    "point to point": "Transport",
    "backend": "Collectives",
}
"""The transports that tests take, with their classes."""
CPU = torch.device("cpu")
WIDTH = 6


class Regression(LightningModule):
    """Three blocks between two linears learn normal numbers."""

    def __init__(self, lr: float = 0.05, optimizer: type = torch.optim.AdamW) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.net = Blocks(3, WIDTH)
            self.head = nn.Linear(WIDTH, WIDTH)
        self.lr = lr
        self.optimizer = optimizer
        self.losses: list[float] = []
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)  # each rank's own: the ranks' mean takes as long as the step
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=self.lr)


class Noted(Regression):
    """SGD, so that rounding stays small."""

    def __init__(self, lr: float = 0.1, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__(lr, optimizer)


class ByHand(Noted):
    """Steps by hand, without a closure."""

    automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def rows(num_rows: int = 16, *, batch_size: int = 2, seed: int = 0) -> DataLoader[Any]:
    """Normal numbers with targets; Lightning gives each rank its own."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, num_rows, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def make_strategy(name: str | int | Strategy, **options: Any) -> str | Strategy:
    """A stage as a strategy whose units are the blocks; anything else is Lightning's to read."""
    return ZeROStrategy(name, **{"units": {Block}, **options}) if isinstance(name, int) else name


def make_trainer(strategy: str | int | Strategy, **options: Any) -> Trainer:
    """A quiet Trainer over all ranks of the pool."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(
            **{
                "accelerator": "cpu",
                "devices": dist.get_world_size() if dist.is_initialized() else 1,
                "strategy": make_strategy(strategy),
                "max_epochs": 1,
                "log_every_n_steps": 1,
                **quiet,
                **options,
            }
        )


@contextmanager
def wired(way: str) -> Iterator[None]:
    """Strategies that are set up within take this way.

    Raises:
        AssertionError: None was set up, or one took another transport.
    """
    taken = set()
    original = Communicator.__init__

    @functools.wraps(original)
    def init(self: Communicator, device: torch.device, **given: Any) -> None:
        if way == "point to point":
            given["reads_peers"] = False
        chosen = {"return_value": "another"} if way == "backend" else {}
        with mock.patch.object(communicator, "backend_for", wraps=backend_for, **chosen):
            original(self, device, **given)
        taken.add(type(self.transport).__name__ if self.mesh.shard.size > 1 else "")

    with mock.patch.object(Communicator, "__init__", init):
        yield
    assert taken, "no strategy was set up"
    assert taken <= {WAYS[way], ""}, f"asked for {way}, took {taken}"


def communicator_by(way: str, device: torch.device = CPU, **division: Any) -> Communicator:
    """Return a communicator that takes this way."""
    with wired(way):
        return Communicator(device, **division)


@dataclass
class Trace:
    """What a run leaves behind on one rank."""

    params: dict[str, Tensor]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    notes: Any = None
    files: list[str] = field(default_factory=list)
    saved: Any = None

    @classmethod
    def of(cls, module: nn.Module, trainer: Trainer | None = None, notes: Any = None) -> Trace:
        """Copies of what the module, which must be whole, and the trainer hold."""
        state = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for named in (module.named_parameters(), module.named_buffers())
            for name, value in named
        }
        metrics = {
            k: v.detach().clone() for k, v in (trainer.callback_metrics if trainer else {}).items()
        }
        return cls(state, metrics, list(getattr(module, "losses", [])), notes)


def fit(module: LightningModule, strategy: str | int | Strategy, **options: Any) -> Trace:
    """Fit on `rows()`, or on the loaders in `data`."""
    data = options.pop("data", None) or (rows(),)
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, *data)
    return Trace.of(module, trainer)
