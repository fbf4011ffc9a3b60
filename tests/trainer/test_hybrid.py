"""Hybrid sharding by the strategy's argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero import MemoryMonitor, TrafficMonitor, ZeROStrategy, estimate
from tests.oracle.by_trainer import Rows, Stop, make_trainer, model
from tests.oracle.checkpoints import told
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools


def _fit(folder: str, shard: Any, path: str | None = None, **more: Any) -> dict[str, Any]:
    """Losses of 6 steps, or of the steps after a checkpoint, and what a step sent."""
    module = model()
    monitor = MemoryMonitor()
    saving = [] if path else [Stop(f"{folder}/{shard}.ckpt", 3)]
    strategy = ZeROStrategy(**{"stage": 2, "shard": shard, **more})
    trainer = make_trainer(
        dist.get_world_size(), strategy, folder, max_steps=6,
        callbacks=[monitor, TrafficMonitor(every_n_steps=1), *saving],
    )  # fmt: skip
    trainer.fit(module, Rows(), ckpt_path=path)
    assert monitor.predicted is not None
    return {
        "losses": module.losses[-3:],
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "traffic": {verb: 0 for _, verb in trainer.strategy.traffic},
        "held": monitor.measured["step"],
        "differs": list(monitor.differences),
    }


def test_copies_of_two_train_save_and_resume(ranks: Pools, tmp_path: Path) -> None:
    plain = ranks(4).run(_fit, str(tmp_path), "all")[0]
    copies = ranks(4).run(_fit, str(tmp_path), 2)
    assert list(plain["traffic"]) == ["reduce", "gather"]
    for one in copies:
        # Every rank reads the same rows, so that no sum has a rounding.
        assert one["losses"] == plain["losses"]
        assert one["weights"] == plain["weights"]
        assert {*one["traffic"]} == {"gather", "reduce", "replicate gather", "replicate reduce"}
        assert one["differs"] == []
    assert copies[0]["held"]["states"] > 1.5 * plain["held"]["states"] > 0
    # A node of one host is all ranks; a file is the same for every number of copies.
    for shard, written_by in (("all", 2), (2, "all"), ("node", 2)):
        path = str(tmp_path / f"{written_by}.ckpt")
        resumed = ranks(4).run(_fit, str(tmp_path), shard, path)[0]
        assert resumed["losses"] == plain["losses"]
        assert resumed["weights"] == plain["weights"]
    files: dict[str, Any] = {"stage": 3, "offload_optimizer": "nvme", "offload_weights": "nvme"}
    files["offload_path"] = str(tmp_path)
    of_files = [ranks(4).run(_fit, str(tmp_path), shard, **files) for shard in ("all", 2)]
    for one in of_files[1]:
        assert one["weights"] == of_files[0][0]["weights"]
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


def test_deepspeeds_mics_is_the_same() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}
    assert ZeROStrategy(config=config).settings.shard == 4
    config["zero_optimization"]["mics_shard_size"] = -1
    assert ZeROStrategy(config=config, shard=2).settings.shard == 2
    config["zero_optimization"]["mics_shard_size"] = 8
    with pytest.raises(ValueError, match=r"shard=2 contradicts"):
        ZeROStrategy(config=config, shard=2)


def test_a_rank_is_predicted_to_hold_its_part_of_a_copy() -> None:
    build = MODELS["nested"].build
    copies = estimate(build, ZeROStrategy(shard=2), world_size=8, rank=5)
    assert copies.resting == estimate(build, world_size=2, rank=1).resting
    with pytest.raises(ValueError, match="shard=3 makes groups of 3 ranks"):
        estimate(build, ZeROStrategy(shard=3), world_size=8)
