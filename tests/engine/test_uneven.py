"""Ranks that do different work: either all take part, or an error names who is where.

Nothing here waits for the process group's time limit, which is half an hour.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import join
from lightning_zero.comm import Communicator, device_mesh
from lightning_zero.engine import Engine
from tests.oracle.models import Blocks
from tests.oracle.projects import WAYS, WIDTH, Regression, make_trainer, rows, wired
from tests.oracle.ranks import Pools, errors_of, impatient
from tests.oracle.sharded import CPU, adamw, adopted, shard


class Buffered(Blocks):
    """A buffer too, which ranks broadcast when they begin a step together."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.register_buffer("shift", torch.zeros(WIDTH))


def engine_over(way: str, stage: int = 3) -> tuple[Engine, Blocks]:
    torch.manual_seed(0)
    model = Buffered(3)
    return shard(model, stage=stage, comm=Communicator(CPU, **WAYS[way])), model


def x_of(rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))


def beside_a_plain_one(engine: Engine, model: Blocks) -> Blocks:
    plain = Blocks(3)
    with engine.sharded.gathered():
        plain.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
    return plain


def require_equal(engine: Engine, plain: nn.Module) -> None:
    with engine.sharded.gathered():
        pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)


# -- without gradients: all take part -------------------------------------------------------------


def lengths(way: str, stages: tuple[int, ...]) -> None:
    """Each rank calls the model, or a part of it, as often as it likes; then all train."""
    rank = dist.get_rank()
    for stage in stages:
        engine, model = engine_over(way, stage)
        plain = beside_a_plain_one(engine, model)
        optimizer, reference = adamw(model), adamw(plain)
        engine.adopt(optimizer)
        for turn in range(2):
            with torch.no_grad(), join(model):
                x = expected = x_of(rank)
                for _ in range(3 * rank + turn):
                    x, expected = model(x), plain(expected)
                    torch.testing.assert_close(x, expected)
                if rank == 1:
                    # Straight to one unit, and a weight that is only read.
                    torch.testing.assert_close(model.blocks[2](x), plain.blocks[2](expected))
            with torch.no_grad():
                assert torch.equal(model(x_of(7)), plain(x_of(7)))
        model(x_of(9)).sum().backward()
        plain(x_of(9)).sum().backward()
        optimizer.step()
        reference.step()
        require_equal(engine, plain)
        engine.close()


@pytest.mark.parametrize(
    ("world", "way", "stages"),
    [(2, "windows", (1, 3)), (2, "backend", (2, 3)), (3, "point to point", (3,))],
)
def test_join_lets_ranks_run_different_parts(
    ranks: Pools, world: int, way: str, stages: tuple[int, ...]
) -> None:
    ranks(world).run(lengths, way, stages)


def backward_within() -> None:
    engine, model = engine_over("point to point")
    with pytest.raises(RuntimeError, match=r"began within `lightning_zero.join`"), join(model):
        model(x_of(0)).sum().backward()
    engine.reset()
    engine.close()


def test_join_has_no_backward(ranks: Pools) -> None:
    ranks(2).run(backward_within)


def test_join_of_a_plain_module() -> None:
    model = Blocks(1)
    with join(model):
        model(x_of(0)).sum().backward()
    assert model.stem.weight.grad is not None


# -- what one rank alone does ---------------------------------------------------------------------


def no_unit(engine: Engine, model: Blocks) -> None:
    with engine.step() as watch:
        loss = model.blocks[2](model.blocks[0](model.stem(x_of(2)))).sum()
        watch(loss)
    loss.backward()


def no_backward(engine: Engine, model: Blocks) -> None:
    model(x_of(2)).sum()


def no_step(engine: Engine, model: Blocks) -> None:
    time.sleep(0.1)


def a_read(engine: Engine, model: Blocks) -> None:
    model.blocks[1].linear.weight.sum()


def a_read_gradient(engine: Engine, model: Blocks) -> None:
    train(engine, model, 2)
    model.blocks[1].linear.weight.grad.tolist()


def a_read_norm(engine: Engine, model: Blocks) -> None:
    train(engine, model, 2)
    float(model.blocks[1].linear.weight.grad.norm())


def a_forward(engine: Engine, model: Blocks) -> None:
    with torch.no_grad():
        model(x_of(2))
    train(engine, model, 2)


def train(engine: Engine, model: Blocks, step: int) -> None:
    with engine.step() as watch:
        loss = model(x_of(step)).sum()
        watch(loss)
    loss.backward()


