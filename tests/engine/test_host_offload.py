"""Offload to a host beside the device: the same numbers, and no operation across the two.

The device is that of `tests/oracle/device.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.comm import Communicator, sum_of
from lightning_zero.engine import Engine
from lightning_zero.optimizer import clip
from lightning_zero.plan import RECIPES, Offload, Settings
from lightning_zero.tensors import HostCopies
from tests.oracle.device import beside_the_host
from tests.oracle.models import MODELS
from tests.oracle.own_optimizers import GroupCounting
from tests.oracle.parity import assert_parity
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, shard, train

STEPS, MICRO = 3, 2


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1, fused=True)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def own(model: nn.Module) -> Optimizer:
    return GroupCounting(model.parameters())


def compare(
    stage: int,
    make: Callable[[nn.Module], Optimizer],
    offload: Offload | None = None,
    folder: str = "",
    **how: Any,
) -> None:
    run = partial(train, "transformer", make, stage=stage, **{"steps": 2, **how})
    expected = run()
    offload = offload or Offload.of_stage(stage, "cpu")
    with beside_the_host():
        assert_parity(run(offload=offload, offload_path=folder), expected, ulps=0)


def compare_states_alone(folder: str) -> None:
    """At stage 3: weights stay sharded on the device."""
    compare(3, adamw, Offload("cpu"), accumulate=2, clip_norm=0.1)
    compare(3, adamw, Offload("cpu"), precision="bf16-mixed", clip_norm=0.1, steps=3)
    compare(3, momentum, Offload("nvme"), folder, precision="16-mixed", steps=3)
    if dist.get_world_size() > 1:
        compare(3, momentum, Offload("nvme"), folder, comm=Communicator(CPU, direct=False))


@pytest.mark.parametrize("world", [1, 2])
def test_states_alone_give_the_bits_of_the_device(ranks: Pools, tmp_path: Any, world: int) -> None:
    ranks(world).run(compare_states_alone, str(tmp_path))


def states_alone_move_stepped_shards() -> None:
    case = MODELS["transformer"]
    with beside_the_host() as memories:
        engine = shard(case.build(), recipe=RECIPES["bf16-mixed"], offload=Offload("cpu"))
        optimizer = momentum(engine.module)
        engine.adopt(optimizer)
        for step in range(3):
            memories.crossed.clear()
            with torch.autocast("cpu", torch.bfloat16):
                loss = case.loss(engine.module, case.batch(4, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # What a step has changed goes up once, behind it.
            engine.comm.host_copies.wait_until_read()
        flats = engine.sharded.flats
        shards = sum(f.layout.shard_numel * 4 for f in flats)
        assert memories.crossed == {"up": shards, "down": shards}
        held = engine.sharded.memory()
        of_weights = [f.layout.shard_numel * f.plan.weight.dtype.itemsize for f in flats]
        assert held["weights"] == sum(of_weights)
        assert held["host master"] == shards
        assert held["master"] == held["states"] == held["gradients"] == held["gathered"] == 0
        engine.close()


def test_states_alone_move_what_a_step_has_changed(ranks: Pools) -> None:
    ranks(2).run(states_alone_move_stepped_shards)


def compare_all() -> None:
    """Each case on one rank or on two; what has more to do with ranks on two."""
    world = dist.get_world_size()
    for number, (stage, precision) in enumerate(
        itertools.product((1, 2, 3), ("32-true", "bf16-mixed"))
    ):
        if (number + number // 2) % 2 == world % 2:
            compare(stage, adamw, precision=precision, accumulate=2, clip_norm=0.1)
    compare(3, momentum, precision=("16-mixed", "bf16-true")[world % 2], steps=4)
    if world == 1:
        return
    compare(2, adamw, accumulate=2, policy="local")
    compare(3, own, accumulate=2, clip_norm=0.1)
    for wires in ({"direct": True, "reads_peers": False}, {"direct": False}):
        compare(3, momentum, comm=Communicator(CPU, **wires))


@pytest.mark.parametrize("world", [1, 2])
def test_the_bits_are_those_of_the_device(ranks: Pools, world: int) -> None:
    ranks(world).run(compare_all)


def crossed(stage: int, folder: str | None = None) -> tuple[dict[str, int], dict[str, int]]:
    """Return what copies moved in a step, and must have: a shard for each gather and reduction."""
    case = MODELS["transformer"]
    model = case.build()
    offload = Offload.of_stage(stage, "cpu" if folder is None else "nvme")
    with beside_the_host() as memories:
        engine = shard(model, stage=stage, offload=offload, offload_path=folder or ".")
        optimizer = momentum(model)
        engine.adopt(optimizer)
        for step in range(STEPS):
            memories.crossed.clear()
            for _ in range(MICRO):
                case.loss(model, case.batch(4, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        moved, sent = dict(memories.crossed), engine.comm.traffic
        held = engine.sharded.memory()
        assert held["master"] == held["states"] == held["gradients"] == 0
        assert (held["weights"] > 0) == (stage < 3)
        assert held["host states" if folder is None else "disk states"] > 0
        assert all(len(unit.flat_parameters) == 1 for unit in engine.sharded.units)
        engine.close()
    for way, nbytes in moved.items():
        assert sum_of(sent, way).bytes == nbytes
    # With two ranks each sends its shard once.
    ways = {"gather": "up", "reduce": "down"}
    expected = dict.fromkeys(ways.values(), 0)
    for (_, verb), sum_ in sent.items():
        if verb in ways:
            expected[ways[verb]] += sum_.bytes
    # From the second microbatch on what rests comes up, to be added to.
    expected["up"] += expected["down"] * (MICRO - 1) // MICRO
    return moved, expected


def unfrozen(stage: int, folder: str) -> None:
    """Check that what was frozen at setup rests on the device, also when it is trained."""

    def run(**settings: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        module[0].requires_grad_(False)
        engine = Engine(module, Settings(stage, units=(nn.Linear,), **settings))
        optimizer = torch.optim.SGD(
            [p for p in module.parameters() if p.requires_grad], 0.05, momentum=0.9, fused=True
        )
        engine.adopt(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            module(torch.full((2, 8), 0.1 * (step + 1))).square().sum().backward()
            pieces = engine.sharded.pieces
            clip.clip_by_norm(pieces, engine.comm, 0.1)
            clip.clip_by_value(pieces, 0.01)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            optimizer.step()
            if step == 0:
                module[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(module[0].parameters())})
        held = engine.sharded.memory()
        own = [piece for flat in engine.sharded.units[0].flat_parameters for piece in flat.pieces]
        if settings:
            assert held["states"] == sum(piece.detach().nbytes for piece in own)
        engine.close()
        return dict(module.state_dict())

    expected = run()
    for medium in ("cpu", "nvme"):
        with beside_the_host():
            actual = run(offload=Offload(medium), offload_path=folder)
        assert all(torch.equal(value, expected[name]) for name, value in actual.items())


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_unfrozen_later_stays(ranks: Pools, tmp_path: Any, stage: int) -> None:
    ranks(2).run(unfrozen, stage, str(tmp_path))


def in_copies() -> None:
    for stage, policy in ((2, "reduce"), (3, "local")):
        compare(stage, momentum, shard=2, accumulate=2, policy=policy)


def test_copies_are_joined_on_the_devices(ranks: Pools) -> None:
    ranks(4).run(in_copies)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_crosses_is_the_formulas(ranks: Pools, stage: int) -> None:
    for actual, expected in ranks(2).run(crossed, stage):
        assert actual == expected


def test_files_are_of_the_host_too(ranks: Pools, tmp_path: Any) -> None:
    for actual, expected in ranks(2).run(crossed, 3, str(tmp_path)):
        assert actual == expected


# ---------------------------------------------------------------------------- late copies


class Late:
    """A copy that is made when it is waited for, and not before."""

    def __init__(self, out: Tensor, source: Tensor) -> None:
        self._out, self._source = out, source.clone()
        out.fill_(float("nan"))

    def wait(self) -> None:
        self._out.copy_(self._source)


def trained(**settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    engine = Engine(module, Settings(units=(nn.Linear,), **settings))
    optimizer = momentum(module)
    engine.adopt(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(MICRO):
            module(torch.full((2, 8), 0.1 * (step + part + 1))).sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(torch.tensor(0.5))
        with torch.no_grad():
            module[0].weight.mul_(0.9)
        optimizer.step()
        with lightning_zero.gathered(module, modify=True):
            nn.init.constant_(module[1].bias, 0.1 * step)
    engine.close()
    return dict(module.state_dict())


def compare_edited() -> None:
    expected = trained()

    def slow(copies: Any, out: Tensor, source: Tensor, finish: Any = None, **_: Any) -> Late:
        if finish is not None:
            finish()
        return Late(out, source)

    # Nothing is followed: on a CPU an edit's copy to the host is none.
    with beside_the_host(followed=False), mock.patch.object(HostCopies, "down", slow):
        for offload in (Offload("cpu", "cpu"), Offload("cpu")):
            actual = trained(offload=offload)
            assert all(torch.equal(value, expected[name]) for name, value in actual.items())


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_waited_for_and_edits_go_up_and_down(ranks: Pools, world: int) -> None:
    ranks(world).run(compare_edited)


def test_nothing_moves_from_the_host_to_its_memory() -> None:
    for offload in (Offload("cpu", "cpu"), Offload("cpu")):
        settings = Settings(stage=3 if offload.weights else 2, offload=offload)
        sharded = Engine(nn.Linear(2, 2), settings).sharded
        assert sharded.settings.offload is None
        assert sharded.moves_nothing
    plain = Engine(nn.Linear(2, 2), Settings()).sharded
    assert not plain.moves_nothing


# ---------------------------------------------------------------------------- abandoned passes


def interrupt(_: Tensor) -> None:
    raise KeyboardInterrupt


def stepped_behind(*, is_interrupted: bool, **settings: Any) -> dict[str, Tensor]:
    """Step behind a pass that was interrupted while gradients went to where others rest."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    engine = Engine(module, Settings(units=(nn.Linear,), **settings))
    optimizer = momentum(module)
    engine.adopt(optimizer)

    def backward(part: int) -> None:
        module(torch.full((2, 8), 0.1 * part)).sum().backward()

    backward(1)
    if is_interrupted:
        handle = module[0].weight.register_hook(interrupt)  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            backward(2)
        handle.remove()
    optimizer.zero_grad(set_to_none=False)
    backward(3)
    optimizer.step()
    engine.close()
    return dict(module.state_dict())


