"""Units that are stepped amid a backward pass: the bits of a step behind it, or an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.optimizer import require_whole_steps, staging
from lightning_zero.plan import Offload
from lightning_zero.plan.settings import Settings
from tests.oracle.in_closures import OPTIMIZERS, Run, assert_equal, counted
from tests.oracle.ranks import Pools
from tests.oracle.sharded import shard, whole


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
    ranks(world).run(compare_all, str(tmp_path), timeout=150)


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
        piece.reduced.mul_(0.5)  # type: ignore[union-attr]


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
        (3, read_weights, "are needed again"),
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


@pytest.mark.parametrize(("stage", "what"), [(2, "arrived after"), (3, "are needed again")])
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
    assert ["arrived after step_in_backward=True" in text for text in texts] == [True, True]


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


def test_an_error_of_the_pass_that_the_closure_keeps_tears_the_step(tmp_path: Path) -> None:
    run = Run("recomputed", str(tmp_path), is_early=True)
    run.step(0)
    backward = run.backward

    def go_on(step: int, micro: int) -> Tensor:
        with contextlib.suppress(ZeroDivisionError):
            return backward(step, micro)
        return torch.zeros(())

    run.backward = go_on  # type: ignore[method-assign]
    run.model.blocks[0][0].weight.register_hook(lambda _: 1 / 0)  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeError, match="raised an error after"):
        run.step(1)
    with pytest.raises(RuntimeError, match="ended half-way"):
        require_whole_steps([run.optimizer])
    run.engine.reset()
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
        ({}, "Pass offload_optimizer="),
        ({"offload": Offload(weights="nvme")}, "Pass offload_optimizer="),
        ({"offload": Offload("cpu", "cpu")}, "accelerator='cpu' has none"),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(step_in_backward=True, **settings).check_device()
