"""A flat tensor for all slots of a layout, whose memory can be released and taken again."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.plan import Layout
from lightning_zero.tensors import LARGE_BYTES, ask_for_large_pages, internals, lasting_tensors


class Buffer:
    """A flat 1-D tensor of a layout's ``numel`` elements, with one view per slot.

    Memory is released by resizing the storage to zero, never by replacing it: autograd saves
    *views* of weights (``F.linear`` saves ``weight.t()``), and those must see the data when the
    buffer is filled again.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        tensor: Tensor | None = None,
    ) -> None:
        with lasting_tensors():
            if tensor is None:
                tensor = torch.empty(layout.numel, dtype=dtype, device=device)
            self.tensor = tensor
            self._slots = layout.slots
            self.views = self._views()
        self._nbytes = self.tensor.nbytes
        self._is_large = self._nbytes >= LARGE_BYTES

    def _views(self) -> list[Tensor]:
        slots, tensor = self._slots, self.tensor
        return [tensor.as_strided(one.shape, one.stride, one.offset) for one in slots]

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer holds now."""
        return min(self.tensor.untyped_storage().nbytes(), self._nbytes)

    def allocate(self) -> None:
        """Allocate the memory; its content is undefined."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() < self._nbytes:
            storage.resize_(self._nbytes)
            if self._is_large:
                ask_for_large_pages(self.tensor)

    def release(self) -> None:
        """Release the memory; views stay, unreadable until the buffer is filled again."""
        storage = self.tensor.untyped_storage()
        # Memory that is shared with a numpy array stays.
        if storage.resizable():
            storage.resize_(0)

    @property
    def is_shared(self) -> bool:
        """Return whether anything but the buffer and its views refers to the storage."""
        storage = self.tensor.untyped_storage()
        # Its own tensor and that variable do, too.
        return internals.num_references(storage) > len(self.views) + 2

    def leave(self) -> None:
        """Leave the memory to whoever refers to it, and have other memory from now on."""
        with lasting_tensors():
            self.tensor = torch.empty_like(self.tensor)
            self.views = self._views()
        self.release()

    def shard(self, rank: int, world_size: int) -> Tensor:
        """Return the part of ``rank``; a view, so it needs memory to be read."""
        return self.tensor.view(world_size, -1)[rank]
