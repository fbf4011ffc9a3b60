"""Bytes that one rank holds of a model at rest: arithmetic on layouts and plans.

A model is a list of **terms**, one per unit, with the unit's bytes in each medium. They come from
the specs that an engine builds its buffers from; every number comes from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.nn import Parameter

from lightning_zero.comm import Codec
from lightning_zero.plan import Layout, Medium, Offload, Plan, UnitSpec
from lightning_zero.tensors import RING_BYTES

RESTING = ("weights", "gradients", "master", "states", "buffers")
PASSING = ("gathered", "unreduced", "activations")
KINDS = (*RESTING, *PASSING)
"""Kinds of bytes: those that a rank always holds, and those that come and go in a step.

``gathered`` are whole weights of units that rest sharded, ``unreduced`` gradients before and during
their reduction; ``docs/memory.md`` describes the others.
"""

HOST_KINDS = (*RESTING, "staging")
"""Kinds of bytes in host memory apart from the device's.

``staging`` is in transit: between the device and the host, or between files and a step.
"""

AWAY_ROWS = (
    *(f"host {kind}" for kind in ("weights", "gradients", "master", "states")),
    *(f"disk {kind}" for kind in ("weights", "master", "states")),
)
"""Kinds of bytes in host memory and in files, as ``ShardedModel.memory`` and tables name them."""

Kinds = dict[str, int]
StateOf = Callable[[Parameter, int], int]
"""Returns the optimizer state bytes of a number of elements of a parameter; 0 if it is frozen."""


class PieceTerms(NamedTuple):
    """A rank's piece of a parameter."""

    parameter: Parameter
    numel: int
    nbytes: int


@dataclass
class UnitTerms:
    """The bytes of one unit on one rank.

    Attributes:
        name: The unit's name; the root's is ``""``.
        resting: Bytes between steps, by medium and kind.
        gathered: Bytes of whole weights that are released after use.
        coded: Bytes of the encoded weights while they are gathered.
        partial: Bytes of whole gradients before their reduction.
        in_flight: Bytes of a reduction under way, without its result.
        shard: Bytes of the rank's reduced gradients.
        sends_shard: Whether these leave the device for its host.
        ring: Bytes of pinned memory by which weights come up that are read from files.
        lent: Bytes of fp32 masters, gradients and states while the unit is stepped, if they rest in
            bf16 with stochastic rounding.
        trainable: The ids of the trainable parameters.
        pieces: The rank's pieces of parameters that are offloaded, frozen ones included.
    """

    name: str
    resting: dict[Medium, Kinds] = field(
        default_factory=lambda: {medium: dict.fromkeys(RESTING, 0) for medium in Medium}
    )
    gathered: int = 0
    coded: int = 0
    partial: int = 0
    in_flight: int = 0
    shard: int = 0
    sends_shard: bool = False
    ring: int = 0
    lent: int = 0
    trainable: set[int] = field(default_factory=set)
    pieces: list[PieceTerms] = field(default_factory=list)

    def add(
        self, layout: Layout, plan: Plan, states: int, *, trainable: bool, on_host: bool
    ) -> None:
        """Count a group of flat parameters, and the bytes of this rank's optimizer ``states``.

        If the device is the host (``on_host``), files are memory-mapped and nothing is staged.
        """
        kinds = plan.resting_bytes(layout.numel, layout.world_size, trainable=trainable)
        for kind, count in (*kinds.items(), ("states", states)):
            self.resting[plan.media[kind]][kind] += count
        codes = layout.world_size * Codec(layout.shard_numel).nbytes
        if plan.reshards:
            self.gathered += layout.numel * plan.weight.dtype.itemsize
            self.coded += codes if plan.gather_bits else 0
        if trainable:
            partial = layout.numel * plan.grad.dtype.itemsize
            self.partial += partial
            self.in_flight += partial if plan.reduce_bits is None else 2 * codes
            self.shard += kinds["gradients"]
            self.sends_shard |= plan.media["gradients"] is not Medium.DEVICE
        if plan.master.medium is Medium.DEVICE or on_host:
            return
        if plan.master.medium is Medium.DISK:
            self.ring = RING_BYTES


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
    """Return the terms that units, not allocated yet, will have on a rank of a copy.

    ``on_host`` if the device to offload from is the host itself.
    """
    found = []
    for spec in specs:
        terms = UnitTerms(spec.name)
        for flat in spec.flat_parameters:
            plan, trainable = flat.plan, flat.trainable
            if offload is not None:
                plan = offload.of(plan, trainable=trainable, on_host=on_host)
            layout, itemsize = flat.layout(num_shards, num_copies), plan.master.dtype.itemsize
            states = 0
            pieces = layout.pieces(rank)
            for (_, parameter), (start, stop, _) in zip(flat.named, pieces, strict=True):
                numel = stop - start
                if plan.states is not Medium.DEVICE:
                    terms.pieces.append(PieceTerms(parameter, numel, numel * itemsize))
                states += state_of(parameter, numel)
                if plan.stochastic_rounding and trainable:
                    # Twice the elements have twice the states, but not twice the step count.
                    of_elements = state_of(parameter, 2 * numel) - state_of(parameter, numel)
                    terms.lent += 2 * (of_elements + 2 * numel * itemsize)
            terms.add(layout, plan, states, trainable=trainable, on_host=on_host)
            if trainable:
                terms.trainable |= {id(parameter) for _, parameter in flat.named}
        found.append(terms)
    return found
