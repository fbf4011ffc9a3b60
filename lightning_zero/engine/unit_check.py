"""A warning where ranks run different units."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from lightning_zero.engine.sharded_model import ShardedModel


class UnitCheck:
    """Warns once if ranks ran different units, which works only with shared memory.

    The flags that ranks exchange when a backward pass begins hold, for each unit, the highest rank
    that ran it, and then the highest that did not; both count from 1, and 0 stands for none.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._names = [unit.label for unit in sharded.units]
        self._rank = sharded.comm.control.rank
        self._is_due = sharded.gives_weights_back and sharded.comm.transport.reads_peers

    def flags(self, ran: Sequence[bool]) -> list[int]:
        """Return this rank's flags, to be reduced to their maxima over the ranks."""
        if not self._is_due:
            return list(ran)
        number = min(self._rank + 1, 255)
        return [has_run * number for has_run in ran] + [(not has_run) * number for has_run in ran]

    def compare(self, flags: Sequence[int]) -> None:
        """Warn on rank 0 if the maxima show a unit that some ranks ran and others did not."""
        if not self._is_due:
            return
        for name, runner, other in zip(self._names, flags, flags[len(self._names) :], strict=False):
            if runner and other:
                self._warn(name, runner - 1, other - 1)
                return

    def _warn(self, name: str, runner: int, other: int) -> None:
        self._is_due = False
        if self._rank == 0:
            warnings.warn(
                f"Rank {runner} ran the unit {name!r} in this step and rank {other} did not. This"
                " works only because the ranks read each other's memory here: on GPUs and between"
                " hosts, stage 3 needs all ranks to gather a unit's weights together, and such a"
                " step raises an error. Run the same modules on every rank, for instance with a"
                " loss multiplied by 0; gather the weights beforehand (`with"
                " lightning_zero.gathered(module):`); or use stage 1 or 2.",
                stacklevel=2,
            )
