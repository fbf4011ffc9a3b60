"""Compiled modules train as under DDP: a submodule, `module.compile()` and the LightningModule."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.projects import Regression, Run, assert_like_ddp, fit, under_all
from tests.ranks import Pools


class Silent(Regression):
    """Logs nothing: dynamo cannot read Lightning's `self.log`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _compile_blocks(module: Regression) -> Any:
    for index, block in enumerate(module.net.blocks):
        module.net.blocks[index] = torch.compile(block, backend="aot_eager")
    return module


def _compile_in_place(module: Regression) -> Any:
    for block in module.net.blocks:
        block.compile(backend="aot_eager")
    return module


def _compile_all(module: Regression) -> Any:
    return torch.compile(module, backend="eager")


WAYS = {"submodules": _compile_blocks, "in place": _compile_in_place, "module": _compile_all}


def _train(strategy: Any, way: str) -> Run:
    torch._dynamo.reset()
    module = Silent(lr=0.1, optimizer=torch.optim.SGD)
    torch._dynamo.utils.counters.clear()
    fit(WAYS[way](module), strategy, max_epochs=2)
    frames = dict(torch._dynamo.utils.counters["frames"])
    assert frames["ok"] > 0, "something was compiled"
    run = Run.of(module)
    run.params = {name.replace("_orig_mod.", ""): value for name, value in run.params.items()}
    return run


@pytest.mark.parametrize("way", WAYS)
def test_compiled_modules_train_as_under_ddp(ranks: Pools, way: str) -> None:
    assert_like_ddp(ranks(2).run(under_all, _train, way, timeout=150), ulps=64)


def _with_inductor() -> list[Run]:
    runs = []
    for strategy in ("ddp", 3):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        module = Silent(lr=0.1, optimizer=torch.optim.SGD)
        for block in module.net.blocks:
            block.compile(backend="inductor")
        runs.append(fit(module, strategy))
        assert not torch._dynamo.utils.counters["graph_break"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "one for all blocks"
    return runs


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on CPU needs a C++ compiler")
def test_inductor(ranks: Pools) -> None:
    """The kernels that are generated for CPU, over the hooks of stage 3."""
    runs = ranks(2).run(_with_inductor, timeout=300)
    assert_like_ddp([{"ddp": theirs, 3: ours} for theirs, ours in runs], ulps=64)


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
