"""Activation checkpointing: activations are dropped after forward and recomputed in backward.

The recomputation uses the tensors that the module held in its forward, including those that
`torch.func.functional_call` swapped in for that call only.

Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine.replacements import Replacements


class ActivationCheckpointing(Replacements):
    """Modules whose ``forward`` is checkpointed, non-reentrantly and with the RNG state preserved.

    Only ``forward`` is wrapped, so module hooks run once per call and not again in the
    recomputation.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for module in modules:
            self.wrap(module, "forward", _checkpointed, module)

    @classmethod
    def chosen(
        cls,
        choice: bool | Iterable[type[nn.Module]],
        module: nn.Module,
        units: Iterable[nn.Module],
    ) -> ActivationCheckpointing:
        """Checkpoint ``units`` if ``choice`` is ``True``, or all modules of the chosen classes.

        Raises:
            ValueError: ``module`` contains no module of these classes.
        """
        if isinstance(choice, bool):
            return cls(units if choice else ())
        classes = tuple(choice)
        found = [child for child in module.modules() if isinstance(child, classes)]
        if not found:
            names = ", ".join(wanted.__name__ for wanted in classes)
            raise ValueError(f"activation_checkpointing={names}: the model has no such module.")
        return cls(found)


def _checkpointed(forward: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run = forward if torch.compiler.is_compiling() else _with_held(module, forward)
    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _with_held(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` bound to the parameters and buffers that ``module`` holds now."""
    held = [named for child in module.modules() for named in (child._parameters, child._buffers)]
    then = [{**named} for named in held]

    def run(*args: Any, **kwargs: Any) -> Any:
        if all(map(_are_same, held, then)):
            return forward(*args, **kwargs)
        now = [{**named} for named in held]
        _hold(held, then)
        try:
            return forward(*args, **kwargs)
        finally:
            _hold(held, now)

    return run


_Named = dict[str, Any]


def _are_same(named: _Named, others: _Named) -> bool:
    return named.keys() == others.keys() and all(map(is_, named.values(), others.values()))


def _hold(held: Sequence[_Named], others: Sequence[_Named]) -> None:
    for named, tensors in zip(held, others, strict=True):
        named.clear()
        named.update(tensors)
