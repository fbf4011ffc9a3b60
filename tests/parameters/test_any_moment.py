"""What is gathered is edited, kept and trained; views of weights, and data that is replaced."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lightning_zero import gathered
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.models import Block, Blocks
from tests.oracle.projects import WIDTH, Regression, fit
from tests.oracle.ranks import Pools

Values = dict[str, Tensor]


def _assign(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = 0.9 * parameter.data


def _scale(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.9)


def _array(module: nn.Module) -> None:
    for parameter in module.parameters():
        array = parameter.detach().numpy()
        array *= 0.9


def _restorage(module: nn.Module) -> None:
    """As cuDNN's RNNs do when they flatten their weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.set_(0.9 * parameter)


class _Edited(Regression):
    """Edits its weights before every forward."""

    def __init__(self, edit: Callable[[nn.Module], None]) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.edit = edit

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.edit(self)
        return super().training_step(batch, batch_idx)


def _edited_by(stage: int, edit: Callable[[nn.Module], None]) -> Values:
    return fit(_Edited(edit), stage, max_steps=3, max_epochs=-1).params


def test_weights_that_moved_are_found(ranks: Pools) -> None:
    """Something put them into a storage of their own. (DDP stops to average their gradients.)"""
    for stage in (1, 2, 3):
        scaled, _ = ranks(2).run(_edited_by, stage, _scale)
        for moved in ranks(2).run(_edited_by, stage, _restorage):
            torch.testing.assert_close(moved, scaled)


# ------------------------------------------------------------------------------------ gathered


def _engine(stage: int, precision: str = "32-true") -> Engine:
    torch.manual_seed(0)
    settings = Settings(stage=stage, units={Block}, recipe=RECIPES[precision])
    return Engine(Blocks(2, WIDTH), settings)


def _edit_gathered(stage: int, edit: Callable[[nn.Module], None]) -> Values:
    engine = _engine(stage)
    with gathered(engine.module, modify=True):
        if engine.comm.control.rank == 0:
            edit(engine.module)
    engine.close()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("edit", [_assign, _array, _restorage])
