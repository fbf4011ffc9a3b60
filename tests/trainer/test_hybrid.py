"""Hybrid sharding by the strategy's argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero import ZeROStrategy
from tests.oracle.by_trainer import observe
from tests.oracle.checkpoints import told
from tests.oracle.ranks import Pools


def _fit(folder: str, shard: Any, path: str | None = None, **more: Any) -> dict[str, Any]:
    """What is observed with copies of so many ranks, by default at stage 2."""
    return observe(f"{folder}/{shard}", {"stage": 2, "shard": shard, **more}, path)


def _refused(folder: str, shards: list[Any]) -> str:
    return told(_fit, folder, shards[dist.get_rank()])


def test_ranks_that_cannot_be_divided_are_refused(ranks: Pools, tmp_path: Path) -> None:
    for text in ranks(2).run(_refused, str(tmp_path), [3, 3]):
        assert "shard=3 makes groups of 3 ranks, but 2 ranks cannot be divided" in text
    for text in ranks(2).run(_refused, str(tmp_path), [1, "all"]):
        assert "the same number of shards on all ranks, got {1, 2}" in text
    for shard in (0, True, 1.5, "host"):
        with pytest.raises(ValueError, match="Expected shard to be 'all', 'node' or a"):
            ZeROStrategy(shard=shard)  # type: ignore[arg-type]
