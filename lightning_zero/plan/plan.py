"""The meaning of a stage, a precision and an accumulation policy, as data.

Each kind of state has a **home**, where it rests between uses: a dtype, a device and a **medium**,
which is what holds its bytes. Three homes, and what a stage shards, are a **plan**. **Offload**
moves homes from the device to another medium: the memory of its host, or files that the host maps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch


class Stage(NamedTuple):
    """What a stage shards besides masters and optimizer states.

    Sharded weights are released after use. Sharded gradients are reduced in every microbatch,
    others in the last one.
    """

    weights: bool
    gradients: bool


STAGES = {1: Stage(False, False), 2: Stage(False, True), 3: Stage(True, True)}
"""Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
section 5."""


class Medium(Enum):
    """The memory that holds the bytes of a home."""

    DEVICE = "device"
    """Memory of the device that computes."""
    HOST = "cpu"
    """Pinned memory of the device's host."""
    DISK = "nvme"
    """Files."""


_PREFIXES = {Medium.DEVICE: "", Medium.HOST: "host ", Medium.DISK: "disk "}


@dataclass(frozen=True)
class Home:
    """The place where one kind of state rests between uses.

    ``device`` is the device of its tensors. Weights that rest elsewhere become whole there.
    """

    dtype: torch.dtype
    device: torch.device
    medium: Medium = Medium.DEVICE


@dataclass(frozen=True)
class Recipe:
    """A precision's dtypes for fp32 parameters; ``None`` is the parameter's own."""

    weight: torch.dtype | None = None
    reduce: torch.dtype | None = None
    autocast: torch.dtype | None = None
    loss_scaled: bool = False


RECIPES = {
    "64-true": Recipe(),
    "32-true": Recipe(),
    "bf16-true": Recipe(),
    "16-true": Recipe(),
    "bf16-mixed": Recipe(torch.bfloat16, torch.float32, torch.bfloat16),
    "16-mixed": Recipe(torch.float16, torch.float32, torch.float16, loss_scaled=True),
}
"""The ``*-true`` rows cast the module before it is sharded, so its own dtypes are right."""


@dataclass(frozen=True)
class Plan:
    """The three homes of the parameters that share a dtype.

    ``reshards`` is whether whole weights are released after use, ``reduces_every_microbatch``
    whether gradients are reduced in every microbatch, not only in the last. Whole weights come from
    masters in one of four ways:

    ================== ============= ===================== =========================================
    has_master         reshards      is_cast               whole weights
    ================== ============= ===================== =========================================
    no                 no            no                    are the masters, in one storage
    no                 yes           with ``gather_bits``  are gathered from them
    yes                no            in mixed precision    stay, and are gathered after each step
    yes                yes           in mixed precision    are cast and gathered before each use
    ================== ============= ===================== =========================================

    ``rests_apart`` is true in all rows but the first, ``keeps_cast_weights`` in the last if both
    rest on an accelerator's host.

    ``grad`` is the home of gradients between microbatches; they are reduced in its dtype. A reduced
    gradient has the master's dtype, because the optimizer reads it. ``states`` is the medium of
    optimizer states. ``gather_bits`` and ``reduce_bits`` are the bits per element of weights and
    gradients that are sent quantized. ``stochastic_rounding`` gives the optimizer fp32 copies of
    masters and states.
    """

    weight: Home
    grad: Home
    master: Home
    reshards: bool
    reduces_every_microbatch: bool
    states: Medium = Medium.DEVICE
    gather_bits: int | None = None
    reduce_bits: int | None = None
    stochastic_rounding: bool = False

    @cached_property
    def has_master(self) -> bool:
        """Return whether the master is a copy apart from the weight."""
        return (self.master.dtype, self.master.medium) != (self.weight.dtype, self.weight.medium)

    @cached_property
    def rests_apart(self) -> bool:
        """Return whether masters and whole weights lie in different storages."""
        return self.has_master or self.reshards

    @cached_property
    def is_cast(self) -> bool:
        """Return whether whole weights have less precision than their masters."""
        return self.weight.dtype is not self.master.dtype or self.gather_bits is not None

    @cached_property
    def rests_on_host(self) -> bool:
        """Return whether masters and gradients rest on the host of a device that computes."""
        return self.grad.medium is Medium.HOST

    @property
    def keeps_cast_weights(self) -> bool:
        """Return whether an accelerator's host holds sharded weights besides their masters.

        They are cast in host memory once per step, which halves the bytes of each upload.
        """
        in_memory = self.weight.medium is self.master.medium is Medium.HOST
        return in_memory and self.weight.dtype is not self.master.dtype

    @property
    def media(self) -> dict[str, Medium]:
        """The medium of each kind of resting bytes."""
        return {
            "weights": self.weight.medium,
            "gradients": self.grad.medium,
            "master": self.master.medium,
            "states": self.states,
        }

    def row(self, kind: str) -> str:
        """Return the name under which a kind of resting bytes is counted, with its medium."""
        return _PREFIXES[self.media.get(kind, Medium.DEVICE)] + kind

    @property
    def stays(self) -> bool:
        """Return whether masters and states rest on the device, whatever else is offloaded."""
        return self.states is self.master.medium is Medium.DEVICE

    def rows(self, kinds: Mapping[str, int]) -> Counter[str]:
        """Return bytes by name, from bytes by kind."""
        return Counter({self.row(kind): count for kind, count in kinds.items()})

    def resting_bytes(
        self, numel: int, world_size: int, *, trainable: bool = True
    ) -> dict[str, int]:
        """Return a rank's bytes between steps, by kind, for a padded buffer of ``numel`` elements.

        A sharded weight needs no copy beside its master on the same medium: it is cast as it is
        gathered, except from an accelerator's host. Gradients are counted as reduced; where
        that is only in the last microbatch, ``numel`` elements of ``grad.dtype`` rest before it.
        """
        shard = numel // world_size
        weight = shard if self.reshards else numel
        is_beside = self.has_master and self.master.medium is self.weight.medium
        comes_from_master = self.reshards and is_beside and not self.keeps_cast_weights
        return {
            "weights": 0 if comes_from_master else weight * self.weight.dtype.itemsize,
            "gradients": shard * self.master.dtype.itemsize if trainable else 0,
            "master": shard * self.master.dtype.itemsize if self.has_master else 0,
        }


