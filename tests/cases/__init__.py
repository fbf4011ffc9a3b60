"""What users do: modules, callbacks and loops with no word of ZeRO, held against DDP."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tests.oracle.projects import Noted, Regression


def user(base: type[Regression] = Noted, **members: Any) -> Any:
    """Return a class of module that adds these attributes and methods to `base`."""
    return type("User", (base,), members)


def scheduled(optimizer: Any, gamma: float = 0.9, interval: str = "step") -> Any:
    """Return what `configure_optimizers` returns for an optimizer whose rate falls."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    return [optimizer], [{"scheduler": scheduler, "interval": interval}]


def all_gather(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module's method, which calls a function that torch 2.13 deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return module.all_gather(*args, **kwargs)
