"""Functions that take parameters cover those of all engines, as in a GAN under Fabric."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_zero import gathered, grad_norm
from tests.oracle.models import Blocks
from tests.oracle.ranks import Pools
from tests.oracle.sharded import shard

WIDTH = 6


def _both(stage: int) -> None:
    torch.manual_seed(0)
    engines = [shard(Blocks(2), stage=stage) for _ in range(2)]
    plain = [torch.nn.Linear(2, 2)]
    modules = [*(engine.module for engine in engines), *plain]
    for module in modules:
        width = WIDTH if module is not plain[0] else 2
        module(torch.ones(2, width)).square().sum().backward()
    parameters = [p for module in reversed(modules) for p in module.parameters()]
    for order in (2.0, float("inf"), 1.0):
        norm = grad_norm(parameters, order)
        each = torch.stack([grad_norm(module, order) for module in modules])
        torch.testing.assert_close(norm, torch.linalg.vector_norm(each, order))
    with gathered(parameters, modify=True):
        if dist.get_rank() == 0:
            for parameter in parameters:
                torch.nn.init.ones_(parameter)
    with gathered(parameters):
        sharded = [p for engine in engines for p in engine.module.parameters()]
        assert all((p == 1).all() for p in sharded)
    for engine in reversed(engines):
        engine.close()


def test_all_engines_are_covered(ranks: Pools) -> None:
    for stage in (1, 3):
        ranks(2).run(_both, stage)
