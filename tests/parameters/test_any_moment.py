"""The module as an object, at rest, within a step and after fit: copied, saved, converted, edited.

Whatever is done to it is right; conversions are refused by an error that names the parameter.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_zero import gathered
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.models import Block, Blocks
from tests.oracle.projects import (
    WIDTH,
    Regression,
    Run,
    assert_like_ddp,
    fit,
    rows,
    under_all,
)
from tests.oracle.ranks import Pools

# ------------------------------------------------------------------------------------- reading

Values = dict[str, Tensor]


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=not isinstance(value, nn.Module))


def _whole(module: nn.Module, prefix: str = "") -> Values:
    parameters = dict(module.named_parameters(prefix))
    assert {type(parameter) for parameter in parameters.values()} == {Parameter}
    return parameters


READS: dict[str, Callable[[Regression], Values]] = {
    "deepcopy": lambda module: _whole(copy.deepcopy(module)),
    "deepcopy of a child": lambda module: _whole(copy.deepcopy(module.net), "net"),
    "torch.save": lambda module: _whole(_saved(module)),
    "pickle of a child": lambda module: _whole(pickle.loads(pickle.dumps(module.net)), "net"),
    "torch.save of state_dict": lambda module: _saved(module.state_dict()),
    "deepcopy of state_dict": lambda module: copy.deepcopy(module.state_dict()),
    "torch.save of a parameter": lambda module: {"head.bias": _saved(module.head.bias)},
    "vector": lambda module: {"vector": parameters_to_vector(module.parameters())},
    "float": lambda module: dict(module.float().named_parameters()),
    "to": lambda module: dict(module.to("cpu", torch.float32).named_parameters()),
}
CONVERSIONS: dict[str, Callable[[Regression], Any]] = {
    "half": lambda module: module.half(),
    "to bfloat16": lambda module: module.net.to(torch.bfloat16),
}
MOMENTS = [("at rest", 1), ("training_step", 2), ("after forward", 1), ("validation", 2)]


class _Probed(Regression):
    """Does everything to itself at one moment of its second step."""

    def __init__(self, moment: str) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.moment = moment
        self.is_whole = True
        self.said: dict[str, str] = {}
        self.wrong: list[str] = []
        self.expected: Values = {}

    def probe(self, moment: str) -> None:
        if moment != self.moment or self.global_step != 1 or self.said:
            return
        for name, read in READS.items():
            self.attempt(name, read)
        if self.is_whole:
            self.attempt("rank 0 alone", lambda module: module.of_one_rank())
        for name, convert in CONVERSIONS.items():
            self.attempt(name, convert)

    def attempt(self, name: str, read: Callable[[Regression], Any]) -> None:
        try:
            values = read(self)
        except RuntimeError as error:
            self.said[name] = str(error)
            return
        self.said[name] = "done"
        for key, value in values.items() if name in READS else ():
            if not torch.equal(value.detach(), self.expected[key]):
                self.wrong.append(f"{name}: {key}")

    def of_one_rank(self) -> None:
        """A copy is called, and weights are looked at, by one rank."""
        if self.global_rank == 0:
            with torch.enable_grad():
                copy.deepcopy(self.net)(torch.ones(2, WIDTH)).sum().backward()
            assert float(self.head.weight.data.norm()) > 0
            self.head.float()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            with gathered(self):
                self.expected = {n: p.detach().clone() for n, p in self.named_parameters()}
                self.expected["vector"] = parameters_to_vector(self.parameters()).detach()
        self.probe("at rest")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.probe("training_step")
        loss = super().training_step(batch, batch_idx)
        self.probe("after forward")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with gathered(self):
            self.expected = {n: p.detach().clone() for n, p in self.named_parameters()}
            self.expected["vector"] = parameters_to_vector(self.parameters()).detach()
        self.probe("validation")
        super().validation_step(batch, batch_idx)


def _probe(strategy: Any, moment: str) -> Run:
    module = _Probed(moment)
    module.is_whole = strategy != 3
    if strategy == "ddp":
        # What DDP would make of conversions is no example to follow.
        module.attempt = lambda *_: None  # type: ignore[method-assign]
    options = {"max_steps": 3, "max_epochs": -1, "val_check_interval": 1}
    run = fit(module, strategy, data=(rows(), rows(4, seed=1)), **options)
    run.notes = [module.wrong]
    if strategy != "ddp":
        _check_what_was_said(module.said, strategy, moment)
    return run


def _check_what_was_said(said: dict[str, str], stage: int, moment: str) -> None:
    for name, words in said.items():
        where = f"{name}, {moment}, stage {stage}: {words}"
        if name in CONVERSIONS:
            assert "Parameter 'net.stem.weight' is a view of a flat buffer" in words, where
            assert "the `precision` of the Trainer" in words, where
        else:
            assert words == "done", where


@pytest.mark.parametrize(("moment", "stage"), MOMENTS)
def test_the_module_may_be_read_or_says_why_not(ranks: Pools, moment: str, stage: int) -> None:
    runs = ranks(2).run(under_all, _probe, moment, stages=(stage, 3))
    assert runs[0]["ddp"].notes == [[]]
    assert_like_ddp(runs)


# ------------------------------------------------------------------------------------- editing


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


def _vector(module: nn.Module) -> None:
    vector_to_parameters(0.9 * parameters_to_vector(module.parameters()), module.parameters())


def _row(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data[0] = 0.05


def _restorage(module: nn.Module) -> None:
    """As cuDNN's RNNs do when they flatten their weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.set_(0.9 * parameter)


