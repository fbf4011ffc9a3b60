"""Weights between the steps of a plain loop: read and written where they are touched."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero import full_grad, gathered, grad_norm
from lightning_zero.comm import Communicator, device_mesh
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES
from tests.oracle.models import Blocks
from tests.oracle.projects import WAYS, WIDTH
from tests.oracle.ranks import Pools, RankError
from tests.oracle.sharded import CPU, sgd, shard
from tests.oracle.watch import impatient

STAGES = (1, 2, 3)


def _job(way: str, stage: int = 3, num_blocks: int = 6) -> tuple[Engine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    engine = shard(Blocks(num_blocks), stage=stage, comm=Communicator(CPU, **WAYS[way]))
    optimizer = sgd(engine.module)
    engine.adopt(optimizer)
    return engine, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.step()


# ------------------------------------------------------------------------------- the same numbers


def _use(model: nn.Module, found: list[Tensor], turn: int) -> None:
    """Reads and writes of all kinds, by code that knows nothing of shards."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9 + 0.01 * turn)
        for parameter in model.parameters():
            parameter.div_(parameter.norm().clamp_min(0.1))
        found.append(torch.cat([p.flatten() for p in model.parameters()]))
        views = [parameter.data for parameter in model.parameters()]
        torch._foreach_mul_(views, 0.5)
        for view in views:
            view.add_(0.01)
        first, *_, last = model.parameters()
        found.append(first.flatten()[0] + last.flatten()[-1])
        for parameter in model.parameters():
            parameter.copy_(parameter.clone().clamp(-0.4, 0.4))
        for view in views:
            found.append(view.sum())
    found.append(copy.deepcopy(model)(torch.ones(2, WIDTH)))


def _loop(way: str, stage: int) -> None:
    engine, optimizer = _job(way, stage)
    torch.manual_seed(0)
    plain = Blocks(6)
    reference = sgd(plain)
    for turn in range(3):
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        _use(engine.module, ours, turn)
        _use(plain, theirs, turn)
        torch.testing.assert_close(ours, theirs)
        _step(engine.module, optimizer)
        _step(plain, reference)
    _use(engine.module, [], 0)
    _use(plain, [], 0)
    engine.close()
    for mine, its in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def _all_loops(way: str) -> None:
    for stage in STAGES:
        _loop(way, stage)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_plain_loop_reads_and_writes_between_steps(ranks: Pools, way: str, world: int) -> None:
    if world == 2 or way == "windows":
        ranks(world).run(_all_loops, way)


def _clamp(model: nn.Module) -> Callable[..., None]:
    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    return clamp


def _loop_with_hooks(way: str, stage: int, precision: str) -> None:
    """Hooks of optimizers change weights, whenever they were registered."""
    torch.manual_seed(0)
    module = Blocks(3)
    plain, rank = copy.deepcopy(module), dist.get_rank()
    optimizer, reference = sgd(module), sgd(plain)
    optimizer.register_step_pre_hook(_clamp(module))
    optimizer.register_step_post_hook(_clamp(module))
    how = RECIPES[precision]
    engine = shard(module, stage=stage, comm=Communicator(CPU, **WAYS[way]), recipe=how)
    engine.adopt(optimizer)
    optimizer.register_step_pre_hook(_clamp(module))
    optimizer.register_step_post_hook(_clamp(module))
    reference.register_step_pre_hook(_clamp(plain))
    reference.register_step_post_hook(_clamp(plain))
    for x in torch.randn(3, 2, WIDTH):
        for model, its in ((module, optimizer), (plain, reference)):
            its.zero_grad()
            if rank and model is module:
                time.sleep(0.01)  # nothing waits for this rank but what must
            with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                model(x).float().square().sum().backward()
            its.step()
        with gathered(module):
            for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs)
    engine.close()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_optimizers_change_weights(
    ranks: Pools, way: str, stage: int, precision: str
) -> None:
    ranks(2).run(_loop_with_hooks, way, stage, precision)


# ------------------------------------------------------------------------------- memory, messages


def _ema(way: str) -> tuple[list[int], int, list[int]]:
    """Bytes that are whole while an average of all parameters is updated."""
    engine, optimizer = _job(way)
    _step(engine.module, optimizer)
    average = [torch.zeros(p.shape) for p in engine.module.parameters()]
    held = []
    with torch.no_grad():
        for mean, parameter in zip(average, engine.module.parameters(), strict=True):
            mean.lerp_(parameter, 0.5)
            held.append(engine.sharded.memory()["gathered"])
    sizes = [
        sum(flat.layout.numel * 4 for flat in unit.flat_parameters) for unit in engine.sharded.units
    ]
    _step(engine.module, optimizer)
    at_rest = engine.sharded.memory()["gathered"]
    engine.close()
    return held, at_rest, sizes


@pytest.mark.parametrize("way", WAYS)
def test_few_units_are_whole_at_a_time(ranks: Pools, way: str) -> None:
    for held, at_rest, sizes in ranks(2).run(_ema, way):
        first, second = sorted(sizes)[-2:]
        assert 0 < max(held) <= first + second < sum(sizes)
        assert at_rest == 0


