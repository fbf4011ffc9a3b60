"""The predicted time of a step on a cluster: what a rank computes, sends and waits for.

The engine runs a step without data, as it does to predict memory (``replay``). Its computation
between the model's events, the messages it starts and the places where it waits for them form a
**timeline**, in the engine's own order and with its own prefetch; bytes come from its ledger.
Playing the timeline on a cluster advances two kinds of clocks: the rank's, which computes or waits,
and one per link, which carries one message at a time.

A collective in which each rank sends ``b`` bytes takes a latency plus ``b`` divided by the slower
of two rates: the rank's own within its node, and its group's share of the node's link. This models
a ring, which brings data into a node once; all groups that leave a node at the same time share its
link. Where every rank sends to every other (coded gradients, and on CPUs), all bytes for other
nodes cross the node's link.
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
64x8       nodes x ranks per node
400Gb/s    bandwidth from a node to the others, over all its links, in one direction
450GB/s    bandwidth from a rank to the others of its node
400TFLOPS  compute rate that a rank reaches in a step, about half of the peak
3TB/s      memory bandwidth of a device, for optimizer steps (default: they take no time)
20us       latency of a collective (default: none)
cpu        ranks are CPUs, which also copy their messages: no communication is hidden
Bandwidths are in bits (b) or bytes (B) and come in this order; other terms may be anywhere."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of ranks, and how fast they are.

    Attributes:
        num_nodes: Number of nodes.
        ranks_per_node: Ranks on each node.
        between: Bytes per second that a node sends to others.
        within: Bytes per second that a rank sends within its node.
        flops: Floating-point operations per second of a rank.
        memory: Bytes per second of a device's memory; ``None`` if the optimizer takes no time.
        latency: Seconds that each collective takes on top of its bytes.
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
        """Total number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Parse a description such as ``64x8, 400Gb/s, 450GB/s, 400TFLOPS``.

        Raises:
            ValueError: The text does not describe a cluster.
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
                raise ValueError(f"Expected a term of a cluster, got {term!r}:\n{TERMS}")
        if len(sizes) != 1 or len(rates) not in (2, 3) or "flops" not in rest:
            raise ValueError(
                "Expected nodes x ranks, two or three bandwidths and FLOPS, such as"
                f" '64x8, 400Gb/s, 450GB/s, 400TFLOPS', got {text!r}:\n{TERMS}"
            )
        if 0 in (*sizes[0], *rates, rest["flops"]):
            raise ValueError(f"Expected all numbers of a cluster to be above 0, got {text!r}.")
        between, within, *memory = rates
        return cls(*sizes[0], between, within, memory=memory[0] if memory else None, **rest)

    def leaves_node(self, axis: Axis) -> bool:
        """Return whether any group along an axis spans several nodes."""
        return any(len(self._counts(ranks)) > 1 for ranks in axis.groups)

    def _counts(self, ranks: Iterable[int]) -> Counter[int]:
        """Count the ranks on each node."""
        return Counter(rank // self.ranks_per_node for rank in ranks)

    def seconds(self, axis: Axis, nbytes: int, *, is_direct: bool = False) -> float:
        """Return how long a collective along an axis takes if each rank sends ``nbytes``.

        ``is_direct`` means that each rank sends every other rank its part.
        """
        if axis.size == 1:
            return 0.0
        # The fewest ranks of a group that share a node: the slowest group determines the time.
        together = min(min(self._counts(ranks).values()) for ranks in axis.groups)
        if is_direct or not self.hides:
            inside = nbytes * (together - 1) / (axis.size - 1)
            outside = (nbytes - inside) * self.ranks_per_node
        else:
            inside = nbytes if together > 1 else 0
            outside = nbytes * self.ranks_per_node / together if self.leaves_node(axis) else 0
        return self.latency + max(inside / self.within, outside / self.between)


class Step(NamedTuple):
    """One action of a rank.

    ``amount`` is floating-point operations, bytes that the rank sends or, for the optimizer, bytes
    that it reads and writes; ``message`` is the number of the message that begins or is awaited;
    ``is_direct`` tells whether each rank sends every other rank its part.
    """

    what: str
    amount: int = 0
    axis: str = ""
    message: int = -1
    is_direct: bool = False


@dataclass
class Timeline:
    """The actions of a rank from the start of one optimizer step to the next.

    Attributes:
        steps: The optimizer's, then those of each microbatch.
        bytes: Bytes sent in these microbatches, by axis and verb.
        optimizer_bytes: Bytes that the optimizer's step reads and writes.
        axes: The ranks along each axis, by its name.
        is_over: Whether the recording is complete.
    """

    steps: list[list[Step]] = field(default_factory=lambda: [[]])
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    optimizer_bytes: int = 0
    axes: dict[str, Axis] = field(default_factory=dict)
    is_over: bool = False
    _num_messages: int = 0

    def restart(self) -> None:
        """Forget what was recorded: an optimizer step begins."""
        self.steps = [[Step("optimize", self.optimizer_bytes)]]
        self.bytes.clear()

    def end(self) -> None:
        """Stop recording messages: any that follow belong to the next step."""
        self.is_over = True

    def next_microbatch(self) -> None:
        """Record what follows under a new microbatch."""
        self.steps.append([])

    def compute(self, flops: int) -> None:
        """Record computation."""
        if flops:
            self.steps[-1].append(Step("compute", flops))

    def begin(self, axis: str, verb: str, nbytes: int) -> Callable[[], None]:
        """Record that a message begins; return a function that records that it is awaited."""
        number = self._num_messages
        self._num_messages += 1
        if self.is_over:
            return lambda: None
        is_direct = verb == "trade"
        self.bytes[axis, "reduce" if is_direct else verb] += nbytes
        self.steps[-1].append(Step("begin", nbytes, axis, number, is_direct))
        return lambda: self.steps[-1].append(Step("await", message=number))


class Played(NamedTuple):
    """The times of a step, in seconds.

    Attributes:
        total: Time from one step to the next.
        compute: Time of computation, including the optimizer's.
        sending: Time of all messages, by axis.
        waiting: Time in which nothing is computed, by the axis of the awaited message.
        sent: Bytes of all messages, by axis.
    """

    total: float
    compute: float
    sending: dict[str, float]
    waiting: dict[str, float]
    sent: dict[str, int]


def play(timeline: Timeline, cluster: Cluster, num_microbatches: int = 1) -> Played:
    """Return how long a timeline takes on a cluster.

    Every microbatch but the last is taken to be like the first.
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
            # A second wait for the same message takes no time.
            axis, end = ends.pop(step.message, ("shard", 0.0))
            waiting[axis] += max(0.0, end - now)
            now = max(now, end)
        else:
            rate = cluster.flops if step.what == "compute" else cluster.memory
            seconds = step.amount / rate if rate else 0.0
            computed += seconds
            now += seconds
    return Played(now, computed, sending, waiting, sent)
