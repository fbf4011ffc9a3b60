"""Offload to a host beside the device: the order of copies, edits and steps.

The device is that of `tests/oracle/device.py`; `test_device_paths.py` has whole ways to train.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_zero
from lightning_zero.engine import ActivationOffload, Engine
from lightning_zero.optimizer import clip
from lightning_zero.parameters.stores import HostStore
from lightning_zero.plan import RECIPES, Offload, Settings
from lightning_zero.tensors import HostCopies
from tests.oracle.device import beside_the_host
from tests.oracle.ranks import Pools

STEPS, MICRO = 3, 2
SGD = importlib.import_module("torch.optim.sgd")


def linears(*, is_frozen: bool = False, **settings: Any) -> tuple[Any, Engine, Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    module[0].requires_grad_(not is_frozen)
    engine = Engine(module, Settings(units=(nn.Linear,), **settings))
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9, fused=True)
    engine.adopt(optimizer)
    return module, engine, optimizer


def backward(module: nn.Module, number: float) -> None:
    module(torch.full((2, 8), 0.1 * number)).square().sum().backward()


def require_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: Any) -> None:
    assert [name for name, x in actual.items() if not torch.equal(x, expected[name])] == [], what


# ---------------------------------------------------------------------------- as without offload


def unfrozen(**settings: Any) -> dict[str, Tensor]:
    """Train what was frozen at set-up, and rests on the device then too."""
    module, engine, optimizer = linears(is_frozen=True, stage=2, **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(module, step + 1)
        clip.clip_by_norm(engine.sharded.pieces, engine.comm, 0.1)
        clip.clip_by_value(engine.sharded.pieces, 0.01)
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        optimizer.step()
        if step == 0:
            module[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(module[0].parameters())})
    thawed = [p for flat in engine.sharded.units[0].flat_parameters for p in flat.pieces]
    nbytes = sum(piece.detach().nbytes for piece in thawed)
    assert not settings or engine.sharded.memory()["states"] == nbytes
    engine.close()
    return dict(module.state_dict())


def edited(**settings: Any) -> dict[str, Tensor]:
    """Change gradients that are on their way, and weights between steps."""
    module, engine, optimizer = linears(**settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(MICRO):
            backward(module, step + part + 1)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for parameter in module.parameters():
            parameter.grad.mul_(torch.tensor(0.5))
        with torch.no_grad():
            module[0].weight.mul_(0.9)
        optimizer.step()
        with lightning_zero.gathered(module, modify=True):
            nn.init.constant_(module[1].bias, 0.1 * step)
    engine.close()
    return dict(module.state_dict())


def interrupt(_: Tensor) -> None:
    raise KeyboardInterrupt


def abandoned(*, is_interrupted: bool = True, **settings: Any) -> dict[str, Tensor]:
    """Step behind a pass that was interrupted while gradients went to where others rest."""
    module, engine, optimizer = linears(**settings)
    backward(module, 1)
    if is_interrupted:
        handle = module[0].weight.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            backward(module, 2)
        handle.remove()
    optimizer.zero_grad(set_to_none=False)
    backward(module, 3)
    optimizer.step()
    engine.close()
    return dict(module.state_dict())


class Late:
    """A copy that is made when it is waited for, and not before."""

    def __init__(self, out: Tensor, source: Tensor) -> None:
        self._out, self._source = out, source.clone()
        out.fill_(float("nan"))

    def synchronize(self) -> None:
        self._out.copy_(self._source)


def slow(copies: Any, out: Tensor, source: Tensor, finish: Any = None, **_: Any) -> Late:
    if finish is not None:
        finish()
    return Late(out, source)


def compare(folder: str) -> None:
    for medium in ("cpu", "nvme"):
        with beside_the_host():
            found = unfrozen(offload=Offload(medium), offload_path=folder)
        require_equal(found, unfrozen(), medium)
    # Nothing is followed: on a CPU an edit's copy to the host is none.
    with beside_the_host(followed=False), mock.patch.object(HostCopies, "down", slow):
        for offload in (Offload("cpu", "cpu"), Offload("cpu")):
            require_equal(edited(offload=offload), edited(), offload)
    for stage, offload in ((2, Offload("cpu")), (3, Offload("cpu", "cpu")), (3, Offload("cpu"))):
        expected = abandoned(is_interrupted=False, stage=stage)
        require_equal(abandoned(stage=stage), expected, f"stage {stage}")
        with beside_the_host():
            require_equal(abandoned(stage=stage, offload=offload), expected, (stage, offload))


def test_numbers_are_those_without_offload(ranks: Pools, tmp_path: Any) -> None:
    ranks(2).run(compare, str(tmp_path))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_set_up_and_its_end_copy_each_weight_once(precision: str) -> None:
    with beside_the_host() as device:
        settings = {"offload": Offload("cpu", "cpu"), "recipe": RECIPES[precision]}
        module, engine, _ = linears(stage=3, **settings)
        assert device.crossed == {"down": sum(p.nbytes for p in module.parameters())}
        engine.close()
        assert set(device.crossed) == {"down"}


# ---------------------------------------------------------------------------- masters under way


def write_what_goes_up() -> None:
    """Change masters while the device may still read them, in each way."""
    for stage in (2, 3):
        with beside_the_host():
            module, engine, optimizer = linears(stage=stage, offload=Offload.of_stage(stage, "cpu"))
            backward(module, 1)

            def load(module: nn.Module = module, engine: Engine = engine) -> None:
                with engine.sharded.writing():
                    for parameter in module.parameters():
                        parameter.copy_(torch.zeros(parameter.shape))

            changes: list[Callable[[], Any]] = [
                optimizer.step,
                optimizer.step,
                load,
                optimizer.step,
            ]
            for change in changes:
                with torch.no_grad():
                    module(torch.ones(2, 8))
                    change()
            engine.close()


@pytest.mark.parametrize("world", [1, 2])
def test_what_goes_up_is_not_written_to_meanwhile(ranks: Pools, world: int) -> None:
    ranks(world).run(write_what_goes_up)


# ---------------------------------------------------------------------------- unit by unit


class Uneven(nn.Module):
    """Units of which a rank has nothing, and one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(8, 1), nn.Linear(1, 1, bias=False)
        self.last, self.unused = nn.Linear(1, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.one(self.first(x)))  # type: ignore[no-any-return]


