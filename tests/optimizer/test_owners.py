"""Steps of all parameters at once, whose closures are called again, against a plain loop."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle.ranks import Pools
from tests.oracle.sharded import Stack, build, rows, shard, square, whole


def search(world: int, stage: int | None) -> tuple[dict[str, Tensor], list[float]]:
    """Search along lines, with a closure that clears, and goes forward and backward."""
    model = build(Stack)
    engine = None if stage is None else shard(model, stage=stage)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    if engine is not None:
        engine.adopt(optimizer)
    losses = []
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            own = range(world) if engine is None else [engine.comm.control.rank]
            loss: Any = sum(square(model, rows(rank, seed)) / len(own) for rank in own)
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
    if engine is None:
        return {key: p.detach().clone() for key, p in model.named_parameters()}, losses
    found = whole(engine)
    engine.close()
    return found, losses


def test_closures_may_be_called_again(ranks: Pools) -> None:
    """Ranks have losses of their own, by which a search along a line would end elsewhere."""
    expected, losses = search(2, None)
    results = ranks(2).run(search, 2, 3)
    means = [sum(each) / 2 for each in zip(*(seen for _, seen in results), strict=True)]
    assert means == pytest.approx(losses, rel=1e-4)
    for found, _ in results:
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def test_an_optimizer_is_freed_with_its_states() -> None:
    model = build(Stack)
    engine = shard(model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.Muon(matrices, lr=0.1)
    engine.adopt(optimizer)
    square(model, rows(0)).backward()
    assert optimizer.step(lambda: 0.1) == 0.1  # with all of its digits
    engine.close()
    held = weakref.ref(optimizer)
    del optimizer, engine
    gc.collect()
    assert held() is None
