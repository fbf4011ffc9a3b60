"""Host memory beside a device: of what size it is, and when it comes again."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from lightning_zero.comm import Pending
from lightning_zero.tensors import NUM_BUFFERS, HostCopies, Work
from tests.oracle.device import beside_the_host

CPU = torch.device("cpu")


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
    other = copies.recurring_memory(12, torch.bfloat16)
    assert other.data_ptr() == place
    storage = other.untyped_storage()
    del other
    assert copies.recurring_memory(6, torch.float32).data_ptr() != place
    del storage
    assert copies.recurring_memory(0, torch.float32).numel() == 0


def test_memory_that_a_copy_fills_does_not_recur() -> None:
    with beside_the_host():
        copies = HostCopies(CPU)
        out = copies.recurring_memory(4, torch.float32)
        place, end = out.data_ptr(), copies.down(out, torch.ones(4), group=0)
        del out
        assert copies.recurring_memory(4, torch.float32).data_ptr() != place
        end.synchronize()
        assert copies.recurring_memory(4, torch.float32).data_ptr() == place
        copies.close()


def test_sources_of_two_groups_are_kept_and_no_more() -> None:
    with beside_the_host() as device:
        copies = HostCopies(CPU)
        sources = [torch.full((4,), float(number)) for number in range(6)]
        alive = [weakref.ref(source.untyped_storage()) for source in sources]
        landed = [copies.lasting_memory(4, torch.float32) for _ in sources]
        for number, out in enumerate(landed):
            # Units of two tensors each.
            copies.down(out, sources.pop(0), group=number // 2)
            kept = [place for place, storage in enumerate(alive) if storage() is not None]
            first = max(0, 2 * (number // 2 - 1))
            assert kept == list(range(first, 6)), number
        # None but the first two had to be waited for, and by the device.
        assert not device.waits
        ends = [device.memory_of(out)[0].in_use(device.computation.clock) for out in landed]
        assert [not late for late in ends] == [True] * 2 + [False] * 4
        copies.close()
        assert [out.tolist()[0] for out in landed] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_nothing_goes_up_behind_what_goes_down() -> None:
    with beside_the_host() as device:
        copies = HostCopies(CPU)
        below, other = (copies.lasting_memory(4, torch.float32) for _ in range(2))
        above = torch.zeros(4)
        end = copies.down(below, torch.ones(4), group="unit")
        copies.up(above, other, Pending).wait()
        assert device.overlapped("up", "down") == 1
        # But where it is the same that comes and goes.
        with pytest.raises(AssertionError, match=r"copy_.* reads what copy_.* not have written"):
            copies.up(above, below, Pending)
        copies.up(above, below, Pending, end).wait()
        assert above.tolist() == [1.0] * 4
        copies.close()


# ---------------------------------------------------------------------------- uploads from files


def started(copies: HostCopies, outs: list[Tensor], what: str = "a unit") -> Work:
    """Fill each part with the number of its place."""
    sources = [copies.lasting_memory(out.numel(), out.dtype) for out in outs]
    pairs = [
        (out, source.fill_(n)) for n, (out, source) in enumerate(zip(outs, sources, strict=True))
    ]
    return copies.up_from_files(what, pairs, Pending)


def test_parts_come_through_a_small_ring_that_the_host_never_waits_for() -> None:
    with beside_the_host() as device:
        copies = HostCopies(CPU)
        outs = [torch.empty(3) for _ in range(3 * NUM_BUFFERS)]
        other = torch.empty(2, dtype=torch.int64)
        works = [started(copies, outs), started(copies, [other])]
        device.restart()
        works[1].wait()  # also sends what comes before
        works[0].wait()
        assert [out.tolist() for out in outs] == [[n] * 3 for n in range(len(outs))]
        assert device.waits == {}
        assert device.crossed == {"up": 12 * len(outs) + 16}
        copies.close()


def test_an_upload_that_fails_gives_back_the_ring() -> None:
    with beside_the_host():
        copies, nothing = HostCopies(CPU), torch.empty(3, device="meta")
        other, out = torch.zeros(3), torch.zeros(3)
        for _ in range(2 * NUM_BUFFERS):
            work = copies.up_from_files("Reading net", [(out, nothing), (out, nothing)], Pending)
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match="Reading net failed: Cannot copy out of meta"
                ):
                    work.wait()
            started(copies, [out])
            copies.abandon()
        started(copies, [other, out]).wait()
        assert out.tolist() == [1.0] * 3
        copies.close()
