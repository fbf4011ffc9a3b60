"""What every wire does, and what travels on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero.buffer import lasting_tensors
from lightning_zero.meeting import Meetings
from lightning_zero.watch import Meeting, Watch
from lightning_zero.window import Window


class Work(Protocol):
    """Something on its way; ``wait`` may be called once or never."""

    def wait(self) -> Any:
        """Return when its result may be used on the current stream."""


class Arrived:
    """Nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class Pending:
    """Works on their way to a meeting, and what to do when they have arrived."""

    def __init__(
        self,
        watch: Watch,
        meeting: Meeting,
        works: Sequence[Work],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._watch = watch
        self._meeting = meeting
        self._works = works
        self._finish = finish

    def wait(self) -> None:
        """Return when all have arrived and what follows is done."""
        self._watch.wait(self._meeting, self._works)
        if self._finish is not None:
            self._finish()


class Shared(NamedTuple):
    """This rank's master shard and, where peers can be read, everybody's."""

    own: Tensor
    everybodys: list[Tensor] | None = None

    def sharded(self, world_size: int, rank: int) -> Shared:
        """The shards in what was shared whole: each rank's own part of its own."""
        shards = None
        if self.everybodys is not None:
            shards = [whole.view(world_size, -1)[r] for r, whole in enumerate(self.everybodys)]
        return Shared(self.own.view(world_size, -1)[rank], shards)


class ReduceBuffer(NamedTuple):
    """A unit's unreduced gradients, ``[world_size * n]``; in a window if peers read it."""

    tensor: Tensor
    window: Window | None = None


class Wire(ABC):
    """One way to gather weights and to reduce gradients.

    1. :meth:`share` once for every master, a collective.
    2. :meth:`gather` for a unit's weights.
    3. :meth:`reduce_buffer` to write a unit's gradients to, then :meth:`reduce`, which takes the
       buffer back.
    4. :meth:`release_scratch` when a backward pass is over, :meth:`drop_outgrown` between steps,
       :meth:`release` at the end.

    What a message needs is allocated before the watch is told that it begins: a rank without memory
    must fail before the others send theirs.

    Args:
        meetings: The ranks' channel for decisions.
        device: Where weights and gradients are.
    """

    reads_peers: ClassVar[bool] = False
    """Whether ranks read each other's memory, so that a gather needs nobody to take part."""
    has_tags: ClassVar[bool] = True
    """Whether a unit's messages are told from another's by more than their order."""

    def __init__(self, meetings: Meetings, device: torch.device) -> None:
        self.rank, self.world_size = meetings.rank, meetings.world_size
        self.meetings = meetings
        self.watch = meetings.watch
        self.device = device

    @abstractmethod
    def gather(self, whole: Tensor, shard: Shared, *, unit: str, tag: int) -> Work:
        """Start to fill ``whole`` (``[world_size * n]``) from every rank's ``shard`` (``[n]``)."""

    @abstractmethod
    def reduce(self, partial: ReduceBuffer, out: Tensor, *, unit: str, tag: int) -> Work:
        """Start to write the sum of all ranks' summands of this rank's shard to ``out``."""

    def share(self, numel: int, dtype: torch.dtype) -> Shared:
        """Memory for a master."""
        return Shared(self._lasting(numel, dtype))

    def reduce_buffer(self, numel: int, dtype: torch.dtype) -> ReduceBuffer:
        """Memory for a unit's gradients before their reduction; its content is undefined."""
        return ReduceBuffer(self._lasting(numel, dtype))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of receive and reduce buffers, in use or kept for reuse."""
        return 0

    def release_scratch(self) -> None:
        """Free the receive buffers that a backward pass reused."""
        return

    def drop_outgrown(self) -> None:
        """Free reduce buffers that a larger unit outgrew; when all ranks have read them."""
        return

    def release(self) -> None:
        """Let go of all reduce buffers."""
        return

    def _lasting(self, numel: int, dtype: torch.dtype) -> Tensor:
        with lasting_tensors():
            return torch.empty(numel, dtype=dtype, device=self.device)


def weights_of(unit: str) -> str:
    """The name of the meeting in which a unit's weights are gathered."""
    return f"the weights of {unit}"


def gradients_of(unit: str) -> str:
    """The name of the meeting in which a unit's gradients are reduced."""
    return f"the gradients of {unit}"


def sum_into(out: Tensor, summands: list[Tensor]) -> None:
    """Write the sum to ``out``, added up in the order of the list; none wants a gradient."""
    first, *rest = summands
    if rest and first.dtype == out.dtype:
        torch.add(first, rest.pop(0), out=out)
    else:
        out.copy_(first)
    for summand in rest:
        out.add_(summand)


def copy(out: Tensor, source: Tensor) -> None:
    """Write ``source`` to ``out``, which may have another dtype, unless it lies there already.

    Neither wants a gradient. To turn gradients off would cost more than the copy of a small unit.
    """
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)
