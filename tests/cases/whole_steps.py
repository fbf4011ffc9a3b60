"""Optimizers that mix elements, of each kind, and what a Trainer does around their steps.

Of those in the packages, `test_the_page_of_optimizers_is_true` steps many more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import prodigyopt
import pytorch_optimizer
import schedulefree
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from tests.cases.optimizers import Made
from tests.oracle.play import WIDE, case, widen


class Scaled(Made):
    """Has matrices, vectors and a scale of no dimension."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__(make)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def of(cls: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    return lambda module: cls(module.parameters(), **options)


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2 and p.requires_grad]


def muon(module: nn.Module) -> Any:
    return torch.optim.Muon(matrices(module), lr=0.02)


def schedule_free(module: nn.Module) -> Any:
    optimizer = schedulefree.AdamWScheduleFree(module.parameters(), lr=0.02)  # type: ignore[attr-defined]
    optimizer.train()
    return optimizer


KINDS: dict[str, Callable[[Any], Any]] = {
    "muon": muon,
    "adafactor": of(torch.optim.Adafactor, lr=0.05),
    "prodigy": of(prodigyopt.Prodigy),
    "lookahead": lambda m: pytorch_optimizer.Lookahead(torch.optim.AdamW(m.parameters()), k=2),
    "schedule_free": schedule_free,
    **{
        name: of(pytorch_optimizer.load_optimizer(name), lr=0.02)
        for name in ("adan", "shampoo", "splus")
    },
}
for name, make in KINDS.items():
    case("optimizers", lambda m=make: Scaled(m), f"steps_{name}", ulps=64)
widen("steps_muon", "steps_prodigy", worlds=(2, 3))


# -- around a step ---------------------------------------------------------------------------------


class Unfreezes(BaseFinetuning):
    """Takes a block in after an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            block = pl_module.net.blocks[0]
            self.make_trainable(block)
            optimizer.add_param_group({"params": matrices(block)})


AROUND: dict[str, dict[str, Any]] = {
    "clips_the_norm": {"gradient_clip_val": 0.3, **WIDE},
    "clips_values": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value", **WIDE},
    "accumulates": {"accumulate_grad_batches": 3},
    "scales_the_loss": {"gradient_clip_val": 0.3, "precisions": ("16-mixed",)},
    # Of what is unfrozen later DDP averages no gradients, so all ranks have the same rows.
    "unfreezes": {
        "callbacks": lambda: [Unfreezes()], "max_epochs": 2, "use_distributed_sampler": False
    },
}  # fmt: skip
for number, (name, how) in enumerate(AROUND.items()):
    make = (muon, lambda m: prodigyopt.Prodigy(matrices(m)))[number % 2]
    case("optimizers", lambda m=make: Scaled(m), f"around_a_step_{name}", ulps=64, **how)
