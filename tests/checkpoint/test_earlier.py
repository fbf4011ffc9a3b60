"""Checkpoints that earlier versions wrote, with checksums of blocks that are read no more."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero import ZeROStrategy
from tests.oracle import by_trainer
from tests.oracle.by_trainer import Rows, make_trainer, world
from tests.oracle.ranks import Pools

EARLIER = Path(__file__).parent / "earlier"
"""After two steps of ``by_trainer.Model`` on two ranks, of stage 1 and 3, and a directory."""
THIRD_LOSS = 6.013940334320068


def resume(path: str, stage: int) -> tuple[list[float], dict[str, Any]]:
    module = by_trainer.model()
    trainer = make_trainer(
        world(), ZeROStrategy(stage), "/nowhere", enable_checkpointing=False, max_steps=3
    )
    trainer.fit(module, Rows(), ckpt_path=path)
    return module.losses, {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("size", [1, 3])
def test_all_of_them_load(ranks: Pools, size: int) -> None:
    paths = [str(EARLIER / f"{name}.ckpt") for name in ("zero1", "zero3", "dcp3")]
    results = [ranks(size).run(resume, path, 3 - size % 2)[0] for path in paths]
    for losses, weights in results:
        assert losses == pytest.approx([THIRD_LOSS], rel=1e-6)
        for key, value in results[0][1].items():
            assert torch.equal(weights[key], value), key
