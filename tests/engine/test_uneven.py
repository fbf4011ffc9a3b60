"""Ranks that do different work: either all take part, or an error names who is where.

Nothing here waits for the process group's time limit, which is half an hour.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.comm import device_mesh
from lightning_zero.engine import Engine
from tests.oracle.models import Blocks
from tests.oracle.projects import (
    WIDTH,
    Regression,
    communicator_by,
    make_trainer,
    rows,
    wired,
)
from tests.oracle.ranks import Pools, errors_of, impatient
from tests.oracle.sharded import adamw, adopted


def x_of(rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))


def train(engine: Engine, run: Callable[[Any], Tensor], step: int = 2) -> None:
    with engine.step() as watch:
        loss = run(x_of(step)).sum()
        watch(loss)
    loss.backward()


def without_a_unit(engine: Engine, m: Any) -> None:
    train(engine, lambda x: m.blocks[2](m.blocks[0](m.stem(x))))


def a_forward(engine: Engine, m: Any) -> None:
    with torch.no_grad():
        m(x_of(2))
    train(engine, m)


def no_backward(engine: Engine, m: Any) -> None:
    with engine.step() as watch:
        watch(m(x_of(2)).sum())


def gradient(engine: Engine, m: Any) -> Any:
    train(engine, m)
    return m.blocks[1].linear.weight.grad


ODD: dict[str, tuple[Callable[[Engine, Any], Any], tuple[str, ...]]] = {
    "no unit": (without_a_unit, ()),
    "no backward": (no_backward, ()),
    "no step": (lambda engine, m: time.sleep(0.1), ()),
    "a forward": (a_forward, ()),
    "a read": (
        lambda engine, m: m.blocks[1].linear.weight.sum(),
        ("the weights of blocks.1", "lightning_zero.gathered"),
    ),
    "a gradient": (
        lambda engine, m: gradient(engine, m).tolist(),
        ("access to a gradient", "lightning_zero.full_grad"),
    ),
    "a norm": (
        lambda engine, m: float(gradient(engine, m).norm()),
        ("access to a gradient", "lightning_zero.grad_norm"),
    ),
}
"""What a rank alone does, and what the error says of it."""


@impatient
def alone(way: str, stage: int, odd: str) -> None:
    """Rank 1 does another thing than the others in its third step."""
    if odd == "a read":
        device_mesh("cpu", 2)  # of tensor parallelism, whose groups are kept beside ours
    torch.manual_seed(0)
    model = Blocks(3)
    model.register_buffer("shift", torch.zeros(WIDTH))  # which ranks broadcast together
    engine, optimizer = adopted(model, adamw, stage=stage, comm=communicator_by(way))
    for step in range(5):
        if (dist.get_rank(), step) == (1, 2):
            ODD[odd][0](engine, model)
        else:
            train(engine, model, step)
        optimizer.step()
    raise AssertionError("the ranks have not noticed")


# Gloo's own collectives abort the process where messages of different sizes meet.
CASES = [
    *(("backend", "no unit"), ("point to point", "no unit"), ("windows", "no backward")),
    *(("point to point", "no backward"), ("windows", "no step"), ("windows", "a read")),
    *(("point to point", "a read"), ("point to point", "a gradient"), ("windows", "a norm")),
    ("point to point", "a forward"),
]


def test_what_one_rank_alone_does_is_named() -> None:
    """The same on one host as on a cluster, and on both ranks."""
    errors = errors_of(*((alone, way, 3, odd) for way, odd in CASES))
    for (_, odd), found in zip(CASES, errors, strict=True):
        assert found.count("The ranks have diverged") >= 2, found
        waits = r"rank 0 waits in step \d for .*test_uneven.*rank 1 waits in step \d"
        assert re.search(waits, found), found
        assert all(text in found for text in ODD[odd][1]), found


# -- under the Trainer ----------------------------------------------------------------------------


class Some(IterableDataset[tuple[Tensor, Tensor]]):
    """Rank 0 has `first` rows, each other rank three more than the one before it."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for row in range(self.first + 3 * dist.get_rank()):
            generator = torch.Generator().manual_seed(10 * row + dist.get_rank())
            yield tuple(torch.randn(2, WIDTH, generator=generator))  # type: ignore[misc]


class Counting(Regression):
    """Counts its validation steps."""

    num_validated = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_validated += 1
        super().validation_step(batch, batch_idx)


def iterables() -> list[Any]:
    found = []
    for way, stage in (("windows", 2), ("point to point", 1)):
        module = Counting()
        trainer = make_trainer(stage, max_epochs=2, num_sanity_val_steps=0)
        loaders = DataLoader(Some(5), batch_size=1), DataLoader(Some(2), batch_size=1)
        with wired(way), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, *loaders)
        said = [str(w.message) for w in caught if "ended before" in str(w.message)]
        counts = trainer.global_step, len(module.losses), module.num_validated
        found.append((counts, said))
    return found


def test_iterable_data_of_different_lengths(ranks: Pools) -> None:
    """Training ends with the shortest; validation, which needs nobody, sees everything."""
    first, second = ranks(2).run(iterables)
    for (counts, said), (other, _) in zip(first, second, strict=True):
        assert (counts, other) == ((10, 10, 2 * 2), (10, 10, 2 * 5))
        assert "The training data of ranks [0] ended before" in said[0]


class Shuffled(DataLoader[Any]):
    """A loader of a user's own, with a length that only its rank knows."""

    def __len__(self) -> int:
        return 2 + 2 * dist.get_rank()

    def __iter__(self) -> Iterator[Any]:
        return (tuple(torch.randn(2, 1, WIDTH)) for _ in range(len(self)))  # type: ignore[misc]


@impatient
def sized_apart(what: str, way: str) -> None:
    trainer = make_trainer(3, use_distributed_sampler=False, max_epochs=2)
    with wired(way):
        loader = Shuffled(Some(1))
        trainer.fit(Counting(), *((loader,) if what == "training" else (rows(), loader)))


class FailsOnOne(Regression):
    """Returns no loss on one rank, or changes weights, of which others would hear, and fails."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__()
        self.raises = raises

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_odd = (self.global_rank, batch_idx) == (1, 1)
        if is_odd and self.raises:
            with torch.no_grad():
                self.head.weight.mul_(0.5)
            raise ArithmeticError("its own")
        loss = super().training_step(batch, batch_idx)
        return None if is_odd else loss


def fails_on_one(raises: bool) -> None:
    make_trainer(3).fit(FailsOnOne(raises=raises), rows())


def test_what_ranks_alone_do_in_a_trainer_or_in_backward_is_named() -> None:
    """Rank 0 is in its second epoch, or through, while rank 1 goes on with the first."""
    *lengths, no_loss, edits, at_stage_1 = errors_of(
        (sized_apart, "training", "windows"),
        (sized_apart, "validation", "point to point"),
        (fails_on_one, False),
        (fails_on_one, True),
        # Rank 1 goes on to weights that rank 0 does not send.
        (alone, "point to point", 1, "no backward"),
    )
    for found in (*lengths, at_stage_1):
        assert "The ranks have diverged" in found, found
    assert re.search(r"Rank 1 failed in step 1 at .*: Skipping the", no_loss), no_loss
    assert re.search(r"Rank 1 failed in step 1 at .*: its own", edits), edits
    assert at_stage_1.count("The ranks have diverged") >= 2
    assert "rank 0 waits in step 2 for " in at_stage_1
