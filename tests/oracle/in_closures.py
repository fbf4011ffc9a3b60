"""A plain loop whose backward passes are in the optimizer's closures, as Lightning's are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_zero.comm.communicator import Communicator
from lightning_zero.optimizer import UnitStep
from lightning_zero.plan import RECIPES, Offload
from tests.oracle.models import MODELS, Case, numbers, square_loss
from tests.oracle.parity import share
from tests.oracle.sharded import shard, surroundings, whole

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}


class Recomputed(nn.Module):
    """Blocks whose forward is run once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


class Shared(nn.Module):
    """A block whose gradients come twice in a pass, each time from a pass within it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for number in (0, 1, 2, 3, 0, 3):
            x = checkpoint(self.blocks[number], x, use_reentrant=True).tanh()
        return self.head(x)  # type: ignore[no-any-return]


class Borrowed(nn.Module):
    """The root computes with the weights of a block, whose gradients so come late in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 3)

    borrows = True

    def forward(self, x: Tensor) -> Tensor:
        if self.borrows:
            x = nn.functional.linear(x, self.blocks[2].weight)  # type: ignore[arg-type]
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def wide() -> nn.Module:
    """Return layers whose weights are stepped part by part, if batches are small."""
    layers = [nn.Sequential(nn.Linear(200, 200), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(200, 3))


CASES = {
    **MODELS,
    "wide": Case(wide, numbers(200, out=3), square_loss),
    "recomputed": Case(Recomputed, numbers(16, out=3), square_loss),
    "borrowed": Case(Borrowed, numbers(16, out=3), square_loss),
    "shared": Case(Shared, numbers(16, out=3), square_loss),
}


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Yield how many units were left whenever one was stepped ahead."""
    found: list[int] = []
    step_ahead = UnitStep.step_ahead

    def count(self: UnitStep, order: Any, landed: Any) -> None:
        found.append(len(order))
        step_ahead(self, order, landed)

    with patch.object(UnitStep, "step_ahead", count):
        yield found


class Run:
    """The loop; by default on a CPU with states in files."""

    def __init__(
        self,
        case: str,
        folder: str,
        *,
        is_early: bool,
        name: str = "adamw",
        stage: int = 3,
        precision: str = "32-true",
        accumulate: int = 1,
        offload: Offload | None = None,
        comm: Communicator | None = None,
        between: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.case = CASES[case]
        self.is_early, self.precision, self.accumulate = is_early, precision, accumulate
        self.between = between
        self.model = self.case.build()
        self.engine = shard(
            self.model,
            stage=stage,
            recipe=RECIPES[precision],
            offload=offload or Offload.of_stage(stage, "nvme"),
            offload_path=folder,
            step_in_backward=True,
            comm=comm,
        )
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.engine.adopt(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.losses: list[float] = []

    def backward(self, step: int, micro: int) -> Tensor:
        engine, control = self.engine, self.engine.comm.control
        rank, world = control.rank, control.world_size
        rows = self.case.batch(4 * world * self.accumulate, step)
        part = share(rows, rank, world, micro, self.accumulate)
        with engine.step() as watch, surroundings(self.precision):
            loss = self.case.loss(self.model, part) / self.accumulate
            watch(loss)
        self.losses.append(loss.item())
        with engine.stepping_early() if self.is_early else contextlib.nullcontext():
            loss.backward()
        return loss

    def step(self, step: int) -> None:
        for micro in range(self.accumulate - 1):
            with self.engine.no_sync():
                self.backward(step, micro)

        def closure() -> Tensor:
            loss = self.backward(step, self.accumulate - 1)
            self.between(self)
            return loss

        self.optimizer.step(closure)
        self.optimizer.zero_grad()
        self.scheduler.step()

    def result(self) -> tuple[list[float], dict[str, Tensor], list[Any]]:
        for step in range(3):
            self.step(step)
        found = whole(self.engine)
        states = [
            value.clone() if isinstance(value, Tensor) else value
            for piece in self.engine.sharded.pieces
            for value in self.optimizer.state[piece].values()
        ]
        self.engine.close()
        return self.losses, found, states


def assert_equal(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    pairs = [(found[1][key], expected[1][key]) for key in expected[1]]
    pairs += zip(found[2], expected[2], strict=True)
    for one, other in pairs:
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
