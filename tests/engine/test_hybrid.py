"""Hybrid sharding: gradients of several microbatches."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.comm import Communicator
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, adopted


class _Branches(nn.Module):
    """Two units, of which each microbatch uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor, which: str) -> Tensor:
        return sum((self.blocks[int(one)](x).sum() for one in which), torch.zeros(()))


ORDERS = ["-0 01", "-01 1", "-0 -1 1", "01 01", "01 -0 1", "-01 zero 1", "-0 -0"]
"""Microbatches by the blocks that they use; those with a minus are within `no_sync`."""


def _grads_after(num_shards: int | None, stage: int) -> dict[str, Any]:
    """Whole gradients after each order."""
    found: dict[str, Any] = {}
    # Nobody waits for readers of what is given up before a step.
    comm = Communicator(CPU, num_shards=num_shards, reads_peers=False)
    for order in ORDERS:
        engine, optimizer = adopted(_Branches(), stage=stage, accumulate="reduce", comm=comm)
        for number, word in enumerate(order.split()):
            if word == "zero":
                optimizer.zero_grad()
                continue
            with engine.no_sync() if word[0] == "-" else contextlib.nullcontext():
                # Whole numbers, whose sums and averages have no rounding.
                rows = torch.full((2, 8), float(number + comm.control.rank))
                engine.module(rows, word.strip("-")).backward()
        grads = [engine.sharded.full_grad(p) for p in engine.module.parameters()]
        found[order] = [None if grad is None else grad.tolist() for grad in grads]
        engine.close(restore=False)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_come_together_whatever_each_microbatch_uses(ranks: Pools, stage: int) -> None:
    plain = ranks(4).run(_grads_after, None, stage)[0]
    for of_rank in ranks(4).run(_grads_after, 2, stage):
        assert of_rank == plain
