"""The benchmark of steps runs, on a model that is too small to say anything about speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.launch import run_script

TINY = "--layers 2 --dim 32 --heads 2 --vocabulary 64 --length 16 --steps 2 --warmup 1 --rounds 1"
NUMEL = 2 * 64 * 32 + 16 * 32 + 2 * 32 + 2 * (12 * 32 * 32 + 13 * 32)
"""Both vocabularies, positions, the last norm, and two blocks."""


def compare(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [*TINY.split(), "--output", str(folder), *arguments]
    run_script("examples/benchmarks/compare.py", *command, launcher="plain")
    rows: dict[str, Any] = json.loads((folder / "compare.json").read_text())["rows"]
    return rows


def assert_sharded(row: dict[str, Any], world: int) -> None:
    """Weights in `world` parts, padded to whole units a little."""
    assert NUMEL * 4 / world <= row["bytes"]["weights"] <= 1.05 * NUMEL * 4 / world
    assert row["bytes"]["gathered"] == 0


def test_contenders_side_by_side(tmp_path: Path) -> None:
    rows = compare(tmp_path, "--only", "ddp", "zero3")
    assert rows["ddp"]["ratio"] == 1.0
    assert rows["zero3"]["ratio"] > 0
    assert_sharded(rows["zero3"], 2)


def test_one_rank_of_many_on_the_fake_backend(tmp_path: Path) -> None:
    assert_sharded(compare(tmp_path, "--only", "zero3", "--fake-world", "4")["zero3"], 4)
