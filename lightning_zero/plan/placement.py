"""The homes of a model's state: how each kind lies over the ranks, and on what medium.

A stage is a row of :data:`PLACEMENTS` (Rajbhandari et al., *ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models*, section 5):

    =====  ==========  ========  =======
    stage  weight      grad      master
    =====  ==========  ========  =======
    1      replicated  partial   sharded
    2      replicated  sharded   sharded
    3      sharded     sharded   sharded
    =====  ==========  ========  =======
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Placement(Enum):
    """A buffer's distribution over the ranks."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    PARTIAL = "partial"
    """Every rank holds a summand of all of it."""
    SHARDED = "sharded"
    """Every rank holds its own equal part."""


PLACEMENTS = {
    1: (Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED),
    2: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    3: (Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}


class Medium(Enum):
    """The memory that holds the bytes of a home."""

    DEVICE = "device"
    """The memory of the device that computes."""
    HOST = "cpu"
    """Pinned memory of its host."""
    DISK = "nvme"
    """Files."""


@dataclass(frozen=True)
class Home:
    """The place where one kind of state rests between uses."""

    placement: Placement
    dtype: torch.dtype
    device: torch.device
    medium: Medium = Medium.DEVICE
