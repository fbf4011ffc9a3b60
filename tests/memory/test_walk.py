"""A walk through a step finds what the engine holds in it, whatever calls the step is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.memory import estimate
from lightning_zero.plan import Settings

WIDTH = 16


class Inner(nn.Linear):
    """A unit within a unit."""


class Outer(nn.Module):
    """A unit whose output is the output of the unit within it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, 2 * WIDTH)
        self.inner = Inner(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.before(x)))


class Calls(nn.Module):
    """Units that are called twice, or again in backward; some of them frozen."""

    def __init__(self, *, recomputes: bool = False, frozen: int = 0, stem: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if stem else nn.Identity()
        self.outers = nn.ModuleList([Outer() for _ in range(4)])
        self.outers[:frozen].requires_grad_(False)
        self.recomputes = recomputes
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for outer in (*self.outers, self.outers[1]):
            x = checkpoint(outer, x, use_reentrant=False) if self.recomputes else outer(x)
        return self.head(x)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"recomputes": True},
    "first_frozen": {"frozen": 2, "stem": False},
    "some_frozen": {"frozen": 2},
    "no_stem": {"stem": False},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no_prefetch": {"prefetch": 0},
    "prefetch_far": {"prefetch": 3},
    "kept": {"reshard_after_forward": False},
    "stage_2": {"stage": 2},
    "coded": {"gather_bits": 8, "reduce_bits": 8},
}
UNITS = {"outer": (Outer,), "both": (Outer, Inner)}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def cuts(name: str) -> dict[str, str]:
    """A cut for each setting; but for the first, models have every second one, in turns."""
    first = list(MODELS).index(name)
    cuts = {chosen: list(UNITS)[(first + i) // 2 % 2] for i, chosen in enumerate(SETTINGS)}
    return {one: cut for i, (one, cut) in enumerate(cuts.items()) if not first or (first + i) % 2}


class Watched(TorchDispatchMode):
    """Calls a function after every operation that computes anything."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = [one.alias_info for one in func._schema.arguments if one.alias_info is not None]
        if not aliases or any(one.is_write for one in aliases):
            self._look()
        return out


def measure_all(name: str) -> dict[str, dict[str, int]]:
    """Return what an engine held at most in its second step, by setting."""
    return {
        chosen: measure(Calls(**MODELS[name]), UNITS[cut], SETTINGS[chosen])
        for chosen, cut in cuts(name).items()
    }


def measure(model: nn.Module, units: Any, settings: dict[str, Any]) -> dict[str, int]:
    chosen = Settings(units=units, **settings)
    comm = Communicator(torch.device("cpu"), **{**chosen.division(2), "reads_peers": False})
    engine = Engine(model, chosen, comm)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine.adopt(optimizer)
    most = {"gathered": 0, "unreduced": 0, "gradients": 0}

    def look() -> None:
        now = engine.sharded.memory()
        now["unreduced"] -= comm.transport.scratch_bytes  # what messages arrive in
        most.update({kind: max(count, now[kind]) for kind, count in most.items()})

    for _ in range(2):
        most.update(dict.fromkeys(most, 0))
        with Watched(look):
            loss = loss_of(model, torch.ones(4, WIDTH))
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    engine.close()
    return dict(most)


@pytest.mark.parametrize("name", MODELS)
def test_a_walk_finds_what_training_holds(ranks: Any, name: str) -> None:
    measured = ranks(2).run(measure_all, name)[0]
    for chosen, held in measured.items():
        cut = cuts(name)[chosen]
        found = estimate(
            Calls(**MODELS[name]), Settings(units=UNITS[cut], **SETTINGS[chosen]), world_size=2,
            optimizer="sgd", batch=torch.ones(4, WIDTH), step=loss_of,
        )  # fmt: skip
        predicted = {kind: found.most[kind] for kind in held}
        # The result of a reduction under way counts as a gradient. Codes of weights do not count.
        assert 0.75 * held["unreduced"] < predicted["unreduced"] <= held["unreduced"], (cut, chosen)
        assert predicted["gradients"] == held["gradients"], (cut, chosen)
        assert predicted["gathered"] == held["gathered"] or chosen == "coded", (cut, chosen)
