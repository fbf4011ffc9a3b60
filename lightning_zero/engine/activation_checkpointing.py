"""Activation checkpointing: activations are dropped after forward and computed again in backward.

Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine.replacements import Replacements


class ActivationCheckpointing(Replacements):
    """Modules whose ``forward`` is checkpointed, non-reentrantly and with the RNG state kept.

    Only ``forward`` is wrapped, so module hooks run once per call and not again in the
    recomputation.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for module in modules:
            self.wrap(module, "forward", _checkpointed)

    @classmethod
    def chosen(
        cls,
        choice: bool | Iterable[type[nn.Module]],
        module: nn.Module,
        units: Iterable[nn.Module],
    ) -> ActivationCheckpointing:
        """Checkpoint ``units`` if the choice is ``True``, or the children of the classes chosen.

        Raises:
            ValueError: The module has no child of these classes.
        """
        if isinstance(choice, bool):
            return cls(units if choice else ())
        classes = tuple(choice)
        found = [child for child in module.modules() if isinstance(child, classes)]
        if not found:
            names = ", ".join(wanted.__name__ for wanted in classes)
            raise ValueError(f"activation_checkpointing={names}: the model has no such module.")
        return cls(found)


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
