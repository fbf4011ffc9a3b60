"""The comparison of what must be equal on all ranks, before anything relies on it.

Each rank describes its model, settings and optimizers as named things with attributes. One sync
point compares digests of the descriptions. Only if these differ do the ranks exchange the
descriptions, and all raise the same error, which says what differs on which ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero.comm import Control, SyncPoint
from lightning_zero.optimizer import bare, parameter_of
from lightning_zero.plan import Settings, find_units

Facts = Mapping[str, Mapping[str, Any]]
"""Named things with their attributes; the order counts: ``{"Parameter 'a'": {"shape": (3, 4)}}``.
"""

Description = dict[str, dict[str, str]]
"""Facts whose values are text, equal on two ranks if and only if the values agree."""

_MOST_SHOWN = 8
_DIGEST_BYTES = 16
_CHOICES_OF_ONE_RANK = ("params", "foreach", "fused")
"""Entries of a param group that may differ: its members, and choices among equal kernels."""


def require_equal(control: Control, make_facts: Callable[[], Facts]) -> None:
    """Compare facts of all ranks; a collective, with one small message if they agree.

    Raises:
        RuntimeError: The facts differ. All ranks raise the same text.
    """
    if control.world_size == 1:
        return
    description = describe(make_facts())
    if control.all_equal(SyncPoint.COMPARE, digest(description)):
        return
    refuse(control.gather_objects(description))


def refuse(descriptions: Sequence[Description]) -> None:
    """Raise a ``RuntimeError`` that says how the ranks' descriptions differ, if they do."""
    found = differences(descriptions)
    if not found:
        return
    shown = [f"\n- {difference}." for difference in found[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        shown.append(f"\n- {len(found) - _MOST_SHOWN} more differences.")
    raise RuntimeError(
        "The ranks differ, so they cannot train one model together:"
        + "".join(shown)
        + "\nBuild the same model with the same settings and optimizers on every rank. Only the"
        " data may depend on the rank, on unseeded random numbers, or on one host's files and"
        " environment variables."
    )


# -- descriptions ----------------------------------------------------------------------------------


def describe(facts: Facts) -> Description:
    """Return facts as text, without the values that cannot be compared."""
    # Of very many things, most have the attributes of others.
    different = {id(attributes): attributes for attributes in facts.values()}
    texts = {
        key: {n: text for n, value in attributes.items() if (text := _text(value)) is not None}
        for key, attributes in different.items()
    }
    return {thing: texts[id(attributes)] for thing, attributes in facts.items()}


def digest(description: Description) -> bytes:
    """Return a few bytes that are equal for equal descriptions, in any process."""
    different = {id(attributes): attributes for attributes in description.values()}
    texts = {key: repr(sorted(attributes.items())) for key, attributes in different.items()}
    items = [(thing, texts[id(attributes)]) for thing, attributes in description.items()]
    return hashlib.blake2b(repr(items).encode(), digest_size=_DIGEST_BYTES).digest()


def differences(descriptions: Sequence[Description]) -> list[str]:
    """Return each difference of the ranks' descriptions as a sentence, with names and ranks."""
    things = dict.fromkeys(thing for one in descriptions for thing in one)
    return [
        *_other_order(descriptions),
        *(text for thing in things for text in _differences_of(thing, descriptions)),
    ]


def _other_order(descriptions: Sequence[Description]) -> Iterator[str]:
    """Yield the first place where the things that all ranks have come in different orders."""
    common = set.intersection(*(set(one) for one in descriptions))
    orders = [[thing for thing in one if thing in common] for one in descriptions]
    for places in zip(*orders, strict=True):
        if len(set(places)) > 1:
            yield f"The order differs: next comes {_by_rank(places)}"
            return


def _differences_of(thing: str, descriptions: Sequence[Description]) -> Iterator[str]:
    has_thing = [thing in one for one in descriptions]
    if not all(has_thing):
        there = _ranks([rank for rank, has in enumerate(has_thing) if has])
        missing = _ranks([rank for rank, has in enumerate(has_thing) if not has])
        yield f"{thing} exists on {there} and not on {missing}"
        return
    for name in dict.fromkeys(name for one in descriptions for name in one[thing]):
        values = [one[thing].get(name, "missing") for one in descriptions]
        if len(set(values)) > 1:
            yield f"{thing} has {name} {_by_rank(values)}"


def _by_rank(values: Sequence[Hashable]) -> str:
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on {_ranks(those)}" for value, those in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _text(value: Any) -> str | None:
    """Return a value as text that is equal in every process; ``None`` if it has no such text."""
    if isinstance(value, Enum):
        return _text(value.value)
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, int | float):
        # A subclass such as numpy's has another text for the same number.
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return value.type  # each rank has its own index
    if isinstance(value, Tensor):
        return repr(value.item()) if not value.dim() and value.device.type == "cpu" else None
    if isinstance(value, Mapping):
        return _text_of_all([f"{_text(key)}: {_text(item)}" for key, item in value.items()], "{}")
    if isinstance(value, list | tuple):
        return _text_of_all([_text(item) for item in value], "()")
    if isinstance(value, set | frozenset):
        return _text_of_all(sorted(str(_text(item)) for item in value), "{}")
    if is_dataclass(value) and not isinstance(value, type):
        return _text({field.name: getattr(value, field.name) for field in fields(value)})
    return _qualified_name(value) if callable(value) else None


def _text_of_all(texts: Sequence[str | None], brackets: str) -> str:
    end = "," if brackets == "()" and len(texts) == 1 else ""
    return f"{brackets[0]}{', '.join(map(str, texts))}{end}{brackets[1]}"


def _qualified_name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    # A launcher may import the main module of some ranks under another name.
    is_main = named.__module__ in ("__main__", "__mp_main__")
    return str(named.__qualname__ if is_main else f"{named.__module__}.{named.__qualname__}")


# -- facts -----------------------------------------------------------------------------------------


def model_facts(module: nn.Module, settings: Settings, more: Facts) -> dict[str, dict[str, Any]]:
    """Return the facts of a model, not sharded yet, and its settings that must be equal.

    Args:
        module: The model.
        settings: The engine's settings.
        more: Other facts, which come first.
    """
    facts = {thing: dict(attributes) for thing, attributes in more.items()}
    own = {field.name: getattr(settings, field.name) for field in fields(settings)}
    facts.setdefault("The strategy", {}).update(own)
    first_names: dict[int, str] = {}
    known: dict[Any, dict[str, Any]] = {}  # of very many parameters, there are few kinds
    for name, p in module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(p), name)
        tie = None if first == name else first
        shape = None if is_lazy(p) else p.shape
        kind = shape, p.dtype, p.is_meta, p.requires_grad, tie
        if kind not in known:
            known[kind] = {**_facts_of(p), "requires_grad": p.requires_grad, "tie": tie}
        facts[f"Parameter {name!r}"] = known[kind]
    for name, buffer in module.named_buffers(remove_duplicate=False):
        facts[f"Buffer {name!r}"] = _facts_of(buffer)
    facts.update((f"Unit {name!r}", {}) for name in _unit_names(module, settings))
    return facts


