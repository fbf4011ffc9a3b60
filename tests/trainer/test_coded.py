"""Traffic in few bits by the strategy's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_zero import MemoryMonitor, ZeROStrategy, estimate
from tests.oracle.by_trainer import Rows, Stop, make_trainer, model
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools

CODED = {"gather_bits": 8, "reduce_bits": 8}


def _fit(folder: str, bits: dict[str, int], path: str | None = None, **more: Any) -> dict[str, Any]:
    """Losses of 6 steps, or of the steps after a checkpoint, and what a step sent."""
    module, monitor = model(), MemoryMonitor()
    saving = [] if path else [Stop(f"{folder}/{len(bits)}.ckpt", 3)]
    trainer = make_trainer(
        dist.get_world_size(), ZeROStrategy(**bits, **more), folder, max_steps=6,
        callbacks=[monitor, *saving], enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, Rows(), ckpt_path=path)
    sent: dict[str, int] = {}
    for (_, verb), of_unit in trainer.strategy.traffic.items():
        sent[verb] = sent.get(verb, 0) + of_unit.bytes
    return {"losses": module.losses, "sent": sent, "differs": list(monitor.differences)}


def test_a_trainer_sends_a_quarter_and_resumes(ranks: Pools, tmp_path: Path) -> None:
    plain = ranks(2).run(_fit, str(tmp_path), {})[0]
    coded = ranks(2).run(_fit, str(tmp_path), CODED)
    for one in coded:
        assert one["differs"] == []
        assert one["sent"] == {verb: sent * 17 // 64 for verb, sent in plain["sent"].items()}
        assert one["losses"] == pytest.approx(plain["losses"], rel=0.02)
        assert one["losses"] != plain["losses"]
    # A file holds masters: either way reads the other's.
    for written_by, bits in ((2, {}), (0, CODED)):
        path = str(tmp_path / f"{written_by}.ckpt")
        resumed = ranks(2).run(_fit, str(tmp_path), bits, path)[0]
        assert resumed["losses"] == pytest.approx(plain["losses"][-3:], rel=0.02)


def test_deepspeeds_keys_are_the_same() -> None:
    config: dict[str, Any] = {
        "zero_optimization": {
            "stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True
        }
    }  # fmt: skip
    settings = ZeROStrategy(config=config).settings
    assert (settings.gather_bits, settings.reduce_bits) == (8, 8)
    with pytest.raises(ValueError, match="reduce_bits=4 contradicts"):
        ZeROStrategy(config=config, reduce_bits=4)
    config["zero_optimization"]["zero_quantized_weights"] = False
    assert ZeROStrategy(config=config).settings.gather_bits is None


def test_an_estimate_takes_them() -> None:
    build = MODELS["nested"].build
    plain = estimate(build, world_size=4)
    coded = estimate(build, ZeROStrategy(**CODED), world_size=4)
    assert coded.resting == plain.resting
    assert coded.most["gathered"] > plain.most["gathered"]
    # Inboxes hold codes, and what was coded is gone.
    assert coded.most["unreduced"] < plain.most["unreduced"]
    with pytest.raises(ValueError, match="read each other's memory"):
        estimate(build, ZeROStrategy(**CODED), world_size=4, shares_memory=True)
    with pytest.raises(ValueError, match="gather_bits=8 has no effect"):
        estimate(build, ZeROStrategy(2, gather_bits=8), world_size=4)
    assert estimate(build, "ddp", world_size=4).stage == 0
