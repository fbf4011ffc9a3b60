"""The optimizers of a model on ``meta``, and the bytes of their states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.optimizer import StateBytes, check_can_be_cut, state_bytes
from lightning_zero.parameters import Piece

Optimizers = str | Callable[[list[Parameter]], Optimizer] | None


class OptimizerStates:
    """The optimizers of a model, as they would step its parameters on ``meta``.

    They may hold pieces or parameters of an engine; ``own`` are those on ``meta`` that stand for
    them, by the ids of the engine's parameters.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], own: Mapping[int, Parameter] | None = None
    ) -> None:
        self._optimizers = list(optimizers)
        self._own = own or {}

    @property
    def names(self) -> list[str]:
        """The optimizers' classes, each once."""
        return list(dict.fromkeys(type(optimizer).__name__ for optimizer in self._optimizers))

    def check_can_be_cut(self) -> None:
        """Raise a ``ValueError`` if an optimizer would step parts of a parameter differently."""
        for optimizer in self._optimizers:
            check_can_be_cut(optimizer)

    def nbytes(self, parameter: Parameter, numel: int) -> int:
        """Return the bytes of states for ``numel`` elements; none that no optimizer holds."""
        own = self._own.get(id(parameter), parameter)
        found = self._by_parameter.get(id(own))
        return found.of(numel) if found is not None and own.requires_grad else 0

    @cached_property
    def _by_parameter(self) -> dict[int, StateBytes]:
        found: dict[int, StateBytes] = {}
        known: dict[str, StateBytes] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                options = str({key: value for key, value in group.items() if key != "params"})
                for entry in group["params"]:
                    parameter = entry.parameter if isinstance(entry, Piece) else entry
                    parameter = self._own.get(id(parameter), parameter)
                    # Masters have the parameter's own dtype.
                    key = f"{type(optimizer)} {options} {parameter.dtype}"
                    if key not in known:
                        known[key] = state_bytes(optimizer, group, parameter.dtype)
                    found[id(parameter)] = known[key]
        return found


def optimizers_for(
    module: nn.Module, parameters: list[Parameter], choice: Optimizers
) -> list[Optimizer]:
    """Return the optimizers that would step the parameters of a module on ``meta``.

    ``choice`` makes an optimizer of a list of parameters, or is its name in ``torch.optim``; by
    default it is the module's ``configure_optimizers``, else AdamW.
    """
    configure = getattr(module, "configure_optimizers", None)
    if choice is None and configure is not None:
        return list(_configured(type(module).__name__, configure))
    cls = _named(choice) if isinstance(choice, str) else choice or torch.optim.AdamW
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return [cls(trainable)] if trainable else []


def _named(name: str) -> Callable[[list[Parameter]], Optimizer]:
    known = {
        key.lower(): cls
        for key, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    if name.lower() not in known:
        raise ValueError(
            f"Expected an optimizer of torch.optim ({', '.join(sorted(known))}), got {name!r}."
        )
    return known[name.lower()]


def _configured(name: str, configure: Callable[[], Any]) -> Iterator[Optimizer]:
    try:
        returned = configure()
    except Exception as error:
        raise ValueError(
            f"{name}.configure_optimizers does not run without a Trainer: {error} Pass `optimizer`,"
            " a name of torch.optim or a function of a list of parameters."
        ) from error
    found = list(_optimizers_in(returned))
    if not found:
        raise ValueError(f"{name}.configure_optimizers returned no optimizer. Pass `optimizer`.")
    yield from found


def _optimizers_in(returned: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in any of the forms that ``configure_optimizers`` may return."""
    if isinstance(returned, Optimizer):
        yield returned
    elif isinstance(returned, Mapping):
        yield from _optimizers_in(returned.get("optimizer"))
    elif isinstance(returned, list | tuple):
        for item in returned:
            yield from _optimizers_in(item)
