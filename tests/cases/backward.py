"""Backward in all its forms: what autograd saves, several passes, aliases, ends of units.

The averaged gradients of a plain loop over the engine are those of plain torch. The more usual
models, those of `tests/oracle/models.py`, are trained by it as under DDP.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import full_grad
from tests.oracle.models import MODELS, Block, Of, chained
from tests.oracle.play import Player, case
from tests.oracle.projects import Trace
from tests.oracle.sharded import Stack, adamw, build, replicate, rows, sgd, shard, square, train

How = Callable[[Any, Tensor], Any]
"""Runs forward and backward of a model on one rank's rows."""


def backward(make: Callable[[], nn.Module], how: How, steps: int, play: Player) -> Trace:
    """Sum gradients of steps: of all ranks by plain torch, or by the engine."""
    if not play.is_ddp:
        engine = shard(build(make), stage=play.way.strategy, **play.way.settings)  # type: ignore[arg-type]
        for step in range(steps):
            how(engine.module, rows(play.rank, step))
            assert engine.sharded.memory()["gathered"] == 0
        grads = {name: full_grad(p) for name, p in engine.module.named_parameters()}
        found = {name: grad.clone() for name, grad in grads.items() if grad is not None}
        engine.close()
        return Trace(found)
    total: dict[str, Tensor] = {}
    for step, rank in itertools.product(range(steps), range(play.way.world)):
        model = build(make)
        how(model, rows(rank, step))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                more = parameter.grad / play.way.world
                total[name] = total[name] + more if name in total else more
    return Trace({n: total[n] for n, _ in build(make).named_parameters() if n in total})


def plain(model: nn.Module, x: Tensor) -> None:
    square(model, x).backward()


# ------------------------------------------------------------------------- models


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.rand(6))


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad * ctx.weight, (grad * x).sum(0)


def saved_views() -> nn.Module:
    """Units whose autograd saves views of weights: in one, two and three dimensions, or by hand."""

    def forward(m: Any, x: Tensor) -> Tensor:
        flat, cubic, conv, own = m.units
        y = cubic(flat(m.stem(x).flatten()).view(2, 2, 6)).view(4, 6)
        return m.head(own(conv(y[None])[0]))

    own = Of(lambda m, x: _Scale.apply(x, m.weight), weight=weight())
    units = [nn.Linear(24, 24), linear(), nn.Conv1d(4, 4, 3, padding=1), own]
    return Of(forward, stem=linear(), units=units, head=linear())


