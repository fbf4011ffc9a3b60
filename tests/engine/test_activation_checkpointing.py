"""Activation checkpointing by one argument: the same numbers, dropout included, in less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import ActivationCheckpointing, Engine
from lightning_zero.plan import Settings
from tests.oracle.ranks import Pools

WIDTH = 16


class Noisy(nn.Module):
    """A block whose recomputation must draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + self.down(nn.functional.dropout(self.up(x).tanh(), 0.5))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _saved_bytes(run: Any) -> int:
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(saved.values())


def _train(stage: int, is_checkpointed: bool) -> tuple[list[float], list[Tensor], int, int]:
    torch.manual_seed(0)
    model = Stack()
    engine = Engine(model, Settings(stage=stage, units=[Noisy]))
    recompute = ActivationCheckpointing(model.blocks if is_checkpointed else [])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine.adopt(optimizer)
    losses, outputs = [], []
    torch.manual_seed(1 + engine.comm.control.rank)
    for _ in range(3):
        optimizer.zero_grad()
        saved = _saved_bytes(lambda: outputs.append(model(torch.randn(64, WIDTH))))
        loss = outputs.pop().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    recompute.remove()
    assert all("forward" not in vars(block) for block in model.blocks)
    engine.close()
    calls = model.blocks[0].num_calls
    return losses, [p.detach() for p in model.parameters()], saved, calls


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_numbers_are_the_same_and_fewer_activations_are_kept(ranks: Pools, stage: int) -> None:
    plain = ranks(2).run(_train, stage, False)
    checkpointed = ranks(2).run(_train, stage, True)
    for one, other in zip(plain, checkpointed, strict=True):
        assert other[0] == one[0]
        torch.testing.assert_close(other[1], one[1], rtol=0, atol=0)
        assert other[2] < one[2] / 2
        assert (one[3], other[3]) == (3, 6)


def test_copies_keep_what_the_user_put_in_place_of_forward() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    plain = linear.forward
    linear.forward = lambda x: 2 * plain(x)
    x = torch.randn(2, WIDTH, requires_grad=True)
    expected = linear(x)
    checkpointing = ActivationCheckpointing([linear])
    assert torch.equal(copy.deepcopy(linear)(x), expected)
    checkpointing.remove()
    assert torch.equal(linear(x), expected)
