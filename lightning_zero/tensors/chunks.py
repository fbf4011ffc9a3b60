"""Parts of large tensors that are worked on one after the other."""

from __future__ import annotations

import torch

_ON_CPU = 2**16
_ON_DEVICE = 2**24


def numel_at_a_time(device: torch.device) -> int:
    """Return how many elements a pass of several operations takes at a time.

    On a CPU as many as stay in a core's cache; on a device enough to keep it busy.
    """
    return _ON_CPU if device.type == "cpu" else _ON_DEVICE
