"""The benchmarks run; their models say nothing about speed."""

from __future__ import annotations

import importlib.util
import json
import pstats
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero import estimate
from tests.oracle.launch import run_script
from tests.oracle.ranks import ROOT
from tests.oracle.sharded import padded

pytestmark = pytest.mark.slow

LAYERS, DIM, VOCABULARY, LENGTH = 3, 128, 64, 16
SIZES = {"layers": LAYERS, "dim": DIM, "vocabulary": VOCABULARY, "length": LENGTH, "heads": 4}
BRIEF = {"steps": 2, "warmup": 1}
LINEAR = [(DIM, DIM * 3), (DIM, DIM), (DIM, DIM * 4), (DIM * 4, DIM)]
BLOCK = [DIM] * 4 + [size for rows, width in LINEAR for size in (rows * width, width)]
ROOT_SIZES = [VOCABULARY * DIM, LENGTH * DIM, DIM, DIM, VOCABULARY * DIM]
"""Elements of each parameter of a block, and of what is around the blocks."""


def load(name: str) -> Any:
    """A benchmark as a module, which finds its neighbours as when it is run."""
    path = ROOT / "examples" / "benchmarks" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = ModuleType(spec.name)
    module.__file__ = str(path)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def held(world: int) -> int:
    """Elements of a rank's shards."""
    return (LAYERS * padded(BLOCK, world) + padded(ROOT_SIZES, world)) // world


