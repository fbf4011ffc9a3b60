"""The units of a module under given settings, before any of them has memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import Parameter

from lightning_zero.plan.plan import Plan
from lightning_zero.plan.settings import Settings
from lightning_zero.plan.units import assign_parameters, find_units

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class FlatSpec(NamedTuple):
    """Parameters that will share flat buffers, and their plan."""

    named: list[tuple[str, Parameter]]
    plan: Plan


class UnitSpec(NamedTuple):
    """A unit before it has memory; also of a module on ``meta``."""

    name: str
    module: nn.Module
    flat_parameters: list[FlatSpec]


def specify_units(module: nn.Module, settings: Settings) -> list[UnitSpec]:
    """Cut ``module`` into units as ``settings`` say; the root comes last."""
    modules = find_units(module, settings.units)
    assigned = assign_parameters(module, modules)
    # The root comes last: a tied parameter is loaded when every module that uses it has its values.
    root_parameters = assigned.pop("")
    uncast = _uncast_parameters(module) if settings.recipe.weight else set()
    for named in assigned.values():
        # A second dtype would double the unit's collectives for a handful of elements.
        root_parameters += [(name, p) for name, p in named if id(p) in uncast]
        named[:] = [(name, p) for name, p in named if id(p) not in uncast]
    specs = [
        UnitSpec(name, modules[name], _specify_flat_parameters(named, settings, uncast))
        for name, named in assigned.items()
        if named
    ]
    return [
        *specs,
        UnitSpec("", module, _specify_flat_parameters(root_parameters, settings, uncast)),
    ]


def _specify_flat_parameters(
    named: Iterable[tuple[str, Parameter]], settings: Settings, uncast: set[int]
) -> list[FlatSpec]:
    groups: dict[tuple[torch.dtype, bool, bool], list[tuple[str, Parameter]]] = {}
    for name, parameter in named:
        is_cast = id(parameter) not in uncast
        key = (parameter.dtype, parameter.requires_grad, is_cast)
        groups.setdefault(key, []).append((name, parameter))
    return [
        FlatSpec(members, settings.plan(dtype, is_cast=is_cast))
        for (dtype, _, is_cast), members in groups.items()
    ]


def _uncast_parameters(module: nn.Module) -> set[int]:
    """Return the ids of parameters that stay as they are in mixed precision.

    Torch's normalizations refuse weights of less precision than their input or their statistics.
    """
    norms = (m for m in module.modules() if isinstance(m, _NORMS))
    return {id(p) for norm in norms for p in norm.parameters(recurse=False)}
