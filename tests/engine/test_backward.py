"""Backward in all its forms: touches, aliases, the end of a unit's backward, broken steps.

Every case runs under stage 3 and one of 1 and 2 on two ranks and once in plain torch; the averaged
gradients are the same.
"""

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import full_grad
from lightning_zero.engine import Engine
from tests.oracle.models import Block
from tests.oracle.ranks import Pools
from tests.oracle.sharded import shard
from tests.oracle.stack import Stack, build, rows, square

WORLD = 2
Grads = dict[str, Tensor | None]


# ------------------------------------------------------------------- one case, plain and sharded

Case = Callable[[nn.Module, Tensor], None]
"""Runs forward and backward of a model on one rank's rows."""


def plain(make: Callable[[], nn.Module], case: Case, steps: int = 1) -> Grads:
    """The gradients of all ranks' rows, averaged."""
    total: dict[str, Tensor] = {}
    for rank in range(WORLD):
        model = build(make)
        for step in range(steps):
            case(model, rows(rank, step))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                more = parameter.grad / WORLD
                total[name] = total[name] + more if name in total else more
    return {name: total.get(name) for name, _ in build(make).named_parameters()}


def grads_of(engine: Engine) -> Grads:
    grads = {}
    for name, parameter in engine.module.named_parameters():
        grad = full_grad(parameter)
        grads[name] = None if grad is None else grad.clone()
    return grads


def backward_of(loss: Callable[[nn.Module, Tensor], Tensor]) -> Case:
    """The ordinary case: a loss and its backward."""

    def case(model: nn.Module, x: Tensor) -> None:
        loss(model, x).backward()

    return case


# ------------------------------------------------------------------------- kinds of saved tensors


# ----------------------------------------------------------------------------- ways of backward


# -------------------------------------------------------------------- the end of unit backward


# ------------------------------------------------------------------------- touches at rest


def touch_in_two_backwards() -> None:
    engine = shard(build(Stack), stage=3)
    resting = engine.sharded.units[0].flat_parameters[0].parameters[0]
    sums: list[Tensor] = []
    output = engine.module(rows(engine.comm.control.rank))
    output.register_hook(lambda _: sums.append(resting.detach().sum()))
    loss = output.square().mean()
    loss.backward(retain_graph=True)
    assert engine.sharded.memory()["gathered"] == 0
    loss.backward()
    assert engine.sharded.memory()["gathered"] == 0
    assert sums[0] == sums[1] != 0
    engine.close()


def test_a_touch_within_a_second_backward_gathers_too(ranks: Pools) -> None:
    ranks(WORLD).run(touch_in_two_backwards)


# ------------------------------------------------------------------------------------ memory


def whole_units(
    stage: int, prefetch: int, *, reshard: bool, make: Callable[[], nn.Module] | None = None
) -> list[int]:
    """The most units that were whole besides the root, in each of three steps."""
    how = {} if reshard else {"reshard_after_forward": False}
    engine = shard(build(make or (lambda: Deep(8))), stage=stage, prefetch=prefetch, **how)
    inner = [unit for unit in engine.sharded.units if unit is not engine.sharded.root]
    peak = [0]

    def look(*_: Any) -> None:
        peak[-1] = max(
            peak[-1], sum(b.weight.nbytes > 0 for unit in inner for b in unit.flat_parameters)
        )

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


class Deep(Stack):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(num_blocks)])


def test_two_units_at_most_are_whole_besides_the_root(ranks: Pools) -> None:
    assert ranks(WORLD).run(whole_units, 3, 0, reshard=True) == [[1, 1, 1]] * WORLD
    assert ranks(WORLD).run(whole_units, 3, 1, reshard=True) == [[1, 2, 2]] * WORLD
    assert ranks(WORLD).run(whole_units, 3, 1, reshard=False) == [[8, 8, 8]] * WORLD


