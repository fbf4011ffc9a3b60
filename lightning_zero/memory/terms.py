"""What one rank holds of a model, term by term: arithmetic on layouts and plans.

A model is a list of **terms**, one for each unit, which say what the unit weighs in each state.
They come from the drafts that an engine builds its buffers from, and every number from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter

from lightning_zero.draft import UnitDraft
from lightning_zero.layout import Layout
from lightning_zero.optim import StateBytes
from lightning_zero.plan import Medium, Offload, Plan

RESTING = ("weights", "gradients", "master", "states", "buffers")
PASSING = ("gathered", "unreduced", "activations")
KINDS = (*RESTING, *PASSING)
"""Kinds of bytes: those that a rank holds all the time, and those that come and go in a step.

``gathered`` is whole weights of units that rest sharded, ``unreduced`` gradients before and during
their reduction; the other words are the vocabulary's.
"""

HOST_KINDS = (*RESTING, "staging")
"""Kinds of bytes in host memory beside the device's.

``staging`` is what lies there on its way between the device, host memory and files.
"""

Kinds = dict[str, int]
StateOf = Callable[[Parameter], StateBytes]


@dataclass(frozen=True)
class BundleTerms:
    """What one bundle's gradients weigh on one rank until they are reduced.

    Attributes:
        members: Its trainable parameters, by their number in the module.
        owned: Those of which this rank has a piece.
        partial: Bytes of whole gradients before they are reduced.
        target: Bytes of the shard that they are reduced into.
        box: Elements and dtype of what one other rank sends for a reduction.
        num_boxes: How many others send.
    """

    members: tuple[int, ...]
    owned: frozenset[int]
    partial: int
    target: int
    box: tuple[int, torch.dtype]
    num_boxes: int


@dataclass
class UnitTerms:
    """What one unit weighs on one rank.

    Attributes:
        name: The unit's name; the root's is ``""``.
        resting: Bytes between steps, by what holds them and by kind.
        whole: Bytes of the whole weights, if they rest sharded.
        bundles: Its gradients on their way.
        fetched: Bytes in host memory through which offloaded weights come to the device.
        stepped: Bytes in host memory into which files are read for a step, and written from.
        sent_up: Bytes in host memory through which stepped weights come to the device.
        flushed: Bytes on the device of reduced gradients on their way to host memory.
    """

    name: str
    resting: dict[Medium, Kinds] = field(
        default_factory=lambda: {medium: dict.fromkeys(RESTING, 0) for medium in Medium}
    )
    whole: int = 0
    bundles: list[BundleTerms] = field(default_factory=list)
    fetched: int = 0
    stepped: int = 0
    sent_up: int = 0
    flushed: int = 0

    def add(
        self, layout: Layout, parts: Iterable[tuple[float, Plan]], states: int, *, trainable: bool
    ) -> None:
        """Count one bundle, of which shares may follow different plans.

        Args:
            layout: Where its parameters lie.
            parts: Shares, which sum up to 1, and their plans.
            states: Bytes of optimizer states on this rank.
            trainable: Whether it has gradients and states.
        """
        for share, plan in parts:
            kinds = plan.resting_bytes(layout.numel, layout.world_size, trainable=trainable)
            kinds["states"] = states
            for kind, count in kinds.items():
                self.resting[plan.media[kind]][kind] += round(share * count)
            self._add_staging(layout, share, plan, kinds, trainable=trainable)

    def _add_staging(
        self, layout: Layout, share: float, plan: Plan, kinds: Mapping[str, int], *, trainable: bool
    ) -> None:
        """Count what the offloaded share of a bundle needs on its way; nothing on the device."""
        weight, source = plan.weight, plan.weight if plan.copies_weights else plan.master
        as_weights = layout.shard_numel * weight.dtype.itemsize
        is_cast = source.dtype is not weight.dtype
        if weight.medium is not Medium.DEVICE:
            as_read = layout.shard_numel * source.dtype.itemsize
            from_disk = as_read if source.medium is Medium.DISK else 0
            self.fetched += round(share * (from_disk + is_cast * as_weights))
        if not trainable or plan.master.medium is Medium.DEVICE:
            return
        if plan.master.medium is Medium.DISK:
            own = "master" if plan.has_master else "weights"
            self.stepped += round(share * (kinds[own] + kinds["states"]))
        leaves_by_cast = plan.copies_weights and plan.master.dtype is not weight.dtype
        if leaves_by_cast and weight.medium is not Medium.HOST:
            self.sent_up += round(share * as_weights)
        self.flushed += round(share * kinds["gradients"])


def terms_of_drafts(
    drafts: Iterable[UnitDraft],
    state_of: StateOf,
    *,
    numbers: Mapping[int, int],
    world_size: int,
    rank: int,
    receives: bool,
    offload: Offload | None = None,
) -> list[UnitTerms]:
    """The terms of units that have no memory yet.

    Args:
        drafts: The units, the root last.
        state_of: What the optimizer keeps for a parameter.
        numbers: Each parameter's number in the module, by its id.
        world_size: Number of ranks.
        rank: Whose terms they are.
        receives: Whether others' gradients are received into boxes before they are added.
        offload: What rests outside the device.
    """
    found = []
    for draft in drafts:
        terms = UnitTerms(draft.name)
        for named, plan in draft.bundles:
            layout = Layout.build(
                [(name, tuple(p.shape), tuple(p.stride())) for name, p in named], world_size
            )
            trainable = named[0][1].requires_grad
            pieces = [layout.piece(index, rank) for index in range(len(named))]
            sizes = [stop - start for start, stop in pieces]
            pairs = list(zip((p for _, p in named), sizes, strict=True))
            states = sum(state_of(p).of(size) for p, size in pairs) if trainable else 0
            parts = offload.parts(plan, trainable=trainable) if offload else [(1.0, plan)]
            terms.add(layout, parts, states, trainable=trainable)
            if plan.gives_weights_back:
                terms.whole += layout.numel * plan.weight.dtype.itemsize
            if trainable:
                terms.bundles.append(
                    _bundle_terms(layout, parts, pairs, numbers, receives=receives)
                )
        found.append(terms)
    return found


def _bundle_terms(
    layout: Layout,
    parts: Sequence[tuple[float, Plan]],
    pairs: Sequence[tuple[Parameter, int]],
    numbers: Mapping[int, int],
    *,
    receives: bool,
) -> BundleTerms:
    plan = parts[0][1]
    stays = sum(share for share, one in parts if one.grad.medium is Medium.DEVICE)
    return BundleTerms(
        members=tuple(numbers[id(p)] for p, _ in pairs),
        owned=frozenset(numbers[id(p)] for p, size in pairs if size),
        partial=layout.numel * plan.grad.dtype.itemsize,
        # What is offloaded is reduced into a shard that is free anyway.
        target=round(stays * layout.shard_numel * plan.master.dtype.itemsize),
        box=(layout.shard_numel, plan.grad.dtype),
        num_boxes=layout.world_size - 1 if receives else 0,
    )
