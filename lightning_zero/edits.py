"""What users change in whole weights by themselves, and how it is noticed.

A change leaves one of three traces:

* the parameter's version counter has gone up (``p.mul_(2)``, ``load_state_dict``);
* the parameter lies in a storage of its own (cuDNN's RNNs put theirs there);
* its bytes differ from a copy, which is made when its memory is handed to something that raises no
  version (``p.data``, ``p.numpy()``): when it is **exposed**.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero import resting
from lightning_zero.buffer import Buffer, lasting_tensors
from lightning_zero.layout import Layout

_VERSION = Tensor._version.__get__  # type: ignore[attr-defined]


class Edits:
    """Watches the parameters that show a buffer.

    Args:
        parameters: Those of a bundle.
        layout: Where they lie in the buffer.
        shown: The buffer.
    """

    def __init__(self, parameters: Sequence[Parameter], layout: Layout, shown: Buffer) -> None:
        self._parameters = parameters
        self._layout = layout
        self._shown = shown
        self._versions: list[int] = []
        self._exposed: dict[int, Tensor] = {}

    def begin(self, shown: Buffer) -> None:
        """Count as changes what is done to the parameters, views of ``shown``, from now on."""
        self._shown = shown
        self._versions = self._now()
        self._exposed = {}

    def _now(self) -> list[int]:
        return list(map(_VERSION, self._parameters))

    def expose(self, index: int) -> None:
        """Keep what parameter ``index`` is now, since no version will tell of its changes."""
        if index not in self._exposed:
            with lasting_tensors():
                self._exposed[index] = self._bytes(index).clone()

    @property
    def changed(self) -> list[int]:
        """The parameters that are not what they were at the beginning, by index."""
        moved = self.moved
        if not moved and not self._exposed and self._now() == self._versions:
            return []
        return [
            index
            for index, parameter in enumerate(self._parameters)
            if parameter._version != self._versions[index]
            or index in moved
            or (index in self._exposed and self._differs(index))
        ]

    @property
    def moved(self) -> list[int]:
        """The parameters that were put into storages of their own, by index."""
        with torch._C.DisableTorchFunctionSubclass():
            actual = list(map(Tensor.data_ptr, self._parameters))
        expected = list(map(Tensor.data_ptr, self._shown.views))
        if actual == expected:
            return []
        pairs = zip(actual, expected, strict=True)
        return [index for index, (is_at, belongs_at) in enumerate(pairs) if is_at != belongs_at]

    @torch.no_grad()
    def bring_back(self) -> None:
        """Copy parameters that have moved to where they belong."""
        for index in self.moved:
            view = self._shown.views[index]
            view.copy_(self._parameters[index])
            resting.point(self._parameters[index], view)

    def forget(self, shown: Buffer) -> None:
        """Drop the copies of what was exposed; ``shown`` holds nothing that can be changed."""
        self._shown, self._exposed = shown, {}

    def _differs(self, index: int) -> bool:
        return not torch.equal(self._exposed[index], self._bytes(index))

    def _bytes(self, index: int) -> Tensor:
        slot = self._layout.slots[index]
        flat = self._shown.tensor.detach()[slot.offset : slot.stop]
        return flat.view(torch.uint8)
