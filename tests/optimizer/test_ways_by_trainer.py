"""What a Trainer does around a step, with optimizers that step whole parameters, against DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import prodigyopt
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.oracle import by_trainer
from tests.oracle.by_trainer import Rows, make_trainer, strategy_of, world
from tests.oracle.ranks import Pools

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "prodigy": prodigyopt.Prodigy,
}


class Unfreeze(BaseFinetuning):
    """Takes the head in after an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            module = pl_module.net.blocks[0]
            self.make_trainable(module)
            new = [p for p in module.parameters() if p.ndim == 2]
            optimizer.add_param_group({"params": new})


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "clips the norm": lambda: {"gradient_clip_val": 0.3},
    "clips values": lambda: {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "accumulates": lambda: {"accumulate_grad_batches": 3},
    # On CPU the Trainer itself would turn this precision into "bf16-mixed".
    "scales the loss": lambda: {
        "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**10))],
        "gradient_clip_val": 0.3,
    },
    "unfreezes": lambda: {
        "callbacks": [Unfreeze()], "limit_train_batches": 2, "max_steps": -1, "max_epochs": 2
    },
}  # fmt: skip


class Model(by_trainer.Model):
    def __init__(self, name: str, run: str) -> None:
        super().__init__()
        self.name, self.run = name, run

    def training_step(self, batch: Any, index: int) -> Tensor:
        # Every rank has rows of its own. Of what is unfrozen later DDP averages no gradients.
        (text,) = batch
        shift = self.global_rank * (self.run != "unfreezes")
        return super().training_step([text.roll(shift, 0)[:3]], index)

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.ndim == 2 and p.requires_grad]
        return OPTIMIZERS[self.name](trainable)


def fit(name: str, run: str, strategy: str) -> Any:
    torch.manual_seed(0)
    module = Model(name, run)
    options = {"max_steps": 3, "callbacks": [], "enable_checkpointing": False, **RUNS[run]()}
    make_trainer(world(), strategy_of(strategy), "/nowhere", **options).fit(module, Rows())
    return module.losses, {key: p.detach().clone() for key, p in module.named_parameters()}


def fit_both(name: str, run: str, stage: int) -> list[Any]:
    return [fit(name, run, strategy) for strategy in ("ddp", f"zero{stage}")]


@pytest.mark.parametrize("run", RUNS)
def test_a_trainer_does_as_under_ddp(ranks: Pools, run: str) -> None:
    """Optimizers and stages take turns."""
    number = list(RUNS).index(run)
    name, stage = list(OPTIMIZERS)[number % 2], 1 + 2 * (number // 2 % 2)
    limit = 1e-2 if "scales" in run else 1e-5
    for (losses, weights), (found, after) in ranks(2).run(fit_both, name, run, stage):
        assert found == pytest.approx(losses, rel=limit)
        for key, value in after.items():
            torch.testing.assert_close(value, weights[key], rtol=limit, atol=limit)
