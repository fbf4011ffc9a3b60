"""Steps of whole parameters: who keeps states, what is sent, and closures against a plain loop."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optimizer import kept_states, members
from tests.oracle.ranks import Pools
from tests.oracle.sharded import shard, whole


class Model(nn.Module):
    """Matrices of several shapes, vectors, and a scale of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Linear(12, 20), nn.Linear(20, 12)])
        self.head = nn.Linear(12, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) * self.scale


def rows(rank: int, seed: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * seed + rank))


def loss_of(model: nn.Module, rank: int, seed: int) -> Tensor:
    return model(rows(rank, seed)).square().mean()


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def look_at_muon() -> tuple[int, list[str], int, str]:
    model = Model()
    engine = shard(model, stage=3)
    muon = torch.optim.Muon(matrices(model), lr=0.02)
    engine.adopt(muon)
    notice = engine.steps[-1]
    seen: list[Any] = []
    # Not by its own method, which would have it called before the step begins.
    Optimizer.register_step_pre_hook(
        muon, lambda *_: seen.append([tuple(p.shape) for p in muon.param_groups[0]["params"]])
    )
    held = list(muon.param_groups[0]["params"])
    pieces = members(muon)
    loss_of(model, 0, 0).backward()
    muon.step()
    # Between steps the groups hold the module's parameters; the owner alone has the whole state.
    assert all(a is b for a, b in zip(muon.param_groups[0]["params"], held, strict=True))
    assert seen[0] != [tuple(p.shape) for p in held]
    kept = dict(kept_states([muon]))
    owned = [index for index, piece in enumerate(pieces) if piece in kept]
    shapes = [tuple(p.shape) for p in matrices(model)]
    for index in owned:
        assert kept[pieces[index]]["momentum_buffer"].shape == shapes[index]
    muon.zero_grad()
    assert all(one.grad is None for one in (*held, *pieces))
    nbytes = engine.sharded.memory()["states"]
    engine.close()
    return nbytes, owned, engine.comm.control.rank, notice


def test_states_live_with_the_owner_only(ranks: Pools) -> None:
    found = ranks(2).run(look_at_muon)
    owned = [index for _, indices, _, _ in found for index in indices]
    assert sorted(owned) == [0, 1, 2]
    assert sum(nbytes for nbytes, *_ in found) == 4 * (240 + 240 + 60)
    assert max(nbytes for nbytes, *_ in found) <= 4 * (240 + 60)
    for *_, notice in found:
        assert "Muon mixes the elements of a parameter" in notice
        assert "by parameter" in notice


def closures(make: Callable[[nn.Module], Optimizer], world: int, stage: int | None) -> Any:
    """Steps with a closure that clears, and goes forward and backward."""
    model = Model()
    engine = None if stage is None else shard(model, stage=stage)
    optimizer = make(model)
    if engine is not None:
        engine.adopt(optimizer)
    losses = []
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            own = range(world) if engine is None else [engine.comm.control.rank]
            loss = sum(loss_of(model, rank, seed) / len(own) for rank in own)
            loss.backward()
            return loss.detach()

        losses.append(float(optimizer.step(closure)))
    if engine is None:
        return {key: p.detach().clone() for key, p in model.named_parameters()}, losses
    found = whole(engine)
    engine.close()
    return found, losses


CLOSURES: dict[str, Callable[[nn.Module], Optimizer]] = {
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4),
    "lbfgs searching": lambda m: torch.optim.LBFGS(
        m.parameters(), max_iter=4, line_search_fn="strong_wolfe"
    ),
}


def with_closure(name: str, stage: int) -> Any:
    return closures(CLOSURES[name], 2, stage)


@pytest.mark.parametrize(("name", "stage"), list(zip(CLOSURES, (1, 3), strict=True)))
def test_closures_may_be_called_again(ranks: Pools, name: str, stage: int) -> None:
    """Ranks have losses of their own, by which a search along a line would end elsewhere."""
    expected, losses = closures(CLOSURES[name], 2, None)
    results = ranks(2).run(with_closure, name, stage)
    means = [sum(each) / 2 for each in zip(*(seen for _, seen in results), strict=True)]
    assert means == pytest.approx(losses, rel=1e-4)
    for found, _ in results:
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def test_an_optimizer_is_freed_with_its_states() -> None:
    model = Model()
    engine = shard(model)
    optimizer = torch.optim.Muon(matrices(model), lr=0.1)
    engine.adopt(optimizer)
    loss_of(model, 0, 0).backward()
    assert optimizer.step(lambda: 0.1) == 0.1  # with all of its digits
    engine.close()
    held = weakref.ref(optimizer)
    del optimizer, engine
    gc.collect()
    assert held() is None
