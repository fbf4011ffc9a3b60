"""Backward in all its forms: touches, aliases, the end of a unit's backward, broken steps.

Every case runs under stage 3 and one of 1 and 2 on two ranks and once in plain torch; the averaged
gradients are the same.
"""

import contextlib
import copy
import gc
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero import full_grad, gathered
from lightning_zero.engine import Engine
from lightning_zero.engine.step import Phase
from lightning_zero.engine.weights import Residency
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


WAYS = {1: ["blocks"], 2: ["leaves"], 3: ["blocks", "leaves"]}
"""Units by stage."""


def sharded(name: str, stages: Sequence[int]) -> dict[tuple[int, str], Grads]:
    """The same on this rank, through the engine."""
    make, case, steps = CASES[name]
    found = {}
    for stage, units in [(s, units) for s in stages for units in WAYS[s]]:
        engine = shard(build(make), stage=stage, units=units)
        for step in range(steps):
            case(engine.module, rows(engine.comm.control.rank, step))
        found[stage, units] = grads_of(engine)
        assert engine._step.phase is Phase.IDLE
        if stage == 3:
            held = [
                unit.label
                for unit in engine.sharded.units
                if unit.flat_parameters and unit.weights.residency is Residency.WHOLE
            ]
            assert held == []
            assert engine.sharded.memory()["gathered"] == 0
        engine.close()
    return found


def backward_of(loss: Callable[[nn.Module, Tensor], Tensor]) -> Case:
    """The ordinary case: a loss and its backward."""

    def case(model: nn.Module, x: Tensor) -> None:
        loss(model, x).backward()

    return case


# ------------------------------------------------------------------------- kinds of saved tensors