def test_contenders_side_by_side(tmp_path: Path) -> None:
    """Two real ranks of each: a table, a JSON and a picture, with the elements of the oracle."""
    names = ["ddp", "zero1", "zero3", "fsdp2"]
    options = [
        word for name, n in {**SIZES, **BRIEF, "rounds": 1}.items() for word in (f"--{name}", n)
    ]
    command = ["--only", *names, *options, "--output", tmp_path]
    script = "examples/benchmarks/compare.py"
    finished = run_script(script, *command)
    rows = re.findall(r"^\| ([a-z]\w*) \| [\d.]+ \| [\d.]+ \|", finished.stdout, re.MULTILINE)
    assert rows == names
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report["job"].items() >= {**SIZES, **BRIEF, "world": 2}.items()
    measured = report["rows"]
    assert list(measured) == names
    assert measured["ddp"]["ratio_range"] == [1.0, 1.0]
    assert all(len(row["seconds_by_round"]) == 1 for row in measured.values())
    base = measured["ddp"]["loss"]
    assert all(row["loss"] == pytest.approx(base, rel=1e-4) for row in measured.values())
    # Stage 3 gathers all but the root and the last block twice.
    once, again = held(2), (LAYERS - 1) * padded(BLOCK, 2) // 2
    assert measured["zero1"]["sent"] == 2 * once
    assert measured["zero3"]["sent"] == 2 * once + again
    for name in ("zero1", "zero3"):
        # What the kernel counts, where it does, are our messages, their heads and small talk.
        sent = measured[name]["sent"] * 4
        assert sent <= measured[name].get("socket_bytes", sent) < 1.1 * sent
    assert measured["zero3"]["bytes"]["weights"] == 4 * once
    assert measured["zero1"]["bytes"]["weights"] == 8 * once
    numel = LAYERS * sum(BLOCK) + sum(ROOT_SIZES)
    of_ddp = {"weights": 4 * numel, "master": 0, "gradients": 4 * numel}
    assert measured["ddp"]["bytes"].items() >= of_ddp.items()
    assert 8 * numel < measured["ddp"]["bytes"]["states"] < 8.1 * numel
    # Every dimension is even: FSDP2 pads nothing.
    of_fsdp2 = {kind: nbytes // 2 for kind, nbytes in of_ddp.items()}
    assert measured["fsdp2"]["bytes"].items() >= of_fsdp2.items()
    # DDP's whole gradients and their buckets; of ours a shard and at least one unit beside it.
    whole = 4 * (LAYERS * sum(BLOCK) + sum(ROOT_SIZES)) / 2**20
    least = {"ddp": 2 * whole, "zero1": whole / 2, "zero3": whole / 2, "fsdp2": whole / 2}
    for name, row in measured.items():
        assert least[name] <= row["peak_mib"] <= row["trainer_peak_mib"] < 5 * whole, name
    for stage in (1, 3):
        peak, predicted = measured[f"zero{stage}"]["trainer_peak_mib"], predicted_peak(stage)
        # One run: what a thread of the backend frees may count as alive, of a block or two.
        assert 0.97 * predicted <= peak <= 1.03 * predicted + 2 * 4 * sum(BLOCK) / 2**20


def predicted_peak(stage: int) -> float:
    """The estimate's peak beyond weights, masters and optimizer states, in MiB."""
    contenders = load("contenders")
    job = contenders.Job(**SIZES)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    batch = torch.zeros(job.batch, job.length + 1, dtype=torch.int64)
    found = estimate(
        lambda: contenders.GPT(job),
        f"zero{stage}",
        world_size=2,
        optimizer="AdamW",
        batch=batch,
        step=loss,
    )
    still = sum(found.resting[kind] for kind in ("weights", "master", "states"))
    return (found.peak.total - still) / 2**20


def test_a_gpus_run_is_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its parts on the CPU, with fewer contenders and a file of one test."""
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "PRECISIONS", ["bf16-mixed"])
    worlds = {1: ("Trainer", "Trainer zero3", "ddp", "zero3"), 8: ("zero3",)}
    monkeypatch.setattr(gpu, "WORLDS", worlds)
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    monkeypatch.setattr(gpu, "TESTS", [str(tmp_path / "test_one.py")])
    sizes = [word for name, n in {**SIZES, **BRIEF}.items() for word in (f"--{name}", str(n))]
    monkeypatch.setattr(
        sys,
        "argv",
        ["gpu.py", "--device", "cpu", "--output", str(tmp_path), "--rounds", "1", *sizes],
    )
    assert gpu.main() == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["tests"]["code"] == 0
    assert "1 passed" in report["tests"]["summary"]
    rows = {(row["world"], row["name"]): row for row in report["rows"]}
    assert list(rows) == [(world, name) for world, names in worlds.items() for name in names]
    assert rows[1, "ddp"]["ratio"] == 1.0
    assert rows[1, "zero3"]["loss"] == pytest.approx(rows[1, "ddp"]["loss"], rel=2e-2)
    assert rows[1, "Trainer zero3"]["loss"] == pytest.approx(rows[1, "Trainer"]["loss"], rel=2e-2)
    assert rows[8, "zero3"]["bytes"]["master"] == pytest.approx(4 * held(8), rel=0.05)
    page = (tmp_path / "gpu.md").read_text()
    assert page.count("| bf16-mixed |") == len(rows)
    assert page in capsys.readouterr().out


@pytest.mark.parametrize("world", [8, 64])
def test_one_rank_of_many_on_the_fake_backend(tmp_path: Path, world: int) -> None:
    """In this process: what ``--fake-world`` starts another one for."""
    measure = load("measure")
    job = measure.Job(**SIZES, **BRIEF, fake_world=world)
    for name in ("zero1", "zero3", "fsdp2"):
        answer = tmp_path / name
        measure.timed(0, name, job, 0, answer)
        assert json.loads(answer.read_text())["seconds"] > 0
        measure.weighed(0, name, job, 0, answer)
        row = json.loads(answer.read_text())
        assert 0 < row["peak_mib"] <= row["trainer_peak_mib"]
        if name == "fsdp2":
            continue
        whole, kinds = held(world) * world, row["bytes"]
        assert kinds["weights"] == 4 * (held(world) if name == "zero3" else whole)
        assert kinds["gradients"] == 4 * held(world)
        assert kinds["gathered"] == kinds["unreduced"] == kinds["master"] == 0
        # Rank 0's shards hold no padding, or a little at their ends.
        states = 8 * held(world)
        assert 0.9 * states <= kinds["states"] <= states + 4 * (len(BLOCK) * LAYERS + 5)
        again = (LAYERS - 1) * padded(BLOCK, world) if name == "zero3" else 0
        assert row["sent"] == (2 * whole + again) // world * (world - 1)


def test_files_against_disk_and_memory(tmp_path: Path) -> None:
    words = ["--megabytes", 10, "--width", 512, "--rounds", 2, "--folder", tmp_path]
    output = run_script("examples/benchmarks/offload.py", *words).stdout
    assert "9 layers, 0.01 GB of weights" in output
    rows = re.findall(r"^\| ([a-z].*) \| ([\d.]+) \| [\d.]+ to [\d.]+ \|$", output, re.MULTILINE)
    assert len(rows) == 15
    ratios = re.findall(r"^(.*): ([\d.]+) \([\d.]+ to [\d.]+\)$", output, re.MULTILINE)
    assert [name for name, _ in ratios] == [
        "stream, 1 tokens to the limit",
        "stream, 512 tokens to the limit",
        "step with states in files to the limit",
        "step in files to the limit",
        *(f"training in files, {rows} rows to the limit" for rows in (1, 64)),
        "step by unit to fused step",
    ]
    assert all(float(ratio) > 0 for _, ratio in ratios)
    assert re.search(r"it reads 0\.02 GB at [\d.]+ GB/s while writing at [\d.]+ GB/s", output)
    assert list(tmp_path.iterdir()) == []


def test_small_tensors_beside_ddp(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    words = ["--parameters", 30, 130, "--rounds", 1, "--stages", 1, 3, "--profile", profile]
    output = run_script("examples/benchmarks/small_tensors.py", *words).stdout
    assert re.findall(r"^(\d+) parameters of 16 x 16, 2 ranks$", output, re.MULTILINE) == [
        "30", "130",
    ]  # fmt: skip
    rows = re.findall(r"^\| (ddp|zero\d) \|((?: [\d.]+ \([\d.]+\) \|){6})$", output, re.M)
    assert [name for name, _ in rows] == ["ddp", "zero1", "zero3"] * 2
    numbers = [[float(number) for number in re.findall(r"[\d.]+", cells)] for _, cells in rows]
    assert all(number > 0 for row in numbers for number in row)
    ratios = [[row[index] for index in (2, 3, 6, 7, 10, 11)] for row in numbers]
    assert ratios[0] == ratios[3] == [1.0] * 6
    assert pstats.Stats(str(profile)).total_calls > 0  # type: ignore[attr-defined]


def test_checkpoints(tmp_path: Path) -> None:
    """Every way saves and loads the same values again, and has its line."""
    ways = ["file", "directory", "dcp"]
    command = ["--megabytes", 3, "--rounds", 1, "--folder", tmp_path, "--only", *ways]
    script = "examples/benchmarks/checkpoint.py"
    finished = run_script(script, *command)
    lines = re.findall(r"^([a-z.]+)((?: +[\d.]+){5})$", finished.stdout, re.M)
    assert [name for name, _ in lines] == ways
    assert list(tmp_path.iterdir()) == []


WIRES = ["shared memory", "point to point", "collectives"]
WAYS = [
    *[f"{wire} gather" for wire in WIRES],
    *["all_gather_into_tensor", "broadcast"],
    *[f"{wire} reduce" for wire in WIRES],
    *["all_to_all_single + sum", "reduce_scatter_tensor", "all_reduce"],
]


def test_wires_side_by_side(tmp_path: Path) -> None:
    """Two real ranks: a line and a row for each way and size, with the elements that were sent."""
    command = ["--mib", 0.25, 0.5, "--rounds", 2, "--devices", "cpu", "--output", tmp_path]
    script = "examples/benchmarks/wires.py"
    finished = run_script(script, *command)
    line = r"^\| (\w.*?)( \(chosen\))? \| [\d.]+ \| [\d.]+ to [\d.]+ \|"
    lines = [(way, bool(mark)) for way, mark in re.findall(line, finished.stdout, re.MULTILINE)]
    assert lines == [(way, way.startswith("shared memory ")) for way in WAYS] * 2
    rows = json.loads((tmp_path / "wires.json").read_text())["rows"]
    assert [(row["way"], row["is_chosen"]) for row in rows] == lines
    assert [row["mib"] for row in rows] == [0.25] * len(WAYS) + [0.5] * len(WAYS)
    for row in rows:
        numel, wire = row["mib"] * 2**20 / 4, row["way"].rpartition(" ")[0]
        assert row["ms_range"][0] <= row["ms"] <= row["ms_range"][1]
        assert row["sent"] == (numel / 2 if wire in WIRES else None)
        # The kernel, where it counts, counts tokens and barriers too.
        if row["on_sockets"] is not None and wire in ("shared memory", "point to point"):
            least = numel / 2 if wire == "point to point" else 0
            assert least <= row["on_sockets"] < least + numel / 8, row


@pytest.mark.slow
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
