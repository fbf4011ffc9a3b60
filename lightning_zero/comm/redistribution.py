"""Movement of buffers from one placement on a mesh to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from lightning_zero.comm.coded import Coded
from lightning_zero.comm.mesh import Verb
from lightning_zero.comm.transport import Arrived, ReduceBuffer, Shared, Transport, Work

Redistribute = Callable[..., Work]
"""A verb ``(out, source, *, unit, tag)`` that starts to fill ``out``. The source is a
``ReduceBuffer``, which is given up, if the first step is a reduction, else a ``Shared``."""

_Source = Shared | ReduceBuffer
_Steps = Sequence[tuple[Transport | Coded, Verb]]


def along(steps: _Steps) -> Redistribute:
    """Return the verb that takes all steps; for a single step, the transport's own."""
    if not steps:
        return _stay
    if len(steps) > 1:
        return partial(_Walk, steps)
    transport, verb = steps[0]
    return transport.reduce if verb is Verb.REDUCE else transport.gather


def _stay(out: Tensor, source: Shared, *, unit: str, tag: int) -> Work:
    """Do nothing: the buffer is in place already."""
    assert out is source.own
    return Arrived()


class _Walk:
    """Steps taken one after another: the first at once, the others when they are waited for."""

    def __init__(self, steps: _Steps, out: Tensor, source: _Source, *, unit: str, tag: int) -> None:
        self._works = _start(steps, out, source, unit, tag)
        self._first = next(self._works)

    def wait(self) -> None:
        """Wait until the last step has arrived."""
        self._first.wait()
        for work in self._works:
            work.wait()


def _start(steps: _Steps, out: Tensor, source: _Source, unit: str, tag: int) -> Iterator[Work]:
    """Yield the work of each step, which starts only when it is asked for."""
    value: Tensor = source[0]
    given: _Source | None = source
    for number, (transport, verb) in enumerate(steps):
        is_last = number + 1 == len(steps)
        if verb is Verb.GATHER:
            shard = given if isinstance(given, Shared) else Shared(value)
            target = out if is_last else value.new_empty(value.numel() * transport.size)
            yield transport.gather(target, shard, unit=unit, tag=tag)
        else:
            partial_sum = given
            if not isinstance(partial_sum, ReduceBuffer):
                partial_sum = transport.reduce_buffer(value.numel(), value.dtype)
                partial_sum.tensor.copy_(value)
            target = out if is_last else value.new_empty(value.numel() // transport.size)
            yield transport.reduce(target, partial_sum, unit=unit, tag=tag)
        value, given = target, None