@impatient
def alone(way: str, stage: int, odd: Callable[[Engine, Blocks], None]) -> None:
    """Rank 1 does another thing than the others in its third step."""
    if odd is a_read:
        device_mesh("cpu", 2)  # of tensor parallelism, whose groups are kept beside ours
    engine, model = engine_over(way, stage)
    optimizer = adamw(model)
    engine.adopt(optimizer)
    for step in range(5):
        if (dist.get_rank(), step) == (1, 2):
            odd(engine, model)
        else:
            train(engine, model, step)
        optimizer.step()
    raise AssertionError("the ranks have not noticed")


# Gloo's own collectives abort the process where messages of different sizes meet.
CASES = [
    ("backend", no_unit),
    ("point to point", no_unit),
    ("windows", no_backward),
    ("point to point", no_backward),
    ("windows", no_step),
    ("windows", a_read),
    ("point to point", a_read),
    ("point to point", a_read_gradient),
    ("windows", a_read_norm),
    ("point to point", a_forward),
]
CURES = {
    a_read: ("the weights of blocks.1", "lightning_zero.gathered"),
    a_read_gradient: ("access to a gradient", "lightning_zero.full_grad"),
    a_read_norm: ("access to a gradient", "lightning_zero.grad_norm"),
}


def test_what_one_rank_alone_does_is_named() -> None:
    """The same on one host as on a cluster, and on both ranks."""
    errors = errors_of(*((alone, way, 3, odd) for way, odd in CASES))
    for (_, odd), found in zip(CASES, errors, strict=True):
        assert found.count("The ranks have diverged") >= 2, found
        waits = r"rank 0 waits in step \d for .*test_uneven.*rank 1 waits in step \d"
        assert re.search(waits, found), found
        for text in CURES.get(odd, ()):
            assert text in found


def reads_alone() -> None:
    """Weights that are whole on each rank need no other rank, over any transport."""
    for way, stage in zip(WAYS, (1, 2, 1), strict=True):
        model = Blocks(3)
        engine, optimizer = adopted(model, adamw, stage=stage, comm=Communicator(CPU, **WAYS[way]))
        for step in range(2):
            train(engine, model, step)
            optimizer.step()
            if dist.get_rank():
                with torch.no_grad():
                    assert sum(p.sum().item() for p in model.parameters()) != 0
                    model(x_of(0))
        engine.close()


def test_one_rank_reads_alone_what_is_whole(ranks: Pools) -> None:
    ranks(2).run(reads_alone)


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
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"train": 0, "val": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts["train"] += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.counts["val"] += 1
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
        found.append((module.counts, trainer.global_step, said))
    return found


def test_iterable_data_of_different_lengths(ranks: Pools) -> None:
    """Training ends with the shortest; validation, which needs nobody, sees everything."""
    first, second = ranks(2).run(iterables)
    for (counts, steps, said), (other, other_steps, _) in zip(first, second, strict=True):
        assert steps == other_steps == counts["train"] == other["train"] == 2 * 5
        assert (counts["val"], other["val"]) == (2 * 2, 2 * 5)
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


class NoneOnOne(Regression):
    """Returns no loss on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if (self.global_rank, batch_idx) == (1, 1) else loss


def none_on_one() -> None:
    make_trainer(3).fit(NoneOnOne(), rows())


class EditsAndFails(Regression):
    """Changes weights on one rank, which other ranks would have to hear of, and fails there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.global_rank, batch_idx) == (1, 1):
            with torch.no_grad():
                self.head.weight.mul_(0.5)
            raise ArithmeticError("its own")
        return super().training_step(batch, batch_idx)


def edits_and_fails() -> None:
    make_trainer(3).fit(EditsAndFails(), rows())


def test_what_ranks_alone_do_in_a_trainer_or_in_backward_is_named() -> None:
    """Rank 0 is in its second epoch, or through, while rank 1 goes on with the first."""
    *lengths, no_loss, edits, at_stage_1 = errors_of(
        (sized_apart, "training", "windows"),
        (sized_apart, "validation", "point to point"),
        (none_on_one,),
        (edits_and_fails,),
        # Rank 1 goes on to weights that rank 0, in its backward pass, does not send.
        (alone, "point to point", 1, no_backward),
    )
    for found in (*lengths, at_stage_1):
        assert "The ranks have diverged" in found, found
    assert re.search(r"Rank 1 failed in step 1 at .*: Skipping the", no_loss), no_loss
    assert re.search(r"Rank 1 failed in step 1 at .*: its own", edits), edits
    assert at_stage_1.count("The ranks have diverged") >= 2
    assert "rank 0 waits in step 2 for the start of a backward pass" in at_stage_1
