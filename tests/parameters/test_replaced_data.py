"""``p.data = x`` leaves what an earlier ``p.data`` shows as it was, as in plain torch."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import gathered
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.models import Block, Blocks
from tests.oracle.projects import WIDTH, Regression, Run, assert_like_ddp, fit, rows, under_all
from tests.oracle.ranks import Pools

STAGES = (1, 2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.phase = Blocks(2, WIDTH), nn.Linear(2, 2, dtype=torch.complex64)


def _replace(model: Net) -> list[Tensor]:
    """Replace data in the ways of averages, and return what was kept of it before and behind."""
    first, second = (block.linear for block in model.body.blocks)
    found = [first.weight.data.clone()]
    kept = {name: p.data for name, p in model.body.named_parameters()}
    also = [first.weight.detach(), first.weight.T, first.weight[1:3], first.weight.data]
    halves = first.weight.chunk(2)
    wide = model.phase.weight.mH, model.phase.weight.imag
    for p in model.parameters():
        p.data = torch.full(p.shape, 0.25, dtype=torch.complex64 if p.is_complex() else None)
    found += [*kept.values(), *also, *halves, *wide, *model.parameters()]
    found = [one.detach().clone() for one in found]
    also[0].mul_(2.0)  # is the one that it was taken with, and no longer the parameter
    found += [also[1].clone(), also[3].clone()]
    for name, p in model.body.named_parameters():
        p.data = kept[name]
    first.weight.data, second.weight.data = second.weight.data, first.weight.data
    shown = first.weight.data
    first.weight.data = first.weight.data
    shown.add_(1.0)  # nothing has taken its place
    second.weight.data = second.weight.data.t().contiguous()
    return [one.detach().float().clone() for one in (*found, *model.body.parameters())]


def _like_torch(stage: int, precision: str, moment: str) -> None:
    engine = Engine(Net(), Settings(stage=stage, units={Block}, recipe=RECIPES[precision]))
    model: Any = engine.module
    with torch.no_grad():
        if moment == "between steps":
            seen = _replace(model)
        elif moment == "step":
            with engine.step(awaits_backward=False):
                seen = _replace(model)
        else:
            with gathered(model, modify=True):
                seen = _replace(model)
        plain = Net()
        expected = _replace(plain)
    near = {"rtol": 0.02, "atol": 0.02} if precision != "32-true" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(seen, expected, **near)
    engine.close()
    torch.testing.assert_close(
        dict(model.named_parameters()), dict(plain.named_parameters()), **near
    )


def _all_like_torch(stage: int) -> None:
    for precision in ("32-true", "bf16-mixed"):
        for moment in ("between steps", "step", "gathered"):
            _like_torch(stage, precision, moment)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_what_was_kept_of_replaced_data_stays(ranks: Pools, stage: int, world: int) -> None:
    ranks(world).run(_all_like_torch, stage)


class Averaged(Regression):
    """Validates with an average of its weights, which take turns with it in one way of two."""

    def on_fit_start(self) -> None:
        self.shadow = {n: p.data.clone() for n, p in self.named_parameters()}
        self.swaps = False

    def on_train_batch_end(self, *_: Any) -> None:
        for n, p in self.named_parameters():
            self.shadow[n] = (0.1 * p.data + 0.9 * self.shadow[n]).clone()

    def on_validation_epoch_start(self) -> None:
        self.swaps = not self.swaps
        self.backup = {}
        for n, p in self.named_parameters():
            self.backup[n] = p.data
            p.data = self.shadow[n]
            if self.swaps:
                self.shadow[n] = self.backup[n]

    def on_validation_epoch_end(self) -> None:
        for n, p in self.named_parameters():
            if self.swaps:
                self.shadow[n] = p.data
            p.data = self.backup[n]


def _average(strategy: Any) -> Run:
    options = {"max_epochs": 3, "data": (rows(), rows(4, seed=1))}
    return fit(Averaged(lr=0.1, optimizer=torch.optim.SGD), strategy, **options)


def test_averages_that_change_places_with_weights(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, _average, stages=(1, 3)))


def _refusals() -> list[str]:
    said = []
    for stage, precision in ((1, "32-true"), (2, "32-true"), (3, "bf16-mixed")):
        engine = Engine(Net(), Settings(stage=stage, units={Block}, recipe=RECIPES[precision]))
        weight = engine.module.phase.bias if stage == 2 else engine.module.body.stem.weight
        with torch.no_grad():
            row = weight.data[0]
        try:
            with engine.step(awaits_backward=False):
                weight.data = torch.zeros_like(weight)
        except RuntimeError as error:
            said.append(str(error))
        del row
        weight.data = torch.zeros(weight.shape, dtype=torch.complex64 if stage == 2 else None)
        assert not weight.data.any()
        engine.close()
    return said


def test_what_cannot_keep_its_value_is_refused(ranks: Pools) -> None:
    for first, second, third in ranks(1).run(_refusals):
        assert "'body.stem.weight' cannot be replaced" in first
        assert "has views of its own" in first
        assert "'phase.bias' cannot be replaced" in second
        assert "between steps, at a higher precision" in third


HALVE = compile("for p in parameters: p.data.mul_(0.5)", "<run>", "exec")


def test_code_of_no_module_changes_data() -> None:
    engine = Engine(Net(), Settings(stage=3, units={Block}))
    for moment in (contextlib.nullcontext(), engine.step(awaits_backward=False)):
        with moment:
            exec(HALVE, {"parameters": engine.module.parameters()})
    engine.close()
    for halved, p in zip(engine.module.parameters(), Net().parameters(), strict=True):
        assert torch.equal(halved, p / 4)
