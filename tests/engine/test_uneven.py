"""Ranks that do different work: either all take part, or an error names who is where.

Nothing here waits for the process group's time limit, which is half an hour.
"""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import join
from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.comm.verdicts import Whereabouts, stays, wait_for_each_other
from lightning_zero.engine import Engine
from tests.oracle.models import Blocks
from tests.oracle.projects import WAYS, WIDTH, Regression, make_trainer, rows, wired
from tests.oracle.ranks import Pools, RankError
from tests.oracle.sharded import CPU, adamw, shard
from tests.oracle.watch import impatient

SECONDS = 120.0
"""Far less than the group's time limit, far more than finding out takes on a busy machine."""


class Buffered(Blocks):
    """A buffer too, which ranks broadcast when they begin a step together."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.register_buffer("shift", torch.zeros(WIDTH))


def engine_over(way: str, stage: int = 3, num_blocks: int = 3) -> Engine:
    torch.manual_seed(0)
    return shard(Buffered(num_blocks), stage=stage, comm=Communicator(CPU, **WAYS[way]))


def x_of(rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))


# -- without gradients: all take part -------------------------------------------------------------


def lengths(way: str, stage: int) -> None:
    """Each rank calls the model, or a part of it, as often as it likes."""
    rank = dist.get_rank()
    engine = engine_over(way, stage)
    model, plain = engine.module, Blocks(3)
    assert isinstance(model, Blocks)
    with engine.sharded.gathered():
        plain.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
    optimizer = adamw(model)
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
    # The step after it is an ordinary one.
    reference = adamw(plain)
    model(x_of(9)).sum().backward()
    plain(x_of(9)).sum().backward()
    optimizer.step()
    reference.step()
    with engine.sharded.gathered():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    engine.close()


def all_lengths(way: str) -> None:
    for stage in (1, 2, 3):
        lengths(way, stage)


@pytest.mark.parametrize("way", WAYS)
def test_join_lets_ranks_run_different_parts(ranks: Pools, way: str) -> None:
    ranks(2).run(all_lengths, way)


def generate_on_three() -> None:
    lengths("point to point", 3)


def test_join_on_three_ranks(ranks: Pools) -> None:
    ranks(3).run(generate_on_three)


def backward_within() -> None:
    engine = engine_over("point to point")
    with (
        pytest.raises(RuntimeError, match=r"backward pass began within `lightning_zero.join`"),
        join(engine.module),
    ):
        engine.module(x_of(0)).sum().backward()
    engine.reset()
    engine.close()


def test_join_has_no_backward(ranks: Pools) -> None:
    ranks(2).run(backward_within)


def test_join_of_a_plain_module() -> None:
    model = Blocks(1)
    with join(model):
        model(x_of(0)).sum().backward()
    assert model.stem.weight.grad is not None


# -- with gradients: an error that says who is where ----------------------------------------------


def skips(way: str, what: str, stage: int = 3) -> list[str]:
    """Rank 1 leaves something out in the third step; every rank returns its error."""
    rank = dist.get_rank()
    engine = engine_over(way, stage)
    optimizer = adamw(engine.module)
    engine.adopt(optimizer)
    start = time.monotonic()
    try:
        for step in range(4):
            leaves_out = what if (rank, step) == (1, 2) else ""
            optimizer.zero_grad()
            x = x_of(step)
            if leaves_out != "step":
                if leaves_out == "unit":
                    with_all = engine.module.blocks
                    engine.module.blocks = nn.ModuleList(list(with_all)[:1] + list(with_all)[2:])
                loss = engine.module(x).sum()
                if leaves_out != "backward":
                    loss.backward()
            optimizer.step()
    except RuntimeError as error:
        return [str(error), str(time.monotonic() - start)]
    return []


@impatient
def raises_on_all(way: str, what: str, stage: int) -> None:
    """As `skips`; where connections are given up, so is the pool."""
    found = skips(way, what, stage)
    raise AssertionError(f"after {found[1]} seconds: {found[0]}" if found else "no error")


def test_a_backward_that_one_rank_leaves_out(ranks: Pools) -> None:
    """Found out in a meeting, at once."""
    for message, seconds in ranks(2).run(skips, "windows", "backward"):
        assert float(seconds) < SECONDS
        assert re.search(r"rank 0 .*step 2 for the start of a backward pass .*test_uneven", message)
        assert re.search(r"rank 1 .*step 2 for an optimizer step .*test_uneven", message)


def warned(way: str, stage: int) -> list[str]:
    """Rank 1 leaves a unit out in two of three steps; every rank returns its warnings of that."""
    engine = engine_over(way, stage)
    model = engine.module
    assert isinstance(model, Blocks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            left_out = 1 if step and dist.get_rank() == 1 else None
            with engine.step() as watch:
                loss = without(model, x_of(step), left_out).sum()
                watch(loss)
            loss.backward()
            model.zero_grad()
    engine.close()
    return [str(w.message) for w in caught if "ran the unit" in str(w.message)]


def warned_everywhere() -> dict[tuple[str, int], list[str]]:
    kinds = [("windows", 3), *((way, stage) for way in WAYS for stage in (1, 2))]
    return {kind: warned(*kind) for kind in kinds}


def test_a_unit_that_one_rank_leaves_out_in_windows(ranks: Pools) -> None:
    """Weights are read without the others, and its gradient is zero."""
    assert ranks(2).run(skips, "windows", "unit") == [[], []]


def test_what_only_shared_memory_allows_is_warned_of_once(ranks: Pools) -> None:
    """By the name of the unit and both ranks; where every transport allows it, no word is said."""
    first, second = ranks(2).run(warned_everywhere)
    (message,) = first.pop(("windows", 3))
    assert "Rank 0 ran the unit 'blocks.1' in this step and rank 1 did not" in message
    assert re.search(r"on GPUs and between hosts, .* an error[.] .*zero.gathered", message)
    assert not any(first.values())
    assert not any(second.values())


@pytest.mark.parametrize("way", ["point to point", "backend"])
def test_a_unit_that_one_rank_leaves_out_is_found_by_the_watch(ranks: Pools, way: str) -> None:
    """Rank 0 waits for weights that rank 1 never sends."""
    with pytest.raises(RankError) as error:
        ranks(2).run(raises_on_all, way, "unit", 3)
    found = str(error.value)
    assert found.count("The ranks have diverged") >= 2
    assert re.search(r"rank 0 waits in step 2 for the weights of blocks.\d", found)
    assert re.search(r"rank 1 waits in step 2 for", found)


def test_a_backward_that_one_rank_leaves_out_is_found_by_the_watch(ranks: Pools) -> None:
    """Rank 1 goes on to weights that rank 0, in its backward pass, does not send."""
    with pytest.raises(RankError) as error:
        ranks(2).run(raises_on_all, "point to point", "backward", 1)
    found = str(error.value)
    assert found.count("The ranks have diverged") >= 2
    assert re.search(r"rank 0 waits in step 2 for the start of a backward pass", found)


def part_in_a_meeting() -> None:
    apart, together = Communicator(CPU, direct=False), Communicator(CPU)
    apart.control.log.begin_untagged(f"the weights of blocks.{apart.control.rank}", "gather")
    for comm in (apart, together):
        odd = SyncPoint.END if comm is together and comm.control.rank else SyncPoint.FORWARD
        with pytest.raises(RuntimeError, match="The ranks have diverged"):
            comm.control.call(odd).wait()
    # Weights that met the wrong ones cannot be put together again; by their tags others can.
    assert apart.control.last_words(timedelta(seconds=60)) is None
    assert together.control.last_words(timedelta(seconds=60)) is not None


def test_nothing_is_restored_over_collectives_out_of_step(ranks: Pools) -> None:
    ranks(2).run(part_in_a_meeting)


def without(model: Blocks, x: Tensor, block: int | None) -> Tensor:
    """The model's output, with a block left out or not."""
    x = model.stem(x)
    for number, inner in enumerate(model.blocks):
        x = x if number == block else inner(x)
    return x


