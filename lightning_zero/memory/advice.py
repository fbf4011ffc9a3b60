"""Which stage fits a device and its host, and what to change if none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
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
            raise ValueError(f"Expected ranks_per_node >= 1, got {self.ranks_per_node}.")

    def on_node(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks share a host."""
        return min(world_size, self.ranks_per_node or _RANKS_OF_NODE)

    def admits(self, found: Estimate) -> bool:
        """Return whether a step of ``found`` fits the device and the host."""
        node = found.host_peak * self.on_node(found.world_size)
        is_on_host = self.host_memory is None or node <= self.host_memory
        return found.device_peak <= self.device_memory and is_on_host


def advise(
    model: ModelPlan,
    estimates: Sequence[Estimate],
    limits: Limits | int,
    *,
    write: Callable[[Estimate], str] | None = None,
    **settings: Any,
) -> str:
    """Return a paragraph per number of ranks: the least sharding that fits, or what would.

    ``limits`` may be the bytes of one device; ``settings`` are those of the estimates. ``write``
    returns a last line, for the first that fits.
    """
    limits = Limits(limits) if isinstance(limits, int) else limits
    lines: list[str] = []
    chosen: list[Estimate] = []
    for world_size in dict.fromkeys(found.world_size for found in estimates):
        own = [e for e in estimates if e.world_size == world_size and e.offload is None]
        case = _Case(model, world_size, limits, settings)
        lines += case.advice(own)
        chosen += filter(None, [next(filter(limits.admits, own), None) or case.with_offload])
    if not model.has_activations:
        lines.append("Activations are not counted. Pass a batch to count them too.")
    if write is not None and chosen:
        lines.append(write(chosen[0]))
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
                f"On {ranks}, {fits.name} fits: at most {most} of {limit}.",
                *self._outside_of_steps(fits),
            ]
        if not own:
            return [f"On {ranks}:", *self._offloaded()]
        least = min(own, key=lambda found: found.device_peak)
        too_much = f"{format_bytes(least.device_peak)}, but a device has {limit}"
        if least.device_peak <= self.limits.device_memory:
            node = least.host_peak * self.limits.on_node(self.world_size)
            assert self.limits.host_memory is not None
            limit = format_bytes(self.limits.host_memory)
            too_much = f"{format_bytes(node)} of host memory per node, but a node has {limit}"
        cures = " ".join([*self._cures(), *self._offloaded()]) or "Use a larger device."
        return [f"On {ranks}, nothing fits: {least.name} needs {too_much}. {cures}"]

    def _outside_of_steps(self, found: Estimate) -> list[str]:
        """Return warnings about host memory before setup and after ``fit``."""
        num, most = self.limits.on_node(self.world_size), self.limits.host_memory
        if most is None or num * found.whole <= most:
            return []
        return [
            f"Before setup and after fit, {num} ranks of a node hold {format_bytes(found.whole)} of"
            f" host memory each, but a node has {format_bytes(most)}. Build the model on meta in"
            " configure_model and set restore_weights=False."
        ]

    def _cures(self) -> list[str]:
        cures = []
        now = estimate_of(self.model, 3, self.world_size, **self.settings)
        if self.model.has_activations and not self.model.microbatch.checkpointing:
            leaner = estimate_of(
                self.model.checkpointed(), 3, self.world_size, **self.settings
            ).device_peak
            if leaner < 0.95 * now.device_peak:
                cures.append(f"Activation checkpointing lowers zero3 to {format_bytes(leaner)}.")
        if 2 * now.peak.kinds["activations"] > now.peak.total:
            cures.append(
                "A smaller batch per rank helps most: activations are more than half of the peak."
            )
        more = self._enough_ranks()
        if more is not None:
            cures.append(f"zero3 fits on {more} ranks.")
        return cures

    @cached_property
    def with_offload(self) -> Estimate | None:
        """The least offload that would fit, if any does."""
        return next(filter(self.limits.admits, self._with_offload()), None)

    def _offloaded(self) -> list[str]:
        """Return a line on the least offload that would fit, if any does."""
        found = self.with_offload
        if found is None:
            return []
        device, host, disk = found.device_peak, found.host_peak, sum(found.disk.values())
        files = f" and {format_bytes(disk)} in files" if disk else ""
        return [
            f"{found.name} would fit: at most {format_bytes(device)} per device, with"
            f" {format_bytes(host)} of host memory{files} per rank."
        ]

    def _with_offload(self) -> Iterator[Estimate]:
        """Yield the estimates for the offloads that a run allows."""
        for stage, offload in named_offloads("cpu", "nvme"):
            if offload.runs_on(self.model.device):
                with suppress(ValueError):  # not with these settings or this optimizer
                    yield from compare(
                        self.model,
                        (),
                        [self.world_size],
                        offloads=[(stage, offload)],
                        **self.settings,
                    )

    def _enough_ranks(self) -> int | None:
        more = 2 * self.world_size
        while more <= _MOST_RANKS:
            if self.limits.admits(estimate_of(self.model, 3, more, **self.settings)):
                return more
            more *= 2
        return None
