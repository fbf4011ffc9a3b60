"""Offload to a host beside the device: what crosses, and the order of copies, edits and steps.

The device is that of `tests/oracle/device.py`; `test_device_paths.py` has whole ways to train.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.comm import sum_of
from lightning_zero.engine import Engine
from lightning_zero.optimizer import clip
from lightning_zero.plan import Offload, Settings
from lightning_zero.tensors import HostCopies
from tests.oracle.device import beside_the_host
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools
from tests.oracle.sharded import adopted

STEPS, MICRO = 3, 2
CASE = MODELS["transformer"]


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def unfrozen(folder: str) -> None:
    """Check that what was frozen at setup rests on the device, also when it is trained."""

    def run(**settings: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        module[0].requires_grad_(False)
        engine = Engine(module, Settings(2, units=(nn.Linear,), **settings))
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9, fused=True)
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
        thawed = [
            piece for flat in engine.sharded.units[0].flat_parameters for piece in flat.pieces
        ]
        if settings:
            assert held["states"] == sum(piece.detach().nbytes for piece in thawed)
        engine.close()
        return dict(module.state_dict())

    expected = run()
    for medium in ("cpu", "nvme"):
        with beside_the_host():
            actual = run(offload=Offload(medium), offload_path=folder)
        assert all(torch.equal(value, expected[name]) for name, value in actual.items())


def test_what_is_unfrozen_later_stays(ranks: Pools, tmp_path: Any) -> None:
    ranks(2).run(unfrozen, str(tmp_path))


# ---------------------------------------------------------------------------- what crosses


def crossed(stage: int, medium: str, folder: str) -> None:
    """What copies move in a step: a shard for each gather and each reduction."""
    with beside_the_host() as memories:
        offload = Offload.of_stage(stage, medium)
        engine, optimizer = adopted(
            CASE.build(), momentum, stage=stage, offload=offload, offload_path=folder
        )
        for step in range(STEPS):
            memories.crossed.clear()
            for _ in range(MICRO):
                CASE.loss(engine.module, CASE.batch(4, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        moved, sent, held = dict(memories.crossed), engine.comm.traffic, engine.sharded.memory()
        engine.close()
    assert held["master"] == held["states"] == held["gradients"] == 0
    assert (held["weights"] > 0) == (stage < 3)
    assert held["host states" if medium == "cpu" else "disk states"] > 0
    assert {way: sum_of(sent, way).bytes for way in moved} == moved
    # With two ranks each sends its shard once.
    up, down = (
        sum(of_unit.bytes for (_, verb), of_unit in sent.items() if verb == one)
        for one in ("gather", "reduce")
    )
    # From the second microbatch on what rests comes up, to be added to.
    assert moved == {"up": up + down * (MICRO - 1) // MICRO, "down": down}


def test_what_crosses_is_the_formulas(ranks: Pools, tmp_path: Any) -> None:
    for stage, medium in ((2, "cpu"), (3, "cpu"), (3, "nvme")):
        ranks(2).run(crossed, stage, medium, str(tmp_path))


# ---------------------------------------------------------------------------- late, and abandoned


class Late:
    """A copy that is made when it is waited for, and not before."""

    def __init__(self, out: Tensor, source: Tensor) -> None:
        self._out, self._source = out, source.clone()
        out.fill_(float("nan"))

    def wait(self) -> None:
        self._out.copy_(self._source)


def linears(**settings: Any) -> tuple[nn.Sequential, Engine, Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    engine = Engine(module, Settings(units=(nn.Linear,), **settings))
    optimizer = momentum(module)
    engine.adopt(optimizer)
    return module, engine, optimizer


def edited(**settings: Any) -> dict[str, Tensor]:
    module, engine, optimizer = linears(**settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(MICRO):
            module(torch.full((2, 8), 0.1 * (step + part + 1))).sum().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(torch.tensor(0.5))
        with torch.no_grad():
            module[0].weight.mul_(0.9)  # type: ignore[operator]
        optimizer.step()
        with lightning_zero.gathered(module, modify=True):
            nn.init.constant_(module[1].bias, 0.1 * step)  # type: ignore[arg-type]
    engine.close()
    return dict(module.state_dict())


def compare_edited() -> None:
    expected = edited()

    def slow(copies: Any, out: Tensor, source: Tensor, finish: Any = None, **_: Any) -> Late:
        if finish is not None:
            finish()
        return Late(out, source)

    # Nothing is followed: on a CPU an edit's copy to the host is none.
    with beside_the_host(followed=False), mock.patch.object(HostCopies, "down", slow):
        for offload in (Offload("cpu", "cpu"), Offload("cpu")):
            actual = edited(offload=offload)
            assert all(torch.equal(value, expected[name]) for name, value in actual.items())


def test_gradients_are_waited_for_and_edits_go_up_and_down(ranks: Pools) -> None:
    ranks(2).run(compare_edited)


def interrupt(_: Tensor) -> None:
    raise KeyboardInterrupt


def stepped_behind(*, is_interrupted: bool, **settings: Any) -> dict[str, Tensor]:
    """Step behind a pass that was interrupted while gradients went to where others rest."""
    module, engine, optimizer = linears(**settings)

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
        run = partial(stepped_behind, is_interrupted=True, stage=stage)
        found = {"the device": run()}
        with beside_the_host():
            found["its host"] = run(offload=offload)
        for where, weights in found.items():
            wrong = [name for name, one in weights.items() if not torch.equal(one, expected[name])]
            assert not wrong, f"stage {stage}, where gradients rest on {where}: {wrong}"


def test_nothing_of_a_pass_that_was_abandoned_is_added_later(ranks: Pools) -> None:
    ranks(2).run(compare_abandoned)


# ---------------------------------------------------------------------------- masters under way


def write_what_goes_up() -> None:
    """Change masters while the device may still read them, in each way."""
    for stage in (2, 3):
        with beside_the_host():
            module, engine, optimizer = linears(stage=stage, offload=Offload.of_stage(stage, "cpu"))
            module(torch.ones(2, 8)).sum().backward()

            def load(module: nn.Module = module, engine: Engine = engine) -> None:
                with engine.sharded.writing():
                    for parameter in module.parameters():
                        parameter.copy_(torch.zeros(parameter.shape))

            for change in (optimizer.step, optimizer.step, load, optimizer.step):
                with torch.no_grad():
                    module(torch.ones(2, 8))
                    change()
            engine.close()


@pytest.mark.parametrize("world", [1, 2])
def test_what_goes_up_is_not_written_to_meanwhile(ranks: Pools, world: int) -> None:
    ranks(world).run(write_what_goes_up)
