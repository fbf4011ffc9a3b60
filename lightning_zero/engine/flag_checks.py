"""What ranks compare by the flags that they exchange when a backward pass begins.

That is what may have changed on one rank only: which parameters are trained, and the optimizers'
hyperparameters. A callback may freeze layers, or a scheduler follow a metric that is not synced. If
the digests differ, all ranks raise the same error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
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
