"""Optimizers, users' own too, with states in files or in bf16: the numbers of one step at once."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.engine import Engine
from lightning_zero.optimizer import Way, clip, staging
from lightning_zero.optimizer.known import known_class
from lightning_zero.plan import RECIPES, Offload, Settings
from tests.oracle.own_optimizers import OWN, Evaluating, Nested, Own, SelfCounting
from tests.oracle.ranks import Pools
from tests.oracle.sharded import is_in_file


def wide(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Pieces of several batches of the smallest size, and of a part of one, one of them frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 400), nn.Linear(400, 50), nn.Linear(50, 9))
    model[1].bias.requires_grad_(False)
    return model.to(dtype)


def files(stage: int, folder: str) -> dict[str, Any]:
    return {"offload": Offload.of_stage(stage, "nvme"), "offload_path": folder}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with names, of which a unit that is one piece has only one."""
    named = [*model.named_parameters()]
    return [
        {"params": [(name, p) for name, p in named if name.endswith("weight")]},
        {"params": [(name, p) for name, p in named if name.endswith("bias")], "lr": 0.1},
    ]


def trained(cls: Any, stage: int, dtype: torch.dtype = torch.float32, **how: Any) -> list[Any]:
    """Return weights, states and what else the optimizer keeps, after steps of all kinds."""
    model = wide(dtype)
    recipe = RECIPES["32-true" if dtype is torch.float32 else "bf16-true"]
    engine = Engine(model, Settings(stage=stage, units=(nn.Linear,), recipe=recipe, **how))
    optimizer = cls(groups_of(model))
    engine.adopt(optimizer)
    names = [[*group["param_names"]] for group in optimizer.param_groups]
    first = next(iter(engine.sharded.pieces))

    def accumulated() -> Tensor:
        for micro in range(2):
            rows = torch.linspace(-1, 1 + micro, 300 * (1 + dist.get_rank())).to(dtype)[-300:]
            with contextlib.nullcontext() if micro else engine.no_sync():
                loss = model(rows.view(3, 100)).pow(2).mean()
                loss.backward()
        clip.clip_by_norm(engine.sharded.pieces, engine.comm, 0.3)
        return loss.detach()

    for number in range(4):
        if hasattr(optimizer, "train"):
            optimizer.train()
        if number % 2:
            optimizer.step(accumulated)
        else:
            accumulated()
            if number == 2:
                first.grad = None
            optimizer.step()
        optimizer.zero_grad()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    assert names == [group["param_names"] for group in optimizer.param_groups]
    held = [optimizer.state.get(piece, {}) for piece in engine.sharded.pieces]
    for piece, state in zip(engine.sharded.pieces, held, strict=True):
        of_elements = [x for x in tree_leaves(state) if torch.is_tensor(x) and x.dim()]
        assert all(x.dtype is dtype for x in of_elements)
        if "offload" in how and piece.range.numel:
            assert all(is_in_file(x, how["offload_path"]) for x in of_elements)
    states = [x.clone() if torch.is_tensor(x) else x for x in tree_leaves(held)]
    kept = [
        {key: str(value) for key, value in entries.items() if not _is_of_torch(key, value)}
        for entries in shared_of(optimizer)
    ]
    engine.close()
    return [*kept, *states, *(p.detach() for p in model.parameters())]


