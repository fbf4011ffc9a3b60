"""Copies of optimizers that own toy parameters, and the sizes of states that these show."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.optimizer.attached import bare, options_of
from lightning_zero.optimizer.known import is_patched
from lightning_zero.optimizer.pieces import held_by, parameter_of, with_entries
from lightning_zero.optimizer.steppers import Stepper, stepper_of
from lightning_zero.tensors import bytes_held, internals, is_wrapper, without_draws

Toys = Mapping[int, Sequence[tuple[Parameter, Parameter]]]
"""Toys by the index of their param group, each with the parameter that it stands for."""


class CannotCopy(ValueError):
    """The optimizer holds something that a copy cannot have, or must not be copied."""


@contextlib.contextmanager
def stepping_toys(toys: Iterable[Tensor]) -> Iterator[None]:
    """Enter a context for steps of toys without side effects outside of the optimizer.

    All generators, those of the toys' devices too, continue as if nothing had been drawn. What the
    optimizer compiles runs as written, what it prints is not shown, and hooks on the steps of all
    optimizers are not called.
    """
    devices = {toy.device for toy in toys if toy.device.type not in ("cpu", "meta")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_draws())
        for kind in {device.type for device in devices}:
            own = [device for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(own, device_type=kind))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(internals.without_hooks_of_all_steps())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


# -- copies ----------------------------------------------------------------------------------------


def copy_of(optimizer: Any, toys: Toys) -> Optimizer:
    """Return a copy of ``optimizer`` that owns toys, with the param groups that have some.

    Its attributes are copied. No method of the optimizer is called, nor its constructor, whose
    arguments are not known.

    Raises:
        CannotCopy: It holds a module, or tensors outside of its state and groups, for example.
    """
    original = bare(optimizer)
    _check(original)
    groups, made = original.param_groups, type(original).__new__(type(original))
    memo: dict[Any, Any] = {id(original): made}
    pairs = [pair for each in toys.values() for pair in each]
    try:
        memo[id(groups)] = [_copy_group(groups[index], toys[index], memo) for index in toys]
        memo[id(original.state)] = _copy_states(original.state, pairs, memo)
        for name, value in vars(original).items():
            if _holds_hooks(name):
                vars(made)[name] = OrderedDict()
            elif not _is_ours(original, name):
                vars(made)[name] = copy.deepcopy(value, memo)
    except CannotCopy:
        raise
    except Exception as error:  # whatever its attributes raise
        raise CannotCopy(f"cannot be copied ({error})") from error
    return made


def _check(optimizer: Optimizer) -> None:
    if is_patched(type(optimizer)):  # its calls may be counted
        raise CannotCopy("has a `step` that was replaced")
    ids = {id(parameter_of(member)) for member in held_by(optimizer)}
    for one in held_by_attributes(optimizer):
        if isinstance(one, Optimizer):
            raise CannotCopy("steps another optimizer inside it")
        if isinstance(one, nn.Module):
            raise CannotCopy("holds a module")
        if isinstance(one, Parameter):
            raise CannotCopy("refers to parameters outside of its param groups")
        if isinstance(one, Tensor) and one.numel() > 1:
            raise CannotCopy("keeps tensors outside of its states")
        if isinstance(one, int) and one in ids:
            raise CannotCopy("knows parameters by their id()")


def held_by_attributes(optimizer: Optimizer) -> Iterator[Any]:
    """Yield what an optimizer holds, other than in its groups and states.

    Tensors, modules, numbers and other optimizers, also those in objects and closures that its
    attributes refer to.
    """
    groups = optimizer.param_groups
    own = [optimizer, optimizer.state, groups, *groups, *(group["params"] for group in groups)]
    seen = {id(one): one for one in own}
    found = [value for name, value in vars(optimizer).items() if not _is_ours(optimizer, name)]
    found += [group[key] for group in groups for key in options_of(group)]
    while found:
        one = found.pop()
        if id(one) in seen or isinstance(one, _OPAQUE):
            continue
        seen[id(one)] = one  # alive, so that no other object has its id
        if isinstance(one, (Tensor, nn.Module, int, Optimizer)):
            yield one
        elif isinstance(one, FunctionType):
            found += [*(one.__closure__ or ()), *(one.__defaults__ or ())]
        else:
            found += gc.get_referents(one)


_OPAQUE = (type, ModuleType, CodeType, FrameType)


def _is_ours(optimizer: Optimizer, name: str) -> bool:
    """Return whether an attribute is not the optimizer's own: hooks, or a method's stand-in.

    A copy must not have the ``step`` that a scheduler or a user has put on the object: it would
    step the user's optimizer.
    """
    value = vars(optimizer)[name]
    is_method = callable(value) and hasattr(type(optimizer), name)
    return is_method or isinstance(value, Stepper) or _holds_hooks(name)


def _holds_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _copy_group(
    group: Mapping[str, Any], pairs: Sequence[tuple[Parameter, Parameter]], memo: dict[Any, Any]
) -> dict[str, Any]:
    own = [toy for _, toy in pairs]
    copied = {key: copy.deepcopy(value, memo) for key, value in options_of(group).items()}
    if not copied.get("lr", 1):
        copied["lr"] += 1  # a schedule may begin at zero, with which all steps are alike
    if copied.get("fused"):
        copied["fused"] = False  # one operation, by the same numbers but for rounding
    if all(toy.device.type == "cpu" for toy in own) and copied.get("capturable"):
        # On a host torch refuses `capturable`, and without it `foreach` with a learning rate in a
        # tensor.
        copied.update(capturable=False, foreach=False)
    if "param_names" in group:
        copied["param_names"] = [str(index) for index in range(len(own))]
    memo[id(group)] = copied
    copied["params"] = own
    return copied


def _copy_states(
    states: Mapping[Any, Any], pairs: Sequence[tuple[Parameter, Parameter]], memo: dict[Any, Any]
) -> defaultdict[Any, Any]:
    """Return the states made so far, each toy's from the parameter that it stands for."""
    copied: defaultdict[Any, Any] = defaultdict(dict)
    for key, entries in states.items():
        if not isinstance(key, Tensor):
            copied[key] = copy.deepcopy(entries, memo)
    for parameter, toy in pairs:
        entries = states.get(parameter)
        if isinstance(entries, Mapping):
            copied[toy] = with_entries(entries, partial(_toy_entry, parameter, toy))
    return copied


