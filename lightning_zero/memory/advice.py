"""Which stage fits a device, and what to change if none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_zero.memory.prediction import Estimate, estimate_of
from lightning_zero.memory.size import format_bytes
from lightning_zero.memory.subject import Subject

_MOST_RANKS = 2**14


def advise(
    subject: Subject, estimates: Sequence[Estimate], device_memory: int, **settings: Any
) -> str:
    """One sentence for each number of ranks: the least sharding that fits, or what would.

    Args:
        subject: What was estimated.
        estimates: Several stages over one or more numbers of ranks.
        device_memory: Bytes of one device.
        settings: What the estimates were made with.
    """
    lines = []
    for world_size in dict.fromkeys(found.world_size for found in estimates):
        own = [found for found in estimates if found.world_size == world_size]
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        fits = next((found for found in own if found.peak.total <= device_memory), None)
        if fits is not None:
            lines.append(
                f"On {ranks}, {fits.name} fits: {format_bytes(fits.peak.total)} at most, of"
                f" {format_bytes(device_memory)}."
            )
        else:
            least = min(own, key=lambda found: found.peak.total)
            lines.append(
                f"On {ranks}, nothing fits: {least.name} holds {format_bytes(least.peak.total)} of"
                f" {format_bytes(device_memory)}. "
                + (_cures(subject, world_size, device_memory, settings) or "Use a larger device.")
            )
    if not subject.has_activations:
        lines.append("Activations are not counted: give a batch to count them too.")
    return "\n".join(lines)


def _cures(subject: Subject, world_size: int, device_memory: int, settings: dict[str, Any]) -> str:
    cures = []
    now = estimate_of(subject, 3, world_size, **settings)
    if subject.has_activations and not subject.checkpointing:
        leaner = estimate_of(subject.checkpointed(), 3, world_size, **settings)
        if leaner.peak.total < 0.95 * now.peak.total:
            cures.append(
                f"activation checkpointing brings zero3 to {format_bytes(leaner.peak.total)}"
            )
    if 2 * now.peak.kinds["activations"] > now.peak.total:
        cures.append("a smaller batch per rank helps most: activations are more than half")
    more = _enough_ranks(subject, world_size, device_memory, settings)
    if more is not None:
        cures.append(f"zero3 fits on {more} ranks")
    text = "; ".join(cures)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _enough_ranks(
    subject: Subject, world_size: int, device_memory: int, settings: dict[str, Any]
) -> int | None:
    more = 2 * world_size
    while more <= _MOST_RANKS:
        if estimate_of(subject, 3, more, **settings).peak.total <= device_memory:
            return more
        more *= 2
    return None