def unit(inner: Callable[[], nn.Module], reshape: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """A model with `inner` as a unit between two linears."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList([nn.Linear(6, 6)])
            self.inner = nn.ModuleList([inner()])
            self.last = nn.ModuleList([nn.Linear(6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner[0](reshape(self.first[0](x)))
            y = y[0] if isinstance(y, tuple) else y
            return self.last[0](y.reshape(-1, 6))

    return Between


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class DotProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x @ self.query, x @ self.key, x)


class Layer(nn.Module):
    """A block that may look at an encoder's output, and hands a bias on to those after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.look = nn.Linear(6, 6)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, *, encoded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y = self.look(x if encoded is None else encoded)
        bias = y.mean(0) if bias is None else bias
        return x + torch.tanh(self.linear(x) + y + bias), bias


class Translator(nn.Module):
    """As T5: every layer of the decoder is given the encoder's output, and the first's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.encoder = nn.ModuleList([Layer() for _ in range(3)])
        self.decoder = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        encoded, bias = self.stem(x), None
        for layer in self.encoder:
            encoded, bias = layer(encoded, bias)
        x, bias = self.stem(x.flip(0)), None
        for layer in self.decoder:
            x, bias = layer(x, bias, encoded=encoded)
        return x


class Truncated(nn.Module):
    """Units that cut what they are given off the graph, as recurrent ones do."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
            h, c = state
            return self.linear(x) * h.detach_() + c

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([self.Unit() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, (self.stem(x), self.stem(x) * 2))
        return x


class Forces(nn.Module):
    """A unit that differentiates one of its inputs by the other."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, energy: Tensor, position: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(energy.sum(), position, create_graph=True)
            return self.linear(position) * force

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([self.Unit() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            position = self.stem(x)
            x = block(position**3, position)
        return x


class TwoInPlace(nn.Module):
    """Units that change one of two inputs in place, which are one tensor to some."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, pair: tuple[Tensor, Tensor], kept: list[Tensor]) -> Tensor:
            x, y = pair
            kept.append(self.linear(y) if y is not x else y)
            x += kept[-1]
            return x

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.units = nn.ModuleList([self.Unit() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x, y, kept = self.stem(x), torch.tanh(self.stem(x)), list[Tensor]()
        for unit in self.units:
            x = unit((x, y), kept)
        return self.units[0]((x, x), kept) + torch.stack(kept).sum(0)


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


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(x, self.weight)


class EmbeddingOfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(torch.arange(4)) * x


SAVED: dict[str, Any] = {
    "linear_1d": unit(lambda: nn.Linear(24, 24), lambda x: x.flatten()),
    "linear_2d": unit(lambda: nn.Linear(6, 6)),
    "linear_3d": unit(lambda: nn.Linear(6, 6), lambda x: x.view(2, 2, 6)),
    "conv1d": unit(lambda: nn.Conv1d(4, 4, 3, padding=1)),
    "conv2d": unit(lambda: nn.Conv2d(1, 1, 3, padding=1), lambda x: x[None, None]),
    "layer_norm": unit(lambda: nn.LayerNorm(6)),
    "embedding": unit(EmbeddingOfRows),
    "multihead_attention": unit(SelfAttention, lambda x: x.view(2, 2, 6)),
    "dot_product": unit(DotProduct),
    "rnn": unit(lambda: nn.RNN(6, 6)),
    "gru": unit(lambda: nn.GRU(6, 6)),
    "custom_function": unit(CustomFunction),
}

# ----------------------------------------------------------------------------- ways of backward


def two_backwards(model: nn.Module, x: Tensor) -> None:
    loss = square(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    y.square().mean().backward(retain_graph=True)
    y.abs().mean().backward()


def two_forwards(model: nn.Module, x: Tensor) -> None:
    (square(model, x) + square(model, x + 1)).backward()


def gradient_penalty(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    y = model(x).square().mean()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    (y + grad.square().sum()).backward()


def penalty_before_forward(model: nn.Module, x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(leaf).square().mean(), leaf, create_graph=True)
    penalty = grad.square().sum()
    (square(model, x) + penalty).backward()


def regularised(model: nn.Module, x: Tensor) -> None:
    loss = square(model, x)
    (loss + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()


def gradient_of_parameters(model: nn.Module, x: Tensor) -> None:
    loss = square(model, x)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(grad.square().sum() for grad in grads)).backward()


def adversarial_input(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    square(model, x).backward()
    assert x.grad is not None
    square(model, (x + x.grad).detach()).backward()


def evaluation_between(model: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        model(x)
    square(model, x).backward()
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)


# -------------------------------------------------------------------- the end of unit backward


class FrozenPrefix(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].norm.requires_grad_(False)


class FrozenInside(nn.Module):
    """A unit whose last parameter's gradient comes before its first weight is used."""

    class Layer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.gain = nn.Parameter(torch.rand(6), requires_grad=False)
            self.bias = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * self.gain).tanh() * self.gain + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.rand(6))
        self.layers = nn.ModuleList([self.Layer(nn.Linear(6, 6)), self.Layer(nn.Linear(6, 6))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.prompt


class FrozenFirstLeafInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))])
        self.layers[0][0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@dataclass
class Out:
    hidden: Tensor
    rest: tuple[Tensor, dict[str, Tensor]]


class Outputs(nn.Module):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Out:
            penalty = self.side.weight.square().sum()
            hidden = self.linear(x).tanh()
            unused = self.side(x)
            return Out(hidden, (penalty, {"unused": unused, "view": hidden.view(-1, 2, 3)}))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), self.Layer()])

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for layer in self.layers:
            out = layer(x)
            x = out.rest[1]["view"].flatten(1)
            total = total + out.rest[0]
        return x + total


class InPlace(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)[:, :6]
            x += 1
            x.mul_(0.5)
        return self.head(x)


class Repeated(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number in (0, 0, 1, 0, 2, 2):
            x = self.blocks[number](x)
        return self.head(x)


class RepeatedBorrowed(Stack):
    """A weight is borrowed between two calls of its unit."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        x = F.linear(x, self.blocks[0].linear.weight)
        x = self.blocks[0](x)
        x = self.blocks[1](F.linear(x, self.blocks[1].linear.weight))
        return self.blocks[2](F.linear(x, self.blocks[0].linear.weight))


class GivesWeightsAway(nn.Module):
    """A unit returns its own weight and a view of it."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x @ self.weight, self.weight.t(), self.weight

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([self.Table(), self.Table()])
        self.blocks = nn.ModuleList([Block(6), Block(6)])

    def forward(self, x: Tensor) -> Tensor:
        x, view, weight = self.tables[0](x)
        x = self.blocks[0](x) @ view
        y, _, _ = self.tables[1](x)
        return self.blocks[1](y) * weight.sum()


class SharedModule(nn.Module):
    """Two units hold the same module."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 6), shared), nn.Sequential(shared, nn.Linear(6, 6))]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class LateTie(nn.Module):
    """Weights are tied in forward, not in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleList([nn.Embedding(4, 6)])
        self.blocks = nn.ModuleList([Block(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding[0](torch.arange(4)) + x)
        return F.linear(x, self.embedding[0].weight)


class Checkpointed(Stack):
    reentrant = False
    around = "units"

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.around == "units":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.around == "all":
            x = checkpoint(self._run, x, use_reentrant=self.reentrant)
        else:
            for block in self.blocks:
                x = checkpoint(self._nested, block, x, use_reentrant=self.reentrant)
        return self.head(x)

    def _run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def _nested(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant) + block(x)


def checkpointed(around: str, *, reentrant: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Checkpointed()
        model.around, model.reentrant = around, reentrant
        return model

    return make


class InsideCheckpointed(nn.Module):
    """Units that checkpoint a part of themselves."""

    class Layer(nn.Module):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.block, self.last = Block(6), nn.Linear(6, 6)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.block, x, use_reentrant=self.reentrant))

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.layers = nn.ModuleList([self.Layer(reentrant=reentrant) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


class RankDependent(Stack):
    """Every rank runs every unit, but not every rank's loss depends on it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        outs = [block(x) for block in self.blocks]
        takes_first = bool(rows(0)[0, 0] == self.seen) if hasattr(self, "seen") else True
        return self.head(outs[0] if takes_first else outs[2])


def rank_dependent(model: nn.Module, x: Tensor) -> None:
    model.seen = x[0, 0]
    square(model, x).backward()


class Branching(Stack):
    """Another path in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        paths = [(0, 1, 2), (2, 0), (1,), (0, 1, 2), (2, 2, 1, 0)]
        x = self.stem(x)
        for number in paths[self.step % len(paths)]:
            x = self.blocks[number](x)
        return self.head(x)


CASES: dict[str, tuple[Callable[[], nn.Module], Case, int]] = {
    **{f"saved_{name}": (make, backward_of(square), 2) for name, make in SAVED.items()},
    "plain": (Stack, backward_of(square), 3),
    "two_backwards": (Stack, two_backwards, 2),
    "two_losses": (Stack, two_losses, 2),
    "two_forwards": (Stack, two_forwards, 2),
    "gradient_penalty": (Stack, gradient_penalty, 2),
    "penalty_before_forward": (Stack, penalty_before_forward, 2),
    "regularised": (Stack, regularised, 2),
    "gradient_of_parameters": (Stack, gradient_of_parameters, 1),
    "adversarial_input": (Stack, adversarial_input, 2),
    "evaluation_between": (Stack, evaluation_between, 2),
    "encoder_and_decoder": (Translator, backward_of(square), 3),
    "two_in_place": (TwoInPlace, backward_of(square), 2),
    "truncated": (Truncated, backward_of(square), 2),
    "forces": (Forces, backward_of(square), 2),
    "frozen_prefix": (FrozenPrefix, backward_of(square), 2),
    "frozen_inside": (FrozenInside, backward_of(square), 2),
    "frozen_inside_adversarial": (FrozenInside, adversarial_input, 2),
    "frozen_first_leaf_input": (FrozenFirstLeafInput, adversarial_input, 2),
    "outputs": (Outputs, backward_of(square), 2),
    "in_place": (InPlace, backward_of(square), 2),
    "repeated": (Repeated, backward_of(square), 3),
    "repeated_borrowed": (RepeatedBorrowed, backward_of(square), 3),
    "gives_weights_away": (GivesWeightsAway, backward_of(square), 3),
    "shared_module": (SharedModule, backward_of(square), 2),
    "late_tie": (LateTie, backward_of(square), 3),
    "rank_dependent": (RankDependent, rank_dependent, 2),
    "branching": (Branching, backward_of(square), 6),
    "inside_checkpointed": (
        lambda: InsideCheckpointed(reentrant=False),
        backward_of(square),
        2,
    ),
    "inside_checkpointed_reentrant": (
        lambda: InsideCheckpointed(reentrant=True),
        backward_of(square),
        2,
    ),
    **{
        f"checkpoint_{around}{'_reentrant' * reentrant}": (
            checkpointed(around, reentrant=reentrant),
            backward_of(square),
            3,
        )
        for around in ("units", "all", "nested")
        for reentrant in (False, True)
    },
}


@pytest.mark.parametrize(("name", "stage"), list(zip(CASES, itertools.cycle((1, 2)), strict=False)))
def test_gradients_are_those_of_plain_torch(ranks: Pools, name: str, stage: int) -> None:
    make, case, steps = CASES[name]
    expected = plain(make, case, steps)
    for found in ranks(WORLD).run(sharded, name, (stage, 3)):
        for (at, units), grads in found.items():
            for key, grad in grads.items():
                what = f"stage {at}, units {units}, {key}"
                assert (grad is None) == (expected[key] is None), what
                torch.testing.assert_close(
                    grad, expected[key], rtol=1e-5, atol=1e-6, msg=lambda m, w=what: f"{w}: {m}"
                )


# ------------------------------------------------------------------------- touches at rest


def _save(model: nn.Module) -> None:
    torch.save(model.state_dict(), io.BytesIO())


def _save_parameter(model: nn.Module) -> None:
    torch.save(next(model.parameters()), io.BytesIO())


TOUCHES: dict[str, Callable[[nn.Module], Any]] = {
    "cpu": lambda model: next(model.parameters()).cpu(),
    "to": lambda model: next(model.parameters()).to(torch.float64),
    "norm": lambda model: next(model.parameters()).norm(),
    "add": lambda model: next(model.parameters()) + 1,
    "multiply in place": lambda model: next(model.parameters()).data.mul_(2),
    "data": lambda model: next(model.parameters()).data.sum(),
    "detach": lambda model: next(model.parameters()).detach().sum(),
    "clone": lambda model: next(model.parameters()).clone(),
    "item": lambda model: next(model.parameters())[0, 0].item(),
    "tolist": lambda model: next(model.parameters()).tolist(),
    "numpy": lambda model: next(model.parameters()).detach().numpy(),
    "matmul": lambda model: torch.ones(6) @ next(model.parameters()),
    "equal": lambda model: torch.equal(next(model.parameters()), torch.ones(6, 6)),
    "deepcopy": copy.deepcopy,
    "deepcopy of a parameter": lambda model: copy.deepcopy(next(model.parameters())),
    "torch.save": _save,
    "torch.save of a parameter": _save_parameter,
    "linear": lambda model: F.linear(torch.ones(6), next(model.parameters())),
    "stack": lambda model: torch.stack([p.flatten()[0] for p in model.parameters()]),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "initialize": lambda model: nn.init.zeros_(next(model.parameters())),
    "module method": lambda model: model.double(),
}


def touch_everything() -> None:
    """Compare what each touch at rest comes to with the same where nothing is sharded."""
    engine, plain = shard(build(Stack), stage=3), build(Stack)
    for name, touch in TOUCHES.items():
        if name == "module method":
            with pytest.raises(RuntimeError, match=r"'stem.weight' is a view of a flat buffer"):
                touch(engine.module)
            continue
        ours, theirs = touch(engine.module), touch(plain)
        if isinstance(theirs, Tensor | float | list):
            torch.testing.assert_close(ours, theirs, msg=name)
    engine.close()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_touch_at_rest_gathers(ranks: Pools) -> None:
    ranks(WORLD).run(touch_everything)


def look_at_rest() -> None:
    """Check what a resting parameter tells without being touched."""
    plainly = build(Stack)
    engine = shard(build(Stack), stage=3)
    for ours, theirs in zip(engine.module.parameters(), plainly.parameters(), strict=True):
        assert ours.shape == theirs.shape
        assert (ours.ndim, ours.numel(), ours.dtype) == (theirs.ndim, theirs.numel(), theirs.dtype)
        assert ours.requires_grad
        assert isinstance(ours, nn.Parameter)
        assert torch.zeros_like(ours).shape == theirs.shape
        assert "at rest" in repr(ours)
    assert list(engine.module.state_dict(keep_vars=True)) == list(plainly.state_dict())
    assert len({*engine.module.parameters()}) == len([*plainly.parameters()])


def test_metadata_at_rest_is_the_parameters_own(ranks: Pools) -> None:
    ranks(WORLD).run(look_at_rest)


def read_and_edit(stage: int) -> None:
    engine = shard(build(Stack), stage=stage)
    expected = build(Stack)
    rank = engine.comm.control.rank
    with gathered(engine.module):
        twin = copy.deepcopy(engine.module)
        saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
    for name, value in expected.state_dict().items():
        assert torch.equal(saved[name], value)
        assert torch.equal(twin.state_dict()[name], value)
        assert type(dict(twin.named_parameters())[name]) is nn.Parameter
    with gathered(engine.module.blocks[1], modify=True), torch.no_grad():
        engine.module.blocks[1].linear.weight.fill_(rank + 1.0)
    with gathered(engine.module.blocks[1]):
        assert bool((engine.module.blocks[1].linear.weight == 1.0).all())
    with engine.step(awaits_backward=False), torch.no_grad():
        assert float(engine.module.blocks[1].linear.weight.sum()) == 36.0
        loss = engine.module(rows(rank))
    with torch.no_grad():
        expected.blocks[1].linear.weight.fill_(1.0)
        torch.testing.assert_close(loss, expected(rows(rank)))
    engine.close()
    assert {type(p) for p in engine.module.parameters()} == {nn.Parameter}
    for ours, theirs in zip(engine.module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gathered_is_the_way_to_read_and_edit(ranks: Pools, stage: int) -> None:
    ranks(WORLD).run(read_and_edit, stage)


def touch_in_step() -> None:
    engine = shard(build(Stack), stage=3)
    expected = build(Stack)
    with engine.step(awaits_backward=False), torch.no_grad():
        for name, touch in TOUCHES.items():
            if name not in ("multiply in place", "initialize", "module method", "numpy"):
                touch(engine.module)
        total = sum(p.double().square().sum() for p in engine.module.parameters())
        torch.testing.assert_close(
            total, sum(p.double().square().sum() for p in expected.parameters())
        )
    assert engine.sharded.memory()["gathered"] == 0
    with engine.step(awaits_backward=False), torch.no_grad():
        # An array keeps the memory, which then cannot be given back.
        array = TOUCHES["numpy"](engine.module)
        assert torch.equal(torch.tensor(array), expected.stem.weight)
    square(engine.module, rows(engine.comm.control.rank)).backward()
    assert torch.equal(torch.tensor(array), expected.stem.weight)
    engine.close()


def test_a_touch_within_a_step_gathers(ranks: Pools) -> None:
    ranks(WORLD).run(touch_in_step)


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
