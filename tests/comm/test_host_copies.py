"""Host memory beside a device: of what size it is, and when it comes again."""

from __future__ import annotations

import torch

from lightning_zero.comm.dry import DryHostCopies
from lightning_zero.comm.host_copies import HostCopies, pinned_bytes
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


def test_what_waits_in_torchs_pinned_memory_is_rounded_up() -> None:
    assert [pinned_bytes(n, CUDA) for n in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    for device, expected in ((CUDA, 8192), (CPU, 4097)):
        copies = DryHostCopies(device)
        held = copies.storage_down(torch.empty(4097, dtype=torch.uint8))
        assert copies.passing == expected == held.nbytes