EDITS = [_assign, _scale, _array, _vector, _row]


class _Edited(Regression):
    """Edits its weights in every step, at given moments."""

    def __init__(self, edit: Callable[[nn.Module], None], moments: tuple[str, ...]) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.edit, self.moments = edit, moments
        self.num_edits = 0

    def maybe_edit(self, moment: str) -> None:
        if moment in self.moments:
            self.num_edits += 1
            self.edit(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.maybe_edit("training_step")
        loss = super().training_step(batch, batch_idx)
        self.maybe_edit("after forward")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.maybe_edit("validation")
        super().validation_step(batch, batch_idx)


class _EditedByHand(_Edited):
    """Edits right after the optimizer's step, before the new weights have arrived."""

    def __init__(self, edit: Callable[[nn.Module], None], moments: tuple[str, ...]) -> None:
        super().__init__(edit, moments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())
        self.maybe_edit("after the optimizer's step")


def _edit(strategy: Any, moment: str, edits: list[Callable[[nn.Module], None]]) -> Run:
    by_hand = moment == "after the optimizer's step"
    notes = []
    for edit in edits:
        module = (_EditedByHand if by_hand else _Edited)(edit, (moment,))
        run = fit(
            module,
            strategy,
            max_steps=2,
            max_epochs=-1,
            val_check_interval=1,
            data=(rows(), rows(4, seed=1)),
        )
        notes.append([edit.__name__, module.num_edits, run.params, run.metrics, run.losses])
    return Run({}, notes=notes)


@pytest.mark.parametrize(
    ("moment", "edits", "stage"),
    [
        ("training_step", EDITS, 1),
        # Torch itself refuses a backward pass through weights that were replaced before it.
        ("after forward", [_scale], 2),
        ("after the optimizer's step", [_assign, _array, _row], 1),
        ("validation", [_assign, _array], 2),
    ],
)
def test_edits_through_data_last(ranks: Pools, moment: str, edits: list[Any], stage: int) -> None:
    runs = ranks(2).run(under_all, _edit, moment, edits, stages=(stage, 3))
    assert all(note[1] > 0 for note in runs[0]["ddp"].notes)
    assert_like_ddp(runs)


def _edited_by(stage: int, edit: Callable[[nn.Module], None]) -> Values:
    return fit(_Edited(edit, ("training_step",)), stage, max_steps=3, max_epochs=-1).params


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


def _digits(stage: int) -> list[Tensor]:
    """The masters' values before and after one row of their bf16 weights was edited."""
    engine = _engine(stage, "bf16-mixed")
    weight = engine.module.blocks[0].linear.weight
    with engine.sharded.gathered():
        before = weight.detach().clone()
    with engine.step(awaits_backward=False), torch.no_grad():
        weight[1] = 0.5
    with engine.step(awaits_backward=False):
        weight.data[2] = 0.25
        bias = engine.module.blocks[0].linear.bias
        bias.data = torch.full_like(bias.data, 0.75)
    with engine.sharded.gathered():
        assert (bias == 0.75).all()
        return [before, weight.detach().clone()]


def test_an_edit_keeps_the_digits_of_what_it_leaves_alone(ranks: Pools) -> None:
    for stage in (1, 2, 3):
        for before, after in ranks(2).run(_digits, stage):
            assert before.dtype == torch.float32
            before[1], before[2] = 0.5, 0.25
            assert torch.equal(before, after)


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
