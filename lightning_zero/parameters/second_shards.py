"""A second copy of weights for the backward pass, sharded over fewer ranks than their masters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_zero.comm import Communicator, Scratch, Shared, Work
from lightning_zero.parameters.stores import HostStore, Store, extent_of
from lightning_zero.plan import Layout, Medium, Plan


class SecondShards(Store):
    """A store that keeps a part of the whole weights after a forward, for the gathers that follow.

    Together the ranks of a group (the mesh's ``backward`` axis) keep the whole, in the weights' own
    dtype, so that a gather in the group restores every bit. The parts date from the last gather
    from all ranks, and are used only if no rank can have changed the masters since: changes take
    exclusive access, which all ranks take together, so all choose the same gather. A backward pass
    thus sees edits, optimizer steps and loads that happen within its step.
    """

    keeps_weights: ClassVar[bool] = True

    @override
    def _rest(self, shared: Shared) -> None:
        super()._rest(shared)
        self._second: Tensor | None = None
        # The communicator's `num_changes` when the weights were last gathered from all ranks.
        self._as_of = -1
        self._fetch_from_all: Callable[..., Work] = self.fetch_weights
        self.fetch_weights = self._fetch

    def _fetch(self, out: Tensor, *, unit: str, tag: int) -> Work:
        if self._second is not None and self._is_current:
            group = self.comm.transports["backward"]
            return group.gather(out, Shared(self._second), unit=unit, tag=tag)
        self._second = None
        self._as_of = self.comm.num_changes
        return self._fetch_from_all(out, unit=unit, tag=tag)

    @property
    def _is_current(self) -> bool:
        return self._as_of == self.comm.num_changes

    @override
    def keep(self, whole: Tensor) -> None:
        axis = self.comm.mesh.backward
        assert axis is not None
        if self._second is None and self._is_current:
            part = whole.view(axis.size, -1)[axis.rank]
            buffer = self.comm.transport.passing_buffer(part.numel(), part.dtype, "gathered")
            self._second = buffer.copy_(part)

    @override
    def forget(self) -> None:
        self._second = None


def store_for(
    layout: Layout,
    plan: Plan,
    comm: Communicator,
    scratch: Scratch | None = None,
    num_away: int | None = None,
    shared: Iterator[Shared] | None = None,
) -> Store:
    """Return the store that a plan and the division of the ranks call for.

    With offload to a device's host, ``num_away`` elements of the shard are offloaded, by default
    all; ``Settings`` rules out second shards there. Without, ``shared`` yields the memory for the
    masters next, if given.
    """
    if plan.grad.medium is Medium.HOST:
        return HostStore(layout, plan, comm, scratch, num_away)
    has_second = plan.gives_weights_back and comm.mesh.backward is not None
    return (SecondShards if has_second else Store)(layout, plan, comm, scratch, shared)


def shared_masters(
    layouts: Iterable[tuple[Layout, Plan]], comm: Communicator, scratch: Scratch | None = None
) -> Generator[Shared, None, None]:
    """Yield memory for the masters of several stores, in the order in which stores are made."""
    return comm.transport.share(
        extent_of(layout, plan, scratch)
        for layout, plan in layouts
        if plan.grad.medium is not Medium.HOST
    )