def _changes(way: str) -> tuple[list[int], int]:
    """The same while all parameters are changed."""
    engine, optimizer = _job(way)
    _step(engine.module, optimizer)
    held = []
    for parameter in engine.module.parameters():
        with torch.no_grad():
            parameter.mul_(0.5)
        held.append(engine.sharded.shown.num_touched)
    engine.close()
    return held, engine.sharded.shown.num_touched


def test_changed_units_are_few_where_nobody_reads_them(ranks: Pools) -> None:
    for held, at_end in ranks(2).run(_changes, "point to point"):
        assert max(held) == 2
        assert at_end == 0


# ------------------------------------------------------------------------------- one rank alone


def _alone(way: str, stage: int) -> None:
    """Rank 0 looks at everything, more than once, where it has it."""
    engine, optimizer = _job(way, stage)
    plain = Blocks(6)
    for _ in range(2):
        if dist.get_rank() == 0:
            for _ in range(2):
                seen = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
                assert seen.isfinite().all()
            assert set(engine.module.state_dict()) == set(plain.state_dict())
        _step(engine.module, optimizer)
    engine.close()


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_alone_may_look_at_what_is_whole(ranks: Pools, way: str) -> None:
    for stage in (1, 2):
        ranks(2).run(_alone, way, stage)


@impatient
def _touches_alone(way: str, use: Callable[[nn.Module], Any]) -> None:
    """Rank 0 uses what others do not, and every rank raises its error with the seconds it took."""
    engine, optimizer = _job(way)
    start = time.monotonic()
    for step in range(3):
        engine.module(torch.ones(2, WIDTH)).square().sum().backward()
        if step == 1 and dist.get_rank() == 0:
            use(engine.module)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"no error after {time.monotonic() - start} s")


def _read_weight(model: nn.Module) -> Any:
    return float(model.blocks[2].linear.weight.detach().norm())


def _read_grad(model: nn.Module) -> Any:
    return model.blocks[2].linear.weight.grad.tolist()


def _read_norm(model: nn.Module) -> Any:
    return float(model.blocks[2].linear.weight.grad.norm())


@pytest.mark.parametrize(
    ("way", "use", "place", "cure"),
    [
        ("windows", _read_weight, "the weights of blocks.2", r"lightning_zero[.]gathered"),
        ("point to point", _read_weight, "the weights of blocks.2", r"lightning_zero[.]gathered"),
        ("backend", _read_weight, "the weights of blocks.2", r"lightning_zero[.]gathered"),
        ("point to point", _read_grad, "access to a gradient", r"lightning_zero[.]full_grad"),
        ("windows", _read_norm, "access to a gradient", r"lightning_zero[.]grad_norm"),
    ],
)
def test_one_rank_alone_is_told_what_to_do(
    ranks: Pools, way: str, use: Callable[[nn.Module], Any], place: str, cure: str
) -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(_touches_alone, way, use)
    found = str(error.value)
    assert found.count("The ranks have diverged") >= 2
    assert re.search(
        rf"rank 0 waits in step 1 for [^;]*{place}[^;]* [(]called at [^;]*test_betw", found
    )
    assert re.search(cure, found)


def _touches_alone_beside_a_mesh() -> None:
    device_mesh("cpu", 2)  # of tensor parallelism, whose groups are kept beside ours
    _touches_alone("point to point", _read_weight)


def test_it_is_told_also_where_there_is_a_mesh(ranks: Pools) -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(_touches_alone_beside_a_mesh)
    assert str(error.value).count("The ranks have diverged") >= 2


# ------------------------------------------------------------------------------- gradients


def _penalty(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def _graph_between_steps(way: str) -> None:
    engine, _ = _job(way)
    with gathered(engine.module):
        _penalty(engine.module).backward()
    for parameter in engine.module.parameters():
        torch.testing.assert_close(full_grad(parameter), 2 * parameter.detach())
    loss = _penalty(engine.module)
    with pytest.raises(RuntimeError, match=r"no longer in memory[.] .* `training_step`"):
        loss.backward()
    engine.reset()
    engine.close()


@pytest.mark.parametrize("way", ["windows", "point to point"])
def test_a_graph_of_weights_between_steps_needs_them_gathered(ranks: Pools, way: str) -> None:
    ranks(2).run(_graph_between_steps, way)


def _gradients(stage: int) -> None:
    engine, optimizer = _job("windows", stage)
    for _ in range(2):
        engine.module(torch.ones(2, WIDTH)).square().sum().backward()
        weight = engine.module.stem.weight
        whole = full_grad(weight)
        assert whole is not None
        torch.testing.assert_close(weight.grad.clone(), whole)
        assert float(grad_norm(engine.module)) > 0
        optimizer.zero_grad()
        assert [p.grad for p in engine.module.parameters()] == [None] * 26
        assert [piece.grad for piece in engine.sharded.pieces] == [None] * 26
        assert engine.sharded.memory()["gradients"] == 0
        with gathered(engine.module):
            assert full_grad(weight) is None
    engine.module(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in engine.module.parameters())
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_leaves_none(ranks: Pools, stage: int) -> None:
    # On three ranks some pieces are empty.
    ranks(3).run(_gradients, stage)
