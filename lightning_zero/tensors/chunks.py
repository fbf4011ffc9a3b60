"""The chunk size in which large tensors are processed."""

from __future__ import annotations

import torch

_ON_CPU = 2**16
_ON_DEVICE = 2**24


def numel_at_a_time(device: torch.device) -> int:
    """Return how many elements of a large tensor a sequence of operations takes at a time.

    On a CPU they fit in a core's cache; on a device there are enough of them to keep it busy.
    """
    return _ON_CPU if device.type == "cpu" else _ON_DEVICE
