"""What is rounded on purpose, by the strategy's arguments: traffic in 8 bits, weights in bf16."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero import ZeROStrategy, estimate
from tests.oracle.by_trainer import Rows, Stop, make_trainer, model, world
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools


def observe(folder: str, how: dict[str, Any], path: str | None = None, **more: Any) -> Any:
    """Six steps, of which `<folder>/mid.ckpt` has three, or those after another file."""
    module, strategy = model(), ZeROStrategy(**how)
    saving = [] if path else [Stop(f"{folder}/mid.ckpt", 3)]
    trainer = make_trainer(world(), strategy, folder, max_steps=6, callbacks=saving, **more)
    trainer.fit(module, Rows(), ckpt_path=path)
    sent: Counter[str] = Counter()
    for (_, verb), of_unit in strategy.traffic.items():
        sent[verb] += of_unit.bytes
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"losses": module.losses, "weights": weights, "sent": sent}


CODED = {"gather_bits": 8, "reduce_bits": 8}
ROUNDED: dict[str, Any] = {"stochastic_rounding": True}


def test_a_trainer_sends_a_quarter_and_resumes(ranks: Pools, tmp_path: Path) -> None:
    plain = ranks(2).run(observe, str(tmp_path / "plain"), {})[0]
    coded = ranks(2).run(observe, str(tmp_path / "coded"), CODED)
    for one in coded:
        assert one["sent"] == {verb: sent * 17 // 64 for verb, sent in plain["sent"].items()}
        assert one["losses"] == pytest.approx(plain["losses"], rel=0.02)
        assert one["losses"] != plain["losses"]
    # A file holds masters: either way reads the other's.
    for written_by, bits in (("coded", {}), ("plain", CODED)):
        path = str(tmp_path / written_by / "mid.ckpt")
        resumed = ranks(2).run(observe, str(tmp_path), bits, path)[0]
        assert resumed["losses"] == pytest.approx(plain["losses"][-3:], rel=0.02)


def test_an_estimate_takes_them() -> None:
    build = MODELS["nested"].build
    plain = estimate(build, world_size=4)
    coded = estimate(build, ZeROStrategy(**CODED), world_size=4)
    assert coded.resting == plain.resting
    # Codes are held only while they are on the way, and the peak here has none.
    assert coded.most["gathered"] == plain.most["gathered"]
    assert coded.most["unreduced"] <= plain.most["unreduced"]


def _fit(folder: str, path: str | None = None, **how: Any) -> dict[str, Any]:
    return observe(folder, how, path, precision="bf16-true")


def test_a_run_in_bf16_goes_on_with_its_noise(ranks: Pools, tmp_path: Path) -> None:
    paths = {kind: str(tmp_path / kind / "mid.ckpt") for kind in ("plain", "rounded")}
    plain = ranks(2).run(_fit, str(tmp_path / "plain"))[0]
    whole = ranks(2).run(_fit, str(tmp_path / "rounded"), **ROUNDED)
    resumed = ranks(2).run(_fit, str(tmp_path), paths["rounded"], **ROUNDED)
    for one, other in zip(whole, resumed, strict=True):
        assert one["losses"][3:] == other["losses"] != plain["losses"][3:]
        for name, value in one["weights"].items():
            assert value.dtype is torch.bfloat16
            assert torch.equal(value, other["weights"][name])
    files = [torch.load(path, weights_only=True)["optimizer_states"][0] for path in paths.values()]
    forms = [
        [{name: (value.dtype, value.shape) for name, value in entries.items()}
         for entries in states["state"].values()]
        for states in files
    ]  # fmt: skip
    assert forms[0] == forms[1]
    for written_by, how in (("plain", ROUNDED), ("rounded", {})):
        found = ranks(2).run(_fit, str(tmp_path), paths[written_by], **how)[0]
        assert found["losses"] == pytest.approx(plain["losses"][3:], rel=0.05)
