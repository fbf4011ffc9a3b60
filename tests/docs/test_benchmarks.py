"""The benchmarks run; their models say nothing about speed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.devices import NO_HOSTS
from tests.oracle.launch import run_script
from tests.oracle.ranks import ROOT

pytestmark = pytest.mark.slow

LAYERS, DIM, VOCABULARY, LENGTH = 3, 128, 64, 16
SIZES = {"layers": LAYERS, "dim": DIM, "vocabulary": VOCABULARY, "length": LENGTH, "heads": 4}
JOB = {**SIZES, "steps": 2, "warmup": 1}
WORDS = [word for name, n in JOB.items() for word in (f"--{name}", str(n))]
NUMEL = LAYERS * (12 * DIM**2 + 13 * DIM) + (2 * VOCABULARY + LENGTH + 2) * DIM


def load(name: str) -> Any:
    """A benchmark as a module, which finds its neighbours as when it is run."""
    path = ROOT / "examples" / "benchmarks" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_contenders_side_by_side(tmp_path: Path) -> None:
    """Two real ranks of each: a table, a JSON and a picture, and bytes that are known."""
    names = ["ddp", "zero1", "zero3", "fsdp2"]
    words = ["--only", *names, *WORDS, "--rounds", 1, "--output", tmp_path]
    output = run_script("examples/benchmarks/compare.py", *words).stdout
    rows = re.findall(r"^\| ([a-z]\w*) \| [\d.]+ \| [\d.]+ \|", output, re.MULTILINE)
    assert rows == names
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report["job"].items() >= {**JOB, "world": 2}.items()
    measured = report["rows"]
    for name in names:
        assert measured[name]["loss"] == pytest.approx(measured["ddp"]["loss"], rel=1e-4)
        weights = 4 * NUMEL // (2 if name in ("zero3", "fsdp2") else 1)
        assert measured[name]["bytes"]["weights"] == pytest.approx(weights, rel=0.01), name
        assert 0 < measured[name]["peak_mib"] <= measured[name]["trainer_peak_mib"]
    assert measured["zero3"]["sent"] > measured["zero1"]["sent"] >= NUMEL
    for name in ("zero1", "zero3"):
        # What the kernel counts, where it does, are our messages, their heads and small talk.
        sent = measured[name]["sent"] * 4
        assert sent <= measured[name].get("socket_bytes", sent) < 1.1 * sent


def test_a_gpus_run_is_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its parts on the CPU, also one rank of eight, with a file of one test."""
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "PRECISIONS", ["bf16-mixed"])
    worlds = {1: ("Trainer", "Trainer zero3", "ddp", "zero3"), 8: ("zero3",)}
    monkeypatch.setattr(gpu, "WORLDS", worlds)
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    monkeypatch.setattr(gpu, "TESTS", [str(tmp_path / "test_one.py")])
    command = ["gpu.py", "--device", "cpu", "--output", str(tmp_path), "--rounds", "1", *WORDS]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["tests"]["code"] == 0
    rows = {(row["world"], row["name"]): row for row in report["rows"]}
    assert list(rows) == [(world, name) for world, names in worlds.items() for name in names]
    assert rows[1, "zero3"]["loss"] == pytest.approx(rows[1, "ddp"]["loss"], rel=2e-2)
    assert rows[1, "Trainer zero3"]["loss"] == pytest.approx(rows[1, "Trainer"]["loss"], rel=2e-2)
    assert rows[8, "zero3"]["bytes"]["master"] == pytest.approx(4 * NUMEL / 8, rel=0.05)
    page = (tmp_path / "gpu.md").read_text()
    assert len(re.findall(r"^\| bf16-mixed \| \d", page, re.MULTILINE)) == len(rows)
    assert page in capsys.readouterr().out


OTHERS: dict[str, tuple[str, str, int]] = {
    "offload": ("--megabytes 10 --width 512 --rounds 2 --folder", r"\| [a-z].* \| [\d.]+ \|", 15),
    "small_tensors": (
        "--parameters 30 130 --rounds 1 --stages 1 3 --profile", r"\| (?:ddp|zero\d) \|", 6
    ),
    "checkpoint": (
        "--megabytes 3 --rounds 1 --only file directory dcp --folder", r"[a-z.]+(?: +[\d.]+){5}$", 3
    ),
    "wires": (
        "--mib 0.25 0.5 --rounds 2 --devices cpu --output", r"\| \w.*? \| [\d.]+ \| [\d.]+ to ", 22
    ),
}  # fmt: skip
"""Words, which end with a place to write at, and the pattern and the number of printed rows."""


@pytest.mark.parametrize("name", OTHERS)
def test_a_benchmark_prints_its_rows(tmp_path: Path, name: str) -> None:
    words, pattern, number = OTHERS[name]
    (tmp_path / "place").mkdir()
    place = tmp_path / "place" / ("file" if name == "small_tensors" else "")
    output = run_script(f"examples/benchmarks/{name}.py", *words.split(), place).stdout
    assert len(re.findall(f"^{pattern}", output, re.MULTILINE)) == number, output
    assert "--folder" not in words or list(place.iterdir()) == []


def test_the_page_of_optimizers_is_true() -> None:
    benchmark = load("optimizers")
    found = benchmark.table(benchmark.measured(benchmark.installed()))
    page = (ROOT / "docs" / "optimizers.md").read_text()
    for line in found[2:]:
        *facts, difference = [cell.strip() for cell in line.strip("|").split("|")]
        (other,) = [row for row in page.splitlines() if row.startswith(f"| {facts[0]} |")]
        *expected, written = [cell.strip() for cell in other.strip("|").split("|")]
        assert facts == expected
        assert float(difference) <= max(10 * float(written), 1e-5), line


@NO_HOSTS
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_what_passes_between_hosts_is_in_the_ledger(num_hosts: int) -> None:
    """Several hosts without shared memory: DDP's loss, and the bytes that pass between them."""
    benchmark, names = load("hosts"), ["ddp", "zero3", "zero3, hybrid", "zero3, 8 bits"]
    job = benchmark.Job(
        dim=128, layers=2, heads=2, vocabulary=2048, length=16, batch=1, steps=4, warmup=1
    )
    found = benchmark.compare(names, num_hosts=num_hosts, ranks=2, gbit=0, rounds=1, job=job)
    losses = {name: rounds[0]["loss"] for name, rounds in found.items()}
    assert losses["zero3"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert losses["zero3, hybrid"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert losses["zero3, 8 bits"] == pytest.approx(losses["ddp"], rel=2e-2)
    for name in names[1:]:
        [one] = found[name]
        # Headers, acknowledgements and messages that are no data; a message at the edge of a step.
        assert 0.98 < one["through"] / one["ledger"] < 1.1, (name, one)
    assert found["zero3, hybrid"][0]["through"] < found["zero3"][0]["through"] / 2
    assert found["zero3, 8 bits"][0]["through"] < found["zero3"][0]["through"] / 3
