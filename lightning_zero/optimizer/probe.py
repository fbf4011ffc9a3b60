"""How an optimizer may be stepped, proved from its own operations on toy parameters.

A copy of the user's optimizer, with the user's arguments and param groups, steps toys under
:class:`Dataflow`, which tracks every value that comes from an element of a parameter, gradient or
state. What is not known to be element-wise counts as not element-wise, and what is not known to
stay within one parameter counts as mixing several. Comparing results would not do: Prodigy,
D-Adaptation, SGDP and AdamP step two halves of a small tensor nearly as they step the whole.

The dataflow does not see an optimizer ask for a shape (decay of matrices only, a rate that depends
on the number of rows). So the first elements of each toy are stepped once more, as a flat vector,
and both must do the same operations with the same numbers.

A value of one parameter that the optimizer reads on the host (``item``, ``if``) may steer all that
follows. So the optimizer is stepped again with made-up values for what it reads of half of the
toys: either truth value, numbers from zero to huge. The other toys must do what they did before, to
the bit, and whatever the toys share must be the same, even if nothing has used it yet. If such a
step raises, nothing is proved, and the optimizer steps all at once. So does one that reads whole
arrays, whose possible values cannot be enumerated, and one that cannot be copied.
"""

from __future__ import annotations

import random
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optimizer.dataflow import Finding, Traced, Way
from lightning_zero.optimizer.known import ELEMENT_WISE, is_known
from lightning_zero.optimizer.optimizer_copy import CannotCopy, bare, held_by_attributes
from lightning_zero.optimizer.pieces import held_by, is_of_torch, parameter_of
from lightning_zero.optimizer.trial import MasterOf, Trial
from lightning_zero.optimizer.unit_trial import reason_against
from lightning_zero.parameters import are_views


class Verdict(NamedTuple):
    """The way in which an optimizer may be stepped, and what rules out a finer one.

    Attributes:
        way: The finest way that is proved.
        reason: Why no finer one is, as the end of a sentence.
        waits_for_closure: Whether the optimizer touches nothing before it has called its closure.
        against_units: Why steps unit by unit are not known to give the numbers of one step, as the
            end of a sentence; empty if they are, or if that was not asked.
    """

    way: Way
    reason: str = ""
    waits_for_closure: bool = True
    against_units: str = ""


def verdict_of(
    optimizer: Any, master_of: MasterOf = lambda parameter: parameter, *, by_unit: bool = False
) -> Verdict:
    """Return how ``optimizer`` is stepped, as found by :func:`probe`.

    Raises:
        ValueError: The optimizer can be stepped in no way, or not ``by_unit``.
    """
    verdict, name = probe(optimizer, master_of, by_unit=by_unit), type(bare(optimizer)).__name__
    if verdict.way is Way.NOT_AT_ALL:
        raise ValueError(
            f"{name} {verdict.reason}, and these are sharded between steps. Let it keep the"
            " parameters themselves, or copies (`p.detach().clone()`), or use another optimizer or"
            " strategy='ddp'."
        )
    if verdict.against_units:
        known = ", ".join(sorted(cls.__name__ for cls in ELEMENT_WISE))
        raise ValueError(
            f"{name} {verdict.against_units}, so it is not proved to give the same numbers when it"
            " steps unit by unit, as offload and stochastic_rounding require. Use an optimizer that"
            f" is, such as torch.optim's {known}, or remove offload_optimizer, offload_weights and"
            " stochastic_rounding."
        )
    return verdict


def probe(
    optimizer: Any, master_of: MasterOf = lambda parameter: parameter, *, by_unit: bool = False
) -> Verdict:
    """Find out how ``optimizer`` may be stepped, without changing it or its parameters.

    Args:
        optimizer: The user's optimizer.
        master_of: As for :class:`Trial`.
        by_unit: Also find out whether it may be stepped unit by unit.
    """
    original = bare(optimizer)
    if is_known(original):
        return Verdict(Way.BY_ELEMENT)
    held = [one for one in held_by_attributes(original) if isinstance(one, Tensor)]
    users = [parameter_of(member) for member in held_by(original)]
    if are_views([one for one in held if not isinstance(one, Parameter)], users):
        return Verdict(Way.NOT_AT_ALL, "keeps views of parameters outside of its states")
    against, numbers = "", random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            # A unit may leave some of several groups empty.
            whole = Trial(original, master_of, least_groups=2 if by_unit else 1)
            whole.run()
            _examine_format(whole)
            if whole.dataflow.way is Way.BY_ELEMENT:
                part = _compare(whole)
            elif whole.dataflow.way is Way.BY_PARAMETER and whole.dataflow.read:
                _answer_otherwise(whole)
            if by_unit and whole.dataflow.way is Way.BY_ELEMENT:
                against = reason_against(whole, part)
    except CannotCopy as error:
        return _without_trial(original, str(error), by_unit=by_unit)
    finally:
        random.setstate(numbers)
    way = whole.dataflow.way
    reason = next((found.what for found in whole.dataflow.findings if found.way is way), "")
    against = reason if by_unit and way is not Way.BY_ELEMENT else against
    return Verdict(way, reason, whole.waits_for_closure, against)


