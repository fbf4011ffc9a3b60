"""Compiled modules train as under DDP: a submodule, `module.compile()` and the LightningModule."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.engine.weights import Residency
from lightning_zero.plan import Settings
from tests.oracle.projects import Regression, Run, assert_like_ddp, fit, under_all
from tests.oracle.ranks import Pools


class Silent(Regression):
    """Logs nothing: dynamo cannot read Lightning's `self.log`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _compile_in_place(module: Regression) -> Any:
    for block in module.net.blocks:
        block.compile(backend="aot_eager")
    return module


def _compile_body(module: Regression) -> Any:
    module.net = torch.compile(module.net, backend="aot_eager")
    return module


WAYS = {"in place": _compile_in_place, "body": _compile_body}


class Inlined(Regression):
    """Notes which units were compiled together with the code that calls them."""

    def on_train_batch_end(self, *_: Any) -> None:
        units = self.trainer.strategy.engine.sharded.units
        self.inlined = [unit.label for unit in units if unit.is_inlined]
        self.whole = [unit.label for unit in units if unit.weights.residency is Residency.WHOLE]


def _inlined(way: str, stage: int) -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    module = Inlined(optimizer=torch.optim.SGD)
    fit(WAYS[way](module), stage, limit_train_batches=2)
    return module.inlined, module.whole


def _all_inlined() -> dict[tuple[str, int], tuple[list[str], list[str]]]:
    ways = [("in place", 1), ("body", 1), ("in place", 3), ("body", 3)]
    return {(way, stage): _inlined(way, stage) for way, stage in ways}


def test_only_a_graph_of_several_units_waits_for_all_of_them(ranks: Pools) -> None:
    """Blocks that are compiled one by one are awaited one by one."""
    for found in ranks(2).run(_all_inlined):
        assert found["in place", 1] == ([], [])
        assert found["body", 1] == ([f"net._orig_mod.blocks.{i}" for i in range(3)], [])
        assert found["in place", 3] == ([], [])
        assert set(found["body", 3][0]) <= {"root"}


class Thawing(Silent):
    """A block that learns from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.net.blocks[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for name, parameter in self.named_parameters():
                if "blocks.1" in name:
                    parameter.requires_grad = True


def _thawed(stage: int) -> list[list[float]]:
    torch._dynamo.reset()
    modules = [Thawing(), _compile_body(Thawing())]
    for module in modules:
        fit(module, stage, max_epochs=3)
    return [module.losses for module in modules]


def test_compiled_units_that_are_unfrozen_are_averaged(ranks: Pools) -> None:
    for losses, compiled in ranks(2).run(_thawed, 2):
        assert compiled == pytest.approx(losses, rel=1e-5)


def _with_inductor(strategy: Any) -> Run:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    module = Silent(lr=0.1, optimizer=torch.optim.SGD)
    for block in module.net.blocks:
        block.compile(backend="inductor")
    run = fit(module, strategy)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1, "one for all blocks"
    return run


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles C++, and there is no g++")
def test_inductor(ranks: Pools) -> None:
    """The kernels that are generated for CPU, over the hooks of every stage."""
    assert_like_ddp(ranks(2).run(under_all, _with_inductor, timeout=300, stages=(2, 3)), ulps=64)


def _recompiles(stage: int) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = _compile_in_place(Regression())
    fit(module, stage, max_epochs=1, limit_train_batches=1)
    first = dict(torch._dynamo.utils.counters["frames"])
    assert not torch._dynamo.utils.counters["graph_break"]
    fit(module, stage, max_epochs=3)
    assert not torch._dynamo.utils.counters["graph_break"]
    return torch._dynamo.utils.counters["frames"]["ok"] - first["ok"]


def test_blocks_are_compiled_once(ranks: Pools) -> None:
    """The hooks around a unit neither break its graph nor compile it anew."""
    assert ranks(2).run(_recompiles, 3) == ranks(2).run(_recompiles, "ddp")


class _Normed(nn.Sequential):
    """Buffers that every rank changes in its own way."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def _loop(stage: int | None, *, compiles: bool = True, in_step: bool = False) -> dict[str, Any]:
    """A loop without a Trainer over a model that is compiled as a whole: what it comes to."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(_Normed(), _Normed(), nn.Linear(4, 1))
    engine = stage and Engine(model, Settings(stage=stage, units={_Normed}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if engine:
        engine.adopt(optimizer)
    call = torch.compile(model, backend="eager") if compiles else model
    buffers, losses = [], []
    torch.manual_seed(dist.get_rank())
    for number in range(6):
        # The first calls come before any step of the optimizer: the weights have been there always.
        with engine.step() if engine and in_step else contextlib.nullcontext():
            loss = call(torch.randn(8, 4)).square().mean()
        losses.append(loss.item())
        loss.backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        buffers.append([buffer.clone() for buffer in model.buffers()])
    if engine:
        engine.close()
    return {
        "losses": losses,
        "buffers": buffers,
        "graphs": counters["stats"].get("unique_graphs", 0),
        "captured": counters["stats"].get("calls_captured", 0),
        "breaks": sum(counters["graph_break"].values()),
    }


def _loops(stage: int) -> list[dict[str, Any]]:
    return [
        _loop(stage, compiles=False),
        _loop(stage),
        _loop(stage, in_step=True),
        _loop(None),
    ]


def test_a_compiled_model_enters_its_steps_without_a_trainer(ranks: Pools) -> None:
    """Its buffers are rank 0's at every call, and its graph is still one and the same."""
    for expected, called, stepped, plain in ranks(2).run(_loops, 2):
        assert called["losses"] == expected["losses"]
        torch.testing.assert_close(called["buffers"], expected["buffers"], rtol=0, atol=0)
        assert stepped["losses"] == expected["losses"]
        for counted in (called, stepped):
            assert counted["graphs"] == plain["graphs"] == 1
            assert counted["captured"] == plain["captured"]
        assert (stepped["breaks"], plain["breaks"]) == (0, 0)