def stepped(seen: list[str], **settings: Any) -> dict[str, Tensor]:
    """Step with a closure, and once more without, which is ``seen``."""
    torch.manual_seed(0)
    module = Uneven()
    engine = Engine(module, Settings(units=(nn.Linear,), **settings))
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, fused=True)
    engine.adopt(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        mixed = settings.get("recipe", RECIPES["32-true"]).autocast
        with torch.autocast("cpu", mixed, enabled=mixed is not None, cache_enabled=False):
            loss = module(torch.full((2, 8), 0.3)).square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for _ in range(STEPS):
        optimizer.step(closure)
    closure()
    seen.clear()
    optimizer.step()
    seen.append("end")
    engine.close()
    return dict(module.state_dict())


def noting(seen: list[str], what: str, owner: Any, name: str) -> Any:
    """Note each call of a function."""
    own = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(what)
        return own(*args, **kwargs)

    return mock.patch.object(owner, name, noted)


def send_between_steps() -> None:
    for sends, owner, name, settings in (
        ("sent", HostCopies, "up", {"stage": 2}),
        ("cast", HostStore, "cast", {"stage": 3, "recipe": RECIPES["bf16-mixed"]}),
        ("sent", HostCopies, "up", {"stage": 3, "offload": Offload("cpu")}),
    ):
        offload = {"offload": Offload.of_stage(settings["stage"], "cpu"), **settings}
        seen: list[str] = []
        step = noting(seen, "stepped", SGD, "sgd")
        with beside_the_host(), step, noting(seen, sends, owner, name):
            found = stepped(seen, **offload)
        assert seen[: seen.index("end")] == 4 * ["stepped", sends], (seen, settings)
        settings.pop("offload", None)
        require_equal(found, stepped([], **settings), sends)


def test_units_are_cast_or_sent_while_others_are_stepped(ranks: Pools) -> None:
    ranks(2).run(send_between_steps)


def test_a_step_that_fails_between_units_is_torn() -> None:
    with beside_the_host():
        module, engine, optimizer = linears(stage=2, offload=Offload("cpu"))
        backward(module, 1)
        steps = mock.patch.object(SGD, "sgd", side_effect=[None, KeyboardInterrupt])
        with steps, pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"half-way: .* Resume from the last checkpoint"):
            optimizer.step()
        engine.close()


# ---------------------------------------------------------------------------- activations


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x).exp()
        return hidden * hidden


def test_what_is_fetched_and_dropped_is_written_before_it_is_freed() -> None:
    with beside_the_host():
        blocks = nn.Sequential(*[Squared(16, 16) for _ in range(3)])
        engine = Engine(blocks, Settings(units=[Squared]))
        offload = ActivationOffload(engine.sharded.units, engine.comm.host_copies, 1)
        middle = blocks[:2](torch.randn(64, 16, requires_grad=True))
        # Backward of the second block fetches the first one's, which is dropped with the graph.
        torch.autograd.grad(middle.sum(), blocks[1].weight)
        del middle
        gc.collect()
        offload.remove()
        engine.close()