def unreduced_bytes(stage: int) -> list[int]:
    """The most bytes of gradients before their reduction, in each of two steps."""
    engine = shard(build(lambda: Deep(8)), stage=stage)
    peaks = []
    for step in range(2):
        peak = 0

        def look(_: Tensor) -> None:
            nonlocal peak
            held = [
                b.gradients.partial for unit in engine.sharded.units for b in unit.flat_parameters
            ]
            peak = max(peak, sum(p[0].tensor.nbytes for p in held if p is not None))

        handles = [p.register_post_accumulate_grad_hook(look) for p in engine.module.parameters()]
        square(engine.module, rows(engine.comm.control.rank, step)).backward()
        for handle in handles:
            handle.remove()
        block = engine.sharded.units[1].flat_parameters[0].layout.numel * 4
        peaks.append(-(-peak // block))
    engine.close()
    return peaks


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_reduced_while_backward_goes_on(ranks: Pools, stage: int) -> None:
    # The root's own gradients are held to the end; of the eight blocks one at a time.
    assert ranks(WORLD).run(unreduced_bytes, stage) == [[2, 2]] * WORLD


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


def _break(engine: Engine, x: Tensor, where: str, *, in_step: bool) -> None:
    """A step that an exception ends, which the user catches."""
    model = engine.module
    model.broken = where
    order, finish = engine._backward._order, engine._backward._order.finish
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


def break_and_go_on(stage: int, where: str, *, in_step: bool, windows: str = "") -> Grads:
    """A good step, one that is broken, behind a pass of its window if so, and a good one."""
    engine = shard(build(Breakable), stage=stage)
    engine.adopt(optimizer := torch.optim.SGD(engine.module.parameters(), 0.0))
    model, x = engine.module, rows(engine.comm.control.rank)
    square(model, x).backward()
    for clear in CLEARS.values():
        clear(model, optimizer)
        with engine.no_sync() if windows == "unsent" else contextlib.nullcontext():
            if windows:
                square(model, x).backward()
            _break(engine, x, where, in_step=in_step)
        clear(model, optimizer)
        square(model, x).backward()
    grads = grads_of(engine)
    assert engine.sharded.memory()["gathered"] == 0
    engine.close()
    return grads


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "end"])
@pytest.mark.parametrize("in_step", [True, False])
def test_the_step_after_a_broken_one_is_clean(
    ranks: Pools, stage: int, where: str, in_step: bool
) -> None:
    expected = plain(Breakable, backward_of(square))
    for grads in ranks(WORLD).run(break_and_go_on, stage, where, in_step=in_step):
        torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("windows", ["sent", "unsent"])
def test_a_window_thrown_away_leaves_nothing(ranks: Pools, stage: int, windows: str) -> None:
    expected = plain(Breakable, backward_of(square))
    broken = ranks(WORLD).run(break_and_go_on, stage, "backward", in_step=False, windows=windows)
    for grads in broken:
        torch.testing.assert_close(grads, expected)


def backward_again(stage: int) -> Grads:
    """A backward pass behind one that failed, without a forward in between."""
    engine = shard(build(Stack), stage=stage)
    y = engine.module(rows(engine.comm.control.rank))
    with pytest.raises(ValueError, match="broken backward"):
        _Raise.apply(y).sum().backward(retain_graph=True)
    y.square().mean().backward(retain_graph=True)
    grads = grads_of(engine)
    hook = engine.module.stem.bias.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.square().mean().backward(retain_graph=True)
    hook.remove()
    engine.module.zero_grad()
    y.square().mean().backward()
    again = grads_of(engine)
    engine.close()
    torch.testing.assert_close(again, grads)
    return grads


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_pass_behind_one_that_failed(ranks: Pools, stage: int) -> None:
    expected = plain(Stack, backward_of(square))
    for grads in ranks(WORLD).run(backward_again, stage):
        torch.testing.assert_close(grads, expected)


def sync_points_of_autograd_grad(stage: int) -> list[Any]:
    """Where ranks wait for each other, and what they reduce."""
    engine = shard(build(Stack), stage=stage)
    x = rows(engine.comm.control.rank).requires_grad_()
    loss, found, control = square(engine.module, x), [], engine.comm.control
    call = control.call
    control.call = lambda point, *args, **more: [found.append(point), call(point, *args, **more)][1]
    torch.autograd.grad(loss, x, retain_graph=True)
    if engine.comm.control.rank == 0 and stage < 3:  # not a collective any more
        torch.autograd.grad(loss, x, retain_graph=True)
    control.call = call
    loss = square(engine.module, x)
    control.call = lambda point, *args, **more: [found.append(point), call(point, *args, **more)][1]
    torch.autograd.grad(loss, [x, *engine.module.parameters()])
    control.call = call
    found += [verb for _, verb in engine.comm.transport.ledger.elements if verb == "reduce"]
    engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_autograd_grad_sends_no_gradients(ranks: Pools, stage: int) -> None:
    assert ranks(WORLD).run(sync_points_of_autograd_grad, stage) == [[]] * WORLD


def graph_is_freed() -> int:
    """The tensors that every step leaves behind; a window that one needed more is kept."""
    engine = shard(build(Stack), stage=3)

    def living() -> Iterator[Tensor]:
        return (value for value in gc.get_objects() if issubclass(type(value), Tensor))

    counts = []
    for step in range(8):
        square(engine.module, rows(engine.comm.control.rank, step)).backward()
        gc.collect()
        counts.append(sum(1 for _ in living()))
    engine.close()
    return min(after - before for before, after in itertools.pairwise(counts))


def test_steps_leave_nothing_behind(ranks: Pools) -> None:
    # Less than nothing, when what earlier tests left is collected meanwhile.
    assert all(more <= 0 for more in ranks(WORLD).run(graph_is_freed))
