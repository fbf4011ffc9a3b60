"""What ranks compare by the flags that they exchange when a backward pass begins.

That is what may have changed on one rank only: which parameters are trained, and the optimizers'
hyperparameters. A callback may freeze layers, or a scheduler follow a metric that is not synced. If
the digests differ, all ranks raise the same error. And it is which units the ranks have run.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from lightning_zero.comm import with_complements
from lightning_zero.engine import rank_check
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.unit import Unit

_DIGEST_BYTES = 4


class ChangeCheck:
    """Compares the ranks by a few extra flags at a sync point.

    Attributes:
        has_frozen: Whether this rank trains other parameters than in its previous pass.
    """

    NUM_FLAGS = 2 * _DIGEST_BYTES

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._groups: dict[int, tuple[list[Any], bytes]] = {}
        self._trained = zlib.crc32(b"".join(map(_trained, sharded.units)))
        self.has_frozen = False

    def flags(self) -> bytes:
        """Return this rank's flags, to be reduced to their maxima over the ranks.

        All units must expect their gradients by now.
        """
        trained = zlib.crc32(
            b"".join([bytes(unit.gradients.wants) for unit in self._sharded.units])
        )
        self.has_frozen, self._trained = trained != self._trained, trained
        return with_complements(self._digest(trained).to_bytes(_DIGEST_BYTES, "big"))

    def _digest(self, digest: int) -> int:
        for optimizer in self._sharded.optimizers:
            for group in optimizer.param_groups:
                digest = zlib.crc32(self._encoded(group), digest)
        return digest

    def _encoded(self, group: Mapping[str, Any]) -> bytes:
        """Return a group's hyperparameters as bytes, from a cache while they stay the same."""
        values = list(group.values())
        before, encoded = self._groups.get(id(group), ([], b""))
        if len(before) == len(values) and all(map(is_, values, before)):
            return encoded
        facts = rank_check.describe({"": rank_check.hyperparameters(group)})
        encoded = repr(sorted(facts[""].items())).encode()
        # Groups with values that can be changed in place are described each time.
        is_lasting = not any(
            isinstance(value, Tensor | list | dict)
            for key, value in group.items()
            if key != "params"
        )
        self._groups[id(group)] = (values if is_lasting else [], encoded)
        return encoded

    def compare(self, flags: bytes, exchange: Callable[[Any], list[Any]]) -> None:
        """Raise on all ranks if the maxima show that they differ.

        Args:
            flags: The maxima.
            exchange: Exchanges a value between all ranks, which are at the sync point; returns all.

        Raises:
            RuntimeError: The ranks differ. All raise the same text.
        """
        if flags != with_complements(flags[:_DIGEST_BYTES]):
            rank_check.refuse(exchange(rank_check.describe(dict(self._facts()))))

    def _facts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, parameter in self._sharded.module.named_parameters():
            yield f"Parameter {name!r}", {"requires_grad": parameter.requires_grad}
        for number, optimizer in enumerate(self._sharded.optimizers):
            yield from rank_check.group_facts(optimizer, f"optimizer {number}").items()


def _trained(unit: Unit) -> bytes:
    return bytes(parameter.requires_grad for parameter in unit.gradients.parameters)


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
