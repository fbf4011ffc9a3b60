"""What no number of a step shows: memory in it, messages that it spares, and steps that break."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import full_grad, gathered
from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from tests.oracle.models import Block
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, Stack, build, rows, sgd, shard, square

WORLD = 2


class Deep(Stack):
    """Eight units besides the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(8)])


# ------------------------------------------------------------------------------------ memory


def whole_units(prefetch: int, **how: Any) -> list[int]:
    """The most units that were whole besides the root, in each of three steps at stage 3."""
    engine = shard(build(Deep), prefetch=prefetch, **how)
    inner = [unit for unit in engine.sharded.units if unit is not engine.sharded.root]
    peak = [0]

    def look(*_: Any) -> None:
        held = (any(b.weight.nbytes for b in unit.flat_parameters) for unit in inner)
        peak[-1] = max(peak[-1], sum(held))

    for module in engine.module.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    for parameter in engine.module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for step in range(3):
        loss = square(engine.module, rows(engine.comm.control.rank, step))
        look()
        loss.backward()
        assert engine.sharded.memory()["gathered"] == 0
        assert engine.sharded.memory()["unreduced"] == engine.comm.transport.scratch_bytes
        peak.append(0)
    engine.close()
    return peak[:-1]


def test_two_units_at_most_are_whole_besides_the_root(ranks: Pools) -> None:
    assert ranks(WORLD).run(whole_units, 0) == [[1, 1, 1]] * WORLD
    assert ranks(WORLD).run(whole_units, 1) == [[1, 2, 2]] * WORLD
    assert ranks(WORLD).run(whole_units, 1, reshard_after_forward=False) == [[8, 8, 8]] * WORLD


