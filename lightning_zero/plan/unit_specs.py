"""The units of a module under given settings, before they have memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import Parameter

from lightning_zero.plan.casts import uncast_parameters
from lightning_zero.plan.layout import Layout
from lightning_zero.plan.plan import Medium, Plan
from lightning_zero.plan.settings import Settings
from lightning_zero.plan.units import MIN_NUMEL, assign_parameters, find_units


class FlatSpec(NamedTuple):
    """Parameters that will share flat buffers, and their plan."""

    named: list[tuple[str, Parameter]]
    plan: Plan

    @property
    def trainable(self) -> bool:
        """Return whether the parameters want gradients."""
        return self.named[0][1].requires_grad

    def layout(self, num_shards: int, num_copies: int) -> Layout:
        """Return where the parameters will lie."""
        slots = [(name, tuple(p.shape), tuple(p.stride())) for name, p in self.named]
        return Layout.build(slots, num_shards, num_copies)

    def bytes_in_files(self, num_shards: int, num_copies: int) -> int:
        """Return the bytes of weights and masters that a rank will have in files."""
        layout = self.layout(num_shards, num_copies)
        kinds = self.plan.resting_bytes(layout.numel, num_shards, trainable=False)
        return sum(kinds[kind] for kind in kinds if self.plan.media[kind] is Medium.DISK)


class UnitSpec(NamedTuple):
    """A unit before it has memory; its module may be on ``meta``."""

    name: str
    module: nn.Module
    flat_parameters: list[FlatSpec]

    def bytes_in_files(self, num_shards: int, num_copies: int) -> int:
        """Return the bytes of weights and masters that a rank will have in files."""
        return sum(flat.bytes_in_files(num_shards, num_copies) for flat in self.flat_parameters)


def specify_units(module: nn.Module, settings: Settings) -> list[UnitSpec]:
    """Cut ``module`` into units as ``settings`` say; the root comes last."""
    modules = find_units(module, settings.units, settings.min_num_params)
    assigned = assign_parameters(module, modules)
    # Last, so that a tied parameter is loaded when every module that uses it has its values.
    root_parameters = assigned.pop("")
    uncast = uncast_parameters(module, settings.cast_weights) if settings.recipe.weight else set()
    for named in assigned.values():
        full = [(name, p) for name, p in named if id(p) in uncast]
        # A second dtype would double the unit's collectives for a handful of elements.
        if len(full) < len(named) and sum(p.numel() for _, p in full) < MIN_NUMEL:
            root_parameters += full
            named[:] = [(name, p) for name, p in named if id(p) not in uncast]
    specs = [
        UnitSpec(name, modules[name], _specify_flat_parameters(named, settings, uncast))
        for name, named in assigned.items()
        if named
    ]
    root = UnitSpec("", module, _specify_flat_parameters(root_parameters, settings, uncast))
    plans = [flat.plan for spec in (*specs, root) for flat in spec.flat_parameters]
    if settings.gather_bits is not None and not any(plan.gather_bits for plan in plans):
        raise ValueError(
            f"gather_bits={settings.gather_bits} has no effect: at stage={settings.stage} without"
            " mixed precision the whole weights are the masters, which are never encoded. Use"
            " stage=3 or precision='bf16-mixed', or remove gather_bits."
        )
    if settings.stochastic_rounding and not any(plan.stochastic_rounding for plan in plans):
        raise ValueError(
            "stochastic_rounding=True has no effect: no parameter rests in bf16. Use"
            " precision='bf16-true', or remove stochastic_rounding."
        )
    return [*specs, root]


def _specify_flat_parameters(
    named: list[tuple[str, Parameter]], settings: Settings, uncast: set[int]
) -> list[FlatSpec]:
    groups: dict[tuple[Plan, bool], list[tuple[str, Parameter]]] = {}
    kinds: dict[tuple[torch.dtype, bool, bool], list[tuple[str, Parameter]]] = {}
    for one in named:
        kind = dtype, is_cast, trainable = (
            one[1].dtype, id(one[1]) not in uncast, one[1].requires_grad
        )  # fmt: skip
        if kind not in kinds:  # of very many parameters, there are few
            plan = settings.plan(dtype, is_cast=is_cast, trainable=trainable)
            kinds[kind] = groups.setdefault((plan, trainable), [])
        kinds[kind].append(one)
    return [FlatSpec(members, plan) for (plan, _), members in groups.items()]
