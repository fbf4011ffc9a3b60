"""Several ranks on a device: numbers, hybrid sharding, offload, overflow, the Trainer, faults.

On GPUs the ranks talk over NCCL, also where one GPU is all there is (oracle/devices.py). On the CPU
the same lines are rehearsed over the transport of NCCL.

Of the faults one was not named when a GPU was last seen: a kill in the optimizer. Since then the
watchdog asks NCCL's groups for errors (`process_groups.failure_on_device`). If it still ends so,
try what `docs/accelerators.md` lists under "Torch's own watch over NCCL", in that order. Also to be
seen: whether `group.abort` returns in seconds beside a rank that its device blocks, and whether the
groups of weights and gradients, aborted one after the other, wait for each other's kernels (then a
thread for each: `ncclGroupStart` counts per thread, and torch aborts in another).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.comm import Communicator
from lightning_zero.plan import RECIPES, Offload
from tests.oracle.device import beside_the_host
from tests.oracle.devices import DEVICES, NO_GPU, joined, trainer_options
from tests.oracle.faults import Fault, run
from tests.oracle.models import MODELS
from tests.oracle.parity import Result, assert_parity, reference
from tests.oracle.projects import Regression, Run, make_trainer, rows
from tests.oracle.ranks import Pools
from tests.oracle.sharded import sgd, train

ON_DEVICES = pytest.mark.parametrize("kind", DEVICES)
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def _results(by_rank: list[dict[Any, Result]]) -> dict[Any, Result]:
    return {key: Result.over_ranks([one[key] for one in by_rank]) for key in by_rank[0]}


def _assert_like(
    actual: Result, expected: Result, kind: str, precision: str = "32-true", *, ulps: int = 4
) -> None:
    """Compare to a few roundings; a device adds in another order."""
    if kind == "cpu":
        assert_parity(actual, expected, ulps=ulps)
    else:
        dtype = RECIPES[precision].weight
        assert_parity(actual, expected, ulps=64 if dtype is None else 8, dtype=dtype)


# ---------------------------------------------------------------------------- numbers


def _train_all(kind: str, folder: str) -> dict[tuple[int, str], Result]:
    with joined(kind, folder) as device:
        comm = Communicator(device, direct=False)
        how = {"accumulate": 2, "clip_norm": 0.1, "units": "leaves", "comm": comm}
        return {
            (stage, precision): train("nested", sgd, stage=stage, precision=precision, **how)
            for stage in (1, 2, 3)
            for precision in PRECISIONS
        }


@ON_DEVICES
def test_two_ranks_are_the_plain_loop(ranks: Pools, kind: str, tmp_path: Path) -> None:
    """At every stage and precision, with two microbatches and clipping."""
    results = _results(ranks(2).run(_train_all, kind, str(tmp_path)))
    for (_, precision), actual in results.items():
        how = {"clip": 0.1, "precision": precision, "world": 2, "accumulate": 2}
        _assert_like(actual, reference(MODELS["nested"], sgd, 3, **how), kind, precision)


def _train_copies(kind: str, folder: str) -> dict[str, Result]:
    with joined(kind, folder) as device:
        shards = {"all": {}, "hybrid": {"num_shards": 2}}
        return {
            name: train("nested", sgd, comm=Communicator(device, direct=False, **how))
            for name, how in shards.items()
        }


@ON_DEVICES
def test_copies_train_as_one(ranks: Pools, kind: str, tmp_path: Path) -> None:
    """Two copies of two shards."""
    results = _results(ranks(4).run(_train_copies, kind, str(tmp_path)))
    _assert_like(results["hybrid"], results["all"], kind, ulps=256)


def _train_offloaded(kind: str, folder: str) -> dict[str, Result]:
    with joined(kind, folder) as device:
        how = {"precision": "bf16-mixed", "accumulate": 2, "clip_norm": 0.1}
        cases = {
            "without": (3, {}),
            "2 cpu": (2, {"offload": Offload.of_stage(2, "cpu")}),
            "3 cpu": (3, {"offload": Offload.of_stage(3, "cpu")}),
            "3 nvme": (3, {"offload": Offload.of_stage(3, "nvme"), "offload_path": folder}),
        }
        if kind != "cpu":  # which refuses it; test_activation_offload.py plays a device
            cases["activations"] = (3, {"activation_offload": True})
        results = {}
        for name, (stage, more) in cases.items():
            is_played = kind == "cpu" and name != "without"
            with beside_the_host() if is_played else contextlib.nullcontext():
                comm = Communicator(device, direct=False)
                results[name] = train("nested", sgd, stage=stage, comm=comm, **how, **more)
        return results


@ON_DEVICES
def test_offload_is_without(ranks: Pools, kind: str, tmp_path: Path) -> None:
    """To the host, to files, and of activations alone."""
    results = _results(ranks(2).run(_train_offloaded, kind, str(tmp_path)))
    for name in results.keys() - {"without"}:
        _assert_like(results[name], results["without"], kind, "bf16-mixed", ulps=0)


def _overflow(kind: str, folder: str) -> Result:
    """Train a step in fp16 that overflows on rank 1 alone, and one that does not."""
    case, steps = MODELS["nested"], []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        steps.append(None)
        is_odd = dist.get_rank() == 1 and len(steps) == 1
        return case.loss(model, batch) * (math.inf if is_odd else 1e-3)

    with joined(kind, folder) as device:
        comm = Communicator(device, direct=False)
        odd = dataclasses.replace(case, loss=loss)
        return train(odd, sgd, steps=2, precision="16-mixed", comm=comm)


@ON_DEVICES
def test_an_overflow_of_one_rank_is_skipped_by_all(ranks: Pools, kind: str, tmp_path: Path) -> None:
    by_rank = ranks(2).run(_overflow, kind, str(tmp_path))
    assert [result.norms[0] for result in by_rank] == [math.inf, math.inf]
    both = Result.over_ranks(by_rank)
    assert 0 < both.norms[1] < math.inf
    assert all(value.isfinite().all() for value in both.params.values())


# ---------------------------------------------------------------------------- the Trainer


class _Project(Regression):
    """Blocks that may be compiled."""

    def __init__(self, *, is_compiled: bool = False) -> None:
        super().__init__()
        for block in self.net.blocks if is_compiled else ():
            block.compile(backend="aot_eager")


def _fit(kind: str, folder: str) -> dict[str, list[Tensor]]:
    with joined(kind, folder) as device:
        options = {
            **trainer_options(device),
            "precision": "bf16-mixed",
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.1,
            "default_root_dir": folder,
        }
        found = {}
        for strategy in ("ddp", 1, 2, 3):
            module = _Project(is_compiled=strategy == 3)
            trainer = make_trainer(strategy, **options)
            trainer.fit(module, rows(), rows(8, seed=1))
            metrics = [trainer.callback_metrics["val_loss"].cpu()]
            found[str(strategy)] = [*Run.of(module).params.values(), *metrics]
        # A checkpoint from within the run of stage 3 goes on at stage 2.
        path = f"{folder}/saved.ckpt"
        half, resumed = _Project(), _Project()
        trainer = make_trainer(3, **options)
        trainer.fit(half, rows())
        trainer.save_checkpoint(path)
        make_trainer(2, **options, max_epochs=2).fit(resumed, rows(), ckpt_path=path)
        whole = _Project()
        make_trainer("ddp", **options, max_epochs=2).fit(whole, rows())
        found |= {"resumed": [*Run.of(resumed).params.values()]}
        found |= {"whole": [*Run.of(whole).params.values()]}
        return found


@ON_DEVICES
def test_a_trainer_over_two_ranks_is_ddp(ranks: Pools, kind: str, tmp_path: Path) -> None:
    """Its weights, what it logs over the ranks, and a run that is resumed at another stage."""
    for found in ranks(2).run(_fit, kind, str(tmp_path)):
        pairs = [("ddp", "1"), ("ddp", "2"), ("ddp", "3"), ("whole", "resumed")]
        for expected, actual in pairs:
            for value, target in zip(found[actual], found[expected], strict=True):
                torch.testing.assert_close(value, target, rtol=2e-3, atol=2e-3)


# ---------------------------------------------------------------------------- faults


FAULTS = [
    ("the user's forward", "kill", "loop"),
    ("the user's backward", "raise", "loop"),
    ("a gather", "kill", "loop"),
    ("a reduction", "raise", "loop"),
    ("the optimizer", "kill", "loop"),
    ("the user's forward", "raise", "fit"),
    ("a reduction", "kill", "fit"),
    ("the end of a batch", "barrier", "fit"),
]


@NO_GPU
@pytest.mark.parametrize(("place", "kind", "program"), FAULTS)
def test_a_fault_is_named_within_seconds(place: str, kind: Any, program: str) -> None:
    """Also by ranks that their device blocks, behind a message that never comes."""
    cell = run(Fault(place, kind), way="nccl", program=program, limit=20.0)
    assert cell.is_good, str(cell)
