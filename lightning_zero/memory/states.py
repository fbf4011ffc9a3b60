"""The optimizers of a model on ``meta``, and the bytes of their states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.memory.dry_run import first_line
from lightning_zero.memory.walk import StateOf
from lightning_zero.optimizer import (
    Way,
    members,
    owners_of,
    parameter_of,
    state_bytes,
    stepper_of,
    verdict_of,
)
from lightning_zero.plan import cut_of, whole_shape

Optimizers = str | Callable[[list[Parameter]], Optimizer] | None


class OptimizerStates:
    """The optimizers of a model, as they would step its parameters.

    Args:
        optimizers: The optimizers.
        choices: The setting ``optimizer_step``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        choices: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._optimizers, self._choices = list(optimizers), choices
        self.names = list(dict.fromkeys(type(one).__name__ for one in optimizers))

    def of_rank(self, rank: int, num_shards: int) -> StateOf:
        """Return what returns the state bytes of a rank that has some elements of a parameter.

        Zero if the parameter is frozen, no optimizer holds it, or another rank keeps its state.

        Raises:
            ValueError: An optimizer cannot be stepped in shards, or its states are unpredictable.
        """
        states, here = self._states, {id(p) for p in self._stepped_whole(rank, num_shards)}

        def nbytes(parameter: Parameter, numel: int) -> int:
            if id(parameter) not in states or not parameter.requires_grad:
                return 0
            bytes_of, whole = states[id(parameter)]
            return bytes_of(numel if whole is None else whole * (id(parameter) in here))

        return nbytes

    def stepped(self, rank: int, num_shards: int) -> int:
        """Return the bytes of the whole masters and gradients that a rank holds for a step.

        The messages that they arrive in, of the same size, are included.
        """
        return sum(
            4 * math.prod(whole_shape(own, own.shape)) * own.element_size()
            for own in self._stepped_whole(rank, num_shards)
            if own.requires_grad
        )

    def require_units(self) -> None:
        """Raise a ``ValueError`` if an optimizer cannot be stepped unit by unit."""
        for optimizer in self._optimizers:
            verdict_of(optimizer, choices=self._choices, by_unit=True)

    @cached_property
    def _held(self) -> list[tuple[Optimizer, Way, list[Parameter]]]:
        """Each optimizer with how it is stepped, and its members: pieces in an engine."""
        ways = [
            stepper_of(one).way  # as an engine steps it already
            if stepper_of(one).pieces
            else verdict_of(one, choices=self._choices).way
            for one in self._optimizers
        ]
        return list(zip(self._optimizers, ways, map(members, self._optimizers), strict=True))

    def _stepped_whole(self, rank: int, num_shards: int) -> Iterator[Parameter]:
        """Yield the parameters that a rank steps whole."""
        of_ways = [(way, list(map(parameter_of, held))) for _, way, held in self._held]
        cut = next((cut for _, held in of_ways for cut in map(cut_of, held) if cut), None)
        if cut is not None:  # the ranks that have parts of the model
            rank, num_shards = rank * cut.size + cut.rank, num_shards * cut.size
        for way, held in of_ways:
            if way is not Way.BY_ELEMENT:
                owners = owners_of(way, [whole_shape(p, p.shape) for p in held], [0] * num_shards)
                yield from (
                    p for p, owner in zip(held, owners, strict=True) if owner in (None, rank)
                )

    @cached_property
    def _states(self) -> dict[int, tuple[Callable[[int], int], int | None]]:
        """The size of each parameter's state, with its elements if it is stepped whole."""
        found: dict[int, tuple[Callable[[int], int], int | None]] = {}
        known: dict[Any, Callable[[int], int]] = {}
        for optimizer, way, held in self._held:
            rest = iter(held)
            for group in optimizer.param_groups:
                options = str({key: value for key, value in group.items() if key != "params"})
                for member in itertools.islice(rest, len(group["params"])):
                    own = parameter_of(member)
                    whole = None if way is Way.BY_ELEMENT else whole_shape(own, own.shape)
                    key = type(optimizer), options, member.dtype, whole
                    if key not in known:
                        known[key] = state_bytes(optimizer, group, member.dtype, whole)
                    found[id(own)] = known[key], None if whole is None else math.prod(whole)
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
        return _configured(module, configure)
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


_RUN = SimpleNamespace(
    max_epochs=1, max_steps=1000, estimated_stepping_batches=1000, num_training_batches=1000,
    accumulate_grad_batches=1, world_size=1, global_step=0, current_epoch=0,
)  # fmt: skip
"""The attributes of a Trainer that schedules ask for; their rates change no bytes."""


def _configured(module: Any, configure: Callable[[], Any]) -> list[Optimizer]:
    name = type(module).__name__
    is_without = getattr(module, "_trainer", module) is None  # a LightningModule on its own
    try:
        if is_without:
            module._trainer = _RUN
        found = [one for one in tree_leaves(configure()) if isinstance(one, Optimizer)]
    except Exception as error:
        raise ValueError(
            f"{name}.configure_optimizers does not run without a Trainer: {first_line(error)} Pass"
            " `optimizer` (--optimizer): a name in torch.optim, or in Python a function that makes"
            " an optimizer from a list of parameters."
        ) from error
    finally:
        if is_without:
            module._trainer = None
    if not found:
        raise ValueError(f"{name}.configure_optimizers returned no optimizer. Pass `optimizer`.")
    return found
