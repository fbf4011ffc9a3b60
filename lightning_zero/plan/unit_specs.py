"""The units of a module under given settings, before they have memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import nn
from torch.nn import Parameter

from lightning_zero.plan.casts import uncast_parameters
from lightning_zero.plan.layout import Layout
from lightning_zero.plan.plan import Medium, Plan
from lightning_zero.plan.settings import Settings
from lightning_zero.plan.units import MIN_NUMEL, assign_parameters, find_units


class FlatSpec(NamedTuple):
    """Parameters that will share flat buffers, and their plan.

    If only a share is offloaded, ``num_away`` is the number of elements of a rank's shard that are.
    """

    named: list[tuple[str, Parameter]]
    plan: Plan
    num_away: int | None = None

    @property
    def trainable(self) -> bool:
        """Return whether the parameters want gradients."""
        return self.named[0][1].requires_grad

    def layout(self, num_shards: int, num_copies: int) -> Layout:
        """Return where the parameters will lie."""
        slots = [(name, tuple(p.shape), tuple(p.stride())) for name, p in self.named]
        return Layout.build(slots, num_shards, num_copies)

    def share_away(self, layout: Layout) -> float:
        """Return the share of the shard that the plan offloads."""
        return 1.0 if self.num_away is None else self.num_away / max(1, layout.shard_numel)

    def stays(self, layout: Layout, index: int, rank: int) -> bool:
        """Return whether a piece stays on the device although others are offloaded."""
        return self.num_away is not None and layout.piece_in_shard(index, rank)[1] > self.num_away

    def bytes_in_files(self, num_shards: int, num_copies: int) -> int:
        """Return the bytes of weights and masters that a rank will have in files."""
        layout = self.layout(num_shards, num_copies)
        kinds = self.plan.resting_bytes(layout.numel, num_shards, trainable=False)
        share, media = self.share_away(layout), self.plan.media
        return sum(round(share * kinds[kind]) for kind in kinds if media[kind] is Medium.DISK)


class UnitSpec(NamedTuple):
    """A unit before it has memory; its module may be on ``meta``."""

    name: str
    module: nn.Module
    flat_parameters: list[FlatSpec]

    def bytes_in_files(self, num_shards: int, num_copies: int) -> int:
        """Return the bytes of weights and masters that a rank will have in files."""
        return sum(flat.bytes_in_files(num_shards, num_copies) for flat in self.flat_parameters)


def cuts_of(layouts: Sequence[Layout], ratio: float, rank: int) -> list[int]:
    """Return how many elements of each of a rank's shards to offload, ``ratio`` of all in total.

    The first elements of a shard go, the others stay. A piece is never split, since an optimizer
    keeps one state for it: cuts are at the nearest boundary between pieces. Shards with large
    pieces are cut first, and the others make up for the error in proportion to their sizes::

        ratio 0.3   | go |  stay        | go      | stay     | stay      |
        shards      | unit 0            | unit 1             | embedding |
    """
    ends = [sorted(layout.ends(rank), reverse=True) for layout in layouts]
    largest = [max(b - a for b, a in pairwise(places)) for places in ends]
    found = [0] * len(layouts)
    rest = sum(layout.shard_numel for layout in layouts)
    to_go = ratio * rest
    for number in sorted(range(len(layouts)), key=largest.__getitem__, reverse=True):
        numel = layouts[number].shard_numel
        wanted = to_go * numel / max(1, rest)
        # Of two equally near ends the later: what is offloaded was too large for the device.
        found[number] = min(ends[number], key=lambda end: abs(end - wanted))
        to_go, rest = to_go - found[number], rest - numel
    return found


def with_cuts(
    specs: list[UnitSpec], ratio: float, *, num_shards: int, num_copies: int, rank: int
) -> list[UnitSpec]:
    """Return the units with a share of their shards offloaded, for one rank of a copy.

    The share holds for trainable and for frozen parameters separately.
    """
    if ratio == 1:
        return specs
    found: dict[int, int] = {}
    for trainable in (True, False):
        flats = [f for spec in specs for f in spec.flat_parameters if f.trainable is trainable]
        layouts = [flat.layout(num_shards, num_copies) for flat in flats]
        cuts = cuts_of(layouts, ratio, rank)
        found.update((id(flat), cut) for flat, cut in zip(flats, cuts, strict=True))

    def cut(flat: FlatSpec) -> FlatSpec:
        return flat._replace(num_away=found[id(flat)])

    return [spec._replace(flat_parameters=[*map(cut, spec.flat_parameters)]) for spec in specs]


def shares_away(
    specs: list[UnitSpec], ratio: float, *, num_shards: int, num_copies: int
) -> list[float]:
    """Return, for each rank of a copy, the share of its trainable shards that it offloads."""
    flats = [flat for spec in specs for flat in spec.flat_parameters if flat.trainable]
    layouts = [flat.layout(num_shards, num_copies) for flat in flats]
    numel = sum(layout.shard_numel for layout in layouts)
    return [sum(cuts_of(layouts, ratio, rank)) / max(1, numel) for rank in range(num_shards)]


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
    plan_of = functools.cache(settings.plan)  # of very many parameters, there are few kinds
    groups: dict[tuple[Plan, bool], list[tuple[str, Parameter]]] = {}
    for name, parameter in named:
        trainable, is_cast = parameter.requires_grad, id(parameter) not in uncast
        plan = plan_of(parameter.dtype, is_cast=is_cast, trainable=trainable)
        groups.setdefault((plan, trainable), []).append((name, parameter))
    return [FlatSpec(members, plan) for (plan, _), members in groups.items()]
