"""A copy of the user's optimizer that owns toy parameters, with the user's arguments and groups."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.optimizer.shared_state import OfOptimizer, options_of
from lightning_zero.tensors import internals, is_wrapper

Toys = Mapping[Parameter, Sequence[Parameter]]


class CannotCopy(Exception):
    """The optimizer holds something that a copy cannot have."""


def bare(optimizer: Any) -> Optimizer:
    """Return the user's optimizer without Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)  # type: ignore[no-any-return]


@contextlib.contextmanager
def stepping_toys() -> Iterator[None]:
    """Enter a context for steps of toys, which no code but the optimizer's notices.

    What it compiles runs as it is written: a step that is followed cannot be compiled, and others
    are over sooner than a compiler. Hooks on the steps of all optimizers are not called.
    """
    with torch.compiler.set_stance("force_eager"), internals.without_hooks_of_all_steps():
        yield


def copy_of(optimizer: Any, toys: Sequence[Toys], kept: Sequence[int]) -> Optimizer:
    """Return a copy of ``optimizer`` that owns toys.

    Its attributes are copied. The constructor is not called, as its arguments are not known, and as
    that of some wrappers is the constructor of another optimizer.

    Args:
        optimizer: The user's optimizer, in any state.
        toys: For each param group, the toys that stand for each of its parameters. Anything else
            that refers to a parameter gets the first of them.
        kept: The indices of the groups that the copy has.

    Raises:
        CannotCopy: It holds a module, or tensors outside of its state and groups, for example. It
            can then only step the module's own parameters.
    """
    original = bare(optimizer)
    memo: dict[Any, Any] = {}
    for stands_for in toys:
        memo.update({id(parameter): first for parameter, (first, *_) in stands_for.items()})
    _check(original)
    groups = original.param_groups
    memo[id(groups)] = [_copy_group(groups[index], toys[index], memo) for index in kept]
    try:
        return _copy(original, memo, {p: own for each in toys for p, own in each.items()})
    except CannotCopy:
        raise
    except Exception as error:  # whatever its attributes raise
        raise CannotCopy(f"cannot be copied ({error})") from error


def with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer, and those that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from with_inner(value)


def _check(optimizer: Optimizer) -> None:
    members = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(getattr(member, "parameter", member)) for member in members}
    for one in held_by_attributes(optimizer):
        if isinstance(one, nn.Module):
            raise CannotCopy("holds a module")
        if isinstance(one, Parameter):
            raise CannotCopy("refers to parameters outside of its param groups")
        if isinstance(one, Tensor) and one.numel() > 1:
            raise CannotCopy("keeps tensors outside of its states")
        if isinstance(one, int) and one in numbers:
            raise CannotCopy("knows parameters by their id()")


def held_by_attributes(optimizer: Optimizer) -> Iterator[Any]:
    """Yield tensors, modules and numbers that an optimizer holds but in its groups and states.

    Also those in objects, closures and generators that its attributes refer to.
    """
    seen: dict[int, Any] = {}
    found: list[Any] = []
    for holder in with_inner(optimizer):
        known = [holder.state, holder.param_groups, *holder.param_groups]
        known += [group["params"] for group in holder.param_groups]
        seen.update((id(one), one) for one in known)
        found += [value for name, value in vars(holder).items() if not _is_ours(holder, name)]
        found += [group[key] for group in holder.param_groups for key in options_of(group)]
    while found:
        one = found.pop()
        if id(one) in seen or isinstance(one, _OPAQUE):
            continue
        seen[id(one)] = one  # alive, so that no other object has its id
        if isinstance(one, (Tensor, nn.Module, int)):
            yield one
        elif isinstance(one, FunctionType):
            found += [*(one.__closure__ or ()), *(one.__defaults__ or ())]
        elif isinstance(one, GeneratorType):
            found += one.gi_frame.f_locals.values() if one.gi_frame else ()
        else:
            found += gc.get_referents(one)


_OPAQUE = (type, ModuleType, CodeType, FrameType, Optimizer)


def _is_ours(optimizer: Optimizer, name: str) -> bool:
    """Return whether an attribute is not the optimizer's own: hooks, or a method's stand-in.

    A copy must not have the ``step`` that a scheduler puts there to count: it would step the user's
    optimizer.
    """
    value = vars(optimizer)[name]
    is_method = callable(value) and hasattr(type(optimizer), name)
    return is_method or isinstance(value, OfOptimizer) or _holds_hooks(name)


