"""The detection of changes that users make to whole weights.

A change leaves one of three traces:

* the parameter's version counter has gone up (``p.mul_(2)``, ``load_state_dict``);
* the parameter has moved to another storage (cuDNN's RNNs do that);
* its bytes differ from a copy, made when its memory was **exposed** to changes that do not raise
  the version counter: directly (``p.data``, ``p.numpy()``) or by a view (``p.detach()``).
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
        parameters: The parameters of one group.
        buffer: The buffer that they are views of.
        has_copies: Whether whole weights and masters lie in different storages, so that a change
            to the weights does not change the masters.

    Attributes:
        buffer: The buffer that the parameters are views of, now or when they are next whole.
        are_gathered: Whether it holds gathered masters, to be read, or edited by rank 0.
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
        """Watch the parameters, which are views of ``buffer``, for changes from now on."""
        self.buffer, self.are_gathered = buffer, are_gathered
        self._versions = list(map(internals.version_of, self._parameters))
        self._exposed = {}

    def end(self, buffer: Buffer) -> None:
        """Drop the copies of exposed bytes; ``buffer`` holds nothing that can be changed."""
        self.buffer, self.are_gathered = buffer, False
        self._exposed = {}

    def expose(self, index: int, *, is_plain: bool = False) -> None:
        """Copy the bytes of parameter ``index`` if a later change to them must be noticed.

        Gathered masters are only read, or else taken over as they are, so a plain view of them
        needs no copy.
        """
        gathers = self.are_gathered and not is_plain
        may_differ = self._has_copies and not self.are_gathered
        if index not in self._exposed and (gathers or may_differ):
            with lasting_tensors():
                self._exposed[index] = self._bytes(index).clone()

    def note_step(self, indices: Sequence[int]) -> None:
        """Let autograd refuse what graphs have saved of parameters that were stepped.

        Under DDP the step changes the parameters themselves, which autograd sees.
        """
        torch.autograd.graph.increment_version([self._parameters[index] for index in indices])
        for index in indices if self._versions else ():
            self._versions[index] += 1

    @property
    def unsaved(self) -> list[int]:
        """The indices of parameters whose changes are to be copied to the masters."""
        if self.are_gathered:
            return []  # to be refused, or taken over as a whole
        return self.changed if self._has_copies else self.moved

    @property
    def changed(self) -> list[int]:
        """The indices of parameters that have changed since :meth:`begin`."""
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
        """The indices of parameters that have moved out of the buffer."""
        with internals.as_plain_tensors():
            actual = list(map(Tensor.data_ptr, self._parameters))
        expected = list(map(Tensor.data_ptr, self.buffer.views))
        if actual == expected:
            return []
        pairs = zip(actual, expected, strict=True)
        return [index for index, (is_at, belongs_at) in enumerate(pairs) if is_at != belongs_at]

    @torch.no_grad()
    def bring_back(self) -> None:
        """Copy moved parameters back to where they belong."""
        for index in self.moved:
            view = self.buffer.views[index]
            view.copy_(self._parameters[index])
            properties.set_data(self._parameters[index], view)

    def _bytes(self, index: int) -> Tensor:
        view = self.buffer.views[index].detach()
        return view.as_strided((view.numel(),), (1,)).view(torch.uint8)
