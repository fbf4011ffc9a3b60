"""How models are cut into units, and what is refused at the door."""

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
    """Four blocks, an embedding, small leftovers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * WIDE, WIDE)
        self.blocks = nn.ModuleList([Layer() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, 10)


BLOCKS = [f"blocks.{number}" for number in range(4)]


def test_blocks_and_large_leftovers_are_units() -> None:
    assert WIDE * WIDE == MIN_NUMEL
    assert list(find_units(Model())) == ["embedding", *BLOCKS]


def test_the_least_size_is_the_users() -> None:
    small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    assert find_units(small) == {}
    assert list(find_units(small, min_num_params=64)) == ["0", "1", "2", "3"]
    assert list(find_units(small, min_num_params=73)) == []
    assert list(find_units(Model(), min_num_params=3 * MIN_NUMEL)) == []
    assert list(find_units(Model(), Layer, min_num_params=10**9)) == BLOCKS


def test_small_neighbours_in_a_sequence_share_a_unit() -> None:
    rows = [nn.Sequential(*(nn.Linear(WIDE // 2, WIDE // 2) for _ in range(4))) for _ in range(4)]
    model = nn.ModuleDict({"rows": nn.ModuleDict(dict(zip("abcd", rows, strict=True)))})
    assert list(find_units(model)) == [f"rows.{name}" for name in "abcd"]
    body = nn.Module()
    body.first, body.second, body.third, body.fourth = rows
    assert list(find_units(body)) == ["first", "second", "third", "fourth"]


def test_sequential_and_dict_are_lists_too() -> None:
    model = nn.Sequential(*(Layer() for _ in range(4)))
    assert list(find_units(model)) == ["0", "1", "2", "3"]
    model = nn.ModuleDict({name: Layer() for name in "abcd"})
    assert list(find_units(model)) == ["a", "b", "c", "d"]


def test_a_block_that_is_half_the_model_is_searched() -> None:
    model = nn.Sequential(nn.Sequential(*(Layer() for _ in range(3))), Layer())
    assert list(find_units(model)) == ["0.0", "0.1", "0.2", "1"]


def test_no_split_modules_are_units_wherever_they_are() -> None:
    model = Model()
    model._no_split_modules = ["Layer"]
    model.extra = Layer()
    assert list(find_units(model)) == ["embedding", *BLOCKS, "extra"]
    body = nn.Sequential(nn.ModuleDict({"a": Layer()}))
    body._no_split_modules = ["Layer"]
    assert list(find_units(body)) == ["0.a"]


def test_attention_is_never_opened() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDE, 4)

    assert list(find_units(Attending())) == ["attention"]


def test_classes_and_callables() -> None:
    model = Model()
    assert list(find_units(model, Layer)) == BLOCKS
    assert list(find_units(model, {Layer, nn.Embedding})) == ["embedding", *BLOCKS]
    assert list(find_units(model, lambda m: m is model.head)) == ["head"]
    # A list is not called, so it cannot be a unit; the model itself is the root.
    assert list(find_units(model, lambda m: isinstance(m, nn.ModuleList | Model))) == []


@pytest.mark.parametrize("policy", [[int], ["Layer"]])
def test_wrong_policies_are_named(policy: object) -> None:
    with pytest.raises(TypeError, match="module classes"):
        find_units(Model(), policy)


def test_compiled_submodules_stand_for_what_is_inside() -> None:
    model = Model()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert list(find_units(model)) == ["embedding", *BLOCKS]
    assert list(find_units(model, Layer)) == BLOCKS
    assigned = assign_parameters(model, find_units(model, Layer))
    assert next(name for name, _ in assigned["blocks.1"]).startswith("blocks.1._orig_mod.")


def owners(model: nn.Module, policy: object = Layer) -> dict[str, str]:
    assigned = assign_parameters(model, find_units(model, policy))
    return {name: unit for unit, named in assigned.items() for name, _ in named}


def test_every_parameter_is_taken_once_by_the_innermost_unit() -> None:
    model = Model()
    found = owners(model)
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert found["blocks.2.linear.weight"] == "blocks.2"
    assert found["norm.weight"] == found["embedding.weight"] == ""


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(4), Layer(4)])
        self.gain = nn.Parameter(torch.ones(4))


def test_tied_parameters_belong_to_the_lowest_common_ancestor() -> None:
    model = nn.ModuleDict({"left": Outer(), "right": Outer(), "last": Layer(4)})
    left, right = model["left"], model["right"]
    left.layers[1].linear.weight = left.layers[0].linear.weight
    right.layers[0].linear.bias = left.layers[0].linear.bias
    right.layers[1].norm.weight = right.gain
    model["last"].norm.bias = model["last"].linear.bias
    found = owners(model, {Layer, Outer})
    assert found["left.layers.0.linear.weight"] == "left"
    assert found["left.layers.0.linear.bias"] == ""
    assert found["right.gain"] == "right"
    assert found["last.linear.bias"] == "last"
    assert "right.layers.0.linear.bias" not in found


def test_a_shared_unit_owns_its_parameters() -> None:
    shared = Layer(4)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    assert set(owners(model, Layer).values()) == {"a.0"}
    assert set(owners(model, nn.Sequential).values()) == {""}


def test_a_sparse_parameter_is_refused() -> None:
    module = nn.Module()
    module.odd = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="'odd' is not a dense tensor"):
        Engine(module, Settings())


def test_units_are_described_with_their_sizes() -> None:
    text = Engine(Model(), Settings(stage=2)).sharded.describe()
    assert "ZeRO stage 2 over 1 rank, by unit:" in text
    assert "embedding: 131,072 parameters" in text
    assert "blocks.0 to blocks.3: 4 x 66,304 parameters" in text
    assert "root: 3,082 parameters" in text
