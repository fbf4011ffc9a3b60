"""Weights and states in bf16, rounded by chance, by the strategy's argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.by_trainer import observe
from tests.oracle.ranks import Pools


def _fit(folder: str, path: str | None = None, **how: Any) -> dict[str, Any]:
    return observe(folder, how, path, precision="bf16-true")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_with_its_noise(ranks: Pools, tmp_path: Path, stage: int) -> None:
    rounded = {"stochastic_rounding": True, "stage": stage}
    whole = ranks(2).run(_fit, str(tmp_path), **rounded)
    resumed = ranks(2).run(_fit, str(tmp_path), str(tmp_path / "mid.ckpt"), **rounded)
    for one, other in zip(whole, resumed, strict=True):
        assert one["losses"][3:] == other["losses"]
        for name, value in one["weights"].items():
            assert value.dtype is torch.bfloat16
            assert torch.equal(value, other["weights"][name])


def test_either_way_reads_the_others_files(ranks: Pools, tmp_path: Path) -> None:
    plain = ranks(2).run(_fit, str(tmp_path / "0"))[0]
    rounded = ranks(2).run(_fit, str(tmp_path / "1"), stochastic_rounding=True)[0]
    assert rounded["losses"] != plain["losses"]
    files = [torch.load(tmp_path / n / "mid.ckpt", weights_only=True) for n in "01"]
    forms = [
        [{name: (value.dtype, value.shape) for name, value in entries.items()}
         for entries in file["optimizer_states"][0]["state"].values()]
        for file in files
    ]  # fmt: skip
    assert forms[0] == forms[1]
    for written_by, how in ((0, {"stochastic_rounding": True}), (1, {})):
        path = str(tmp_path / str(written_by) / "mid.ckpt")
        resumed = ranks(2).run(_fit, str(tmp_path), path, **how)[0]
        assert resumed["losses"] == pytest.approx(plain["losses"][3:], rel=0.05)
