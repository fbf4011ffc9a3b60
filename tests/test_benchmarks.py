"""The benchmark of steps runs with fake ranks; its model says nothing about speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.launch import run_script

TINY = "--layers 2 --dim 32 --heads 2 --vocabulary 64 --length 16 --steps 2 --warmup 1 --rounds 1"
NUMEL = 2 * 64 * 32 + 16 * 32 + 2 * 32 + 2 * (12 * 32 * 32 + 13 * 32)
"""Both vocabularies, positions, the last norm, and two blocks."""


def test_one_rank_of_many_on_the_fake_backend(tmp_path: Path) -> None:
    command = [*TINY.split(), "--only", "zero3", "--fake-world", "4", "--output", str(tmp_path)]
    run_script("examples/benchmarks/compare.py", *command, launcher="plain", timeout=240)
    row: dict[str, Any] = json.loads((tmp_path / "compare.json").read_text())["rows"]["zero3"]
    # In four parts, padded to whole units a little.
    assert NUMEL <= row["bytes"]["weights"] <= 1.05 * NUMEL
    assert row["bytes"]["gathered"] == 0
    assert row["sent"] > 0
