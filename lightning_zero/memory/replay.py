"""The engine itself, driven through the events of a dry run without data.

The engine shards a copy of the model on ``meta``, as one of many ranks; the others do not exist.
The modules compute nothing: each passes on one number through a chain of autograd nodes, in the
order in which the model's own backward reached them. So the engine's hooks run as in training, and
what it holds between two nodes is counted::

    forward     in -- END of call 0 -- grad -- grad -- BACKWARD of call 0 -- ... -- loss
    backward    the same from right to left

The alternative, the module's own step under the engine on fake tensors, was tried: each operation
costs a hundred microseconds of Python, in two or more steps per stage and number of ranks. A dry
run costs this once; 55 units with 99 billion parameters then take a third of a second here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_zero.comm import DryCommunicator
from lightning_zero.engine import Engine
from lightning_zero.memory.cluster import Timeline
from lightning_zero.memory.snapshots import Segment, Segments
from lightning_zero.memory.terms import Kinds
from lightning_zero.memory.trace import Event, Kind
from lightning_zero.plan import Settings
from lightning_zero.tensors import Storages

_NUM_PASSES = 2


def replay(
    events: Sequence[Event],
    module: nn.Module,
    settings: Settings,
    comm: DryCommunicator,
    *,
    num_microbatches: int,
    held: Callable[[], Kinds],
    timeline: Timeline,
) -> list[Segment]:
    """Return the segments of a step's last microbatch; afterwards the rank is at rest.

    ``events`` are those of one microbatch; ``module`` is a copy of the model on ``meta``, which is
    consumed; ``held`` returns the bytes held now, by kind, apart from activations. ``timeline``
    records the first and the last microbatch.
    """
    parameters = list(module.parameters())
    # Tensors on meta have no values to round.
    engine = Engine(module, replace(settings, stochastic_rounding=False), comm)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable or parameters, lr=0.0)
    engine.adopt(optimizer)
    units = {unit.name: unit.module for unit in engine.sharded.units}
    # The first step has no gradients and no order of units yet, so the second one is measured. Two
    # microbatches stand for more: each after the first finds what the one before has left.
    num_passes = min(num_microbatches, _NUM_PASSES)
    arrived = Storages()
    counts = any(event.before for event in events)  # otherwise there was no batch
    segments = Segments(lambda: _with_arrived(held(), arrived) if counts else held())
    for step in range(2):
        for number in range(num_passes):
            is_last = number == num_passes - 1
            is_watched = step == 1 and is_last
            timeline.next_microbatch()
            follow = functools.partial(_follow, segments if is_watched else None, timeline)
            calls = _Calls(events, units, parameters, follow, arrived)
            comm.watch(segments.note if is_watched else _ignore)
            loss = calls.run()
            if number == 0:
                optimizer.zero_grad()  # as the Trainer does
            with contextlib.nullcontext() if is_last else engine.no_sync():
                loss.backward()  # type: ignore[no-untyped-call]
        segments.note()
        comm.watch(_ignore)
        if step == 0:
            timeline.restart()
        else:
            timeline.end()
        optimizer.step()
    return segments.found


def _with_arrived(held: Kinds, arrived: Storages) -> Kinds:
    """Return what is held, with gradients that have arrived and are not moved yet."""
    return {**held, "activations": held["activations"] + arrived.nbytes}


def _follow(segments: Segments | None, timeline: Timeline, event: Event) -> None:
    timeline.compute(event.flops)
    if segments is not None:
        segments.follow(event)


def _ignore(*_: Any) -> None:
    return


class _Calls:
    """One microbatch: calls of the units' modules, around a chain of autograd nodes.

    The inputs and outputs of calls are numbers of the chain, on which the engine registers its
    hooks; they require gradients where the model's own did. ``follow`` is called with each event as
    it happens; ``arrived`` counts the gradients while they are alive.
    """

    def __init__(
        self,
        events: Sequence[Event],
        units: Mapping[str, nn.Module],
        parameters: Sequence[Parameter],
        follow: Callable[[Event], None],
        arrived: Storages,
    ) -> None:
        place = [event.kind for event in events].index(Kind.LOSS)
        self._forward = iter(events[: place + 1])
        self._backward = list(events[place:])
        self._is_placed = {(event.kind, event.call): False for event in self._backward}
        self._running: list[int] = []
        self._returned: set[int] = set()
        self._inputs: dict[int, Tensor] = {}
        self._x = torch.zeros((), device="meta", requires_grad=True)
        self._units = units
        self._parameters = parameters
        self._follow, self._arrived = follow, arrived
        for name, module in units.items():
            module.forward = self._run_unit if name else self._run_root

    def run(self) -> Tensor:
        """Run the forward of the microbatch; ``backward`` on its result runs the rest."""
        self._place()
        loss = self._units[""]()
        assert isinstance(loss, Tensor)
        return loss

    def _run_root(self) -> Tensor:
        loss = self._run_calls()
        while self._next.kind is not Kind.LOSS:
            self._place()
        self._follow(loss)
        return self._x

    def _run_calls(self) -> Event:
        """Run all calls within the current one; return the event that ends it."""
        event = next(self._forward)
        while event.kind is Kind.FORWARD:
            self._call(event)
            event = next(self._forward)
        return event

    def _call(self, begin: Event) -> None:
        """Run the call that the event ``begin`` begins."""
        call = begin.call
        while self._is_placed.get((Kind.BACKWARD_END, call)) is False:
            self._place()
        self._follow(begin)
        self._running.append(call)
        self._units[begin.unit](self._inputs.get(call, self._x.detach()))
        self._running.pop()
        self._returned.add(call)
        # A call may return the output of a call within it: one gradient begins both backwards.
        if any(self._is_placed.get((Kind.BACKWARD, outer)) for outer in self._running):
            return
        while self._next.kind is Kind.BACKWARD and self._next.call in self._returned:
            self._place()

    def _run_unit(self, _: Tensor) -> Tensor | None:
        begin = (Kind.BACKWARD, self._running[-1])
        has_grad = self._is_placed.get(begin) is False
        end = self._run_calls()
        while self._is_placed.get(begin) is False and begin != (self._next.kind, self._next.call):
            self._place()
        self._follow(end)
        return self._x if has_grad else None

    @property
    def _next(self) -> Event:
        """The event whose node comes next."""
        return self._backward[-1]

    def _place(self) -> None:
        """Append to the chain the node whose backward is the next event."""
        event = self._backward.pop()
        act, parameter = functools.partial(self._follow, event), None
        self._is_placed[event.kind, event.call] = True
        if event.kind is Kind.FORWARD_END:
            act = functools.partial(self._recompute, self._recomputed(event))
        elif event.kind is Kind.BACKWARD_END:
            self._inputs[event.call] = self._x
        elif event.kind is Kind.GRAD:
            parameter = self._parameters[event.parameter]
        self._x = _Mark.apply(self._x, act, parameter, self._arrived)  # type: ignore[no-untyped-call]

    def _recomputed(self, end: Event) -> list[Event]:
        """Pop the events of a forward that is recomputed in backward, up to its ``end``."""
        events = [end]
        while (events[-1].kind, events[-1].call) != (Kind.FORWARD, end.call):
            events.append(self._backward.pop())
        return events[::-1]

    def _recompute(self, events: list[Event]) -> None:
        begin, *rest = events
        self._forward = iter(rest)
        with torch.enable_grad():
            self._call(begin)


class _Mark(torch.autograd.Function):
    """An identity that calls ``act`` in backward and gives any ``parameter`` a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        act: Callable[[], None],
        parameter: Parameter | None,
        arrived: Storages,
    ) -> Tensor:
        ctx.act, ctx.arrived = act, arrived
        ctx.like = None if parameter is None else (parameter.shape, parameter.dtype)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.act()
        if ctx.like is None:
            return grads[0], None, None, None
        shape, dtype = ctx.like
        grad = torch.empty(shape, dtype=dtype, device="meta")
        ctx.arrived.add(grad)
        return grads[0], None, grad, None
