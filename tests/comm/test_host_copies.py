"""Host memory beside a device: of what size it is, and when it comes again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lightning_zero.comm import DryHostCopies, HostCopies
from lightning_zero.comm.host_copies import pinned_bytes
from lightning_zero.tensors import LentMemory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_memory_recurs_when_nobody_holds_it() -> None:
    copies = HostCopies(CPU)
    first = copies.recurring_memory(6, torch.float32)
    place, view = first.data_ptr(), first[2:].data.numpy()
    assert first.untyped_storage().nbytes() == 24
    del first
    other = copies.recurring_memory(6, torch.float32)
    assert other.data_ptr() != place
    view[:] = 1
    other.zero_()
    assert view.all()
    del view
    assert copies.recurring_memory(4, torch.float32).data_ptr() != place
    assert copies.recurring_memory(12, torch.bfloat16).data_ptr() == place
    assert copies.recurring_memory(0, torch.float32).numel() == 0


def test_the_last_memory_is_kept_that_nobody_has() -> None:
    memory, make = LentMemory(most=2), HostCopies(CPU).lasting_memory
    for nbytes, kept in ((64, 64), (128, 192), (32, 160)):
        memory.lend(nbytes, torch.uint8, make)  # nobody holds it
        assert memory.nbytes == kept
    held = memory.lend(32, torch.float32, make)
    assert memory.nbytes == 32
    memory.close()
    del held
    assert memory.nbytes == 0


@pytest.mark.parametrize("look", [0, 1, 2])
def test_memory_is_lent_while_other_threads_drop_theirs(look: int) -> None:
    held = dict[int, Tensor]()

    class Seen(Tensor):
        @property
        def nbytes(self) -> int:
            if next(looks) == look:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(held.clear).result()
            return self.numel()

    def make(numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype).as_subclass(Seen)

    memory, looks = LentMemory(most=3), itertools.count(3)
    sizes = 16, 32, 48, 64
    held.update((size, memory.lend(size, torch.uint8, make)) for size in sizes)
    for size in sizes[:3]:
        del held[size]
    looks = itertools.count()
    mine = [memory.lend(48, torch.uint8, make) for _ in range(2)]
    assert not held
    assert mine[0].data_ptr() != mine[1].data_ptr()
    held[0], looks = memory.lend(80, torch.uint8, make), itertools.count()
    del mine
    assert 0 < memory.nbytes <= 3 * 80
    assert not held


class End:
    """The end of a copy, which may be asked for by another thread meanwhile."""

    def __init__(self, *, has_come: bool, ask: Callable[[], object] | None = None) -> None:
        self._has_come, self._ask = has_come, ask

    def query(self) -> bool:
        ask, self._ask = self._ask, None
        if ask is not None:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(ask).result()
        return self._has_come


def test_what_has_not_arrived_is_held_though_two_threads_look() -> None:
    copies = HostCopies(CPU)
    late = torch.empty(4)
    ends = End(has_come=True, ask=copies._let_go), End(has_come=False)
    copies._held.extend((end, late.untyped_storage()) for end in ends)  # type: ignore[misc]
    copies._let_go()
    assert [end for end, _ in copies._held] == [ends[1]]


def test_what_waits_in_torchs_pinned_memory_is_rounded_up() -> None:
    assert [pinned_bytes(n, CUDA) for n in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    for device, expected in ((CUDA, 8192), (CPU, 4097)):
        copies = DryHostCopies(device)
        held = copies.storage_down(torch.empty(4097, dtype=torch.uint8))
        assert copies.passing == expected == held.nbytes
