"""``lightning-zero estimate --cluster``: step times for the arguments a user may choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from lightning_zero.memory import (
    Cluster,
    ModelPlan,
    Played,
    Timeline,
    format_bytes,
    format_ranks,
    play,
)
from lightning_zero.plan import Settings

_BITS: tuple[dict[str, int], ...] = (
    {},
    {"reduce_bits": 8},
    {"gather_bits": 8},
    {"gather_bits": 8, "reduce_bits": 8},
)

_NOTES = """\
waits: time in which a rank waits for messages and computes nothing.
hidden: the share of the time of all messages that overlaps with computation.
sent: by a rank in collectives that span nodes. *: more than --device-memory.
Only matrix products and convolutions count as computation; casts and 8-bit codes take no time."""


class Choice(NamedTuple):
    """A stage with arguments, and how long a step takes with them.

    Attributes:
        stage: As in the strategy.
        settings: The arguments of the strategy that were varied.
        played: The times.
        leaving: Bytes that a rank sends in collectives that span nodes.
        peak: The most bytes that a rank holds.
        fits: Whether the peak fits a device.
    """

    stage: int
    settings: dict[str, int]
    played: Played
    leaving: int
    peak: int
    fits: bool

    @property
    def name(self) -> str:
        """The strategy with its arguments."""
        return ", ".join([f"zero{self.stage}", *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def hidden(self) -> float:
        """The share of the messages' time that overlaps with computation."""
        sending = sum(self.played.sending.values())
        return 1 - min(1.0, sum(self.played.waiting.values()) / sending) if sending else 1.0


def times(
    model: ModelPlan,
    cluster: Cluster,
    device_memory: int | None = None,
    stages: Sequence[int] | None = None,
    num_microbatches: int = 1,
) -> list[Choice]:
    """Return the choices on a cluster: those that fit first, then by the time of a step.

    Settings that the model's run has chosen are not varied, and choices that contradict them are
    left out.

    Raises:
        ValueError: The model's computation is not known, or no choice is left.
    """
    if not (model.has_units and model.has_activations):
        raise ValueError(
            "--cluster counts what a rank computes. Pass a model, and one rank's batch as --batch."
        )
    model.events(is_cast=True)  # which raises if the model does not run
    found, refused = [], None
    for stage, varied in _varied(cluster, stages or (1, 2, 3)):
        if any(getattr(model.settings, name) != getattr(Settings, name) for name in varied):
            continue
        timeline = Timeline()
        try:
            snapshots = model.snapshots(
                stage,
                cluster.world_size,
                timeline=timeline,
                num_microbatches=num_microbatches,
                ranks_on_node=cluster.ranks_per_node,
                **varied,
            )
        except ValueError as error:
            refused = refused or error
            continue
        played = play(timeline, cluster, num_microbatches)
        leaving = sum(
            count for axis, count in played.sent.items() if cluster.leaves_node(timeline.axes[axis])
        )
        peak = max(snapshot.total for snapshot in snapshots)
        fits = device_memory is None or peak <= device_memory
        found.append(Choice(stage, varied, played, leaving, peak, fits))
    if refused is not None and not found:
        raise refused
    return sorted(found, key=lambda choice: (not choice.fits, choice.played.total))


def _varied(cluster: Cluster, stages: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the choices of stages, of groups within a node and of numbers of bits."""
    for stage, bits in product(stages, _BITS):
        if stage not in (1, 2, 3):
            raise ValueError(f"--cluster predicts stages 1, 2 and 3, got {stage}.")
        if "gather_bits" in bits and stage < 3:
            continue
        yield stage, bits
        if cluster.num_nodes > 1:
            yield stage, {"shard": cluster.ranks_per_node, **bits}


def times_table(found: Sequence[Choice], cluster: Cluster) -> str:
    """Return a table of the choices."""
    width = max(len(choice.name) for choice in found)
    head = f"{'':{width}}  {'step':>10}  {'computes':>10}  {'waits':>10}  hidden  {'sent':>8}  peak"
    lines = [f"On {format_ranks(cluster.world_size)}, best choice first:", head]
    for choice in found:
        played = choice.played
        cells = [
            f"{1000 * seconds:>7.4g} ms"
            for seconds in (played.total, played.compute, sum(played.waiting.values()))
        ]
        lines.append(
            f"{choice.name:{width}}  {'  '.join(cells)}  {choice.hidden:>6.0%}"
            f"  {format_bytes(choice.leaving):>8}"
            f"  {format_bytes(choice.peak)}{'' if choice.fits else ' *'}"
        )
    return "\n".join([*lines, "", _NOTES])
