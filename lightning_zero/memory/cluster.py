"""The time of a step on a cluster, before there is one: what a rank does, and what it waits for.

The engine goes through a step without data, as for the memory of one (``replay``). What it computes
between two events of the model, which messages it starts and where it waits for them becomes a
**timeline**, in its own order and with its own prefetch; bytes are those of its ledger. Playing it
on a cluster moves two kinds of clocks: that of computation, which stands still where the engine
waits, and one for each link, over which one message follows the other.

A collective in which a rank sends ``b`` bytes takes a latency and ``b`` over the slower of two
rates: a rank's own within its node, and its group's share of the node's link. That is a ring, which
brings into a node what it needs once; all groups that leave a node at a time share its link. Where
every rank sends to every other (gradients in code, and CPUs), all of that passes the node's link.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_zero.comm import Axis
from lightning_zero.memory.size import parse_prefixed

TERMS = """\
64x8       nodes x ranks on each
400Gb/s    what a node sends to others, all its links together, in one direction
450GB/s    what a rank sends within its node
400TFLOPS  what a rank computes: the rate that a step reaches, about half of the peak
3TB/s      the memory of a rank's device, through which the optimizer steps (else in no time)
20us       the latency of a collective (else none)
cpu        the processors that compute copy messages too, so that nothing is hidden
Numbers of bits (b) or bytes (B); the rates come in this order, the other terms anywhere."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of ranks, and how fast they are.

    Attributes:
        num_nodes: Number of nodes.
        ranks_per_node: Ranks on each.
        between: Bytes a second that a node sends to others.
        within: Bytes a second that a rank sends within its node.
        flops: Floating-point operations a second of a rank.
        memory: Bytes a second of a device's memory; ``None`` if its time does not count.
        latency: Seconds that each collective takes beside its bytes.
        hides: Whether messages travel while a rank computes.
    """

    num_nodes: int
    ranks_per_node: int
    between: float
    within: float
    flops: float
    memory: float | None = None
    latency: float = 0.0
    hides: bool = True

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.num_nodes * self.ranks_per_node

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Return the cluster that a text such as ``64x8, 400Gb/s, 450GB/s, 400TFLOPS`` describes.

        Raises:
            ValueError: It describes none.
        """
        sizes: list[tuple[int, int]] = []
        rates: list[float] = []
        rest: dict[str, Any] = {}
        for term in (part.strip() for part in text.split(",")):
            if match := re.fullmatch(r"(\d+) ?x ?(\d+)", term):
                sizes.append((int(match[1]), int(match[2])))
            elif match := re.fullmatch(r"(.+?)(b|B)/s", term):
                rates.append(parse_prefixed(match[1]) / (8 if match[2] == "b" else 1))
            elif match := re.fullmatch(r"(.+?)FLOPS", term):
                rest["flops"] = parse_prefixed(match[1])
            elif match := re.fullmatch(r"([\d.]+) ?us", term):
                rest["latency"] = float(match[1]) / 1e6
            elif term == "cpu":
                rest["hides"] = False
            else:
                raise ValueError(f"Expected terms of a cluster, got {term!r}:\n{TERMS}")
        if len(sizes) != 1 or len(rates) not in (2, 3) or "flops" not in rest:
            raise ValueError(
                "Expected nodes x ranks, two or three rates and FLOPS, such as"
                f" '64x8, 400Gb/s, 450GB/s, 400TFLOPS', got {text!r}:\n{TERMS}"
            )
        if 0 in (*sizes[0], *rates, rest["flops"]):
            raise ValueError(f"Expected numbers above 0 of a cluster, got {text!r}.")
        between, within, *memory = rates
        return cls(*sizes[0], between, within, memory=memory[0] if memory else None, **rest)

    def leaves_node(self, axis: Axis) -> bool:
        """Return whether groups along an axis have ranks in several nodes."""
        return any(len(self._counts(ranks)) > 1 for ranks in axis.groups)

    def _counts(self, ranks: Iterable[int]) -> Counter[int]:
        """Return how many of the ranks each node has."""
        return Counter(rank // self.ranks_per_node for rank in ranks)

    def seconds(self, axis: Axis, nbytes: int, *, is_direct: bool = False) -> float:
        """Return how long a collective along an axis takes in which a rank sends ``nbytes``.

        ``is_direct`` if each rank sends each other its part.
        """
        if axis.size == 1:
            return 0.0
        # The ranks of a group that share a node: the fewest, as the slowest group is waited for.
        together = min(min(self._counts(ranks).values()) for ranks in axis.groups)
        if is_direct or not self.hides:
            inside = nbytes * (together - 1) / (axis.size - 1)
            outside = (nbytes - inside) * self.ranks_per_node
        else:
            inside = nbytes if together > 1 else 0
            outside = nbytes * self.ranks_per_node / together if self.leaves_node(axis) else 0
        return self.latency + max(inside / self.within, outside / self.between)


class Step(NamedTuple):
    """Something that a rank does, in its order.

    ``amount`` is floating-point operations, bytes that a rank sends or, of the optimizer, that it
    reads and writes; ``message`` the number of a message that begins or is awaited, ``is_direct``
    whether each rank sends each other its part.
    """

    what: str
    amount: int = 0
    axis: str = ""
    message: int = -1
    is_direct: bool = False


@dataclass
class Timeline:
    """The steps of a rank from the begin of one optimizer's step to the next.

    Attributes:
        steps: The optimizer's, then those of each microbatch.
        bytes: Sent in these microbatches, by axis and verb.
        optimizer_bytes: What the optimizer's step reads and writes.
        axes: The ranks along each axis, by its name.
        is_over: Whether all was noted.
    """

    steps: list[list[Step]] = field(default_factory=lambda: [[]])
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    optimizer_bytes: int = 0
    axes: dict[str, Axis] = field(default_factory=dict)
    is_over: bool = False
    _num_messages: int = 0

    def restart(self) -> None:
        """Forget what was noted: an optimizer's step begins."""
        self.steps = [[Step("optimize", self.optimizer_bytes)]]
        self.bytes.clear()

    def end(self) -> None:
        """Keep what was noted; what comes is the next step's."""
        self.is_over = True

    def next_microbatch(self) -> None:
        """Note what comes as another microbatch's."""
        self.steps.append([])

    def compute(self, flops: int) -> None:
        """Note computation."""
        if flops:
            self.steps[-1].append(Step("compute", flops))

    def begin(self, axis: str, verb: str, nbytes: int) -> Callable[[], None]:
        """Note that a message begins; the returned call notes that it is awaited."""
        number = self._num_messages
        self._num_messages += 1
        if self.is_over:
            return lambda: None
        is_direct = verb == "trade"
        self.bytes[axis, "reduce" if is_direct else verb] += nbytes
        self.steps[-1].append(Step("begin", nbytes, axis, number, is_direct))
        return lambda: self.steps[-1].append(Step("await", message=number))


class Played(NamedTuple):
    """The seconds of a step.

    Attributes:
        total: From one step to the next.
        compute: Of computation, with the optimizer's.
        sending: Of all messages, by axis.
        waiting: In which nothing is computed, by the axis of the message that is awaited.
        sent: Bytes of all messages, by axis.
    """

    total: float
    compute: float
    sending: dict[str, float]
    waiting: dict[str, float]
    sent: dict[str, int]


def play(timeline: Timeline, cluster: Cluster, num_microbatches: int = 1) -> Played:
    """Return how long a timeline takes on a cluster.

    Of several microbatches all but the last are as the first.
    """
    optimizer, first, last = timeline.steps[0], timeline.steps[1], timeline.steps[-1]
    axes = timeline.axes
    now = computed = 0.0
    free = {False: 0.0, True: 0.0}
    ends: dict[int, tuple[str, float]] = {}
    sending, waiting = dict.fromkeys(axes, 0.0), dict.fromkeys(axes, 0.0)
    sent = dict.fromkeys(axes, 0)
    for step in [*optimizer, *(num_microbatches - 1) * first, *last]:
        if step.what == "begin":
            seconds = cluster.seconds(axes[step.axis], step.amount, is_direct=step.is_direct)
            sending[step.axis] += seconds
            sent[step.axis] += step.amount
            link = cluster.leaves_node(axes[step.axis])
            begin = max(now, free[link]) if cluster.hides else now
            free[link] = begin + seconds
            ends[step.message] = step.axis, begin + seconds
            if not cluster.hides:
                waiting[step.axis] += seconds
                now += seconds
        elif step.what == "await":
            # Whoever waits again finds it there.
            axis, end = ends.pop(step.message, ("shard", 0.0))
            waiting[axis] += max(0.0, end - now)
            now = max(now, end)
        else:
            rate = cluster.flops if step.what == "compute" else cluster.memory
            seconds = step.amount / rate if rate else 0.0
            computed += seconds
            now += seconds
    return Played(now, computed, sending, waiting, sent)