def unreduced_units(stage: int) -> list[int]:
    """The most units with gradients before their reduction, in each of two steps."""
    engine = shard(build(Deep), stage=stage)
    peaks = []
    for step in range(2):
        peak = 0

        def look(_: Tensor) -> None:
            nonlocal peak
            held = [flat.gradients.partial for flat in engine.sharded.flats]
            peak = max(peak, sum(p.buffer.tensor.nbytes for p in held if p is not None))

        handles = [p.register_post_accumulate_grad_hook(look) for p in engine.module.parameters()]
        square(engine.module, rows(engine.comm.control.rank, step)).backward()
        for handle in handles:
            handle.remove()
        peaks.append(-(-peak // (engine.sharded.units[1].flat_parameters[0].layout.numel * 4)))
    engine.close()
    return peaks


def test_gradients_are_reduced_while_backward_goes_on(ranks: Pools) -> None:
    for stage in (1, 3):
        # The root's own gradients are held to the end; of the eight blocks one at a time.
        assert ranks(WORLD).run(unreduced_units, stage) == [[2, 2]] * WORLD


def between_steps() -> None:
    """Few units are whole while all are read, or changed where no peer reads them."""
    engine = shard(build(Deep), comm=Communicator(CPU, reads_peers=False))
    largest = sorted(
        sum(flat.layout.numel * 4 for flat in unit.flat_parameters) for unit in engine.sharded.units
    )
    for change in (Tensor.norm, lambda p: p.mul_(0.5)):
        with torch.no_grad():
            for parameter in engine.module.parameters():
                change(parameter)
                assert 0 < engine.sharded.memory()["gathered"] <= sum(largest[-2:])
                assert len(engine.sharded.shown._touched) <= 2
        square(engine.module, rows(0)).backward()
        assert engine.sharded.memory()["gathered"] == 0
    engine.close()


def test_few_units_are_whole_between_steps(ranks: Pools) -> None:
    ranks(WORLD).run(between_steps)


def dropped(stage: int) -> None:
    engine = shard(build(Stack), stage=stage)
    engine.adopt(optimizer := sgd(engine.module))
    for _ in range(2):
        square(engine.module, rows(engine.comm.control.rank)).backward()
        optimizer.zero_grad()
        assert not any(p.grad is not None for p in engine.module.parameters())
        assert not any(piece.grad is not None for piece in engine.sharded.pieces)
        assert engine.sharded.memory()["gradients"] == 0
        with gathered(engine.module):
            assert full_grad(engine.module.stem.weight) is None
    engine.close()


def test_zero_grad_leaves_nothing(ranks: Pools) -> None:
    for stage in (1, 3):
        ranks(3).run(dropped, stage)  # where some pieces are empty


def tensors_left() -> int:
    """The tensors that every step leaves behind; a window that one needed more is kept."""
    gc.collect()
    gc.freeze()  # what the process has imported
    engine, counts = shard(build(Stack), stage=3), []
    for step in range(6):
        square(engine.module, rows(engine.comm.control.rank, step)).backward()
        gc.collect()
        counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    engine.close()
    return min(after - before for before, after in itertools.pairwise(counts))


def test_steps_leave_nothing_behind(ranks: Pools) -> None:
    assert all(more <= 0 for more in ranks(WORLD).run(tensors_left))


# ----------------------------------------------------------------------------------- messages


def sync_points_of_autograd_grad(stage: int) -> list[Any]:
    """Where ranks wait for each other, and what they reduce."""
    engine = shard(build(Stack), stage=stage)
    x = rows(engine.comm.control.rank).requires_grad_()
    found, control = [], engine.comm.control
    call = control.call

    def differentiate(loss: Tensor, by: Any) -> None:
        control.call = lambda point, *args, **more: [
            found.append(point), call(point, *args, **more)
        ][1]  # fmt: skip
        torch.autograd.grad(loss, by, retain_graph=True)
        control.call = call

    loss = square(engine.module, x)
    differentiate(loss, x)
    if engine.comm.control.rank == 0 and stage < 3:  # not a collective any more
        differentiate(loss, x)
    differentiate(square(engine.module, x), [x, *engine.module.parameters()])
    found += [verb for _, verb in engine.comm.transport.ledger.total if verb == "reduce"]
    engine.close()
    return found


def test_autograd_grad_sends_no_gradients(ranks: Pools) -> None:
    for stage in (1, 3):
        assert ranks(WORLD).run(sync_points_of_autograd_grad, stage) == [[]] * WORLD


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
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.broken == "forward":
                raise ValueError("broken forward")
            if number == 1 and self.broken == "backward":
                x = _Raise.apply(x)
        return self.head(x)


def averaged() -> dict[str, Tensor]:
    """The gradients of a step, by plain torch."""
    model = build(Breakable)
    for rank in range(WORLD):
        (square(model, rows(rank)) / WORLD).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def require(engine: Engine, expected: dict[str, Tensor]) -> None:
    grads = {name: full_grad(p) for name, p in engine.module.named_parameters()}
    torch.testing.assert_close(grads, expected)


def _break(engine: Engine, x: Tensor, where: str, *, in_step: bool) -> None:
    """A step that an exception ends, which the user catches."""
    model = engine.module
    model.broken = where
    order, finish = engine._step.backward._order, engine._step.backward._order.finish
    if where == "end":
        order.finish = lambda: 1 / 0

    def step() -> None:
        with engine.step() if in_step else contextlib.nullcontext(lambda _: None) as watch:
            loss = square(model, x)
            watch(loss)
        loss.backward()

    with pytest.raises((ValueError, ZeroDivisionError)):
        step()
    model.broken, order.finish = "", finish
    if in_step:
        engine.reset()


CLEARS: dict[str, Callable[[nn.Module, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "wrapper": lambda model, optimizer: type(optimizer).zero_grad(_wrapped(optimizer)),
    "module": lambda model, optimizer: model.zero_grad(),
    "none": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
}


def _wrapped(optimizer: Any) -> Any:
    """What Fabric makes of an optimizer: an object of a subclass with the same attributes."""
    wrapper = object.__new__(type("Wrapper", (type(optimizer),), {}))
    wrapper.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "zero_grad"})
    return wrapper


def break_and_go_on(stage: int) -> None:
    """A good step, some that break, each behind a pass of its window or not, and a good one."""
    expected = averaged()
    engine = shard(build(Breakable), stage=stage)
    engine.adopt(optimizer := torch.optim.SGD(engine.module.parameters(), 0.0))
    model, x = engine.module, rows(engine.comm.control.rank)
    square(model, x).backward()
    places, windows = itertools.cycle(("forward", "backward", "end")), ("", "", "sent", "unsent")
    for window, (clear, in_step) in itertools.product(
        windows, zip(CLEARS.values(), itertools.cycle((True, False)), strict=False)
    ):
        clear(model, optimizer)
        with engine.no_sync() if window == "unsent" else contextlib.nullcontext():
            if window:
                square(model, x).backward()
            in_step = in_step and not window
            _break(engine, x, "backward" if window else next(places), in_step=in_step)
        clear(model, optimizer)
        square(model, x).backward()
        require(engine, expected)
        assert engine.sharded.memory()["gathered"] == 0
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_step_after_a_broken_one_is_clean(ranks: Pools, stage: int) -> None:
    ranks(WORLD).run(break_and_go_on, stage)


def backward_again(stage: int) -> None:
    """A backward pass behind one that failed, without a forward in between."""
    expected = averaged()
    engine = shard(build(Stack), stage=stage)
    y = engine.module(rows(engine.comm.control.rank))
    with pytest.raises(ValueError, match="broken backward"):
        _Raise.apply(y).sum().backward(retain_graph=True)
    y.square().mean().backward(retain_graph=True)
    require(engine, expected)
    hook = engine.module.stem.bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.square().mean().backward(retain_graph=True)
    hook.remove()
    engine.module.zero_grad()
    y.square().mean().backward()
    require(engine, expected)
    engine.close()


def test_a_backward_pass_behind_one_that_failed(ranks: Pools) -> None:
    for stage in (2, 3):
        ranks(WORLD).run(backward_again, stage)


def graph_between_steps() -> None:
    engine = shard(build(Stack))

    def penalty() -> Tensor:
        return torch.stack([p.square().sum() for p in engine.module.parameters()]).sum()

    with gathered(engine.module):
        penalty().backward()
    for parameter in engine.module.parameters():
        torch.testing.assert_close(full_grad(parameter), 2 * parameter.detach())
    loss = penalty()
    with pytest.raises(RuntimeError, match=r"no longer in memory[.] .* `training_step`"):
        loss.backward()
    engine.reset()
    engine.close()


def test_a_graph_of_weights_between_steps_needs_them_gathered(ranks: Pools) -> None:
    ranks(WORLD).run(graph_between_steps)