def _without_trial(optimizer: Optimizer, reason: str, *, by_unit: bool) -> Verdict:
    """Return the verdict on an optimizer that has no copy: its real steps are those under DDP."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        form = type(optimizer).state_dict(optimizer)
        if not is_of_torch(form) or len(form) > 2:
            what = f"{reason} and has a state_dict with its own format, which may show parameters"
            return Verdict(Way.NOT_AT_ALL, what)
    return Verdict(Way.ALL_AT_ONCE, reason, False, reason if by_unit else "")


def _compare(whole: Trial) -> Trial:
    """Step parts of the same toys; it is a finding if their operations or numbers differ."""
    parts = whole.again(is_flat=True)
    parts.run()
    if not parts.dataflow.findings and parts.dataflow.trace == whole.dataflow.trace:
        return parts
    what = "treats a part of a parameter differently from the whole"
    pairs = zip(whole.dataflow.trace, parts.dataflow.trace, strict=False)
    other = next((one for one, another in pairs if one != another), None)
    detail = parts.dataflow.findings[0].what if parts.dataflow.findings else _told(other)
    whole.dataflow.findings.append(Finding(Way.BY_PARAMETER, what + detail))
    return parts


def _answer_otherwise(whole: Trial) -> None:
    """Make up what is read of every second toy; it is a finding if the others notice."""
    truth = whole.again(least_groups=1)
    truth.run(is_brief=True)
    for turn in (0, 1):
        forced = sum(1 << index for index in range(turn, len(whole.toys), 2))
        other = whole.again(least_groups=1, answer=_Answers(forced))
        other.run(is_brief=True)
        if other.seen_of(~forced) != truth.seen_of(~forced):
            what = f"{whole.dataflow.read}, which may change how it steps another one"
            whole.dataflow.findings.append(Finding(Way.ALL_AT_ONCE, what))
            return


def _examine_format(whole: Trial) -> None:
    """It is a finding if only the optimizer itself can put its state dict together.

    A wrapper may return its own states beside the state dict of the optimizer that it wraps. When
    it steps all at once, its states are whole wherever it is asked for them or loads them. Values
    of parameters are not there then.
    """
    copied = whole.optimizer_copy
    if type(copied).state_dict is Optimizer.state_dict:
        return
    what = "has a state_dict with its own format"
    try:
        form = copied.state_dict()
        if is_of_torch(form):
            return
        before = _num_nans(form)
        for toy in whole.toys:
            toy.data.fill_(nan)
        shows_values = _num_nans(copied.state_dict()) != before
    except Exception:
        shows_values = False  # it has none to show, at least after steps of toys
    way = Way.ALL_AT_ONCE
    if shows_values:
        way, what = Way.NOT_AT_ALL, f"{what}, into which it writes values of its parameters"
    whole.dataflow.findings.append(Finding(way, what))


def _num_nans(state_dict: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(state_dict) if isinstance(leaf, (Tensor, float))]
    return sum(int(torch.as_tensor(leaf).isnan().sum()) for leaf in leaves)


class _Answers:
    """Made-up answers to reads of some toys: either truth value, numbers of all sizes.

    Args:
        forced: The bits of those toys.
    """

    def __init__(self, forced: int) -> None:
        self._forced, self._random = forced, random.Random(0)

    def __call__(self, bits: int, value: Any) -> Any:
        if not bits & self._forced:
            return value
        if isinstance(value, bool):
            return self._random.random() < 0.5
        sign = -1 if value < 0 else 1
        return type(value)(sign * self._random.choice([0.0, 1e-6, 1.0, 1e6]))


def _told(operation: Traced | None) -> str:
    return f" (starting at {operation.operation})" if operation else ""
