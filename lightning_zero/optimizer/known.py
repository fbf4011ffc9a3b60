"""Classes of torch's of which it is known without a trial how they may be stepped.

Exact types, for a subclass may do anything.
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_zero.optimizer.twin import bare

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
"""They step by element, and by unit, as a step changes nothing that parameters share."""

FUSED = frozenset([torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
"""The classes that are fused on CPUs without being told.

Not SGD, whose fused step there leaves most of a 16-bit parameter as it was, and fails where some
parameters have momentum and others not yet.
"""


def is_known(optimizer: Any) -> bool:
    """Return whether an optimizer is known to step by element and by unit."""
    return type(bare(optimizer)) in ELEMENT_WISE