def _facts_of(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": "unknown" if is_lazy(tensor) else tuple(tensor.shape),
        "dtype": tensor.dtype,
        "values": "none (meta device)" if tensor.is_meta else "in memory",
    }


def _unit_names(module: nn.Module, settings: Settings) -> list[str]:
    """Return the names of the units, or the reason why there are none."""
    if not callable(settings.units) and not isinstance(settings.units, Collection):
        return []  # an iterator, which can be read only once
    try:
        return list(find_units(module, settings.units, settings.min_num_params))
    except (TypeError, ValueError) as error:
        return [str(error)]


def optimizer_facts(
    optimizers: Sequence[Optimizer], module: nn.Module
) -> dict[str, dict[str, Any]]:
    """Return the facts of optimizers that must be equal, including the members of groups."""
    names = {id(p): name for name, p in module.named_parameters()}
    facts: dict[str, dict[str, Any]] = {}
    for number, optimizer in enumerate(optimizers):
        facts.update(group_facts(optimizer, f"optimizer {number}"))
        for index, group in enumerate(optimizer.param_groups):
            frozen, trained = ({"group": index, "requires_grad": is_it} for is_it in (False, True))
            for place, parameter in enumerate(map(parameter_of, group["params"])):
                name = _member_name(parameter, names, f"{place} of group {index}")
                own = trained if parameter.requires_grad else frozen
                facts[f"{name} of optimizer {number}"] = own
    return facts


def group_facts(optimizer: Optimizer, label: str) -> dict[str, dict[str, Any]]:
    """Return the facts of an optimizer that must be equal, without the members of its groups."""
    facts: dict[str, dict[str, Any]] = {label.capitalize(): {"class": type(bare(optimizer))}}
    for index, group in enumerate(optimizer.param_groups):
        facts[f"Group {index} of {label}"] = hyperparameters(group)
    return facts


def optimizer_description(optimizer: Optimizer, label: str) -> Description:
    """Return an optimizer's facts as text, with the number of parameters in each group."""
    facts = group_facts(optimizer, label)
    for index, group in enumerate(optimizer.param_groups):
        facts[f"Group {index} of {label}"]["parameters"] = len(group["params"])
    return describe(facts)


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a param group that must be equal on all ranks."""
    return {key: value for key, value in group.items() if key not in _CHOICES_OF_ONE_RANK}


def _member_name(parameter: Parameter, names: Mapping[int, str], place: str) -> str:
    name = names.get(id(parameter))
    if name is not None:
        return f"Parameter {name!r}"
    return f"Parameter {place} (shape {tuple(parameter.shape)}, not in the model)"
