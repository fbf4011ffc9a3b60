"""The optimizers of a model on ``meta``, and the bytes of their states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.memory.dry_run import first_line
from lightning_zero.optimizer import (
    StateBytes,
    Way,
    members,
    owners_of,
    parameter_of,
    state_bytes,
    stepper_of,
    verdict_of,
    whole_state_bytes,
)
from lightning_zero.plan import cut_of, whole_shape

Optimizers = str | Callable[[list[Parameter]], Optimizer] | None


class OptimizerStates:
    """The optimizers of a model, as they would step its parameters.

    Args:
        optimizers: The optimizers.
        choices: The setting ``optimizer_step``.
        dtypes: The dtypes of the masters, by the ids of parameters that may have another.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        choices: Mapping[str, str] = MappingProxyType({}),
        dtypes: Mapping[int, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self._optimizers = list(optimizers)
        self._choices, self._dtypes = choices, dtypes

    @property
    def names(self) -> list[str]:
        """The class names of the optimizers, each once."""
        return list(dict.fromkeys(type(optimizer).__name__ for optimizer in self._optimizers))

    def nbytes(self, parameter: Parameter, numel: int, rank: int, world_size: int) -> int:
        """Return the state bytes of a rank that has ``numel`` elements of a parameter.

        Zero if the parameter is frozen, no optimizer holds it, or another rank keeps its state.

        Raises:
            ValueError: The optimizer cannot be stepped in shards, or its states are unpredictable.
        """
        found = self._by_parameter.get(id(parameter))
        if found is None or not parameter.requires_grad:
            return 0
        if isinstance(found, StateBytes):
            return found.of(numel)
        number, count = self._along_model(rank, world_size)
        owner = self._owners(count)[id(parameter)]
        return found if owner in (None, number) else 0

    def _along_model(self, rank: int, num_shards: int) -> tuple[int, int]:
        """Return a rank's number among the ranks that have parts of the model, and theirs."""
        cut = next((cut for held in self._members for cut in map(cut_of, held) if cut), None)
        if cut is None:
            return rank, num_shards
        return rank * cut.size + cut.rank, num_shards * cut.size

    def stepped(self, rank: int, world_size: int) -> int:
        """Return the bytes of the whole masters and gradients that a rank holds for a step.

        The messages that they arrive in, of the same size, are included.
        """
        own = {id(p): p for members in self._members for p in members}
        number, count = self._along_model(rank, world_size)
        return sum(
            4 * math.prod(whole_shape(own[key], own[key].shape)) * own[key].element_size()
            for key, owner in self._owners(count).items()
            if owner in (None, number) and own[key].requires_grad
        )

    @cached_property
    def against_units(self) -> str:
        """Why an optimizer cannot be stepped unit by unit; empty if all can."""
        for optimizer in self._optimizers:
            if not stepper_of(optimizer).pieces:  # else an engine already steps it
                try:
                    verdict_of(optimizer, choices=self._choices, by_unit=True)
                except ValueError as error:
                    return str(error)
        return ""

    @cached_property
    def _ways(self) -> list[Way]:
        return [
            stepper_of(one).way  # as an engine steps it already
            if stepper_of(one).pieces
            else verdict_of(one, choices=self._choices).way
            for one in self._optimizers
        ]

    @cached_property
    def _members(self) -> list[list[Parameter]]:
        """The parameters of each optimizer."""
        return [list(map(parameter_of, members(optimizer))) for optimizer in self._optimizers]

    def _owners(self, world_size: int) -> dict[int, int | None]:
        """Return which rank steps each parameter that is stepped whole, by id; ``None`` is all."""
        found: dict[int, int | None] = {}
        for way, held in zip(self._ways, self._members, strict=True):
            if way is not Way.BY_ELEMENT:
                owners = owners_of(way, [whole_shape(p, p.shape) for p in held], [0] * world_size)
                found.update(zip(map(id, held), owners, strict=True))
        return found

    @cached_property
    def _by_parameter(self) -> dict[int, StateBytes | int]:
        """Each parameter's state bytes: per element, or in total if it is stepped whole."""
        found: dict[int, StateBytes | int] = {}
        known: dict[Any, StateBytes | int] = {}
        for optimizer, way, held in zip(self._optimizers, self._ways, self._members, strict=True):
            rest = iter(held)
            for group in optimizer.param_groups:
                options = str({key: value for key, value in group.items() if key != "params"})
                kind = type(optimizer), options
                for own in itertools.islice(rest, len(group["params"])):
                    shape = () if way is Way.BY_ELEMENT else whole_shape(own, own.shape)
                    dtype = self._dtypes.get(id(own)) or own.dtype
                    if (key := (kind, dtype, shape)) not in known:
                        known[key] = (
                            state_bytes(optimizer, group, dtype)
                            if way is Way.BY_ELEMENT
                            else whole_state_bytes(optimizer, group, shape, dtype)
                        )
                    found[id(own)] = known[key]
        return found


def optimizers_for(
    module: nn.Module, parameters: list[Parameter], choice: Optimizers
) -> list[Optimizer]:
    """Return the optimizers that would step the parameters of a module on ``meta``.

    ``choice`` makes an optimizer from a list of parameters, or is a name in ``torch.optim``; the
    default is the module's ``configure_optimizers``, else AdamW.
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
            f"{name}.configure_optimizers does not run without a Trainer: {first_line(error)} Pass"
            " `optimizer`: a name in torch.optim, or a function that makes an optimizer from a list"
            " of parameters."
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
