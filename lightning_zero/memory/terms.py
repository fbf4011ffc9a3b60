"""Bytes that one rank holds of a model at rest: arithmetic on layouts and plans.

A model is a list of **terms**, one for each unit, with the bytes of the unit in each medium. They
come from the specs that an engine builds its buffers from, and every number from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch.nn import Parameter

from lightning_zero.plan import Layout, Medium, Offload, Plan, UnitSpec

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

DISK_ROWS = tuple(f"disk {kind}" for kind in ("weights", "master", "states"))
"""Kinds of bytes in files, as ``ShardedModel.memory`` and tables name them."""

Kinds = dict[str, int]
StateOf = Callable[[Parameter, int], int]
"""Bytes of optimizer states for so many elements of a parameter."""


@dataclass
class UnitTerms:
    """The bytes of one unit on one rank.

    Attributes:
        name: The unit's name; the root's is ``""``.
        resting: Bytes between steps, by what holds them and by kind.
        partial: Bytes of its whole gradients before they are reduced.
        fetched: Bytes in host memory through which offloaded weights come to the device.
        stepped: Bytes in host memory into which files are read for a step, and written from.
        sent_up: Bytes in host memory through which stepped weights come to the device.
        flushed: Bytes on the device of reduced gradients on their way to host memory.
    """

    name: str
    resting: dict[Medium, Kinds] = field(
        default_factory=lambda: {medium: dict.fromkeys(RESTING, 0) for medium in Medium}
    )
    partial: int = 0
    fetched: int = 0
    stepped: int = 0
    sent_up: int = 0
    flushed: int = 0

    def add(
        self,
        layout: Layout,
        parts: Iterable[tuple[float, Plan]],
        states: int,
        *,
        trainable: bool,
        on_host: bool,
    ) -> None:
        """Count one group of flat parameters, of which shares may follow different plans.

        ``states`` are the bytes of optimizer states on this rank. Where the device is the host
        (``on_host``), files are mapped, and nothing is staged.
        """
        for share, plan in parts:
            kinds = plan.resting_bytes(layout.numel, layout.world_size, trainable=trainable)
            kinds["states"] = states
            for kind, count in kinds.items():
                self.resting[plan.media[kind]][kind] += round(share * count)
            if not on_host:
                self._add_staging(layout, share, plan, kinds, trainable=trainable)

    def _add_staging(
        self, layout: Layout, share: float, plan: Plan, kinds: Mapping[str, int], *, trainable: bool
    ) -> None:
        """Count what an offloaded share needs on its way; nothing on the device."""
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


def terms_of_specs(
    specs: Iterable[UnitSpec],
    state_of: StateOf,
    *,
    num_shards: int,
    num_copies: int,
    rank: int,
    offload: Offload | None = None,
    on_host: bool = False,
) -> list[UnitTerms]:
    """Return the terms that units, which have no memory yet, will have on a rank of a copy.

    ``on_host`` if what is offloaded is so from a device that is the host itself.
    """
    found = []
    for spec in specs:
        terms = UnitTerms(spec.name)
        for flat in spec.flat_parameters:
            named, plan = flat
            layout = flat.layout(num_shards, num_copies)
            trainable = named[0][1].requires_grad
            states = 0
            for index, (_, parameter) in enumerate(named) if trainable else ():
                start, stop = layout.piece(index, rank)
                states += state_of(parameter, stop - start)
            parts = [(1.0, plan)]
            if offload:
                parts = offload.parts(plan, trainable=trainable, on_host=on_host)
            terms.add(layout, parts, states, trainable=trainable, on_host=on_host)
            if trainable:
                terms.partial += layout.numel * plan.grad.dtype.itemsize
        found.append(terms)
    return found
