"""Where a tensor's values are: in memory, or in a file that is mapped."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor


def is_in_file(tensor: Tensor, folder: str) -> bool:
    """Return whether the system has mapped a file of the folder where the tensor's values are."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= tensor.data_ptr() < last:
            return path.startswith(folder)
    return False
