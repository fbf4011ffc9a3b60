"""Units that are stepped amid a backward pass: the bits of a step behind it, or an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_zero.optimizer import UnitStep, require_whole_steps, staging
from lightning_zero.plan import RECIPES, Offload
from lightning_zero.plan.settings import Settings
from tests.oracle.models import MODELS, Case, numbers, square_loss
from tests.oracle.parity import share
from tests.oracle.ranks import Pools
from tests.oracle.sharded import shard, surroundings, whole

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}


class Recomputed(nn.Module):
    """Blocks whose forward is run once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


class Shared(nn.Module):
    """A block whose gradients come twice in a pass, each time from a pass within it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for number in (0, 1, 2, 3, 0, 3):
            x = checkpoint(self.blocks[number], x, use_reentrant=True).tanh()
        return self.head(x)  # type: ignore[no-any-return]


class Borrowed(nn.Module):
    """The root computes with the weights of a block, whose gradients so come late in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    borrows = True

    def forward(self, x: Tensor) -> Tensor:
        if self.borrows:
            x = nn.functional.linear(x, self.blocks[2].weight)  # type: ignore[arg-type]
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def wide() -> nn.Module:
    """Layers whose weights are stepped part by part, if batches are small."""
    layers = [nn.Sequential(nn.Linear(200, 200), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(200, 3))


CASES = {
    **MODELS,
    "wide": Case(wide, numbers(200, out=3), square_loss),
    "recomputed": Case(Recomputed, numbers(16, out=3), square_loss),
    "borrowed": Case(Borrowed, numbers(16, out=3), square_loss),
    "shared": Case(Shared, numbers(16, out=3), square_loss),
}


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list of how many units were left whenever one was stepped ahead."""
    found: list[int] = []
    step_ahead = UnitStep.step_ahead

    def count(self: UnitStep, order: Any, landed: Any) -> None:
        found.append(len(order))
        step_ahead(self, order, landed)

    with patch.object(UnitStep, "step_ahead", count):
        yield found


class Run:
    """A plain loop whose backward passes are in closures, as Lightning's are."""

    def __init__(
        self,
        case: str,
        folder: str,
        *,
        is_early: bool,
        name: str = "adamw",
        stage: int = 3,
        precision: str = "32-true",
        accumulate: int = 1,
        between: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.case = CASES[case]
        self.is_early, self.precision, self.accumulate = is_early, precision, accumulate
        self.between = between
        self.model = self.case.build()
        self.engine = shard(
            self.model,
            stage=stage,
            recipe=RECIPES[precision],
            offload=Offload.of_stage(stage, "nvme"),
            offload_path=folder,
            step_in_backward=True,
        )
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.engine.adopt(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.losses: list[float] = []

    def backward(self, step: int, micro: int) -> Tensor:
        engine, control = self.engine, self.engine.comm.control
        rank, world = control.rank, control.world_size
        rows = self.case.batch(4 * world * self.accumulate, step)
        part = share(rows, rank, world, micro, self.accumulate)
        with engine.step() as watch, surroundings(self.precision):
            loss = self.case.loss(self.model, part) / self.accumulate
            watch(loss)
        self.losses.append(loss.item())
        with engine.stepping_early() if self.is_early else contextlib.nullcontext():
            loss.backward()
        return loss

    def step(self, step: int) -> None:
        for micro in range(self.accumulate - 1):
            with self.engine.no_sync():
                self.backward(step, micro)

        def closure() -> Tensor:
            loss = self.backward(step, self.accumulate - 1)
            self.between(self)
            return loss

        self.optimizer.step(closure)
        self.optimizer.zero_grad()
        self.scheduler.step()

    def result(self) -> tuple[list[float], dict[str, Tensor], list[Any]]:
        for step in range(3):
            self.step(step)
        found = whole(self.engine)
        states = [
            value.clone() if isinstance(value, Tensor) else value
            for piece in self.engine.sharded.pieces
            for value in self.optimizer.state[piece].values()
        ]
        self.engine.close()
        return self.losses, found, states


def assert_equal(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    pairs = [(found[1][key], expected[1][key]) for key in expected[1]]
    pairs += zip(found[2], expected[2], strict=True)
    for one, other in pairs:
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def compare(folder: str, case: str, **how: Any) -> None:
    with patch.object(staging, "_BATCH_BYTES", 1), counted() as found:
        expected = Run(case, folder, is_early=False, **how).result()
        assert not found
        assert_equal(Run(case, folder, is_early=True, **how).result(), expected)
        assert len(found) >= 3  # in each step at least


def compare_some(folder: str) -> None:
    compare(folder, "recomputed", stage=1, name="sgd")
    compare(folder, "transformer", stage=2, precision="bf16-mixed", accumulate=3)
    compare(folder, "recomputed", stage=3, accumulate=3)
    compare(folder, "tied_blocks", stage=3, name="adagrad")
    compare(folder, "wide", stage=3)
    compare(folder, "borrowed", stage=2)
    compare(folder, "borrowed", stage=3)


def compare_all(folder: str) -> None:
    for stage in (1, 2, 3):
        for case in ("recomputed", "transformer", "tied_blocks", "frozen"):
            for name in OPTIMIZERS:
                compare(folder, case, stage=stage, name=name)
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            compare(folder, "transformer", stage=stage, precision=precision, accumulate=3)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_bits_are_those_of_a_step_behind_the_pass(
    ranks: Pools, tmp_path: Path, world: int
) -> None:
    ranks(world).run(compare_some, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_so_are_those_of_all_optimizers(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks(world).run(compare_all, str(tmp_path))


def test_files_are_read_while_units_go_backward(tmp_path: Path) -> None:
    run, reads = Run("recomputed", str(tmp_path), is_early=True), list[int]()
    run.step(0)
    read = os.preadv
    forward = nn.Linear.forward

    def note(*args: Any) -> int:
        reads.append(0)
        return read(*args)

    def recompute(self: nn.Linear, x: Tensor) -> Tensor:
        reads.append(1)
        return forward(self, x)

    with patch.object(os, "preadv", note), patch.object(nn.Linear, "forward", recompute):
        run.step(1)
    assert 0 in reads[: len(reads) - 1 - reads[::-1].index(1)]
    times = run.engine.comm.step_times
    assert 0 < times.stepping < times.seconds
    run.engine.close()


# ---------------------------------------------------------------------------- what does not fit


def change_gradient(run: Run) -> None:
    run.engine.sharded.pieces[-1].parameter.grad.mul_(2)  # type: ignore[union-attr]
    for piece in run.engine.sharded.pieces:
        piece.grad.mul_(0.5)  # type: ignore[union-attr]


def drop_gradient(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = None


def change_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 1.0


def change_weights(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)


def read_weights(run: Run) -> None:
    next(run.model.parameters()).sum()


@pytest.mark.parametrize(
    ("stage", "between", "what"),
    [
        (3, change_gradient, "the gradient of"),
        (3, drop_gradient, "the gradient of"),
        (3, change_rate, "hyperparameters"),
        (2, change_weights, "weights of"),
        (3, read_weights, "are needed once more"),
    ],
)
def test_what_comes_in_between_is_found_and_the_step_is_torn(
    tmp_path: Path, stage: int, between: Callable[[Run], None], what: str
) -> None:
    run = Run("recomputed", str(tmp_path), is_early=True, stage=stage)
    run.step(0)
    run.between = between
    with pytest.raises(RuntimeError, match=what):
        run.step(1)
    with pytest.raises(RuntimeError, match="ended half-way"):
        require_whole_steps([run.optimizer])
    run.engine.reset()
    run.engine.close(restore=False)


@pytest.mark.parametrize(("stage", "what"), [(2, "came when"), (3, "are needed once more")])
def test_a_unit_that_comes_again_in_the_pass_is_found(
    tmp_path: Path, stage: int, what: str
) -> None:
    run = Run("shared", str(tmp_path), is_early=True, stage=stage)
    with pytest.raises(RuntimeError, match=what):
        run.step(0)
    run.engine.reset()
    is_torn = pytest.raises(RuntimeError, match="ended half-way")
    with is_torn if stage == 2 else contextlib.nullcontext():  # else before the first is stepped
        require_whole_steps([run.optimizer])
    run.engine.close(restore=False)
    slow = Run("shared", str(tmp_path), is_early=False, stage=stage)
    slow.step(0)
    slow.engine.close(restore=False)


def borrowed_by_one(folder: str) -> str:
    run = Run("borrowed", folder, is_early=True, stage=2)
    run.model.borrows = run.engine.comm.control.rank == 1
    with pytest.raises(RuntimeError) as raised:
        run.step(0)
    run.engine.reset()
    run.engine.close(restore=False)
    return str(raised.value)


def test_a_gradient_that_is_late_on_one_rank_is_told_on_all(ranks: Pools, tmp_path: Path) -> None:
    texts = ranks(2).run(borrowed_by_one, str(tmp_path))
    assert ["came when, by step_in_backward=True" in text for text in texts] == [True, True]


def test_who_lacks_the_memory_may_try_again(tmp_path: Path) -> None:
    """Gradients of the pass that failed are not added to those of the next."""
    expected = Run("recomputed", str(tmp_path), is_early=False).result()
    run = Run("recomputed", str(tmp_path), is_early=True)
    lacking = patch.object(staging, "Slot", side_effect=OSError("no memory"))
    with lacking, pytest.raises(MemoryError):
        run.step(0)
    run.engine.reset()
    require_whole_steps([run.optimizer])
    run.model.zero_grad()
    run.losses.clear()
    assert_equal(run.result(), expected)


def test_an_error_in_the_pass_leaves_a_torn_step(tmp_path: Path) -> None:
    run = Run("recomputed", str(tmp_path), is_early=True)
    run.step(0)

    def fail(_: Tensor) -> None:
        raise KeyboardInterrupt

    run.model.blocks[0][0].weight.register_hook(fail)  # type: ignore[index, union-attr]
    with pytest.raises(KeyboardInterrupt):
        run.step(1)
    run.engine.reset()
    with pytest.raises(RuntimeError, match="ended half-way"):
        require_whole_steps([run.optimizer])
    run.engine.close(restore=False)


def test_edited_weights_and_missing_gradients_are_stepped_behind_the_pass(tmp_path: Path) -> None:
    """A unit that a branch leaves out, and one whose weights a forward clamps."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor, step: int) -> Tensor:
            if step == 2:
                with torch.no_grad():
                    self.blocks[3].weight.clamp_(-0.2, 0.2)  # type: ignore[operator]
            for number, block in enumerate(self.blocks):
                if number != 2 or step != 1:
                    x = block(x).tanh()
            return x

    def run(*, is_early: bool) -> tuple[dict[str, Tensor], list[int]]:
        torch.manual_seed(0)
        model = Branch()
        engine = shard(
            model,
            stage=2,
            offload=Offload.of_stage(2, "nvme"),
            offload_path=str(tmp_path),
            step_in_backward=True,
        )
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        engine.adopt(optimizer)
        with counted() as found:
            for step in range(3):

                def closure(step: int = step) -> Tensor:
                    optimizer.zero_grad()
                    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                    loss = model(x, step).square().mean()
                    with engine.stepping_early() if is_early else contextlib.nullcontext():
                        loss.backward()
                    return loss

                optimizer.step(closure)
        masters = whole(engine)
        engine.close()
        return masters, found

    expected, _ = run(is_early=False)
    actual, found = run(is_early=True)
    assert found == [4, 3, 2, 3, 2]
    assert all(torch.equal(actual[key], value) for key, value in expected.items())


def test_steps_without_closures_are_none_of_it(tmp_path: Path) -> None:
    run = Run("recomputed", str(tmp_path), is_early=True)
    with counted() as found:
        run.backward(0, 0)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert not found
    run.engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Give offload_optimizer="),
        ({"offload": Offload(weights="nvme")}, "Give offload_optimizer="),
        ({"offload": Offload("cpu", "cpu")}, "accelerator='cpu' has none"),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(step_in_backward=True, **settings).check_device()
