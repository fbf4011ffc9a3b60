"""Memory that is lent again when nothing refers to it any more."""

from __future__ import annotations

import torch

from lightning_zero.parameters.streams import LentMemory

NBYTES = 2**16


def test_memory_is_lent_again_when_the_last_view_is_gone() -> None:
    memory = LentMemory()
    first = memory.lend(NBYTES).fill_(1)
    place, view, array = first.data_ptr(), first[8:16].view(torch.float32), first[:4].numpy()
    del first, view
    second = memory.lend(NBYTES).fill_(2)
    assert second.data_ptr() != place
    assert array.tolist() == [1] * 4
    del array
    assert memory.nbytes == NBYTES
    third = memory.lend(NBYTES // 2)
    assert third.data_ptr() == place
    assert memory.nbytes == 0


def test_memory_that_is_too_small_is_given_back() -> None:
    memory = LentMemory()
    memory.lend(NBYTES)
    assert memory.nbytes == NBYTES
    large = memory.lend(2 * NBYTES)
    assert (memory.nbytes, large.nbytes) == (0, 2 * NBYTES)
    del large
    assert memory.nbytes == 2 * NBYTES
    last = memory.lend(NBYTES)
    memory.close()
    del last
    assert memory.nbytes == 0
