"""How models are cut into units: a table of models and policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.plan import MIN_NUMEL, Settings, find_units
from lightning_zero.plan.units import assign_parameters

WIDE = 256  # WIDE * WIDE is MIN_NUMEL


class Layer(nn.Module):
    def __init__(self, width: int = WIDE) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    """Four blocks, an embedding, small leftovers; others as a user adds them."""

    def __init__(self, no_split: tuple[str, ...] = (), **others: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * WIDE, WIDE)
        self.blocks = nn.ModuleList([Layer() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, 10)
        if no_split:
            self._no_split_modules = list(no_split)
        for name, module in others.items():
            setattr(self, name, module)


class Parts(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def linears(width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def rows() -> dict[str, nn.Module]:
    return {name: linears(WIDE // 2) for name in "abcd"}


def layers(number: int = 4) -> list[nn.Module]:
    return [Layer() for _ in range(number)]


def halved() -> nn.Module:
    return nn.Sequential(nn.Sequential(*layers(3)), Layer())


def compiled() -> Model:
    model = Model()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return model


BLOCKS = [f"blocks.{number}" for number in range(4)]
LARGE = ["embedding", *BLOCKS]
FOUND: dict[str, tuple[Callable[[], nn.Module], list[str], dict[str, Any]]] = {
    "blocks and large leftovers": (Model, LARGE, {}),
    "nothing large": (linears, [], {}),
    "the least size is the user's": (linears, ["0", "1", "2", "3"], {"min_num_params": 64}),
    "nothing so large": (linears, [], {"min_num_params": 73}),
    "blocks too small": (Model, [], {"min_num_params": 3 * MIN_NUMEL}),
    "a class, however small": (Model, BLOCKS, {"policy": Layer, "min_num_params": 10**9}),
    "several classes": (Model, LARGE, {"policy": {Layer, nn.Embedding}}),
    "a callable": (Model, ["head"], {"policy": lambda m: getattr(m, "out_features", 0) == 10}),
    # A list is not called, so it cannot be a unit; the model itself is the root.
    "the root": (Model, [], {"policy": lambda m: isinstance(m, nn.ModuleList | Model)}),
    # Small neighbours in a sequence share a unit.
    "rows in a dict": (lambda: Parts(x=nn.ModuleDict(rows())), [f"x.{n}" for n in "abcd"], {}),
    "rows as attributes": (lambda: Parts(**rows()), list("abcd"), {}),
    "a sequence": (lambda: nn.Sequential(*layers()), ["0", "1", "2", "3"], {}),
    "a dict": (lambda: nn.ModuleDict({n: Layer() for n in "abcd"}), list("abcd"), {}),
    "half the model is searched": (halved, ["0.0", "0.1", "0.2", "1"], {}),
    "no-split modules": (lambda: Model(("Layer",), extra=Layer()), [*LARGE, "extra"], {}),
    "attention": (lambda: Parts(attention=nn.MultiheadAttention(WIDE, 4)), ["attention"], {}),
    "compiled": (compiled, LARGE, {}),
    "compiled, by class": (compiled, BLOCKS, {"policy": Layer}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_units(name: str) -> None:
    make, expected, how = FOUND[name]
    assert list(find_units(make(), **how)) == expected


@pytest.mark.parametrize("policy", [[int], ["Layer"]])
def test_wrong_policies_are_named(policy: object) -> None:
    with pytest.raises(TypeError, match="module classes"):
        find_units(Model(), policy)


def owners(model: nn.Module, policy: object = Layer) -> dict[str, str]:
    assigned = assign_parameters(model, find_units(model, policy))
    return {name: unit for unit, named in assigned.items() for name, _ in named}


def test_every_parameter_is_taken_once_by_the_innermost_unit() -> None:
    found = owners(Model())
    assert set(found) == {name for name, _ in Model().named_parameters()}
    assert found["blocks.2.linear.weight"] == "blocks.2"
    assert found["norm.weight"] == found["embedding.weight"] == ""
    assert owners(compiled())["blocks.1._orig_mod.linear.weight"] == "blocks.1"


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(4), Layer(4)])
        self.gain = nn.Parameter(torch.ones(4))


def test_tied_parameters_belong_to_the_lowest_common_ancestor() -> None:
    left, right, last = Outer(), Outer(), Layer(4)
    left.layers[1].linear.weight = left.layers[0].linear.weight
    right.layers[0].linear.bias = left.layers[0].linear.bias
    right.layers[1].norm.weight = right.gain
    last.norm.bias = last.linear.bias
    found = owners(Parts(left=left, right=right, last=last), {Layer, Outer})
    assert found["left.layers.0.linear.weight"] == "left"
    assert found["left.layers.0.linear.bias"] == ""
    assert found["right.gain"] == "right"
    assert found["last.linear.bias"] == "last"
    assert "right.layers.0.linear.bias" not in found
    shared = Layer(4)
    model = Parts(a=nn.Sequential(shared), b=nn.Sequential(shared))
    assert set(owners(model, Layer).values()) == {"a.0"}
    assert set(owners(model, nn.Sequential).values()) == {""}


def test_units_are_described_with_their_sizes() -> None:
    text = Engine(Model(), Settings(stage=2)).sharded.describe()
    assert "ZeRO stage 2 over 1 rank, by unit:" in text
    assert "embedding: 131,072 parameters" in text
    assert "blocks.0 to blocks.3: 4 x 66,304 parameters" in text
    assert "root: 3,082 parameters" in text
