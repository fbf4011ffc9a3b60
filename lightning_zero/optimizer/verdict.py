"""How an optimizer is stepped: by the setting, by the table, or by the answer to one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.optimizer.known import (
    CHOICES,
    Way,
    is_patched,
    known_class,
    known_way,
    may_step_in_batches,
)
from lightning_zero.optimizer.pieces import held_by, parameter_of
from lightning_zero.optimizer.shared_state import bare
from lightning_zero.optimizer.toys import held_by_attributes
from lightning_zero.optimizer.watch import MasterOf, reason_against_elements
from lightning_zero.parameters import are_views


class Verdict(NamedTuple):
    """The way in which an optimizer is stepped.

    Attributes:
        way: The way.
        reason: Why it is no finer one, as the end of a sentence.
        waits_for_closure: Whether the optimizer touches nothing before it has called its closure.
        in_batches: Whether steps of its members in batches give the numbers of one step.
    """

    way: Way
    reason: str = ""
    waits_for_closure: bool = True
    in_batches: bool = False


def verdict_of(
    optimizer: Any,
    master_of: MasterOf = lambda parameter: parameter,
    *,
    choices: Mapping[str, str] = MappingProxyType({}),
    by_unit: bool = False,
) -> Verdict:
    """Return how ``optimizer`` is stepped; nothing of it is called or changed.

    Args:
        optimizer: The user's optimizer.
        master_of: Returns a tensor of the dtype and on the device in which a parameter is stepped.
        choices: The setting ``optimizer_step``: a word by the class's name.
        by_unit: Raise unless it steps by element, as offload and stochastic rounding require.

    Raises:
        ValueError: The optimizer cannot be stepped as required.
    """
    original = bare(optimizer)
    name = type(original).__name__
    held = [one for one in held_by_attributes(original) if isinstance(one, Tensor)]
    users = [parameter_of(member) for member in held_by(original)]
    if are_views([one for one in held if not isinstance(one, Parameter)], users):
        raise ValueError(
            f"{name} keeps views of parameters outside of its states, and these are sharded between"
            " steps. Let it keep the parameters themselves, or copies (`p.detach().clone()`), or"
            " use another optimizer or strategy='ddp'."
        )
    verdict = _verdict(original, master_of, choices)
    if by_unit and verdict.way is not Way.BY_ELEMENT:
        raise ValueError(
            f"{name} {verdict.reason}, but offload and stochastic_rounding step parts of"
            " parameters, so it gives other numbers when it steps unit by unit. Use an optimizer"
            " that steps by element, such as torch.optim.AdamW, or remove offload_optimizer,"
            " offload_weights and stochastic_rounding. If it does step by element, set"
            f' optimizer_step={{"{name}": "element"}}.'
        )
    return verdict


def _verdict(optimizer: Optimizer, master_of: MasterOf, choices: Mapping[str, str]) -> Verdict:
    cls = type(optimizer)
    word = choices.get(cls.__name__) or choices.get(f"{cls.__module__}.{cls.__qualname__}")
    if word is not None:
        if CHOICES[word] is not Way.ALL_AT_ONCE:
            _require_no_other(optimizer, word)
        _, waits = reason_against_elements(optimizer, master_of)
        return Verdict(CHOICES[word], f"is set to {word!r} by optimizer_step", waits)
    if is_patched(cls):
        return Verdict(Way.ALL_AT_ONCE, "has a `step` that was replaced", False)
    way = known_way(optimizer)
    if way in (Way.BY_PARAMETER, Way.ALL_AT_ONCE):
        of_one = way is Way.BY_PARAMETER
        return Verdict(way, f"mixes the elements of {'a parameter' if of_one else 'parameters'}")
    known = known_class(cls)
    if known is not None and known.package == "torch.optim":
        return Verdict(Way.BY_ELEMENT, in_batches=True)
    if cls.state_dict is not Optimizer.state_dict:
        return Verdict(Way.ALL_AT_ONCE, "has a state_dict of its own", False)
    # Also one in the table: its package may have another version.
    reason, waits = reason_against_elements(optimizer, master_of)
    if reason:
        return Verdict(Way.ALL_AT_ONCE, reason, waits)
    return Verdict(Way.BY_ELEMENT, "", waits, may_step_in_batches(optimizer))


def _require_no_other(optimizer: Optimizer, word: str) -> None:
    if any(isinstance(one, Optimizer) for one in held_by_attributes(optimizer)):
        name = type(optimizer).__name__
        raise ValueError(
            f'optimizer_step={{"{name}": "{word}"}} is impossible, as {name} steps another'
            ' optimizer inside it. Use "model", or remove it.'
        )


def slowest(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what all ranks can do, given the verdict of each."""
    order = list(Way)
    first = max(verdicts, key=lambda verdict: order.index(verdict.way))
    return first._replace(
        waits_for_closure=all(verdict.waits_for_closure for verdict in verdicts),
        in_batches=all(verdict.in_batches for verdict in verdicts),
    )