def leaves_out_a_unit(way: str, stage: int) -> None:
    """Rank 1 trains without a block now and then; the steps are those of a loop over both ranks."""
    rank = dist.get_rank()
    engine = engine_over(way, stage)
    model, plain = engine.module, Blocks(3)
    assert isinstance(model, Blocks)
    with engine.sharded.gathered():
        plain.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
    optimizer, reference = adamw(model), adamw(plain)
    engine.adopt(optimizer)
    for step in range(3):
        left_out = [None, 1 if step % 2 == 0 else None]
        optimizer.zero_grad()
        with engine.step() as watch:
            loss = without(model, x_of(2 * step + rank), left_out[rank]).sum()
            watch(loss)
        loss.backward()
        optimizer.step()
        reference.zero_grad()
        for other in range(2):
            (without(plain, x_of(2 * step + other), left_out[other]).sum() / 2).backward()
        reference.step()
    with engine.sharded.gathered():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    engine.close()


def leave_out_a_unit_each_way() -> None:
    for way in WAYS:
        for stage in (1, 2):
            leaves_out_a_unit(way, stage)


def test_a_unit_that_one_rank_leaves_out_where_weights_stay(ranks: Pools) -> None:
    """At stages 1 and 2 nobody waits for its weights, and its gradient is the others' share."""
    ranks(2).run(leave_out_a_unit_each_way)


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
    """Counts its steps, and generates by the data's length in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"train": 0, "val": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts["train"] += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.counts["val"] += 1
        super().validation_step(batch, batch_idx)


def iterable(way: str, stage: int) -> tuple[dict[str, int], int, list[str]]:
    module = Counting()
    trainer = make_trainer(stage, max_epochs=2, num_sanity_val_steps=0)
    loaders = DataLoader(Some(5), batch_size=1), DataLoader(Some(2), batch_size=1)
    with wired(way), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *loaders)
    said = [str(warning.message) for warning in caught if "ended before" in str(warning.message)]
    return module.counts, trainer.global_step, said


def all_iterables() -> list[Any]:
    """Validation needs nobody where weights stay, or where they are read from the others."""
    near = [iterable("windows", stage) for stage in (1, 2, 3)]
    return [*near, iterable("point to point", 1), iterable("backend", 2)]


def test_iterable_data_of_different_lengths(ranks: Pools) -> None:
    """Training ends with the shortest; validation, which needs nobody, sees everything."""
    first, second = ranks(2).run(all_iterables)
    for (counts, steps, said), (other, other_steps, _) in zip(first, second, strict=True):
        assert steps == other_steps == counts["train"] == other["train"] == 2 * 5
        assert (counts["val"], other["val"]) == (2 * 2, 2 * 5)
        assert said
        assert "The training data of ranks [0] ended before" in said[0]


class Shuffled(DataLoader[Any]):
    """A loader of a user's own, with a length that only its rank knows."""

    def __len__(self) -> int:
        return 2 + 2 * dist.get_rank()

    def __iter__(self) -> Iterator[Any]:
        return (tuple(torch.randn(2, 1, WIDTH)) for _ in range(len(self)))  # type: ignore[misc]


