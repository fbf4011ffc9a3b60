"""Changes that users make in whole weights by themselves, and how they are noticed.

A change leaves one of three traces:

* the parameter's version counter has gone up (``p.mul_(2)``, ``load_state_dict``);
* the parameter lies in a storage of its own (cuDNN's RNNs put theirs there);
* its bytes differ from a copy, which is made when its memory is handed to something that raises no
  version (``p.data``, ``p.numpy()``), or may be by a view (``p.detach()``): it is **exposed**.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.parameters.buffer import Buffer
from lightning_zero.tensors import internals, lasting_tensors, properties


class Edits:
    """Watches the parameters that are views of a buffer.

    Args:
        parameters: Those of one group.
        buffer: Of which they are views.
        has_copies: Whether whole weights lie in another storage than the masters, which do not
            follow a change by themselves then.

    Attributes:
        buffer: Of which the parameters are views now, or will be.
        are_gathered: Whether it holds whole masters, to be read or edited by rank 0.
    """

    def __init__(
        self, parameters: Sequence[Parameter], buffer: Buffer, *, has_copies: bool
    ) -> None:
        self.buffer = buffer
        self.are_gathered = False
        self._parameters = parameters
        self._has_copies = has_copies
        self._versions: list[int] = []
        self._exposed: dict[int, Tensor] = {}

    def begin(self, buffer: Buffer, *, are_gathered: bool = False) -> None:
        """Count as changes what is done to the parameters, views of ``buffer``, from now on."""
        self.buffer, self.are_gathered = buffer, are_gathered
        self._versions = list(map(internals.version_of, self._parameters))
        self._exposed = {}

    def end(self, buffer: Buffer) -> None:
        """Drop the copies of what was exposed; ``buffer`` holds nothing that can be changed."""
        self.buffer, self.are_gathered = buffer, False
        self._exposed = {}

    def expose(self, index: int, *, is_plain: bool = False) -> None:
        """Keep the bytes of parameter ``index`` if a later change of them must be noticed.

        What is gathered is kept as it is, or read: there a plain view alone is nothing to notice.
        """
        gathers = self.are_gathered and not is_plain
        may_differ = self._has_copies and not self.are_gathered
        if index not in self._exposed and (gathers or may_differ):
            with lasting_tensors():
                self._exposed[index] = self._bytes(index).clone()

    @property
    def unsaved(self) -> list[int]:
        """The parameters whose changes are not in the masters, by index."""
        return self.changed if self._has_copies else self.moved

    @property
    def changed(self) -> list[int]:
        """The parameters that are not what they were at the beginning, by index."""
        moved, versions = self.moved, list(map(internals.version_of, self._parameters))
        if not moved and not self._exposed and versions == self._versions:
            return []
        return [
            index
            for index, version in enumerate(versions)
            if version != self._versions[index]
            or index in moved
            or (index in self._exposed and not self._exposed[index].equal(self._bytes(index)))
        ]

    @property
    def moved(self) -> list[int]:
        """The parameters that were put into storages of their own, by index."""
        with internals.as_plain_tensors():
            actual = list(map(Tensor.data_ptr, self._parameters))
        expected = list(map(Tensor.data_ptr, self.buffer.views))
        if actual == expected:
            return []
        pairs = zip(actual, expected, strict=True)
        return [index for index, (is_at, belongs_at) in enumerate(pairs) if is_at != belongs_at]

    @torch.no_grad()
    def bring_back(self) -> None:
        """Copy parameters that have moved to where they belong."""
        for index in self.moved:
            view = self.buffer.views[index]
            view.copy_(self._parameters[index])
            properties.set_data(self._parameters[index], view)

    def _bytes(self, index: int) -> Tensor:
        view = self.buffer.views[index].detach()
        return view.as_strided((view.numel(),), (1,)).view(torch.uint8)
