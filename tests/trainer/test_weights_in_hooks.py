"""Hooks and callbacks read and write weights between steps as under DDP, at every stage."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.oracle.projects import (
    Regression,
    Run,
    assert_like_ddp,
    fit,
    rows,
    under_all,
    wired,
)
from tests.oracle.ranks import Pools


class Noted(Regression):
    """SGD, so that rounding stays small, and notes of what is seen."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.notes: list[Any] = []


class EMA(Callback):
    """The average that most projects write for themselves."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.average[name].lerp_(parameter, 0.3)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.average[name])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.data = self.kept[name]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.notes.append(self.average)


class ForeachEMA(EMA):
    """The same with all parameters in one operation."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        torch._foreach_lerp_(
            list(self.average.values()), [p.data for p in pl_module.parameters()], 0.3
        )


class Parametrized(Noted):
    """Makes parameters of those that are trained, amid the training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for make in (nn.utils.parametrizations.weight_norm, lambda m: nn.Parameter(m.weight)):
            for module in (self.net.blocks[1].linear, self.head):
                with pytest.raises(RuntimeError, match=r"Parametrize the module .* before `fit`"):
                    make(module)
                self.notes.append(type(module))


def _parametrize() -> list[Any]:
    notes = []
    for stage in (1, 3):
        module = Parametrized()
        fit(module, stage, max_steps=2)
        notes.append(len(module.notes))
    return notes


def test_parameters_made_of_those_that_are_trained_are_refused(ranks: Pools) -> None:
    assert ranks(2).run(_parametrize) == [[8, 8]] * 2


class Orthogonal(Regression):
    """Keeps a weight orthogonal, from the beginning or as soon as it trains."""

    def on_fit_start(self) -> None:
        if not nn.utils.parametrize.is_parametrized(self.head):
            nn.utils.parametrizations.orthogonal(self.head)


def _orthogonal(strategy: Any) -> Run:
    module = Orthogonal()
    if strategy == "ddp":
        # It leaves out of its averages what lies in another memory than when it began.
        module.on_fit_start()
    return fit(module, strategy, max_steps=3)


def test_parametrizing_amid_a_run_is_as_before_it(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, _orthogonal, stages=(1, 3)))


def _edit(parameter: Tensor, how: int) -> None:
    """One of many ways to change a parameter in place."""
    with torch.no_grad():
        if how == 0:
            parameter.data.clamp_(-0.3, 0.3)
        elif how == 1:
            parameter.clamp_(-0.3, 0.3)
        elif how == 2:
            parameter.mul_(0.98)
        elif how == 3:
            parameter.data = 0.98 * parameter.data
        elif how == 4:
            parameter.copy_(0.98 * parameter)
        elif how == 5:
            parameter.div_(parameter.norm().clamp_min(1.0))
        elif how == 6:
            array = parameter.detach().numpy()
            array *= 0.98
        else:
            parameter[0] = parameter.data[0].mul(0.9)


class Edits(Callback):
    """Changes every parameter in every hook, each in another way, and reads what it has written."""

    def __init__(self) -> None:
        self.count = 0
        for hook in EDITING_HOOKS:
            setattr(self, hook, self._edit)

    def _edit(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.count += 1
        for index, parameter in enumerate(pl_module.parameters()):
            _edit(parameter, (index + self.count) % 8)
        pl_module.notes.append(sum(float(p.detach().norm()) for p in pl_module.parameters()))


EDITING_HOOKS = [
    "on_fit_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
]


class EWC(Callback):
    """Elastic weight consolidation: the squares of gradients, and a penalty on them."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        self.fisher = {n: torch.zeros(p.shape) for n, p in pl_module.named_parameters()}

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.fisher[name] += parameter.grad.detach() ** 2

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            parameter.grad.add_(0.1 * self.fisher[name] * (parameter - self.start[name]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.notes.append(self.fisher)


class SWAG(Callback):
    """Means and squares of weights at the ends of epochs; a sample of them for validation."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.sums = [torch.zeros(2, *p.shape) for p in pl_module.parameters()]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for total, parameter in zip(self.sums, pl_module.parameters(), strict=True):
            total += torch.stack([parameter.data, parameter.data.square()])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for total, parameter in zip(self.sums, pl_module.parameters(), strict=True):
            mean, square = total / trainer.max_epochs
            parameter.data.copy_(mean + (square - mean**2))


class TorchsOwn(Callback):
    """Code of torch that keeps views of many parameters while it goes on to others."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.average = AveragedModel(pl_module.net).requires_grad_(False)  # sharded, too

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.average.update_parameters(pl_module.net)
        vector = nn.utils.parameters_to_vector(pl_module.net.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, pl_module.net.parameters())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.notes.append([p.detach().clone() for p in pl_module.average.parameters()])


class Saves(Callback):
    """Saves weights as ``save_pretrained`` does, on all ranks or on one."""

    def __init__(self, *, of_all: bool) -> None:
        self.of_all = of_all

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not (self.of_all or trainer.is_global_zero):
            return
        file = io.BytesIO()
        torch.save(pl_module.state_dict(), file)
        assert file.tell() < 10_000, "no more than the weights"
        file.seek(0)
        pl_module.notes.append(torch.load(file))


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "EMA": EMA,
    "EMA by foreach": ForeachEMA,
    "EWC": EWC,
    "SWAG": SWAG,
    "torch's own": TorchsOwn,
    "saves": lambda: Saves(of_all=True),
    "saves of one rank": lambda: Saves(of_all=False),
    "edits": Edits,
}


def _fit(strategy: Any, make: Callable[[], Callback], **options: Any) -> Run:
    module = Noted()
    data = rows(), rows(4, seed=1)
    run = fit(module, strategy, callbacks=[make()], data=data, **{"max_epochs": 2, **options})
    run.notes = module.notes
    return run


def _fit_all(strategy: Any, names: Sequence[str], **options: Any) -> Run:
    runs = {name: vars(_fit(strategy, CALLBACKS[name], **options)) for name in names}
    return Run({}, notes=runs)


def _over(
    way: str, names: Sequence[str], stages: Sequence[int], **options: Any
) -> dict[str | int, Run]:
    with wired(way):
        return under_all(_fit_all, names, stages=stages, **options)


@pytest.mark.parametrize(("name", "stage"), list(zip(CALLBACKS, cycle((1, 2)), strict=False)))
def test_callbacks_do_what_they_do_under_ddp(ranks: Pools, name: str, stage: int) -> None:
    assert_like_ddp(ranks(2).run(under_all, _fit_all, [name], stages=(stage, 3)))


@pytest.mark.parametrize(
    ("world", "way", "names", "stages", "options"),
    [
        (1, "windows", ["EMA", "edits"], [3], {}),
        (2, "windows", ["EMA", "edits"], [1, 2, 3], {"accumulate_grad_batches": 2}),
        (2, "point to point", ["EMA by foreach", "EWC", "saves", "edits"], [3], {}),
        (2, "backend", ["EMA", "edits"], [3], {}),
        (3, "windows", ["EMA", "edits"], [3], {}),
    ],
)
def test_so_they_do_elsewhere(
    ranks: Pools,
    world: int,
    way: str,
    names: list[str],
    stages: list[int],
    options: dict[str, Any],
) -> None:
    assert_like_ddp(ranks(world).run(_over, way, names, stages, **options), ulps=64)


@pytest.mark.parametrize("way", ["windows", "point to point"])
def test_between_steps_weights_are_those_of_the_masters(ranks: Pools, way: str) -> None:
    """In mixed precision DDP shows fp32 weights."""
    names = ["saves", "edits"] + ["EMA"] * (way == "windows")
    runs = ranks(2).run(_over, way, names, [1, 3], precision="bf16-mixed")
    assert_like_ddp(runs, dtype=torch.bfloat16)
    for by_strategy in runs:
        for run in by_strategy.values():
            (state, *_) = run.notes["saves"]["notes"]
            assert {value.dtype for value in state.values()} == {torch.float32}
            assert any(not torch.equal(v, v.bfloat16().float()) for v in state.values())
