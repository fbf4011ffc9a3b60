"""Bytes in words, the advice, and what a report's folder has."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

from lightning_zero.memory import (
    ModelPlan,
    compare,
    draw,
    format_bytes,
    parse_bytes,
    parse_numel,
    write_report,
)
from lightning_zero.plan import Settings
from tests.oracle.models import MODELS


def subject_of(rows: int) -> ModelPlan:
    case = MODELS["transformer"]
    return ModelPlan(
        case.build(), Settings(units=is_block), batch=case.batch(rows, 0), step=case.loss,
        device=torch.device("cpu"),
    )  # fmt: skip


def is_block(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "TransformerBlock"


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30), ("1e9", 10**9), ("512 B", 512), ("1.5T", 15e11)],
)
def test_bytes_are_read(text: str, count: float) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (160 * 10**9, "160 GB"), (999_999, "1.00 MB"),
     (1_579_008, "1.58 MB"), (33_800, "33.8 kB"), (999.6e9, "1.00 TB")],
)  # fmt: skip
def test_bytes_are_written(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_numbers_of_parameters_are_read() -> None:
    assert parse_numel("10B") == 10**10
    assert parse_numel("350M") == 350 * 10**6
    with pytest.raises(ValueError, match=r"Expected a number of parameters such as '10B'"):
        parse_numel("ten")
    for text in ("big", "24"):  # for 24GB
        with pytest.raises(ValueError, match=r"Expected a number of bytes such as '80GB'"):
            parse_bytes(text)


def test_a_report_has_numbers_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = compare(subject_of(4), (0, 1, 2, 3), [2])
    numbers, picture = write_report(tmp_path / "new" / "folder", stages, 10**6)
    xml.etree.ElementTree.parse(picture)
    facts = json.loads(numbers.read_text())
    assert [row["strategy"] for row in facts] == ["ddp", "zero1", "zero2", "zero3"]
    assert facts[3]["peak"]["total"] == stages[3].peak.total
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert write_report(tmp_path, stages) == [tmp_path / "memory.json"]


def test_the_picture_shows_what_was_estimated() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    found = compare(subject_of(4), [3], [2])[0]
    axes = figure.add_subplot()
    draw(axes, found, limit=10**5)
    highest = max(path.vertices[:, 1].max() for c in axes.collections for path in c.get_paths())
    assert highest * 1e9 == pytest.approx(found.peak.total)
