"""Whoever wrote a checkpoint, whoever resumes from it takes the same next steps: one table.

A row is a run that saves in the middle of an epoch, by a callback and in the end, as a file and as
a directory. Each is read at two numbers of ranks, at a stage that differs from number to number.
"""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero import ZeROStrategy
from lightning_zero.commands.checkpoints import convert
from tests.oracle import by_trainer
from tests.oracle.by_trainer import (
    MIXING,
    NUM_BEFORE,
    OWN_FORMATS,
    Everything,
    Rows,
    Run,
    assert_close,
    brief,
    fit_all,
)
from tests.oracle.checkpoints import ordered, same
from tests.oracle.ranks import Pools

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]
BEHIND: dict[str, Any] = {"async_checkpoint": True, "restore_weights": False}
RUNS = [
    *(Run(*layout) for layout in ((1, 2), (2, 3), (2, 1))),
    *(Run(2, stage, precision="bf16-mixed") for stage in (1, 2, 3)),
    *(Run(2, 3, what) for what in MIXING),
    Run(2, 1, settings=BEHIND),
    Run(3, 1),
    Run(3, 2, settings=BEHIND),
    Run(4, 3),
    Run(4, 2, settings={"shard": 2}),
    Run(4, 1, "mixing", settings={"shard": 2}),
]
PLAIN = {what: Run(what=what) for what in ("elements", *MIXING)}
"""The runs that they are compared with, under plain Lightning on one device."""
KINDS: Any = ("file", "dcp")


class Saved:
    """The folders of all runs, and the losses of the plain ones."""

    def __init__(self, ranks: Pools, folder: Path) -> None:
        self.folder = folder
        self.losses = {what: run.fit(f"{folder}/{what}") for what, run in PLAIN.items()}
        numbered = enumerate(RUNS)
        for world, of_world in groupby(numbered, lambda pair: pair[1].world):
            jobs = [
                (run._replace(settings={**run.settings, "checkpoint": kind}), self[n, kind], None)
                for n, run in of_world
                for kind in kinds_of(run)
            ]
            for (run, *_), losses in zip(jobs, ranks(world).run(fit_all, jobs)[0], strict=True):
                assert losses == pytest.approx(self.losses[run.what], rel=tolerance(run)), run

    def __getitem__(self, key: tuple[int, str]) -> str:
        """Return the folder of a run of this number and kind."""
        return f"{self.folder}/{key[0]}-{key[1]}"


def kinds_of(run: Run) -> Any:
    return KINDS[:1] if run.what in OWN_FORMATS else KINDS


def test_table(ranks: Pools, tmp_path: Path) -> None:
    """One test, as the runs that save take longer than those that read."""
    saved = Saved(ranks, tmp_path)
    files_are_those_of_plain_lightning(saved)
    for size in (1, 2, 3, 4):
        every_checkpoint_resumes(ranks, saved, size)
    every_file_resumes_under_ddp_and_alone(ranks, saved)
    torch_and_lightning_read_directories_as_the_file(saved)


def tolerance(run: Run) -> float:
    return 1e-2 if run.precision == "bf16-mixed" else 1e-4 if run.what in MIXING else 1e-5


def files_are_those_of_plain_lightning(saved: Saved) -> None:
    """Those of a callback too, which removes the oldest."""
    for number, run in enumerate(RUNS):
        plain_folder = saved.folder / run.what
        for kind in kinds_of(run):
            assert sorted(os.listdir(saved[number, kind])) == sorted(os.listdir(plain_folder))
        for name in ("mid", "last", "after"):
            found = torch.load(f"{saved[number, 'file']}/{name}.ckpt", weights_only=True)
            weights = found["state_dict"]
            if run.precision == "bf16-mixed":  # the masters
                weight = weights["blocks.0.linear.weight"]
                assert weight.dtype is torch.float32
                assert not torch.equal(weight, weight.bfloat16().float())
                continue
            plain = torch.load(plain_folder / f"{name}.ckpt", weights_only=True)
            assert_close(found, plain, f"{run} {name}")
            assert weights._metadata == plain["state_dict"]._metadata
            assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
            for key, value in plain["state_dict"].items():
                assert weights[key].stride() == value.stride(), key
    module = Everything.load_from_checkpoint(f"{saved[0, 'file']}/after.ckpt")
    expected = torch.load(saved.folder / "elements" / "after.ckpt")["state_dict"]
    assert_close(dict(module.state_dict()), dict(expected), "after")


