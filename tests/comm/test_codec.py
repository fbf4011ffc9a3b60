"""Numbers in 8 bits: what is lost, and what is not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_zero.comm import Codec, Shards
from tests.oracle.projects import communicator_by
from tests.oracle.ranks import Pools

NUMEL = 64 * 30


def _values(seed: int, numel: int = NUMEL) -> Tensor:
    """Numbers whose blocks of 64 differ by many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-12, 6, numel // 64).repeat_interleave(64)
    return torch.randn(numel, generator=generator) * size


def _back(codec: Codec, values: Tensor, noise: torch.Generator | None = None) -> Tensor:
    codes = torch.empty(values.numel() // max(codec.numel, 1) * codec.nbytes, dtype=torch.uint8)
    codec.encode(values, codes, noise)
    out = torch.full_like(values, 7.0)
    codec.decode(codes, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parts", [1, 3])
def test_an_element_is_off_by_half_a_step_of_its_block(parts: int, dtype: torch.dtype) -> None:
    values = _values(0).to(dtype)
    codec = Codec(NUMEL // parts)
    # A scale of four bytes for each block, and the integers.
    assert codec.nbytes == codec.numel + codec.numel // 64 * 4
    largest = values.float().view(-1, 64).abs().amax(-1, keepdim=True)
    off = (_back(codec, values).float() - values.float()).view(-1, 64).abs() / largest
    rounding = 2 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-6
    assert off.max() <= 0.5 / 127 + rounding
    assert off.max() > 0.4 / 127


def test_zeros_and_the_largest_survive_and_what_is_not_finite_is_seen() -> None:
    codec = Codec(192)
    values = torch.zeros(192)
    values[3], values[70], values[130] = -2.5, torch.inf, torch.nan
    out = _back(codec, values)
    assert out[3] == -2.5
    assert out[:64].count_nonzero() == 1
    assert not out[64:].isfinite().any()


def test_noise_leaves_the_mean_true() -> None:
    values = torch.linspace(-1, 1, 64)
    codec, noise = Codec(64), torch.Generator().manual_seed(0)
    num = 4000
    mean = torch.stack([_back(codec, values, noise) for _ in range(num)]).mean(0)
    step = 1 / 127
    assert (mean - values).abs().max() < 5 * 0.5 * step / num**0.5
    # To the nearest, each time alike, some would stay off by half a step.
    assert (_back(codec, values) - values).abs().max() > 0.4 * step


def _over_ranks(way: str) -> tuple[list[float], list[float], int, int]:
    """Return what a coded gather and reduction leave on this rank, and the bytes that it sent."""
    comm = communicator_by(way)
    before = torch.random.get_rng_state()
    coded = comm.coded(comm.transport, 8)
    rank, size = comm.mesh.shard.rank, comm.mesh.shard.size
    whole = torch.empty(size * NUMEL, dtype=torch.bfloat16)
    coded.gather(whole, Shards(_values(rank)), unit="w", tag=1).wait()
    partial_sum = comm.transport.reduce_buffer(size * NUMEL, torch.float32)
    partial_sum.tensor.copy_(_values(rank, size * NUMEL))
    out = torch.empty(NUMEL)
    work = coded.reduce(out, partial_sum, unit="g", tag=2)
    work.wait()
    if way == "point to point":  # a thread of the backend lets go when it likes
        assert [len(codes) for codes in comm.transport.passing.values()] == [0, 0]
    assert torch.equal(torch.random.get_rng_state(), before)
    comm.transport.ledger.end_step()
    sent = comm.traffic
    comm.control.watchdog.leave()
    return whole.tolist(), out.tolist(), sent["w", "gather"].bytes, sent["g", "reduce"].bytes


@pytest.mark.parametrize("way", ["point to point", "backend"])
def test_ranks_send_codes_and_add_up_in_fp32(ranks: Pools, way: str) -> None:
    by_rank = ranks(3).run(partial(_over_ranks, way))
    shown = torch.cat([_back(Codec(NUMEL), _values(rank)) for rank in range(3)]).bfloat16()
    total = sum(_values(rank, 3 * NUMEL) for rank in range(3))
    assert isinstance(total, Tensor)
    largest = sum(_values(r, 3 * NUMEL).view(-1, 64).abs().amax(-1) for r in range(3))
    assert isinstance(largest, Tensor)
    steps = largest.repeat_interleave(64) / 127
    for rank, (whole, out, gathered, reduced) in enumerate(by_rank):
        # All ranks hold the same, their own part too.
        assert whole == shown.tolist()
        part = slice(rank * NUMEL, (rank + 1) * NUMEL)
        assert ((torch.tensor(out) - total[part]).abs() <= 1.001 * steps[part]).all()
        assert gathered == 2 * (NUMEL + NUMEL // 16)
        assert reduced == 2 * (NUMEL + NUMEL // 16)
    # Rounding by chance is the same in every run.
    assert ranks(3).run(partial(_over_ranks, way)) == by_rank