@dataclass(frozen=True)
class Offload:
    """The kinds of state that are offloaded from the device.

    Attributes:
        optimizer: ``"cpu"`` or ``"nvme"`` for masters and optimizer states, ``None`` if they stay.
        weights: The same for sharded weights, and for the masters of frozen ones.
    """

    optimizer: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        for name in ("optimizer", "weights"):
            value = getattr(self, name)
            if value not in (None, "cpu", "nvme"):
                raise ValueError(f"Expected offload_{name}='cpu', 'nvme' or None, got {value!r}.")

    @classmethod
    def of_stage(cls, stage: int, medium: str) -> Offload:
        """Return the offload for ``zero2_offload``, ``zero3_offload`` or ``zero3_nvme``."""
        return cls(medium, medium if stage == 3 else None)

    def runs_on(self, device: torch.device) -> bool:
        """Return whether anything moves: from a CPU, which is the host itself, only to files."""
        return device.type != "cpu" or "nvme" in (self.optimizer, self.weights)

    def is_mapped(self, device: torch.device) -> bool:
        """Return whether ``device`` is the host itself, and maps the files as its own memory."""
        return device.type == "cpu" and self.runs_on(device)

    def of(self, plan: Plan, *, trainable: bool) -> Plan:
        """Return ``plan`` with other media.

        States rest with the masters, except that on the host itself sharded weights are gathered
        from the masters, which then rest on the weights' medium. Reduced gradients never rest in
        files: every microbatch adds to them, so they rest where the host reads them for a step.
        """
        on_host = self.is_mapped(plan.master.device)
        weights, states = Medium(self.weights or "device"), Medium(self.optimizer or "device")
        masters = states if trainable else weights
        is_away = masters is not Medium.DEVICE
        grad = Medium.HOST if is_away and not on_host else Medium.DEVICE
        device = torch.device("cpu") if is_away else plan.master.device
        medium = weights if on_host and plan.reshards else masters
        return replace(
            plan,
            weight=replace(plan.weight, medium=weights),
            grad=replace(plan.grad, medium=grad),
            master=replace(plan.master, medium=medium, device=device),
            # On the host itself frozen parameters have no states until they are trained.
            states=states if on_host else masters,
        )
