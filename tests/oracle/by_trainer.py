"""A Trainer's run that saves in its course, and one that resumes from what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import prodigyopt
import pytorch_optimizer
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import ZeROStrategy
from tests.oracle import projects
from tests.oracle.models import Block, Tied
from tests.oracle.parity import unequal

NUM_ROWS = 48


class Model(LightningModule):
    """A tied model with dropout-free loss, a scheduler per step and a hyperparameter."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Tied()
        self.losses: list[float] = []

    def loss(self, text: Tensor) -> Tensor:
        return F.cross_entropy(self.net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Rows:
    """A loader that a checkpoint can stop in the middle.

    Every rank reads the same rows, so that world sizes can be compared.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = torch.randint(11, (NUM_ROWS // 4, 4, 5), generator=generator)
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        start, self.position = self.position % len(self), self.position % len(self)
        for batch in self.batches[start:]:
            self.position += 1
            yield [batch]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make_trainer(strategy: Any, folder: Path | str, **more: Any) -> Trainer:
    options: dict[str, Any] = {
        "max_epochs": None,
        "max_steps": 12,
        "log_every_n_steps": 50,
        "enable_checkpointing": True,
        "default_root_dir": str(folder),
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return projects.make_trainer(strategy, **{**options, **more})


def brief(strategy: Any, max_steps: int, **more: Any) -> Trainer:
    """A trainer that saves only when it is told to."""
    options = {"enable_checkpointing": False, "max_steps": max_steps, **more}
    return make_trainer(strategy, "/nowhere", **options)


def model() -> Model:
    torch.default_generator.manual_seed(0)
    return Model()


class Stop(Callback):
    """Saves in the middle of an epoch, after so many batches."""

    def __init__(self, path: str, at: int) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[-1] + 1 == self.at:
            trainer.save_checkpoint(self.path)


def assert_close(found: Any, expected: Any, where: str, eps: float = 1e-5) -> None:
    told = list(unequal(found, expected, eps, where))
    assert not told, "\n".join(told)


# ------------------------------------------------------------------- every kind of state


class Everything(LightningModule):
    """Every kind of state that a checkpoint has to hold, and the optimizers of this name."""

    automatic_optimization = False

    def __init__(self, what: str = "elements", seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.default_generator.manual_seed(seed)
        self.what, self.losses = what, list[float]()
        self.embedding = nn.Embedding(11, 6)
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.blocks = nn.ModuleList([Block(6), Block(6), Block(6)])
        self.blocks[1].requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.unused = nn.Linear(3, 5)
        self.planes = nn.Parameter(
            torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.embedding(x)
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(0, 1)).view_as(x) * self.scale + self.planes.sum() * 0.01
        return self.head(torch.cat([x, self.nothing.expand(0, 6).view(0, *x.shape[1:])]))

    def loss(self, batch: list[Tensor]) -> Tensor:
        (text,) = batch
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizers: Any = self.trainer.strategy._lightning_optimizers

        def closure() -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss := self.loss(batch))
            return loss

        for optimizer in optimizers:
            if isinstance(optimizer.optimizer, pytorch_optimizer.ScheduleFreeWrapper):
                optimizer.optimizer.train()
        self.losses.append(closure().item())
        for optimizer in optimizers:
            is_sam = isinstance(optimizer.optimizer, pytorch_optimizer.SAM)
            optimizer.step(*([closure] if is_sam else []))

    def on_train_start(self) -> None:
        assert self.head.weight is self.embedding.weight

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["average"] = {"of": {"weight": weights["head.weight"], "n": 2}}
        checkpoint["alone"] = weights["norm.weight"]

    def configure_optimizers(self) -> Any:
        return MIXING.get(self.what, elements)(self)


def elements(module: nn.Module) -> list[Optimizer]:
    """Two optimizers, one of them with two groups."""
    small = [p for p in module.parameters() if p.ndim < 2 and p.requires_grad]
    large = [p for p in module.parameters() if p.ndim >= 2 and p.requires_grad]
    half = len(large) // 2
    groups = [{"params": small, "weight_decay": 0.0}, {"params": large[:half]}]
    adam = torch.optim.AdamW(groups, lr=0.01)
    sgd = torch.optim.SGD(large[half:], lr=0.05, momentum=0.9)
    return [adam, sgd]


class Lbfgs(torch.optim.LBFGS):
    """Keeps lists of tensors in its state; for a step in which nothing is searched."""

    def step(self, closure: Any = None) -> Any:
        closure and closure()
        return super().step(lambda: torch.zeros(()))


def mixing(module: nn.Module) -> list[Optimizer]:
    """Two optimizers that mix elements: by parameter, and all at once."""
    matrices = [p for p in _trained(module) if p.ndim == 2]
    others = [p for p in _trained(module) if p.ndim < 2]
    muon = [{"params": matrices[:2], "lr": 0.02}, {"params": matrices[2:], "weight_decay": 0.0}]
    return [torch.optim.Muon(muon, lr=0.01), Lbfgs(others, lr=0.1, max_iter=1)]


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad and p.numel()]


MIXING: dict[str, Callable[[nn.Module], Any]] = {
    "mixing": mixing,
    "prodigy": lambda m: prodigyopt.Prodigy(_trained(m)),
    "sam": lambda m: pytorch_optimizer.SAM(_trained(m), torch.optim.AdamW, lr=0.01),
    "lookahead": lambda m: pytorch_optimizer.Lookahead(
        torch.optim.AdamW(_trained(m), lr=0.02), k=2, pullback_momentum="pullback"
    ),
    "lookahead of adafactor": lambda m: pytorch_optimizer.Lookahead(
        torch.optim.Adafactor(_trained(m), lr=0.02), k=3
    ),
    "schedulefree": lambda m: pytorch_optimizer.ScheduleFreeWrapper(
        torch.optim.SGD(_trained(m), lr=0.02)
    ),
}
"""Optimizers that are not stepped by element."""

OWN_FORMATS = "lookahead", "lookahead of adafactor", "schedulefree"
"""Those whose state dict is not as torch's, for which there is no place in a directory."""
NUM_BEFORE, NUM_STEPS = 2, 4


class Run(NamedTuple):
    """A run of `Everything`: `strategy` is a stage, or a name of Lightning's."""

    world: int = 1
    strategy: int | str = "auto"
    what: str = "elements"
    precision: Any = "32-true"
    settings: Mapping[str, Any] = {}

    def fit(self, saves: str = "", begin: str | None = None) -> list[float]:
        """Train to the end, with checkpoints in the folder `saves`, or from `begin`: the losses."""
        chosen: Any = self.strategy
        if isinstance(chosen, int):
            chosen = ZeROStrategy(chosen, units={Block}, **self.settings)
        newest: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 2}
        keep = ModelCheckpoint(saves, "{step}", every_n_train_steps=1, save_last=True, **newest)
        trainer = make_trainer(
            chosen,
            saves,
            callbacks=[keep, Stop(f"{saves}/mid.ckpt", NUM_BEFORE)] if saves else [],
            enable_checkpointing=bool(saves),
            precision=self.precision,
            limit_train_batches=NUM_STEPS,
            max_epochs=1,
            max_steps=-1,
        )
        # A run that resumes has other values than those to come.
        module = Everything(self.what, seed=int(begin is not None))
        trainer.fit(module, Rows(), ckpt_path=begin)
        if saves:
            trainer.save_checkpoint(f"{saves}/after.ckpt")
            trainer.strategy.barrier()
        return module.losses


def fit_all(jobs: list[tuple[Run, str, str | None]]) -> list[list[float]]:
    """Fit each, as `Run.fit` does."""
    return [run.fit(saves, begin) for run, saves, begin in jobs]
