"""What users do: modules, callbacks and loops with no word of ZeRO, held against DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.oracle.projects import Noted

STATES, WEIGHTS = {"offload_optimizer": "nvme"}, {"offload_weights": "nvme"}
FILES = {**STATES, **WEIGHTS}
SAVED: dict[str, Any] = {"max_epochs": 2, "save_at": 1}


def user(base: Any = Noted, build: Callable[[Any], Any] | None = None, **members: Any) -> Any:
    """Return a class of module that adds these attributes and methods to `base`.

    `build` gives each module its parts, under the same seed.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            build(self)

    return type("User", (base,), {"__init__": init, **members} if build else members)


def scheduled(optimizer: Any, gamma: float = 0.9, interval: str = "step") -> Any:
    """Return what `configure_optimizers` returns for an optimizer whose rate falls."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    return [optimizer], [{"scheduler": scheduler, "interval": interval}]


def all_gather(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module's method, which calls a function that torch 2.13 deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return module.all_gather(*args, **kwargs)
