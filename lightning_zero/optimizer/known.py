"""Optimizer classes of torch that need no proof of how they may be stepped.

Exact types, as a subclass may do anything.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero.optimizer.optimizer_copy import bare

ELEMENT_WISE = frozenset(
    [
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    ]
)
"""Classes that step by element, and by unit, as a step changes nothing that parameters share."""

FUSED = frozenset([torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
"""Classes that are stepped fused on CPUs by default.

Not SGD, whose fused step there leaves most of a 16-bit parameter unchanged, and fails if some
parameters have momentum and others do not yet.
"""


def is_known(optimizer: Any) -> bool:
    """Return whether an optimizer is known to step by element and by unit."""
    return type(bare(optimizer)) in ELEMENT_WISE