def _holds_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _copy_group(group: Mapping[str, Any], toys: Toys, memo: dict[Any, Any]) -> dict[str, Any]:
    own = list(dict.fromkeys(toy for each in toys.values() for toy in each))
    copied = {key: copy.deepcopy(value, memo) for key, value in options_of(group).items()}
    if all(toy.device.type == "cpu" for toy in own) and copied.get("capturable"):
        # On a host torch refuses `capturable`, and without it `foreach` with a learning rate in a
        # tensor.
        copied.update(capturable=False, foreach=False)
    if "param_names" in group:
        copied["param_names"] = [str(index) for index in range(len(own))]
    memo[id(group)] = copied
    copied["params"] = own
    return copied


def _copy(optimizer: Optimizer, memo: dict[Any, Any], toys: Toys) -> Optimizer:
    cls = type(optimizer)
    made = cls.__new__(cls)
    memo[id(optimizer)] = made
    for name, value in vars(optimizer).items():
        if _holds_hooks(name):
            made.__dict__[name] = OrderedDict()
        elif _is_ours(optimizer, name):
            continue
        elif id(value) in memo:
            made.__dict__[name] = memo[id(value)]
        elif isinstance(value, Optimizer):
            made.__dict__[name] = _copy(value, memo, toys)
        elif name == "state":
            made.__dict__[name] = _copy_state(value, memo, toys)
        elif name == "param_groups":
            made.__dict__[name] = [_own_group(group, memo, toys) for group in value]
        else:
            made.__dict__[name] = copy.deepcopy(value, memo)
    return made


def _own_group(group: Mapping[str, Any], memo: dict[Any, Any], toys: Toys) -> dict[str, Any]:
    """Return the copy of a group; a wrapper may have its own groups of the same parameters."""
    if id(group) in memo:
        return memo[id(group)]  # type: ignore[no-any-return]
    return _copy_group(group, {p: toys[p] for p in group["params"] if p in toys}, memo)


def _copy_state(
    state: Mapping[Any, Any], memo: dict[Any, Any], toys: Toys
) -> defaultdict[Any, Any]:
    """Return the states made so far, each toy's from a parameter that it stands for."""
    copied: defaultdict[Any, Any] = defaultdict(dict)
    for key, entries in state.items():
        if not isinstance(key, Parameter) or not isinstance(entries, Mapping):
            copied[key] = copy.deepcopy(entries, memo)
            continue
        if hasattr(key, "parameter") and any(
            isinstance(value, Tensor) and value.dim() and value.shape != key.shape
            for value in tree_leaves(dict(entries))
        ):
            continue  # made by steps of whole parameters, which will make it again
        if any(map(is_wrapper, tree_leaves(dict(entries)))):
            continue  # which only the optimizer can make
        new = [toy for toy in toys.get(key, ()) if toy not in copied]
        # A memo each, as toys share no entries; torch keeps copied storages in `memo["torch"]`.
        memos = [memo, *({**memo, "torch": {**memo.get("torch", {})}} for _ in new[1:])]
        for toy, own in zip(new, memos, strict=False):
            copied[toy] = _toy_state(entries, key, toy, own)
    return copied


def _toy_state(
    state: Mapping[str, Any], parameter: Tensor, toy: Tensor, memo: dict[Any, Any]
) -> dict[str, Any]:
    return {
        name: tree_map(lambda leaf, n=name: _toy_entry(n, leaf, parameter, toy, memo), value)
        for name, value in state.items()
    }


def _toy_entry(name: str, value: Any, parameter: Tensor, toy: Tensor, memo: dict[Any, Any]) -> Any:
    is_number = (
        isinstance(value, Tensor) and not value.dim() and (parameter.dim() or name == "step")
    )
    if not isinstance(value, Tensor) or is_number:
        return copy.deepcopy(value, memo)
    if value.shape != parameter.shape:
        raise CannotCopy("already has a state whose shape is not that of its parameter")
    if value.numel() and value.device.type != "meta":
        dtype = toy.dtype if value.dtype is parameter.dtype else value.dtype
        number = value.detach().reshape(-1)[:1].to(toy.device, dtype)
        return number.expand(toy.numel()).reshape(toy.shape).clone()
    return torch.zeros(toy.shape, dtype=value.dtype, device=toy.device)
