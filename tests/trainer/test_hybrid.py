"""Hybrid sharding by the strategy's argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero import ZeROStrategy
from tests.oracle.by_trainer import observe
from tests.oracle.checkpoints import told
from tests.oracle.ranks import Pools


def _fit(folder: str, shard: Any, path: str | None = None, **more: Any) -> dict[str, Any]:
    """What is observed with copies of so many ranks, by default at stage 2."""
    return observe(f"{folder}/{shard}", {"stage": 2, "shard": shard, **more}, path)


def test_copies_of_two_train_save_and_resume(ranks: Pools, tmp_path: Path) -> None:
    plain = ranks(4).run(_fit, str(tmp_path), "all")[0]
    copies = ranks(4).run(_fit, str(tmp_path), 2)
    assert list(plain["sent"]) == ["reduce", "gather"]
    for one in copies:
        # Every rank reads the same rows, so that no sum has a rounding.
        assert one["losses"] == plain["losses"]
        torch.testing.assert_close(one["weights"], plain["weights"], rtol=0, atol=0)
        assert {*one["sent"]} == {"gather", "reduce", "replicate gather", "replicate reduce"}
        assert one["differs"] == []
    held = [one["held"]["step"]["states"] for one in (copies[0], plain)]
    assert held[0] > 1.5 * held[1] > 0
    # A node of one host is all ranks; a file is the same for every number of copies.
    for shard, written_by in (("all", 2), (2, "all"), ("node", 2)):
        path = str(tmp_path / str(written_by) / "mid.ckpt")
        resumed = ranks(4).run(_fit, str(tmp_path), shard, path)[0]
        assert resumed["losses"] == plain["losses"][3:]
        torch.testing.assert_close(resumed["weights"], plain["weights"], rtol=0, atol=0)
    files: dict[str, Any] = {"stage": 3, "offload_optimizer": "nvme", "offload_weights": "nvme"}
    files["offload_path"] = str(tmp_path)
    of_files = [ranks(4).run(_fit, str(tmp_path), shard, **files) for shard in ("all", 2)]
    for one in of_files[1]:
        torch.testing.assert_close(one["weights"], of_files[0][0]["weights"], rtol=0, atol=0)
        assert one["differs"] == []


@pytest.mark.parametrize("stage", [2, 3])
def test_a_number_of_copies_that_pads_shards_is_predicted(
    ranks: Pools, tmp_path: Path, stage: int
) -> None:
    for one in ranks(3).run(_fit, str(tmp_path), 1, stage=stage):
        assert one["differs"] == []


def _refused(folder: str, shards: list[Any]) -> str:
    return told(_fit, folder, shards[dist.get_rank()])


def test_ranks_that_cannot_be_divided_are_refused(ranks: Pools, tmp_path: Path) -> None:
    for text in ranks(2).run(_refused, str(tmp_path), [3, 3]):
        assert "shard=3 makes groups of 3 ranks, but 2 ranks cannot be divided" in text
    for text in ranks(2).run(_refused, str(tmp_path), [1, "all"]):
        assert "the same number of shards on all ranks, got {1, 2}" in text
    for shard in (0, True, 1.5, "host"):
        with pytest.raises(ValueError, match="Expected shard='all', 'node' or a number of ranks"):
            ZeROStrategy(shard=shard)  # type: ignore[arg-type]
