"""The meaning of a stage, a precision and an accumulation policy, as data.

Each kind of state has a **home**, where it rests between uses: a placement, a dtype and a device.
Three homes are a **plan**. A stage is a row of :data:`PLACEMENTS` (Rajbhandari et al., *ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models*, section 5):

    =====  ==========  ========  =======
    stage  weight      grad      master
    =====  ==========  ========  =======
    1      replicated  partial   sharded
    2      replicated  sharded   sharded
    3      sharded     sharded   sharded
    =====  ==========  ========  =======

Two moments follow from them, and they are all that differs between the stages: whole weights are
released after use if the weight's home is sharded, and gradients are reduced in every microbatch if
the grad's home is sharded (otherwise in the last one).

A home's **medium** is what holds its bytes. **Offload** gives homes another one than the device:
its host's memory, or files that the host maps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch


class Placement(Enum):
    """A buffer's distribution over the ranks."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    PARTIAL = "partial"
    """Every rank holds a summand of all of it."""
    SHARDED = "sharded"
    """Every rank holds its own equal part."""


PLACEMENTS = {
    1: (Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED),
    2: (Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    3: (Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}


class Medium(Enum):
    """The memory that holds the bytes of a home."""

    DEVICE = "device"
    """The memory of the device that computes."""
    HOST = "cpu"
    """Pinned memory of its host."""
    DISK = "nvme"
    """Files."""


_PREFIXES = {Medium.DEVICE: "", Medium.HOST: "host ", Medium.DISK: "disk "}


@dataclass(frozen=True)
class Home:
    """The place where one kind of state rests between uses.

    ``device`` is that of its tensors. Weights that rest elsewhere become whole there.
    """

    placement: Placement
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

    ``grad`` is the home of gradients between microbatches; its dtype is the one in which they are
    reduced. A reduced gradient has the master's dtype, because the optimizer reads it. ``states``
    is the medium of optimizer states, by default that of the masters. ``gather_bits`` and
    ``reduce_bits`` are those of an element of weights and of gradients on their way, if they travel
    in code, with ``error_feedback`` of what that loses of gradients. ``stochastic_rounding`` says
    that masters and states are lent to the optimizer in fp32.
    """

    weight: Home
    grad: Home
    master: Home
    states: Medium | None = None
    gather_bits: int | None = None
    reduce_bits: int | None = None
    error_feedback: bool = False
    stochastic_rounding: bool = False

    @property
    def gives_weights_back(self) -> bool:
        """Return whether whole weights are released after use."""
        return self.weight.placement is Placement.SHARDED

    @property
    def reduces_every_microbatch(self) -> bool:
        """Return whether gradients are reduced in every microbatch, not only in the last."""
        return self.grad.placement is Placement.SHARDED

    @property
    def has_master(self) -> bool:
        """Return whether the master is a second copy beside the weight."""
        return (self.master.dtype, self.master.medium) != (self.weight.dtype, self.weight.medium)

    @property
    def can_code_weights(self) -> bool:
        """Return whether weights are not the masters themselves, and so may be less precise."""
        is_apart = self.has_master or self.gives_weights_back
        return is_apart and self.weight.dtype.is_floating_point

    @property
    def are_copies(self) -> bool:
        """Return whether whole weights are copies of more precise masters."""
        return self.has_master or self.gather_bits is not None

    @property
    def copies_weights(self) -> bool:
        """Return whether weights rest in bytes of their own, and are not cast from the masters."""
        is_beside = self.master.medium is self.weight.medium
        return not (self.gives_weights_back and self.has_master and is_beside)

    @property
    def media(self) -> dict[str, Medium]:
        """The medium of each kind of resting bytes."""
        return {
            "weights": self.weight.medium,
            "gradients": self.grad.medium,
            "master": self.master.medium,
            "states": self.states or self.master.medium,
        }

    def row(self, kind: str) -> str:
        """Return the name by which resting bytes are counted; those away have their own."""
        return _PREFIXES[self.media.get(kind, Medium.DEVICE)] + kind

    def rows(self, kinds: Mapping[str, int], share_away: float = 1.0) -> Counter[str]:
        """Return bytes, given by kind, by name, if only a share rests where the plan says."""
        rows: Counter[str] = Counter()
        for kind, count in kinds.items():
            away = round(share_away * count)
            rows.update({self.row(kind): away})
            rows.update({kind: count - away})
        return rows

    def offloaded(self, *, optimizer: Medium, weights: Medium, on_host: bool = False) -> Plan:
        """Return the same plan with other media; ``on_host`` if the device is the host itself.

        States are where the masters are; but on the host itself sharded weights are gathered from
        the masters, which are then where the weights shall be. Reduced gradients are never in
        files: they are added to in every microbatch, so they rest where the host reads them for a
        step.
        """
        is_away = optimizer is not Medium.DEVICE
        grad = Medium.HOST if is_away and not on_host else Medium.DEVICE
        device = torch.device("cpu") if is_away else self.master.device
        master = weights if on_host and self.gives_weights_back else optimizer
        return replace(
            self,
            weight=replace(self.weight, medium=weights),
            grad=replace(self.grad, medium=grad),
            master=replace(self.master, medium=master, device=device),
            states=optimizer,
        )

    def resting_bytes(
        self, numel: int, world_size: int, *, trainable: bool = True
    ) -> dict[str, int]:
        """Return a rank's bytes between steps, by kind, for a padded buffer of ``numel`` elements.

        A sharded weight needs no copy beside its master on the same medium: it is cast as it is
        gathered. Gradients are counted as reduced; a ``PARTIAL`` home holds ``numel`` elements of
        ``grad.dtype`` between microbatches instead.
        """
        shard = numel // world_size
        weight = shard if self.gives_weights_back else numel
        return {
            "weights": weight * self.weight.dtype.itemsize if self.copies_weights else 0,
            "gradients": shard * self.master.dtype.itemsize if trainable else 0,
            "master": shard * self.master.dtype.itemsize if self.has_master else 0,
        }


@dataclass(frozen=True)
class Offload:
    """The homes that rest outside the device, and how much of them.

    Attributes:
        optimizer: ``"cpu"`` or ``"nvme"`` for masters and optimizer states, ``None`` if they stay.
        weights: The same for sharded weights, and for the masters of frozen ones.
        ratio: The share of that, above 0 and up to 1; the rest stays on the device.
    """

    optimizer: str | None = None
    weights: str | None = None
    ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("optimizer", "weights"):
            value = getattr(self, name)
            if value not in (None, "cpu", "nvme"):
                raise ValueError(f"Expected offload of {name} to 'cpu' or 'nvme', got {value!r}.")
        if self.optimizer is None and self.weights is None:
            raise ValueError("Expected offload of the optimizer, of the weights or of both.")
        is_number = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool)
        if not is_number or not 0 < self.ratio <= 1:
            raise ValueError(
                f"Expected offload_ratio above 0 and up to 1, got {self.ratio!r}. To offload"
                " nothing, leave offload_optimizer and offload_weights out."
            )
        if self.ratio != 1 and self.optimizer is None:
            raise ValueError(
                f"offload_ratio={self.ratio!r} lets the device step a share of what the host would,"
                " which has no meaning without offload_optimizer. Leave it out, or give"
                " offload_optimizer='cpu'."
            )

    @classmethod
    def of_stage(cls, stage: int, medium: str, *, ratio: float = 1.0) -> Offload:
        """Return the offload of ``zero2_offload``, ``zero3_offload`` and ``zero3_nvme``."""
        return cls(medium, medium if stage == 3 else None, ratio)

    def runs_on(self, device: torch.device) -> bool:
        """Return whether the engine does it on ``device``.

        If that is the host there are only files to move to, and nothing to step in the meantime.
        """
        media = {self.optimizer, self.weights} - {None}
        is_for_host = media == {"nvme"} and self.ratio == 1
        return len(media) == 1 and (device.type != "cpu" or is_for_host)

    def is_mapped(self, device: torch.device) -> bool:
        """Return whether ``device`` is the host itself, and so maps the files as its own memory."""
        return device.type == "cpu" and self.runs_on(device)

    def of(self, plan: Plan, *, trainable: bool, on_host: bool = False) -> Plan:
        """Return ``plan`` with other media, ``on_host`` if the device is the host itself."""
        weights = Medium(self.weights or "device")
        optimizer = Medium(self.optimizer or "device") if trainable else weights
        away = plan.offloaded(optimizer=optimizer, weights=weights, on_host=on_host)
        if on_host:
            # Frozen parameters have none, until they are trained.
            away = replace(away, states=Medium(self.optimizer or "device"))
        return away
