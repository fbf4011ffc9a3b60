"""The search for the largest batch: one decision of all ranks, whoever runs out of memory where."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_zero import gathered
from lightning_zero.comm.point_to_point import Inboxes
from tests.oracle.projects import Regression, Run, assert_like_ddp, make_trainer, rows, wired
from tests.oracle.ranks import Pools

OOM = "CUDA out of memory. Tried to allocate more than there is."
FOUND = 8


class Hungry(Regression):
    """Above a batch size it runs out of memory on one rank, at a chosen place."""

    def __init__(self, place: str, rank: int = 0, *, at: int = FOUND, error: str = OOM) -> None:
        super().__init__(lr=0.05, optimizer=torch.optim.Adam)
        self.place, self.rank, self.at, self.error = place, rank, at, error
        self.other_error = ""
        self.batch_size = 2
        self.sizes: list[int] = []

    def train_dataloader(self) -> Any:
        return rows(128, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return rows(64, batch_size=self.batch_size, seed=1)

    def test_dataloader(self) -> Any:
        return rows(128, batch_size=self.batch_size)

    predict_dataloader = test_dataloader

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def eat(self, place: str) -> None:
        if place == self.place and self.sizes[-1] > self.at:
            if dist.get_rank() == self.rank:
                raise RuntimeError(self.error)
            if self.other_error:
                raise RuntimeError(self.other_error)

    def loss(self, batch: Any) -> Tensor:
        self.sizes.append(len(batch[0]))
        self.eat("start")
        x = self.net(batch[0])
        self.eat("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: self.eat("backward"))
        return F.mse_loss(self.head(x), batch[1])

    def on_train_start(self) -> None:
        self.was_training = self.net.training and self.trainer.training

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.eat("step")

    def on_validation_epoch_end(self) -> None:
        self.eat("validation")


def _train(strategy: Any, module: Hungry, folder: str, *callbacks: Any) -> Run:
    callbacks = (*callbacks, EMAWeightAveraging(decay=0.5))
    trainer = make_trainer(strategy, callbacks=list(callbacks), default_root_dir=folder)
    trainer.fit(module)
    return Run.of(module, trainer)


class Editing(Hungry):
    """Memory ends within a context whose end is a message, while others come to another one."""

    def loss(self, batch: Any) -> Tensor:
        self.sizes.append(len(batch[0]))
        x = self.net.stem(batch[0])
        with torch.no_grad(), gathered(self.net.blocks[0], modify=True):
            self.eat("edit")
            self.net.blocks[1](x)
        for block in self.net.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), batch[1])


@contextlib.contextmanager
def hungry_inboxes(module: Hungry) -> Iterator[None]:
    """The memory for what peers send is what there is none of."""
    borrow = Inboxes.borrow

    def eat(self: Inboxes, like: Tensor) -> Tensor:
        module.eat("inbox")
        return borrow(self, like)

    Inboxes.borrow = eat  # type: ignore[method-assign]
    try:
        yield
    finally:
        Inboxes.borrow = borrow  # type: ignore[method-assign]


def _search(folder: str, stage: int, place: str, rank: int, mode: str) -> Run:
    module = (Editing if place == "edit" else Hungry)(place, rank)
    finder = BatchSizeFinder(mode, init_val=4, max_trials=6, margin=0.0)
    way = "point to point" if place in ("inbox", "edit") else "windows"
    with wired(way), hungry_inboxes(module):
        run = _train(stage, module, folder, finder)
    run.notes = [module.batch_size, finder.optimal_batch_size, max(module.sizes)]
    return run


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Lightning collects garbage around every trial, which takes long where torch is loaded."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


CASES = [
    (1, "start", 1, "power"),
    (2, "step", 0, "power"),
    (3, "backward", 1, "power"),
    (3, "forward", 1, "binsearch"),
    (2, "inbox", 1, "power"),
    (3, "edit", 0, "power"),
]


def _search_all(folder: str) -> tuple[Run, list[Run]]:
    fixed = Hungry("nowhere")
    fixed.batch_size = FOUND
    expected = _train("ddp", fixed, folder)
    with quick_collections():
        return expected, [_search(folder, *case) for case in CASES]


def test_memory_that_ends_on_one_rank_ends_for_all(ranks: Pools, tmp_path: Path) -> None:
    """Both come to the size that fits both, and train with it from the first weights on."""
    for expected, found in ranks(2).run(_search_all, str(tmp_path), timeout=240):
        expected.notes = [FOUND, FOUND, 16]
        for case, run in zip(CASES, found, strict=True):
            run.losses = run.losses[-len(expected.losses) :]
            assert_like_ddp([{"ddp": expected, case[0]: run}], ulps=256)
    # The file that brought the first weights back, for which each rank drew a name of its own.
    assert list(tmp_path.iterdir()) == []


@quick_collections()
def _search_elsewhere(folder: str) -> dict[str, Any]:
    options = {"callbacks": [BatchSizeFinder(init_val=4)], "default_root_dir": folder}
    found = {}
    for method in ("validate", "test", "predict"):
        module = Hungry("forward", 1)
        getattr(make_trainer(3, **options), method)(module)
        found[method] = module.batch_size
    late = Hungry("validation", 1, at=16)
    # Only from 32 rows on is a trial's epoch so short that it ends with a validation.
    make_trainer(2, num_sanity_val_steps=0, **options).fit(late)
    with pytest.raises(RuntimeError) as slipped:
        _train(3, Hungry("backward", 1, error="a slip"), folder, BatchSizeFinder())
    both = Hungry("forward", 1)
    both.other_error = "a slip"
    with pytest.raises(RuntimeError) as slipped_too:
        _train(3, both, folder, BatchSizeFinder())
    with pytest.raises(ValueError, match="not supported with distributed"):
        Tuner(make_trainer(3)).scale_batch_size(Hungry("nowhere"))
    return {
        "found": found,
        "late": (late.batch_size, late.was_training),
        "slipped": str(slipped.value),
        "slipped too": str(slipped_too.value),
    }


def test_tests_validations_and_other_errors(ranks: Pools, tmp_path: Path) -> None:
    one, two = ranks(2).run(_search_elsewhere, str(tmp_path), timeout=240)
    for rank in (one, two):
        assert rank["found"] == dict.fromkeys(("validate", "test", "predict"), FOUND)
        assert rank["late"] == (16, True)
    elsewhere = "Another rank failed in this trial; see its error for the reason."
    assert (one["slipped"], two["slipped"]) == (elsewhere, "a slip")
    # Memory that ends on the second while the first slips is no reason to go on searching.
    assert (one["slipped too"], two["slipped too"]) == ("a slip", elsewhere)