def test_edits_of_gathered_data_last(ranks: Pools, edit: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    expected = Blocks(2, WIDTH)
    edit(expected)
    for stage in (1, 2, 3):
        for values in ranks(2).run(_edit_gathered, stage, edit):
            for name, parameter in expected.named_parameters():
                assert torch.equal(values[name], parameter), (stage, name)


def _edit_what_was_gathered_for_reading(stage: int) -> list[str]:
    engine, said = _engine(stage), []
    weight = engine.module.blocks[1].linear.weight
    for edit in (
        lambda: weight.data.mul_(2.0),
        lambda: nn.init.ones_(weight),
        lambda: setattr(weight, "data", torch.full_like(weight, 3.0)),
    ):
        try:
            with gathered(engine.module):
                if engine.comm.control.rank == 1:
                    edit()
        except RuntimeError as error:
            said.append(str(error))
    with gathered(engine.module):
        assert weight.data.norm() > 0
    return said


def test_edits_of_what_is_gathered_for_reading_are_refused(ranks: Pools) -> None:
    for stage in (1, 2, 3):
        first, second = ranks(2).run(_edit_what_was_gathered_for_reading, stage)
        assert len(first) == len(second) == 3
        assert all("A parameter on another rank was changed" in words for words in first)
        assert all("'blocks.1.linear.weight' was changed" in words for words in second)
        assert all("modify=True" in words for words in [*first, *second])


def _nested() -> list[str]:
    engine = _engine(3)
    module, said = engine.module, []
    block = list(module.blocks[0].parameters())
    with gathered(module), gathered(block):
        inside = block[0].sum().item()
    with gathered(module):
        assert block[0].sum().item() == inside
        try:
            with gathered(block, modify=True):
                pass
        except RuntimeError as error:
            said.append(str(error))
        flats = [flat for unit in engine.sharded.units for flat in unit.flat_parameters]
        buffers = [weakref.ref(flat.masters.whole) for flat in flats if flat.masters]
    assert buffers
    assert not any(ref() for ref in buffers), "freed with the context"
    return said


def test_gathered_may_be_nested_for_reading(ranks: Pools) -> None:
    for (message,) in ranks(2).run(_nested):
        assert "to the outer one" in message


def _train_within_gathered(stage: int, precision: str, within: bool) -> list[Tensor]:
    """The masters as shown after each of two steps, and views of them taken in another."""
    engine = _engine(stage, precision)
    module, parameters = engine.module, list(engine.module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    engine.adopt(optimizer)
    shown: list[Tensor] = []
    torch.manual_seed(engine.comm.control.rank)
    for x in torch.randn(2, 3, WIDTH):
        with gathered(module) if within else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                loss = module(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if within:
                shown.append(parameters_to_vector(parameters))
        if not within:
            with gathered(module):
                shown.append(parameters_to_vector(parameters))
        assert engine.sharded.memory()["gathered"] == 0
    with engine.step(awaits_backward=False), torch.no_grad():
        with gathered(module):
            views = [parameter.detach() for parameter in parameters]
        # The weights that they are views of may be released, but not under their feet.
        shown += [view.float().clone() for view in views]
    engine.close()
    return [*shown, parameters_to_vector(parameters).detach()]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_within_gathered_is_a_step(ranks: Pools, stage: int, precision: str) -> None:
    """Forward, backward and optimizer find what is shown, and leave the new values shown."""
    within, apart = (ranks(2).run(_train_within_gathered, stage, precision, how) for how in (1, 0))
    for values in zip(*within, *apart, strict=True):
        assert all(torch.equal(value, values[0]) for value in values)


# ----------------------------------------------------------------------- views, and data replaced


def _snapshots(stage: int, precision: str) -> None:
    """What is kept of parameters between steps has its own storage, and is kept from the next."""
    engine = _engine(stage, precision)
    module = engine.module
    state = module.state_dict()
    views = [p[0] if p.ndim else p for p in map(Tensor.detach, module.parameters())]
    arrays = [p.detach().numpy() for p in module.parameters()]
    for value in state.values():
        assert value.untyped_storage().nbytes() == value.nbytes
    before = copy.deepcopy((state, views, arrays))
    with torch.no_grad():
        for _ in range(2):  # whatever is shown changes places
            with engine.step(awaits_backward=False):
                module(torch.ones(2, WIDTH))
            for p in module.parameters():
                p.copy_(torch.full_like(p, 0.5))
    torch.testing.assert_close((state, views, arrays), before, rtol=0, atol=0)
    assert all((p == 0.5).all() for p in module.parameters())
    engine.close()
    assert all((p == 0.5).all() for p in module.parameters())


def _all_snapshots() -> None:
    for stage in (1, 2, 3):
        _snapshots(stage, "32-true")


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_kept_between_steps_is_a_snapshot(ranks: Pools, world: int) -> None:
    ranks(world).run(_all_snapshots)


class _KeepsData(Block):
    """Keeps views of its weight from its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.linear.weight.data, self.linear.weight.detach()[1:]]
        return super().forward(x)


def _keep_data(stage: int) -> None:
    """Data that a module keeps beyond its forward stays readable."""
    engine = Engine(nn.Sequential(_KeepsData(WIDTH)), Settings(stage=stage, units={_KeepsData}))
    module: Any = engine.module
    expected = module[0].linear.weight.detach().clone()
    for has_grad in (True, False):
        with torch.set_grad_enabled(has_grad):
            out = module(torch.ones(2, WIDTH))
        assert torch.equal(module[0].kept[0], expected)
        if has_grad:
            out.sum().backward()
        data, rows_ = module[0].kept
        assert torch.equal(data, expected)
        assert torch.equal(rows_, expected[1:])
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_data_that_a_module_keeps_stays_readable(ranks: Pools, stage: int) -> None:
    ranks(2).run(_keep_data, stage)
