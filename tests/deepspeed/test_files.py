"""Folders that DeepSpeed itself wrote are read with the values that were in it.

`write_files.py` made them. The weights are compared with those that DeepSpeed's own tool reads from
the same folder; weights and states also with a plain loop over the same rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_zero.commands import main
from tests.deepspeed.write_files import (
    CASES,
    FILES,
    RANKS,
    STEPS,
    Model,
    loss_of,
    optimizer_of,
    rows_of,
)
from tests.oracle.parity import backward_of_ranks


def plain() -> tuple[dict[str, Any], dict[str, Any]]:
    """A plain loop over the rows of all ranks; its weights, and its optimizer's state dict."""
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    for seed in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, rows_of(seed, rank)) for rank in range(RANKS)]
        backward_of_ranks(model, losses)
        optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict()


def assert_near(found: Tensor, expected: Tensor, where: str) -> None:
    """Fail unless two tensors point the same way: DeepSpeed's arithmetic is not the loop's."""
    assert found.shape == expected.shape, where
    likeness = F.cosine_similarity(found.float().flatten(), expected.flatten(), 0)
    assert likeness > 0.9, f"{where}: {likeness}"


@pytest.mark.parametrize("name", CASES)
def test_what_deepspeed_wrote_is_read(name: str, tmp_path: Path) -> None:
    assert main(["convert", str(FILES / name), str(tmp_path / "x.ckpt")]) == 0
    found = torch.load(tmp_path / "x.ckpt", weights_only=True)
    weights, states = found["state_dict"], found["optimizer_states"][0]
    whole = torch.load(FILES / name / "whole.pt", weights_only=True)
    assert set(whole) <= set(weights)
    for key, value in whole.items():
        assert torch.equal(weights[key], value.float()), key
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
    expected, its_states = plain()
    assert set(weights) == set(expected)
    for key, value in expected.items():
        assert_near(weights[key], value, key)
    assert states["param_groups"] == its_states["param_groups"]
    assert list(states["state"]) == list(its_states["state"])
    for number, entries in its_states["state"].items():
        assert states["state"][number]["step"] == entries["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert_near(states["state"][number][key], entries[key], f"{number} {key}")
    assert (found["epoch"], found["global_step"]) == (1, STEPS)