def shared_of(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Return an optimizer's own attributes, its states of non-members, and each group's options."""
    ours = ("state", "param_groups", "_lightning_zero_stepper")
    own = {key: value for key, value in vars(optimizer).items() if key not in ours}
    others: dict[Any, Any] = {k: v for k, v in optimizer.state.items() if not torch.is_tensor(k)}
    groups = [
        {key: value for key, value in group.items() if not key.startswith("param")}
        for group in optimizer.param_groups
    ]
    return [own, others, *groups]


def _is_of_torch(key: str, value: Any) -> bool:
    is_check = key == "_need_device_dtype_check_for_fused"
    return is_check or callable(value) or any(map(callable, tree_leaves(value)))


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other


def torchs() -> Iterator[Any]:
    """Element-wise optimizers of torch, fused where they can be, as files have them stepped."""
    for cls in vars(torch.optim).values():
        if inspect.isclass(cls) and known_class(cls) == ("torch.optim", Way.BY_ELEMENT):
            is_fused = "fused" in inspect.signature(cls).parameters
            yield functools.partial(cls, lr=1e-2, **({"fused": True} if is_fused else {}))


def compare_all(folder: str) -> None:
    """With batches of the smallest size, into which pieces are cut."""
    with mock.patch.object(staging, "_BATCH_BYTES", 1):
        world = dist.get_world_size()
        for number, cls in enumerate([*OWN, pytorch_optimizer.AggMo, *torchs()]):
            if world != (2, 1)[number % 2]:
                continue
            stage = (3, 2, 1)[(number + world) % 3]
            expected = trained(cls, stage)
            assert len(expected) > 7
            assert_equal(trained(cls, stage, **files(stage, folder)), expected)


class Scaled(Own):
    """Has a factor as an attribute, which users change."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale = 1.0

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] * self.scale)


Change = Callable[[Any, int], None]


def change_all(optimizer: Any, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * (number + 1)
    optimizer.scale = 1.0 + number


def keep(optimizer: Any, number: int) -> None:
    pass


def in_closures(
    cls: Any,
    *,
    first: Change = keep,
    last: Change = keep,
    before: Change = keep,
    closes: bool = True,
    **how: Any,
) -> list[Tensor]:
    """Return weights after steps whose closures change something first or last, or a hook does."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    settings = Settings(stage=3, units=(nn.Linear,), **how)
    engine = Engine(model, settings)
    optimizer = cls(model.parameters())
    engine.adopt(optimizer)
    numbers = iter(range(9))
    optimizer.register_step_pre_hook(lambda *_: before(optimizer, next(numbers)))
    for number in range(3):

        def closure(number: int = number) -> Tensor:
            first(optimizer, number)
            optimizer.zero_grad()
            with engine.step() as watch:
                loss = model(torch.linspace(-1, 1, 32).view(4, 8)).square().mean()
                watch(loss)
            loss.backward()
            last(optimizer, number)
            return loss.detach()

        if closes:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    engine.close()
    return [value.clone() for value in model.state_dict().values()]


def rescale(optimizer: Any, number: int) -> None:
    optimizer.scale *= 0.5


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.1)


@pytest.mark.parametrize(
    ("cls", "how"),
    [
        (Scaled, {"first": change_all}),
        (Scaled, {"last": rescale}),
        (Scaled, {"before": change_all}),
        (sgd, {"before": change_all, "closes": False}),
        (Evaluating, {}),
    ],
)
def test_units_are_stepped_with_what_closures_and_hooks_have_set(
    tmp_path: Path, cls: Any, how: dict[str, Any]
) -> None:
    plain = in_closures(cls, **how)
    assert_equal(in_closures(cls, **how, **files(3, str(tmp_path))), plain)
    assert not how or not torch.equal(plain[0], in_closures(cls)[0])


def test_a_pre_hook_that_would_come_late_is_refused(tmp_path: Path) -> None:
    def first(optimizer: Any, number: int) -> None:
        Optimizer.register_step_pre_hook(optimizer, keep)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match=r"pre-hook of SGD .*own register_step_pre_hook"):
        in_closures(sgd, first=first, closes=False, **files(3, str(tmp_path)))


@pytest.mark.parametrize("world", [1, 2])
def test_the_bits_are_those_of_one_step(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks(world).run(compare_all, str(tmp_path))


def rounded() -> None:
    for cls in (Nested, SelfCounting):
        first, again = (trained(cls, 3, torch.bfloat16, stochastic_rounding=True) for _ in range(2))
        assert_equal(first, again)
        nearest = trained(cls, 3, torch.bfloat16)
        for one, other in zip(first, nearest, strict=True):
            if not torch.is_tensor(one):
                assert one == other
            elif one.dim():
                assert not one.isnan().any()
                torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


def test_nested_states_and_counters_are_rounded_by_chance(ranks: Pools) -> None:
    ranks(2).run(rounded)