def _toy_entry(parameter: Tensor, toy: Tensor, name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape == parameter.shape and name != "step" and not is_wrapper(value):
        dtype = toy.dtype if value.dtype is parameter.dtype else value.dtype
        if value.is_meta or not value.numel():
            return torch.zeros(toy.shape, dtype=dtype, device=toy.device)
        first = value.detach().reshape(-1)[:1].to(toy.device, dtype)
        return first.expand(toy.numel()).reshape(toy.shape).clone()
    if value.numel() != 1:
        raise CannotCopy("already has a state whose shape is not that of its parameter")
    return value.detach().clone()


# -- sizes of states -------------------------------------------------------------------------------


def state_bytes(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    whole: Sequence[int] | None = None,
) -> Callable[[int], int]:
    """Return what returns the bytes of the state of so many elements of a parameter.

    They are those of a toy that is stepped, of its shape if it is stepped whole.

    Raises:
        ValueError: Only the optimizer's real steps can tell.
    """
    shape = (24,) if whole is None else tuple(whole)
    # On meta a toy is as large as the parameter. If values are read, a small one has some; its
    # sizes can be told apart.
    small = tuple(map(min, shape, _PRIMES))
    for device, size in (("meta", shape), ("cpu", small)):
        toy = Parameter(torch.ones(size, dtype=dtype, device=device))
        try:
            tensors = _tensors_of(optimizer, group, toy)
            break
        except Exception as error:
            failed = error
    else:
        kind = type(bare(optimizer)).__name__
        raise ValueError(
            f"The size of {kind}'s state cannot be predicted ({failed}); MemoryMonitor measures it."
        ) from failed
    full = {math.prod(size): math.prod(shape), **dict(zip(size, shape, strict=True))}
    per_element = per_parameter = 0
    for value in tensors:
        if value.shape == toy.shape and not is_wrapper(value):
            per_element += value.element_size()
        else:
            numel = math.prod(full.get(length, length) for length in value.shape)
            per_parameter += bytes_held(value) * numel // max(value.numel(), 1)
    # Empty pieces are never stepped.
    return lambda numel: per_element * numel + per_parameter if numel else 0


def _tensors_of(optimizer: Optimizer, group: Mapping[str, Any], toy: Parameter) -> list[Tensor]:
    """Return the tensors in the state of ``toy`` after two steps of a copy in the group."""
    original = bare(optimizer)
    number = next(n for n, other in enumerate(original.param_groups) if other is group)
    with stepper_of(original).holding_parts():
        stands_for = next(iter(original.param_groups[number]["params"]), toy)
        copied: Any = copy_of(original, {number: [(stands_for, toy)]})
    toy.grad = torch.ones_like(toy)
    if callable(train := getattr(copied, "train", None)):
        train()  # without which some optimizers do not step
    with stepping_toys([toy]):
        for _ in range(2):
            copied.step()
    return [leaf for leaf in tree_leaves(dict(copied.state[toy])) if isinstance(leaf, Tensor)]


# Sizes of a small toy: large enough for optimizers that factor only large matrices.
_PRIMES = (131, 137, 139, 149, 151, 157, 163, 167)