def of_units(of_unit: Callable[..., Any], forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    """A linear, and two units that have one too."""
    return lambda: Of(forward, stem=linear(), blocks=[Of(of_unit, linear=linear()) for _ in "12"])


def _truncate(m: Any, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
    """Cut what is given off the graph, as recurrent units do."""
    h, c = state
    return m.linear(x) * h.detach_() + c


def _truncated(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block(x, (m.stem(x), m.stem(x) * 2))
    return x


def _force(m: Any, energy: Tensor, position: Tensor) -> Tensor:
    """Differentiate one of the inputs by the other."""
    (force,) = torch.autograd.grad(energy.sum(), position, create_graph=True)
    return m.linear(position) * force


def _forces(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        position = m.stem(x)
        x = block(position**3, position)
    return x


def _change_one(m: Any, pair: tuple[Tensor, Tensor], kept: list[Tensor]) -> Tensor:
    """Change one of two inputs in place, which are one tensor to some."""
    x, y = pair
    kept.append(m.linear(y) if y is not x else y)
    x += kept[-1]
    return x


def _two_in_place(m: Any, x: Tensor) -> Tensor:
    x, y, kept = m.stem(x), torch.tanh(m.stem(x)), list[Tensor]()
    for each in m.blocks:
        x = each((x, y), kept)
    return m.blocks[0]((x, x), kept) + torch.stack(kept).sum(0)


# ----------------------------------------------------------------------------- ways of backward


def penalty(another: bool, model: nn.Module, x: Tensor) -> None:
    """The gradient of the input has a loss, beside that of the same forward or of another one."""
    leaf = x.clone().requires_grad_()
    loss = square(model, leaf)
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    ((square(model, x) if another else loss) + grad.square().sum()).backward()


def regularised(model: nn.Module, x: Tensor) -> None:
    """Weights and their gradients have a loss."""
    loss, weights = square(model, x), list(model.parameters())
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    (loss + 0.1 * sum(p.square().sum() for p in (*weights, *grads))).backward()


def touch_in_two_backwards(model: nn.Module, x: Tensor) -> None:
    """A hook reads another unit's weights, in a second pass over the graph too."""
    seen: list[float] = []
    y = model(x)
    y.register_hook(lambda _: seen.append(float(model.blocks[0].linear.weight.detach().sum())))
    loss = y.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen[0] == seen[1] != 0


def adversarial_input(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    square(model, x).backward()
    assert x.grad is not None
    with torch.inference_mode():
        model(x)
    square(model, (x + x.grad).detach()).backward()
    with torch.no_grad():
        model(x)


# -------------------------------------------------------------------- the end of unit backward


def frozen_inside() -> nn.Module:
    """A unit whose last parameter's gradient comes before its first weight is used."""

    def layer() -> nn.Module:
        gain = weight().requires_grad_(False)
        run = lambda m, x: (m.inner(x) * m.gain).tanh() * m.gain + m.bias  # noqa: E731
        return Of(run, inner=linear(), gain=gain, bias=weight())

    return Of(lambda m, x: chained(m.layers, x) * m.prompt, prompt=weight(), layers=[layer(), layer()])  # fmt: skip


def frozen_first() -> nn.Module:
    layer = nn.Sequential(linear().requires_grad_(False), nn.Tanh(), linear())
    return Of(lambda m, x: m.layers[0](x), layers=[layer])


def repeated_borrowed() -> nn.Module:
    """A weight is borrowed between two calls of its unit."""

    def forward(m: Any, x: Tensor) -> Tensor:
        first, second, third = m.blocks
        x = first(F.linear(first(m.stem(x)), first.linear.weight))
        x = second(F.linear(x, second.linear.weight))
        return third(F.linear(x, first.linear.weight))

    return Of(forward, stem=linear(), blocks=[Block(6) for _ in range(3)])


def gives_weights_away() -> nn.Module:
    """A unit returns its own weight and a view of it."""

    def table() -> nn.Module:
        run = lambda m, x: (x @ m.weight, m.weight.t(), m.weight)  # noqa: E731
        return Of(run, weight=nn.Parameter(torch.randn(6, 6)))

    def forward(m: Any, x: Tensor) -> Tensor:
        x, view, given = m.tables[0](x)
        x = m.blocks[0](x) @ view
        y, _, _ = m.tables[1](x)
        return m.blocks[1](y) * given.sum()

    return Of(forward, tables=[table(), table()], blocks=[Block(6), Block(6)])


def shared_module() -> nn.Module:
    """Two units hold the same module."""
    shared = linear()
    layers = [nn.Sequential(linear(), shared), nn.Sequential(shared, linear())]
    return Of(lambda m, x: m.layers[1](m.layers[0](x).tanh()).tanh(), layers=layers)


def rank_dependent() -> nn.Module:
    """Every rank runs every unit, but not every rank's loss depends on it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        outs = [block(m.stem(x)) for block in m.blocks]
        return outs[0] if torch.equal(x, rows(0)) else outs[2]

    return Of(forward, stem=linear(), blocks=[Block(6) for _ in range(3)])


def checkpointed(around: str, reentrant: bool) -> nn.Module:
    """Checkpoints around units, around all of them, around a call within another, or in units."""
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    ways: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "units": lambda units, x: chained((functools.partial(again, unit) for unit in units), x),
        "all": lambda units, x: again(lambda y: chained(units, y), x),
        "nested": lambda units, x: again(lambda y: again(units[0], y) + units[1](y), x),
        "inside": lambda units, x: chained(units, x),
    }
    run = again if around == "inside" else lambda block, x: block(x)
    units = [Of(lambda m, x: m.last(run(m.block, x)), block=Block(6), last=linear()) for _ in "12"]
    forward = lambda m, x: m.head(ways[around](m.units, m.stem(x)))  # noqa: E731
    return Of(forward, stem=linear(), units=units, head=linear())


CASES: dict[str, tuple[Callable[[], nn.Module], How, int]] = {
    "plain": (Stack, plain, 3),
    "saved_views": (saved_views, plain, 2),
    "touch_in_two_backwards": (Stack, touch_in_two_backwards, 2),
    "gradient_penalty": (Stack, functools.partial(penalty, False), 2),
    "penalty_before_forward": (Stack, functools.partial(penalty, True), 2),
    "regularised": (Stack, regularised, 1),
    "two_in_place": (of_units(_change_one, _two_in_place), plain, 2),
    "truncated": (of_units(_truncate, _truncated), plain, 2),
    "forces": (of_units(_force, _forces), plain, 2),
    "frozen_inside": (frozen_inside, plain, 2),
    "frozen_inside_adversarial": (frozen_inside, adversarial_input, 2),
    "frozen_first_leaf_input": (frozen_first, adversarial_input, 2),
    "repeated_borrowed": (repeated_borrowed, plain, 3),
    "gives_weights_away": (gives_weights_away, plain, 3),
    "shared_module": (shared_module, plain, 2),
    "rank_dependent": (rank_dependent, plain, 2),
    **{f"checkpoint_{around}{'_reentrant' * reentrant}": (functools.partial(checkpointed, around, reentrant), plain, 3)
       for reentrant in (False, True) for around in ("units", "all", "nested", "inside")},
}  # fmt: skip
for name, (make, how, steps) in CASES.items():
    # At stage 3 all ranks gather the same weights, in backward too.
    more: Any = {"stages": (1, 2)} if name == "rank_dependent" else {}
    case("backward", loop=functools.partial(backward, make, how, steps), name=name, ulps=8, **more,
         settings=({"units": "blocks"}, {"units": "leaves"}), worlds=(1, 2) if name == "plain" else (2,))  # fmt: skip


# ---------------------------------------------------------------------------- trained models

PRECISIONS = ("bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true")
CUTS: list[dict[str, Any]] = [
    {"units": "leaves"},
    {"units": "nested", "prefetch": 2},
    {"units": "root"},
]
STAGE_3: list[dict[str, Any]] = [{}, {"prefetch": 0}, {"reshard_after_forward": False}]


def trained(name: str, play: Player) -> Trace:
    """Three steps; every third model accumulates."""
    how: dict[str, Any] = {
        "precision": play.way.precision,
        "accumulate": 1 + (play.case.number % 3 == 0),
    }
    # Three ranks' sums round otherwise under DDP; Adam's eps is 0 in fp16.
    make = sgd if play.way.world > 2 or play.way.precision == "16-true" else adamw
    if play.is_ddp:
        return replicate(name, make, **how)
    return train(name, make, stage=play.way.strategy, policy="local", **how, **play.way.settings)


for number, (name, model) in enumerate(MODELS.items()):
    known = [p for p in PRECISIONS if p not in model.unsupported]
    chosen = ("32-true", known[number % len(known)], known[(number + 2) % len(known)])
    settings = (STAGE_3[number % 3], CUTS[number % 3], STAGE_3[(number + 1) % 3])
    stages: Any = (3, 1 + number % 2, 3)
    if name == "experts":  # whose ranks run other units
        stages, settings = (1, 2, 1), ({}, CUTS[0], {})
    case("backward", loop=functools.partial(trained, name), name=f"model_{name}", worlds=((2,), (1, 2), (2, 3))[number % 3],
         stages=stages, precisions=chosen, settings=settings, bits=True)  # fmt: skip