def compare_abandoned() -> None:
    for stage, offload in ((2, Offload("cpu")), (3, Offload("cpu", "cpu")), (3, Offload("cpu"))):
        expected = stepped_behind(is_interrupted=False, stage=stage)
        found = {"the device": stepped_behind(is_interrupted=True, stage=stage)}
        with beside_the_host():
            found["its host"] = stepped_behind(is_interrupted=True, stage=stage, offload=offload)
        for where, weights in found.items():
            wrong = [name for name, one in weights.items() if not torch.equal(one, expected[name])]
            assert not wrong, f"stage {stage}, where gradients rest on {where}: {wrong}"


@pytest.mark.parametrize("world", [1, 2])
def test_nothing_of_a_pass_that_was_abandoned_is_added_later(ranks: Pools, world: int) -> None:
    ranks(world).run(compare_abandoned)


# ---------------------------------------------------------------------------- masters under way


def write_what_goes_up(stage: int) -> None:
    """Change masters while the device may still read them, in each way."""
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    with beside_the_host():
        offload = Offload.of_stage(stage, "cpu")
        engine = Engine(module, Settings(units=(nn.Linear,), stage=stage, offload=offload))
        optimizer = momentum(module)
        engine.adopt(optimizer)
        module(torch.ones(2, 8)).sum().backward()

        def step() -> None:
            optimizer.step()

        def load() -> None:
            with engine.sharded.writing():
                for parameter in module.parameters():
                    parameter.copy_(torch.zeros(parameter.shape))

        for change in (step, step, load, step):
            with torch.no_grad():
                module(torch.ones(2, 8))
                change()
        engine.close()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_what_goes_up_is_not_written_to_meanwhile(ranks: Pools, world: int, stage: int) -> None:
    ranks(world).run(write_what_goes_up, stage)


# ---------------------------------------------------------------------------- casts


def cast_before_the_next_forward() -> None:
    case = MODELS["transformer"]
    model = case.build()
    with beside_the_host():
        offload = Offload.of_stage(3, "cpu")
        engine = shard(model, stage=3, recipe=RECIPES["bf16-mixed"], offload=offload)
        optimizer = momentum(model)
        engine.adopt(optimizer)

        def backward(seed: int) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = case.loss(model, case.batch(4, seed))
            loss.backward()

        backward(0)
        optimizer.step()
        # Threads cast nothing: what goes up is there.
        with mock.patch.object(HostCopies, "up_in_parts", side_effect=AssertionError):
            backward(1)
        for flat in engine.sharded.flats:
            if flat.plan.keeps_cast_weights:
                kept = flat.store._kept_weights()
                assert torch.equal(kept, flat.master.to(kept.dtype))
        engine.close()


def test_weights_are_cast_when_they_are_stepped(ranks: Pools) -> None:
    ranks(2).run(cast_before_the_next_forward)
