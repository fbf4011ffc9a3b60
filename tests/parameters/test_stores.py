"""Memory that is not the device's, behind the one seam where weights and gradients rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.comm import Shared, Work
from lightning_zero.engine.engine import Engine
from lightning_zero.parameters import flat_parameters
from lightning_zero.parameters.stores import Store
from lightning_zero.plan.settings import Settings

WIDTH, STEPS = 8, 3


class _Copy:
    """A copy that is made when it is waited for, and not before."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy: Callable[[], object] | None = copy

    def wait(self) -> None:
        if self._copy is not None:
            self._copy()
        self._copy = None


class Elsewhere(Store):
    """Keeps masters and gradients where no rank can send them from, and moves them late."""

    num_flushed = 0

    def _rest(self, shared: Shared) -> None:
        self.shared = shared
        self.fetch = self._fetch  # type: ignore[assignment]

    def _fetch(self, out: Tensor, *, unit: str, tag: int) -> Work:
        axis = self.comm.mesh.shard
        own = out.view(axis.size, -1)[axis.rank]
        own.copy_(self.shared.own)
        return self.gather(out, Shared(own), unit=unit, tag=tag)

    def flush(self, source: Tensor, resting: Tensor | None) -> tuple[Tensor, Work]:
        type(self).num_flushed += 1
        if resting is None:
            resting = torch.full_like(source, float("nan"))
            return resting, _Copy(lambda: resting.copy_(source))
        return resting, _Copy(lambda: resting.add_(source))


def _trained(microbatches: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    engine = Engine(module, Settings(stage=3, units=(nn.Linear,)))
    optimizer = torch.optim.Adam(module.parameters(), 0.1)
    engine.adopt(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(microbatches):
            module(torch.full((2, WIDTH), 0.1 * (step + part + 1))).sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    engine.close()
    return dict(module.state_dict())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_store_of_another_medium_trains_the_same(
    monkeypatch: pytest.MonkeyPatch, microbatches: int
) -> None:
    expected = _trained(microbatches)
    monkeypatch.setattr(flat_parameters, "Store", Elsewhere)
    Elsewhere.num_flushed = 0
    actual = _trained(microbatches)
    # The layers are units; the root has no parameters.
    assert Elsewhere.num_flushed >= 2 * STEPS * microbatches
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())
