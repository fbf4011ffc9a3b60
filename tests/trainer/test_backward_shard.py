"""A second copy of weights for the backward pass, by the strategy's argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero import ZeROStrategy, estimate
from lightning_zero.memory import Estimate
from tests.oracle.by_trainer import has_parameters, observe
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools


@pytest.mark.parametrize(
    "more", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}], ids=str
)
def test_a_trainer_has_the_same_numbers(ranks: Pools, tmp_path: Path, more: dict[str, Any]) -> None:
    how = {"units": has_parameters, "backward_shard": "node"}
    # Validations are between the steps.
    more = {"val_check_interval": 2, "limit_val_batches": 2, **more}
    plain = ranks(4).run(observe, str(tmp_path), how, **more)[0]
    assert {*plain["sent"]} == {"gather", "reduce"}  # a node of all ranks
    for one in ranks(4).run(observe, str(tmp_path), {**how, "backward_shard": 2}, **more):
        assert one["losses"] == plain["losses"]
        torch.testing.assert_close(one["weights"], plain["weights"], rtol=0, atol=0)
        assert {*one["sent"]} == {"gather", "reduce", "backward gather"}
        assert one["differs"] == []
        in_forward = one["held"]["forward"]["gathered"]
        assert in_forward > plain["held"]["forward"]["gathered"]
        assert one["held"]["step"]["gathered"] == 0
        assert one["predicted"].most["gathered"] >= in_forward
        assert "stage 3 over 4 ranks, over 2 for backward" in one["units"]


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