@impatient
def sized_apart() -> None:
    trainer = make_trainer(3, use_distributed_sampler=False, max_epochs=2)
    trainer.fit(Counting(), Shuffled(Some(1)))


def test_loaders_of_different_known_lengths(ranks: Pools) -> None:
    """Rank 0 is in its second epoch, or through, while rank 1 goes on with the first."""
    with pytest.raises(RankError, match="The ranks have diverged"):
        ranks(2).run(sized_apart)


class NoneOnOne(Regression):
    """Returns no loss on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if (self.global_rank, batch_idx) == (1, 1) else loss


def none_on_one() -> None:
    make_trainer(3).fit(NoneOnOne(), rows())


def test_no_loss_on_one_rank(ranks: Pools) -> None:
    with pytest.raises(RankError, match=r"Rank 1 failed in step 1 at .*: Skipping the"):
        ranks(2).run(none_on_one)


# -- the proof ------------------------------------------------------------------------------------


def here(place: str, number: int, *, wait: int = 1, look: int = 1, **begun: int) -> Whereabouts:
    return Whereabouts(place, place, number, 0, "", wait, look, begun)


def inside(function: str, seconds: float) -> Whereabouts:
    return dataclasses.replace(here("a", 1, a=1), function=function, seconds=seconds)


@pytest.mark.parametrize(
    ("everyone", "is_proven"),
    [
        # Each waits for what the other has not begun.
        ([here("a", 1, a=1), here("b", 1, b=1)], True),
        # The first is only slow: the second has sent its part.
        ([here("a", 1, a=1), here("b", 1, a=1, b=1)], False),
        # The same name, but not the same time.
        ([here("a", 2, a=2), here("b", 1, a=1, b=1)], True),
        # A rank that has left comes to nothing more.
        ([here("a", 1, a=1), here("", 0)], True),
        ([here("a", 1, a=1), here("", 0, a=1)], False),
        # Ours waits in vain for one that waits in a collective that is not ours.
        ([here("a", 1, a=1), here("torch.distributed.all_reduce", 0)], True),
        # What is not ours alone is not ours to judge.
        ([here("torch.distributed.barrier", 0), here("torch.distributed.all_reduce", 0)], False),
        # All are in one collective for long, of which one has met the other's earlier call.
        ([inside("barrier", 9.0), inside("all_reduce", 9.0)], True),
        ([inside("barrier", 9.0), inside("all_reduce", 3.0)], False),
        ([inside("barrier", 9.0), inside("barrier", 9.0)], False),
        # Two wait for each other, a third for what is under way.
        ([here("a", 1, a=1, c=1), here("b", 1, b=1, c=1), here("c", 1, c=1)], False),
    ],
)
def test_when_itwait_for_each_other(everyone: list[Whereabouts], is_proven: bool) -> None:
    assert wait_for_each_other(dict(enumerate(everyone))) is is_proven


def test_two_looks_later() -> None:
    before = here("a", 1, wait=5, look=3)
    assert not stays(before, here("a", 1, wait=5, look=4))
    assert stays(before, here("a", 1, wait=5, look=5))
    assert not stays(before, here("a", 1, wait=6, look=9))
