"""What no number of a step shows: memory in it, messages that it spares, and steps that break."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import full_grad, gathered
from lightning_zero.comm import Communicator, Control
from lightning_zero.engine import Engine
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, Stack, adopted, build, rows, sgd, shard, square

WORLD = 2


def backward(engine: Engine, seed: int = 0) -> None:
    square(engine.module, rows(engine.comm.control.rank, seed)).backward()


# ------------------------------------------------------------------------------------ memory


def between_steps() -> None:
    """Few units are whole while all are read, or changed where no peer reads them."""
    engine = shard(Stack(8), comm=Communicator(CPU, reads_peers=False))
    largest = sorted(
        sum(flat.layout.numel * 4 for flat in unit.flat_parameters) for unit in engine.sharded.units
    )
    for change in (Tensor.norm, lambda p: p.mul_(0.5)):
        with torch.no_grad():
            for parameter in engine.module.parameters():
                change(parameter)
                assert 0 < engine.sharded.memory()["gathered"] <= sum(largest[-2:])
                assert len(engine.sharded._touched) <= 2
        backward(engine)
        assert engine.sharded.memory()["gathered"] == 0
    engine.close()


def test_few_units_are_whole_between_steps(ranks: Pools) -> None:
    ranks(WORLD).run(between_steps)


def dropped(stage: int) -> None:
    engine, optimizer = adopted(build(Stack), stage=stage)
    for _ in range(2):
        backward(engine)
        optimizer.zero_grad()
        assert not any(p.grad is not None for p in engine.module.parameters())
        assert not any(piece.grad is not None for piece in engine.sharded.pieces)
        assert engine.sharded.memory()["gradients"] == 0
        with gathered(engine.module):
            assert full_grad(engine.module.stem.weight) is None
    backward(engine)
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones(parameter.shape)
    # No piece shows a part of the shard any more, and it is gone; what was put in is counted.
    expected = sum(piece.numel() * 4 for piece in engine.sharded.pieces)
    assert engine.sharded.memory()["gradients"] == expected
    engine.close()


def test_gradients_that_are_dropped_leave_nothing(ranks: Pools) -> None:
    for stage in (1, 3):
        ranks(3).run(dropped, stage)  # where some pieces are empty


def tensors_left() -> int:
    """The tensors that every step leaves behind; a window that one needed more is kept."""
    gc.collect()
    gc.freeze()  # what the process has imported
    engine, counts = shard(build(Stack)), []
    for step in range(6):
        backward(engine, step)
        gc.collect()
        counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    engine.close()
    return min(after - before for before, after in itertools.pairwise(counts))


def test_steps_leave_nothing_behind(ranks: Pools) -> None:
    assert all(more <= 0 for more in ranks(WORLD).run(tensors_left))


# ----------------------------------------------------------------------------------- messages


def messages_of_autograd_grad(stage: int) -> None:
    """Ranks wait for each other nowhere, and reduce nothing."""
    engine = shard(build(Stack), stage=stage)
    x = rows(engine.comm.control.rank).requires_grad_()
    loss, other = square(engine.module, x), square(engine.module, x)
    with mock.patch.object(Control, "call", side_effect=AssertionError("a rank waits")):
        torch.autograd.grad(loss, x, retain_graph=True)
        if engine.comm.control.rank == 0 and stage < 3:  # not a collective any more
            torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(other, [x, *engine.module.parameters()])
    engine.comm.transport.ledger.end_step()
    assert "reduce" not in {verb for _, verb in engine.comm.traffic}
    engine.close()


def test_autograd_grad_sends_no_gradients(ranks: Pools) -> None:
    for stage in (1, 3):
        ranks(WORLD).run(messages_of_autograd_grad, stage)


def passes_within_a_pass() -> None:
    """A hook brings gradients again that have been averaged, which DDP refuses too."""
    engine = shard(build(Stack))
    x = rows(engine.comm.control.rank)

    @torch.enable_grad()
    def once_more(_: Tensor) -> None:
        engine.module.blocks[2](x).sum().backward()

    engine.module.stem.weight.register_post_accumulate_grad_hook(once_more)
    with pytest.raises(RuntimeError, match=r"'blocks\.2' came from .* outside of hooks"):
        square(engine.module, x).backward()
    engine.close()


def test_a_backward_pass_within_another_that_repeats_gradients_is_refused(ranks: Pools) -> None:
    ranks(WORLD).run(passes_within_a_pass)


# ------------------------------------------------------------------------------- broken steps


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("broken backward")


class Breakable(Stack):
    broken = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        if self.broken == "forward":
            raise ValueError("broken forward")
        x = _Raise.apply(x) if self.broken == "backward" else x
        return self.head(self.blocks[2](x))


def require_average(engine: Engine) -> None:
    """Compare the gradients with those of one good pass by plain torch."""
    model = build(type(engine.module))
    for rank in range(WORLD):
        (square(model, rows(rank)) / WORLD).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found = {name: full_grad(p) for name, p in engine.module.named_parameters()}
    torch.testing.assert_close(found, expected)
    assert engine.sharded.memory()["gathered"] == 0


def _break(engine: Engine, where: str, *, in_step: bool) -> None:
    """A step that an exception ends, which the user catches."""
    model, order = engine.module, engine._step.backward._order
    model.broken, finish = where, order.finish
    if where == "end":
        order.finish = lambda: 1 / 0

    def step() -> None:
        with engine.step() if in_step else contextlib.nullcontext(lambda _: None) as watch:
            loss = square(model, rows(engine.comm.control.rank))
            watch(loss)
        loss.backward()

    with pytest.raises((ValueError, ZeroDivisionError)):
        step()
    model.broken, order.finish = "", finish
    if in_step:
        engine.reset()


CLEARS: list[Callable[[nn.Module, Any], Any]] = [
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: type(optimizer).zero_grad(_wrapped(optimizer)),
    lambda model, optimizer: model.zero_grad(),
    lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
]


def _wrapped(optimizer: Any) -> Any:
    """What Fabric makes of an optimizer: an object of a subclass with the same attributes."""
    wrapper = object.__new__(type("Wrapper", (type(optimizer),), {}))
    wrapper.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "zero_grad"})
    return wrapper


def break_and_go_on(stage: int) -> None:
    """Steps that break, each behind a pass of its window or not, each before a good one."""
    engine, optimizer = adopted(build(Breakable), sgd, stage=stage)
    backward(engine)
    places, turns = itertools.cycle(("forward", "backward", "end")), itertools.cycle((True, False))
    for window, (clear, in_step) in itertools.product(
        ("", "", "sent", "unsent"), zip(CLEARS, turns, strict=False)
    ):
        clear(engine.module, optimizer)
        with engine.no_sync() if window == "unsent" else contextlib.nullcontext():
            if window:
                backward(engine)
            where = "backward" if window else next(places)
            _break(engine, where, in_step=in_step and not window)
        clear(engine.module, optimizer)
        backward(engine)
        require_average(engine)
    # A gradient that is put back after a broken step is added to.
    kept = engine.module.head.bias.grad
    _break(engine, "backward", in_step=True)
    engine.module.zero_grad()
    engine.module.head.bias.grad = kept
    backward(engine)
    bias = engine.module.head.bias.grad.clone()
    engine.module.zero_grad()
    backward(engine)
    torch.testing.assert_close(bias, 2 * engine.module.head.bias.grad.clone())
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_step_after_a_broken_one_is_clean(ranks: Pools, stage: int) -> None:
    ranks(WORLD).run(break_and_go_on, stage)


def backward_again(stage: int) -> None:
    """A backward pass behind one that failed, without a forward in between."""
    engine = shard(build(Stack), stage=stage)
    y = engine.module(rows(engine.comm.control.rank))
    with pytest.raises(ValueError, match="broken backward"):
        _Raise.apply(y).sum().backward(retain_graph=True)
    y.square().mean().backward(retain_graph=True)
    require_average(engine)
    hook = engine.module.stem.bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.square().mean().backward(retain_graph=True)
    hook.remove()
    engine.module.zero_grad()
    y.square().mean().backward()
    require_average(engine)
    engine.close()


def test_a_backward_pass_behind_one_that_failed(ranks: Pools) -> None:
    for stage in (2, 3):
        ranks(WORLD).run(backward_again, stage)
