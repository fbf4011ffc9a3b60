"""Proofs of optimizers, each taken once in a session by ranks of each of the two seeds.

A trial steps toys for up to a second, and most tests on ranks adopt an optimizer that others have
adopted before. So ranks keep what a proof has found, for an optimizer that is the same in all that
a proof sees: its class, attributes and options, the shapes of its parameters, and the dtype and
device in which they are stepped. Where its classes and functions have names by which every process
finds them, they share it with the ranks of their seed (forks.py). One that has states is proved
anew, and so is one with anything in it whose content is not seen here. In the process of a test, as
in those of `tests/optimizer`, nothing is kept.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from lightning_zero.parameters import guarded

_PLAIN = bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None)


class _Unseen(Exception):
    """There is something that may differ where its likeness does not."""


def keep_proofs(folder: Path) -> None:
    """Let the processes that share a folder prove equal optimizers once."""
    module: Any = importlib.import_module("lightning_zero.optimizer.probe")
    probe, kept = module.probe, {}

    @functools.wraps(probe)
    def once(
        optimizer: Any, master_of: Callable[..., Tensor] = lambda p: p, *, by_unit: bool = False
    ) -> Any:
        original = module.bare(optimizer)
        prove = functools.partial(probe, optimizer, master_of, by_unit=by_unit)
        try:
            if module.is_known(original):  # without a proof
                raise _Unseen
            key = _likeness(original, master_of), by_unit, *_surroundings()
        except _Unseen:
            return prove()
        if key not in kept:
            kept[key] = _shared(folder, key, prove)
        return kept[key]

    module.probe = once


class _Names(pickle.Pickler):
    """Names of classes; those that an engine has made of its parameters' have those of their bases.

    They are one in a process for equal bases.
    """

    def persistent_id(self, value: Any) -> Any:
        is_made = isinstance(value, type) and value.__module__ == guarded.__name__
        return value.__bases__ if is_made and issubclass(value, Parameter) else None


def _shared(folder: Path, key: Any, prove: Callable[[], Any]) -> Any:
    """Return what another process has found, which this one waits for, or prove and tell it."""
    name = io.BytesIO()
    pickler = _Names(name)
    pickler.fast = True  # equal keys have equal bytes
    try:
        pickler.dump(key)
    except (pickle.PicklingError, AttributeError):  # a class or a function by no name
        return prove()
    if b"__main__" in name.getvalue():  # where each script has its own
        return prove()
    with (folder / hashlib.sha256(name.getvalue()).hexdigest()).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if found := file.read():
            return pickle.loads(found)
        verdict = prove()
        file.write(pickle.dumps(verdict))
        return verdict


def _surroundings() -> Iterator[Any]:
    yield torch.get_default_dtype()
    yield torch.is_grad_enabled()
    yield tuple(map(type, _get_current_dispatch_mode_stack()))


def _likeness(optimizer: Optimizer, master_of: Callable[..., Tensor]) -> Any:
    """Return what is equal for optimizers of which one proof holds."""
    numbers: dict[int, int] = {}

    def of_parameter(value: Any) -> Any:
        master, whole = master_of(value), getattr(value, "parameter", value)
        number = numbers.setdefault(id(value), len(numbers))
        return type(value), number, tuple(whole.shape), master.dtype, master.device

    def of_optimizer(one: Optimizer) -> Any:
        if one.state:
            raise _Unseen
        own = {k: v for k, v in vars(one).items() if k not in ("state", "param_groups")}
        attributes = [(name, of_attribute(one, name, value)) for name, value in own.items()]
        groups = [
            [(key, of(value)) for key, value in group.items() if key != "param_names"]
            + ["param_names" in group]
            for group in one.param_groups
        ]
        return type(one), _frozen(attributes), _frozen(groups)

    def of_attribute(one: Optimizer, name: str, value: Any) -> Any:
        if callable(value) and hasattr(type(one), name):
            return type(value)  # a copy has that of its class
        if isinstance(value, OrderedDict):  # hooks, which a copy has not
            if any(isinstance(leaf, Module | Tensor) for leaf in tree_leaves(value)):
                raise _Unseen
            return OrderedDict
        return of(value)

    def of(value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            return of_parameter(value)
        if isinstance(value, Optimizer):
            return of_optimizer(value)
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, dict):
            return type(value), _frozen([(of(key), of(entry)) for key, entry in value.items()])
        if isinstance(value, list | tuple):
            return type(value), _frozen([of(entry) for entry in value])
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() < 2:
            return value.dtype, tuple(value.shape), repr(value.tolist())
        if isinstance(value, type | BuiltinFunctionType):
            return value
        if isinstance(value, FunctionType) and value.__closure__ is None:
            return value
        raise _Unseen

    return of_optimizer(optimizer)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
