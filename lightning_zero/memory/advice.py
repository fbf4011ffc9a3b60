"""Which stage fits a device and its host, and what to change if none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.memory.model import ModelPlan
from lightning_zero.memory.prediction import Estimate, compare, estimate_of, named_offloads
from lightning_zero.memory.size import format_bytes, format_ranks

_MOST_RANKS = 2**14
_RANKS_OF_NODE = 8


@dataclass(frozen=True)
class Limits:
    """Limits of device and host memory.

    Attributes:
        device_memory: Bytes of one device.
        host_memory: Bytes of one node's host memory; ``None`` for no limit.
        ranks_per_node: Ranks that share a host; by default all, up to eight.
    """

    device_memory: int
    host_memory: int | None = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"Expected ranks per node >= 1, got {self.ranks_per_node}.")

    def on_node(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks share a host."""
        return min(world_size, self.ranks_per_node or _RANKS_OF_NODE)

    def admits(self, found: Estimate) -> bool:
        """Return whether a step of ``found`` fits the device and the host."""
        node = found.host_peak * self.on_node(found.world_size)
        is_on_host = self.host_memory is None or node <= self.host_memory
        return found.device_peak <= self.device_memory and is_on_host


def advise(
    model: ModelPlan, estimates: Sequence[Estimate], limits: Limits | int, **settings: Any
) -> str:
    """Return a paragraph per number of ranks: the least sharding that fits, or what would.

    ``limits`` may be the bytes of one device; ``settings`` are those of the estimates.
    """
    limits = Limits(limits) if isinstance(limits, int) else limits
    lines = []
    for world_size in dict.fromkeys(found.world_size for found in estimates):
        own = [e for e in estimates if e.world_size == world_size and e.offload is None]
        lines += _Case(model, world_size, limits, settings).advice(own)
    if not model.has_activations:
        lines.append("Activations are not counted: give a batch to count them too.")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Case:
    """A model on a number of ranks."""

    model: ModelPlan
    world_size: int
    limits: Limits
    settings: dict[str, Any]

    def advice(self, own: Sequence[Estimate]) -> list[str]:
        ranks = format_ranks(self.world_size)
        limit = format_bytes(self.limits.device_memory)
        fits = next((found for found in own if self.limits.admits(found)), None)
        if fits is not None:
            most = format_bytes(fits.device_peak)
            return [
                f"On {ranks}, {fits.name} fits: {most} at most, of {limit}.",
                *self._outside_of_steps(fits),
            ]
        if not own:
            return [f"On {ranks}:", *self._offloaded()]
        least = min(own, key=lambda found: found.device_peak)
        too_much = format_bytes(least.device_peak)
        if least.device_peak <= self.limits.device_memory:
            node = least.host_peak * self.limits.on_node(self.world_size)
            assert self.limits.host_memory is not None
            too_much = f"{format_bytes(node)} in its node's host memory"
            limit = format_bytes(self.limits.host_memory)
        cures = " ".join([*self._cures(), *self._offloaded()]) or "Use a larger device."
        return [f"On {ranks}, nothing fits: {least.name} holds {too_much} of {limit}. {cures}"]

    def _outside_of_steps(self, found: Estimate) -> list[str]:
        """Return warnings about host memory before setup and after ``fit``."""
        num, most = self.limits.on_node(self.world_size), self.limits.host_memory
        if most is None or num * found.whole <= most:
            return []
        return [
            f"Before setup {num} ranks build {format_bytes(found.whole)} each in host memory, of"
            f" {format_bytes(most)}, and hold it again after fit: build the model on meta in"
            " configure_model, and set restore_weights=False."
        ]

    def _cures(self) -> list[str]:
        cures = []
        now = estimate_of(self.model, 3, self.world_size, **self.settings)
        if self.model.has_activations and not self.model.microbatch.checkpointing:
            leaner = estimate_of(
                self.model.checkpointed(), 3, self.world_size, **self.settings
            ).device_peak
            if leaner < 0.95 * now.device_peak:
                cures.append(f"activation checkpointing brings zero3 to {format_bytes(leaner)}")
        if 2 * now.peak.kinds["activations"] > now.peak.total:
            cures.append("a smaller batch per rank helps most: activations are more than half")
        more = self._enough_ranks()
        if more is not None:
            cures.append(f"zero3 fits on {more} ranks")
        text = "; ".join(cures)
        return [f"{text[0].upper()}{text[1:]}."] if text else []

    def _offloaded(self) -> list[str]:
        """Return the least offload that would fit, if any does."""
        for one in named_offloads("cpu", "nvme"):
            if not one[1].runs_on(self.model.device):
                continue
            try:
                (found,) = compare(
                    self.model, (), [self.world_size], offloads=[one], **self.settings
                )
            except ValueError:
                continue  # a run refuses it with these settings or this optimizer
            if self.limits.admits(found):
                disk = sum(found.disk.values())
                files = f" and {format_bytes(disk)} in files" if disk else ""
                return [
                    f"{found.name} would fit: {format_bytes(found.device_peak)} at most, with"
                    f" {format_bytes(found.host_peak)} of host memory{files} per rank."
                ]
        return []

    def _enough_ranks(self) -> int | None:
        more = 2 * self.world_size
        while more <= _MOST_RANKS:
            if self.limits.admits(estimate_of(self.model, 3, more, **self.settings)):
                return more
            more *= 2
        return None
