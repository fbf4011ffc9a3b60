"""The search for weights in half precision that a step uses more than once.

Autocast casts a weight for each use, so gradients of several uses are added in fp32, and operations
that it leaves alone (a penalty on weights) read fp32. A weight that arrives in half precision is
cast once for all. Which weights do is decided before the first forward, from their modules alone
(``plan/casts.py``); what else a step does with them, the graphs of its backward passes tell.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

from lightning_zero.engine.backward_events import with_grad
from lightning_zero.engine.sharded_model import ShardedModel

_PASSES = 8
"""The backward passes of a run that are searched: losses of several optimizers come in turn."""
_MOST_SHOWN = 3


class RepeatedUses:
    """The search of a run's first backward passes, which warns once, on rank 0.

    It ends at once if the user has chosen which weights are cast, or if none are.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        settings = sharded.settings
        is_asked = settings.recipe.autocast is not None and settings.cast_weights == "autocast"
        self._names = {
            id(parameter): slot.name
            for flat in sharded.flats
            if flat.plan.weight.dtype.itemsize < flat.plan.master.dtype.itemsize
            for parameter, slot in zip(flat.parameters, flat.layout.slots, strict=True)
        }
        has_to = is_asked and self._names and sharded.comm.control.rank == 0
        self._num_left = _PASSES if has_to else 0

    def search(self, outputs: Any) -> None:
        """Search the graph of ``outputs``, from which a backward pass is about to begin."""
        roots = [tensor.grad_fn for tensor in with_grad(outputs)] if self._num_left else ()
        if not roots:
            return
        self._num_left -= 1
        uses = _uses(roots, self._names)
        found = [self._names[key] for key, number in uses.items() if number > 1]
        if found:
            self._num_left = 0
            self._warn(found)

    @staticmethod
    def _warn(names: list[str]) -> None:
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        warnings.warn(
            "A step uses weights several times that arrive in half precision:"
            f" {', '.join(map(repr, names[:_MOST_SHOWN]))}{more}. The gradients of these uses are"
            " added in half, and operations that autocast leaves alone (a penalty on weights)"
            " compute in half. ZeROStrategy(cast_weights='none') gathers weights in fp32, with the"
            " numbers of DDP.",
            stacklevel=2,
        )


def _uses(roots: Iterable[Any], wanted: Container[int]) -> Counter[int]:
    """Return how often a graph uses each wanted parameter, by ``id``."""
    uses: Counter[int] = Counter()
    waiting = [*roots]
    seen = {*waiting}  # alive, so that torch gives each node one object
    while waiting:
        for node, _ in getattr(waiting.pop(), "next_functions", ()):
            if type(node).__name__ == "AccumulateGrad":
                uses.update([id(node.variable)] if id(node.variable) in wanted else ())
            elif node not in seen:
                seen.add(node)
                waiting.append(node)
    return uses
