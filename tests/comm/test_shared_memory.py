"""The three ways of the wires give the same bits, and windows keep their promises."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_zero.comm import (
    Communicator,
    Control,
    SyncPoint,
    shared_memory,
)
from lightning_zero.comm.shared_memory import Window
from lightning_zero.engine import Engine
from lightning_zero.parameters import FlatParameters
from lightning_zero.plan import Settings
from tests.oracle.ranks import Pools, RankError

CPU = torch.device("cpu")


def _num_files() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            count += "memfd" in os.readlink(f"/proc/self/fd/{number}")
    return count


def _setup(num_units: int) -> tuple[int, list[int]]:
    """Exchanges at setup; open files when each window is made, and behind setup."""
    found: list[int] = []
    create, exchange = Window.create, Control.gather_objects

    def counted(*words: Any) -> Window:
        found.append(_num_files())
        return create(*words)

    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(num_units)])
    with (
        mock.patch.object(shared_memory, "WINDOWS_AT_ONCE", 4),
        mock.patch.object(Window, "create", counted),
        mock.patch.object(Control, "gather_objects", autospec=True, side_effect=exchange) as calls,
    ):
        engine = Engine(model, Settings(3, units=(torch.nn.Linear,)))
    found.append(_num_files())
    engine.close()
    return calls.call_count, [number - found[0] for number in found]


def test_few_files_are_open_at_once_and_few_messages_say_where(ranks: Pools) -> None:
    for calls, found in ranks(2).run(_setup, 30):
        assert len(found) >= 32
        assert max(found) <= 4
        assert found[-1] == 0
        assert calls < 20


class _Scaled(torch.nn.Module):
    """A module whose own weight is made of another unit's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)
        self.scale = torch.nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(self.inner.weight.ne(0).float().mean())


def _share_that_was_there(late: int) -> float:
    """The share of another unit's weights that its peers saw when they were read at setup."""
    take_over = FlatParameters.take_over

    def slow(self: FlatParameters, *words: Any) -> None:
        time.sleep(0.1)
        take_over(self, *words)

    with torch.device("meta"):
        model = _Scaled()
    is_late = int(os.environ["RANK"]) == late
    with mock.patch.object(FlatParameters, "take_over", slow if is_late else take_over):
        engine = Engine(model, Settings(3, units=(torch.nn.Linear,)))
    engine.close()
    return model.scale.item()


def test_weights_are_read_at_setup_when_all_ranks_have_written_them(ranks: Pools) -> None:
    assert ranks(2).run(_share_that_was_there, 1) == [1.0, 1.0]


def _reduce_without_reader() -> tuple[int, int, int]:
    """Rank 0 publishes three buffers before rank 1 reads the first."""
    comm = Communicator(CPU)
    outs, works, buffers = [], [], []
    for unit in range(3):
        buffer = comm.transport.reduce_buffer(128, torch.float32)
        buffer.tensor.fill_(float(comm.control.rank + unit))
        out = torch.empty(64)
        works.append(comm.transport.reduce(out, buffer, unit=str(unit), tag=unit + 1))
        outs.append(out)
        buffers.append(buffer)
    different = len({id(buffer) for buffer in buffers})
    for work in works:
        work.wait()
    assert [out[0].item() for out in outs] == [1.0, 3.0, 5.0]
    comm.fence(SyncPoint.STEP)
    held = comm.transport.scratch_bytes
    again = comm.transport.reduce_buffer(128, torch.float32)
    comm.transport.reduce(torch.empty(64), again, unit="again", tag=9).wait()
    comm.fence(SyncPoint.STEP)
    comm.transport.release()
    return different, held, comm.transport.scratch_bytes


def test_a_buffer_is_reused_only_when_all_have_read_it(ranks: Pools) -> None:
    for different, held, after in ranks(2).run(_reduce_without_reader):
        assert different == 3
        assert held == 3 * 128 * 4
        assert after == 0


def _reduce_with_a_rank_that_has_ended() -> None:
    """Raise on both ranks, as the window of rank 0's peer is gone."""
    comm = Communicator(CPU)
    buffer = comm.transport.reduce_buffer(128, torch.float32)
    work = comm.transport.reduce(torch.empty(64), buffer, unit="a", tag=1)
    is_there = shared_memory._is_there if comm.control.rank else lambda *_: False
    with mock.patch.object(shared_memory, "_is_there", is_there):
        work.wait()
        comm.fence(SyncPoint.STEP)


def test_a_rank_that_ends_before_its_buffer_is_read_ends_all(ranks: Pools) -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(_reduce_with_a_rank_that_has_ended)
    told = "A connection between ranks has failed (No shared-memory window at "
    assert str(error.value).count(f"RuntimeError: {told}") == 2


def _blind_rank() -> bool:
    """Rank 1 cannot open the others' memory, as in another container."""
    hidden = mock.Mock(side_effect=RuntimeError("hidden"))
    is_blind = torch.distributed.get_rank() == 1
    with mock.patch.object(Window, "open", hidden) if is_blind else contextlib.nullcontext():
        return Communicator(CPU).transport.reads_peers


def test_one_rank_that_sees_no_windows_takes_them_from_all(ranks: Pools) -> None:
    assert ranks(3).run(_blind_rank) == [False] * 3


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in the user's own backward")


def _fail_and_train() -> list[int]:
    """The number of windows that are mapped after some steps, between failures and without."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    engine = Engine(model, Settings(2, units=(torch.nn.Linear,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine.adopt(optimizer)
    counts = []
    for _ in range(12):
        loss = model[3:](_Fails.apply(model[:3](torch.ones(2, 4)))).sum()
        with pytest.raises(ArithmeticError):
            loss.backward()
        engine.reset()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with open("/proc/self/maps") as maps:
            counts.append(sum("lightning_zero" in line for line in maps))
    engine.close()
    return counts


def test_windows_of_failed_steps_do_not_stay_mapped(ranks: Pools) -> None:
    for counts in ranks(2).run(_fail_and_train):
        assert max(counts[6:]) <= max(counts[:6]) + 2, counts  # a leak would add one each step