def require_next_steps(
    saved: Saved, jobs: list[tuple[Run, str, str | None]], found: list[list[float]]
) -> None:
    for (run, _, path), losses in zip(jobs, found, strict=True):
        expected = saved.losses[run.what][NUM_BEFORE:]
        assert losses == pytest.approx(expected, rel=tolerance(run)), (run, path)


def every_checkpoint_resumes(ranks: Pools, saved: Saved, size: int) -> None:
    jobs: list[tuple[Run, str, str | None]] = []
    for number, run in [*enumerate(RUNS)][size % 2 :: 2]:
        kind = kinds_of(run)[-1] if (number // 3 + size // 2) % 2 else "file"
        shard = {"shard": 2} if size == 4 and number % 4 else {}
        reader = run._replace(strategy=1 + (number + size) % 3, settings=shard)
        jobs.append((reader, "", f"{saved[number, kind]}/mid.ckpt"))
    for run in PLAIN.values() if size < 3 else ():
        jobs.append((run._replace(strategy=1 + size), "", f"{saved.folder}/{run.what}/mid.ckpt"))
    for found in ranks(size).run(fit_all, jobs):
        require_next_steps(saved, jobs, found)


def every_file_resumes_under_ddp_and_alone(ranks: Pools, saved: Saved) -> None:
    for turn, strategy in enumerate(("ddp_find_unused_parameters_true", "auto")):
        jobs: list[Any] = [
            (run._replace(strategy=strategy), "", f"{saved[number, 'file']}/mid.ckpt")
            for number, run in [*enumerate(RUNS)][turn::2]
            if run.precision == "32-true"
        ]
        found = fit_all(jobs) if strategy == "auto" else ranks(2).run(fit_all, jobs)[0]
        require_next_steps(saved, jobs, found)


def torch_and_lightning_read_directories_as_the_file(saved: Saved) -> None:
    for number, run in enumerate(RUNS):
        if run.what != "elements" or run.world == 1:
            continue
        plain = torch.load(f"{saved[number, 'file']}/mid.ckpt", weights_only=True)
        path = Path(saved[number, "dcp"]) / "mid.ckpt"
        dcp_to_torch_save(path, saved.folder / "whole.pt")
        whole = torch.load(saved.folder / "whole.pt", weights_only=True)
        same(whole["model"], dict(plain["state_dict"]))
        for place, expected in enumerate(plain["optimizer_states"]):
            same(by_name(whole[f"optimizer_{place}"]), expected)
        consolidated = _format_checkpoint(_load_distributed_checkpoint(path))
        same(consolidated["state_dict"], dict(plain["state_dict"]))
        assert len(consolidated["optimizer_states"]) == 2
        assert consolidated["global_step"] == plain["global_step"]
        # Our own way there gives the plain file again, ties and ids included.
        convert(path, saved.folder / "ours.ckpt")
        ours = torch.load(saved.folder / "ours.ckpt", weights_only=True)
        for file in (ours, plain):
            del file["callbacks"]  # which have paths
        assert_close(ordered(ours), ordered(plain), str(run), eps=0.0)
        weights = ours["state_dict"]
        assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as FSDP has it, from the names in its groups."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    ids = {name: number for number, name in enumerate(names)}
    groups = [{**g, "params": [ids[name] for name in g["params"]]} for g in state["param_groups"]]
    return {"state": {ids[k]: v for k, v in state["state"].items()}, "param_groups": groups}


# -- earlier versions ------------------------------------------------------------------------------

EARLIER = Path(__file__).parent / "earlier"
"""After two steps of ``by_trainer.Model`` on two ranks, of stage 1 and 3, and a directory."""


def resume_earlier(path: str, stage: int) -> tuple[list[float], dict[str, Any]]:
    module = by_trainer.model()
    trainer = brief(ZeROStrategy(stage), 3)
    trainer.fit(module, Rows(), ckpt_path=path)
    return module.losses, {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("size", [1, 3])
def test_checkpoints_of_earlier_versions_load(ranks: Pools, size: int) -> None:
    paths = [str(EARLIER / f"{name}.ckpt") for name in ("zero1", "zero3", "dcp3")]
    results = [ranks(size).run(resume_earlier, path, 3 - size % 2)[0] for path in paths]
    for losses, weights in results:
        assert losses == pytest.approx([6.013940334320068], rel=1e-6)
        for key, value in results[0][1].items():
            assert torch.equal(weights[key], value), key
