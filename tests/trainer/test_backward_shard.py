"""A second copy of weights for the backward pass, by the strategy's argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero import MemoryMonitor, TrafficMonitor, ZeROStrategy, estimate
from lightning_zero.memory import Estimate
from tests.oracle.by_trainer import Rows, make_trainer, model
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools


def _fit(folder: str, backward_shard: Any, **more: Any) -> dict[str, Any]:
    """Losses and weights of 4 steps, with validations between, and what a step sent and held."""
    module, monitor = model(), MemoryMonitor()
    strategy = ZeROStrategy(backward_shard=backward_shard, units=lambda m: bool(m._parameters))
    trainer = make_trainer(
        dist.get_world_size(), strategy, folder, max_steps=4, val_check_interval=2,
        callbacks=[monitor, TrafficMonitor(every_n_steps=1)], enable_checkpointing=False, **more,
    )  # fmt: skip
    trainer.fit(module, Rows(), Rows())
    assert monitor.predicted is not None
    assert strategy.engine is not None
    return {
        "losses": module.losses,
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "verbs": {verb for _, verb in strategy.traffic},
        "gathered": [monitor.measured["forward"]["gathered"], monitor.measured["step"]["gathered"]],
        "predicted": max(s.kinds["gathered"] for s in monitor.predicted.snapshots),
        "differs": list(monitor.differences),
        "units": strategy.engine.sharded.describe(),
    }


@pytest.mark.parametrize(
    "more", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}], ids=str
)
def test_a_trainer_has_the_same_numbers(ranks: Pools, tmp_path: Path, more: dict[str, Any]) -> None:
    plain = ranks(4).run(_fit, str(tmp_path), "node", **more)[0]
    assert plain["verbs"] == {"gather", "reduce"}  # a node of all ranks
    for one in ranks(4).run(_fit, str(tmp_path), 2, **more):
        assert one["losses"] == plain["losses"]
        assert one["weights"] == plain["weights"]
        assert one["verbs"] == {"gather", "reduce", "backward gather"}
        assert one["differs"] == []
        in_forward, at_rest = one["gathered"]
        assert in_forward > plain["gathered"][0]
        assert at_rest == 0
        assert one["predicted"] >= in_forward
        assert "stage 3 over 4 ranks, over 2 for backward" in one["units"]


def test_deepspeeds_hpz_is_the_same() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    assert ZeROStrategy(config=config).settings.backward_shard == 8
    with pytest.raises(ValueError, match="backward_shard=2 contradicts"):
        ZeROStrategy(config=config, backward_shard=2)
    config["zero_optimization"]["zero_hpz_partition_size"] = 1
    assert ZeROStrategy(config=config).settings.backward_shard is None


def test_an_estimate_takes_it() -> None:
    def held(**arguments: Any) -> Estimate:
        strategy = ZeROStrategy(min_num_params=0, **arguments)
        return estimate(MODELS["nested"].build, strategy, world_size=8)

    plain, second = held(), held(backward_shard=2)
    assert second.resting == plain.resting
    assert second.most["gathered"] > plain.most["gathered"]
    assert held(backward_shard=8).most == plain.most
    with pytest.raises(ValueError, match="backward_shard=3 makes groups of 3 ranks"):
        held(backward_shard=3)
