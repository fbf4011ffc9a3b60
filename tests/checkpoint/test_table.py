"""Whoever wrote a checkpoint, whoever resumes from it takes the same next steps: one table.

A row is what is saved and the layout that saves it, as a file and as a directory. Each is read at
every number of ranks, at a stage that differs from number to number.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero import ZeROStrategy
from lightning_zero.commands import convert
from tests.oracle import by_trainer
from tests.oracle.by_trainer import Rows, brief
from tests.oracle.checkpoints import same
from tests.oracle.ranks import Pools
from tests.oracle.resharding import MIXING, OWN_FORMATS, Saved, resume, save_all, save_plain

ROWS = sorted(
    [
        *(Saved(*layout) for layout in ((1, 2), (2, 3), (2, 1), (3, 1), (3, 2), (4, 3))),
        Saved(4, 2, shard=2),
        *(Saved(2, stage, precision="bf16-mixed") for stage in (1, 2, 3)),
        *(Saved(2, 3, what=what) for what in MIXING),
        Saved(4, 1, what="mixing", shard=2),
    ],
    key=lambda row: row.world,
)


@pytest.fixture(scope="module")
def saved(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    """The folder of all checkpoints, and the losses after each; those of plain loops by what."""
    folder = tmp_path_factory.mktemp("saved")
    losses: dict[Any, Any] = {
        what: save_plain(folder / f"{what}.ckpt", what) for what in ("elements", *MIXING)
    }
    for size, rows in groupby(ROWS, lambda row: row.world):
        of_world = [*rows]
        losses.update(
            zip(of_world, ranks(size).run(save_all, str(folder), of_world)[0], strict=True)
        )
    return folder, losses


def tolerance(row: Saved) -> float:
    return 1e-2 if row.precision == "bf16-mixed" else 1e-4 if row.what in MIXING else 1e-5


def test_files_are_what_a_plain_loop_saves(saved: tuple[Path, dict[Any, Any]]) -> None:
    folder, losses = saved
    for row in ROWS:
        found = torch.load(folder / f"{row.name}.file", weights_only=True)
        assert losses[row] == pytest.approx(losses[row.what], rel=tolerance(row)), row
        if row.precision == "bf16-mixed":  # the masters
            weight = found["state_dict"]["blocks.0.linear.weight"]
            assert weight.dtype is torch.float32
            assert not torch.equal(weight, weight.bfloat16().float())
            continue
        plain = torch.load(folder / f"{row.what}.ckpt", weights_only=True)
        by_trainer.assert_close({key: found[key] for key in plain}, plain, row.name)
        weights = found["state_dict"]
        assert weights._metadata == plain["state_dict"]._metadata
        assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
        for key, value in plain["state_dict"].items():
            assert weights[key].stride() == value.stride(), key


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_checkpoint_resumes(
    ranks: Pools, saved: tuple[Path, dict[Any, Any]], size: int
) -> None:
    folder, losses = saved
    reads: list[tuple[str, Saved, int | str, Any]] = []
    for number, row in enumerate(ROWS):
        kind = "dcp" if (number // 3 + size) % 2 and row.what not in OWN_FORMATS else "file"
        copies = 2 if size == 4 and number % 2 else "all"
        reads.append((f"{folder}/{row.name}.{kind}", row, 1 + (number + size) % 3, copies))
    for row in (Saved(1, 0, what) for what in ("elements", *MIXING) if size < 3):
        reads.append((f"{folder}/{row.what}.ckpt", row, 1 + size, "all"))
    found = ranks(size).run(resume, reads)
    for read, *of_ranks in zip(reads, *found, strict=True):
        row = read[1]
        for of_rank in of_ranks:
            assert of_rank == pytest.approx(losses[row.what], rel=tolerance(row)), read


def test_every_file_resumes_under_ddp_and_alone(
    ranks: Pools, saved: tuple[Path, dict[Any, Any]]
) -> None:
    folder, losses = saved
    rows = [row for row in ROWS if row.precision == "32-true"]
    reads = [(f"{folder}/{row.name}.file", row, "ddp", None) for row in rows]
    for found in (ranks(2).run(resume, reads)[0], resume(reads)):  # type: ignore[arg-type]
        for row, of_row in zip(rows, found, strict=True):
            assert of_row == pytest.approx(losses[row.what], rel=tolerance(row)), row


def test_torch_and_lightning_read_directories_as_the_file(
    saved: tuple[Path, dict[Any, Any]], tmp_path: Path
) -> None:
    folder, _ = saved
    for row in (row for row in ROWS if row.what == "elements" and row.world > 1):
        plain = torch.load(folder / f"{row.name}.file", weights_only=True)
        path = folder / f"{row.name}.dcp"
        dcp_to_torch_save(path, tmp_path / "whole.pt")
        whole = torch.load(tmp_path / "whole.pt", weights_only=True)
        same(whole["model"], dict(plain["state_dict"]))
        for number, expected in enumerate(plain["optimizer_states"]):
            same(by_name(whole[f"optimizer_{number}"]), expected)
        consolidated = _format_checkpoint(_load_distributed_checkpoint(path))
        same(consolidated["state_dict"], dict(plain["state_dict"]))
        assert len(consolidated["optimizer_states"]) == 2
        assert consolidated["global_step"] == 7
        # Our own way there gives the plain file again, ties and ids included.
        convert(path, tmp_path / "ours.ckpt")
        ours = torch.load(tmp_path / "ours.ckpt", weights_only=True)
        same(ours, {**plain, "state_dict": dict(plain["state_dict"])})
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
