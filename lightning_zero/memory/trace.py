"""The events of a step: which units run, which gradients arrive, and how many bytes are alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_zero.plan import UnitSpec


class Kind(Enum):
    """The kind of an event."""

    FORWARD = "forward"
    """A call of a unit's forward begins."""
    FORWARD_END = "end of forward"
    """The call has returned."""
    LOSS = "loss"
    """The backward pass begins."""
    BACKWARD = "backward"
    """The first gradient of a call's outputs has arrived."""
    BACKWARD_END = "end of backward"
    """All gradients of a call's inputs have arrived."""
    GRAD = "gradient"
    """A parameter's gradient has arrived."""
    END = "end"
    """The backward pass has ended."""


@dataclass(frozen=True)
class Event:
    """An event of a step: of a call of a unit, or of a parameter by its number in the module.

    Attributes:
        before: The most bytes of activations alive since the previous event, including the gradient
            that has arrived.
        now: Bytes of activations alive, but that gradient.
        flops: Floating-point operations of matrices since the previous event.
        away: Bytes of activations kept in the memory of an accelerator's host.
    """

    kind: Kind
    unit: str = ""
    call: int = -1
    parameter: int = -1
    before: int = 0
    now: int = 0
    flops: int = 0
    away: int = 0


def in_order(specs: Sequence[UnitSpec], numbers: dict[int, int]) -> Iterator[Event]:
    """Yield the events of a step that runs the units in the order of registration.

    The root's gradients come first: they are then held longest, so no other order holds more.
    ``numbers`` are the parameters' numbers in the module, by id.
    """
    *inner, root = specs

    def grads(spec: UnitSpec) -> Iterator[Event]:
        named = (pair for flat in spec.flat_parameters for pair in flat.named)
        trainable = (p for _, p in named if p.requires_grad)
        yield from (Event(Kind.GRAD, parameter=numbers[id(p)]) for p in trainable)

    for call, spec in enumerate(inner):
        yield Event(Kind.FORWARD, spec.name, call)
        yield Event(Kind.FORWARD_END, spec.name, call)
    yield Event(Kind.LOSS)
    yield from grads(root)
    ended: list[Event] = []
    for call, spec in reversed(list(enumerate(inner))):
        # A unit's outputs are the next one's inputs, and its hooks on them were registered first.
        yield Event(Kind.BACKWARD, spec.name, call)
        yield from ended
        yield from grads(spec)
        ended = [Event(Kind.BACKWARD_END, spec.name, call)]
    yield from ended
    yield Event(Kind.END)
