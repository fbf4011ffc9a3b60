"""Offload is predicted by the plan's terms: where each kind rests, and what lies on its way."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import estimate
from lightning_zero.comm import default_world_size
from lightning_zero.engine import Engine
from lightning_zero.memory import (
    Estimate,
    Limits,
    ModelPlan,
    Offload,
    advise,
    compare,
    estimate_of,
    format_bytes,
    named_offloads,
)
from lightning_zero.optimizer import staging
from lightning_zero.plan import RECIPES, Settings
from lightning_zero.tensors import RING_BYTES, StagingMemory
from tests.oracle.command import run
from tests.oracle.device import beside_the_host
from tests.oracle.ranks import Pools

P, N = 10**9, 8


def total(kinds: dict[str, int]) -> float:
    """Bytes for each parameter."""
    return sum(kinds.values()) / P


@pytest.mark.parametrize(
    ("stage", "medium", "precision", "device", "host", "disk"),
    [
        # 2 or 4 of weights; 4 + 4 + 8 of gradients, masters and Adam's states.
        (1, "cpu", "bf16-mixed", 2, 16 / N, 0),
        (2, "cpu", "bf16-mixed", 2, 16 / N, 0),
        # Weights that come up often are cast once.
        (3, "cpu", "bf16-mixed", 0, 18 / N, 0),
        (3, "nvme", "bf16-mixed", 0, 4 / N, 12 / N),
        # A sharded fp32 weight is its own master; a replicated one on the device cannot be.
        (2, "cpu", "32-true", 4, 16 / N, 0),
        (3, "cpu", "32-true", 0, 16 / N, 0),
        (3, "nvme", "32-true", 0, 4 / N, 12 / N),
        (2, "nvme", "bf16-true", 2, 2 / N, 6 / N),
    ],
)
def test_what_rests_where(
    stage: int, medium: str, precision: str, device: float, host: float, disk: float
) -> None:
    settings = Settings(stage, offload=Offload.of_stage(stage, medium))
    found = estimate(P, settings, world_size=N, precision=precision, device="cuda")
    held = (found.model_states / P, total(found.host), total(found.disk))
    assert held == pytest.approx((device, host, disk), rel=1e-6)
    assert found.host_peak == sum(found.host.values())


@pytest.mark.parametrize(
    ("offload", "device", "host", "disk"),
    [
        (Offload("nvme"), 8 / N, 0, 8 / N),
        (Offload(weights="nvme"), 12 / N, 0, 4 / N),
        # Beside an accelerator, which the device is assumed to be.
        (Offload("cpu", "cpu"), 0, 18 / N, 0),
    ],
)
def test_homes_move_in_part(offload: Offload, device: float, host: float, disk: float) -> None:
    found = estimate(P, Settings(offload=offload), world_size=N, precision="bf16-mixed")
    held = (found.model_states / P, total(found.host), total(found.disk))
    assert held == pytest.approx((device, host, disk), rel=1e-6)


@pytest.mark.parametrize(
    ("stage", "precision", "memory", "disk"),
    [
        # Gradients stay, as do whole weights; a sharded fp32 weight is its own master.
        (1, "32-true", 4 + 4 / N, 12 / N),
        (2, "bf16-mixed", 2 + 4 / N, 12 / N),
        (3, "bf16-mixed", 4 / N, 12 / N),
        (3, "32-true", 4 / N, 12 / N),
    ],
)
def test_files_of_a_cpu_are_mapped(stage: int, precision: str, memory: float, disk: float) -> None:
    settings = Settings(stage, offload=Offload.of_stage(stage, "nvme"))
    found = estimate(P, settings, world_size=N, precision=precision)
    held = (found.model_states / P, total(found.host), total(found.disk))
    assert held == pytest.approx((memory, 0, disk), rel=1e-6)
    assert found.host_peak == found.peak.total


def test_what_does_not_move_is_as_before() -> None:
    for precision in ("32-true", "bf16-mixed"):
        here = estimate(P, world_size=N, precision=precision)
        away = estimate(P, "zero3_nvme", world_size=N, precision=precision)
        everywhere = [away.resting, away.host, away.disk]
        for kind, count in here.resting.items():
            assert sum(kinds[kind] for kinds in everywhere) == count


ROWS = 640
"""Elements of a unit below; with two ranks a shard has half of them, without padding."""


def chain() -> nn.Module:
    """Four units, the second twice as large, and a root without parameters."""
    widths = (5, 10, 5, 5)
    return nn.Sequential(*[nn.Linear(128, width, bias=False) for width in widths])


def of_chain(*, stage: int = 3, offload: str | None = None, **how: Any) -> Estimate:
    away = None if offload is None else Offload.of_stage(stage, offload)
    settings = Settings(stage, units=(nn.Linear,), offload=away)
    return estimate(chain, settings, world_size=2, optimizer="adam", **how)


def test_what_is_on_its_way() -> None:
    shard = ROWS // 2
    mixed = of_chain(precision="bf16-mixed", offload="cpu")
    by_phase: dict[str, int] = {}
    for moment in mixed.snapshots:
        staging = moment.host["staging"]
        by_phase[moment.phase] = max(by_phase.get(moment.phase, 0), staging)
    # Nothing: weights are cast where they rest.
    assert by_phase == {"forward": 0, "backward": 0, "rest": 0}
    plain = of_chain(precision="bf16-mixed")
    assert mixed.most["gathered"] == plain.most["gathered"]
    assert mixed.host["weights"] == 2 * 5 * shard
    # The reduced gradients of two units, on the device while they are sent.
    assert mixed.most["gradients"] == 4 * (2 + 1) * shard
    assert mixed.resting["gradients"] == 0
    assert mixed.host["gradients"] == 4 * 5 * shard

    # On the host states are stepped where they are; from files in staging memory for four units,
    # with both of Adam's in a page of its own.
    assert of_chain(stage=2, offload="cpu").host["staging"] == 0
    in_files = of_chain(offload="nvme", device="cuda")
    assert {m.phase: m.host["staging"] - RING_BYTES for m in in_files.snapshots} == {
        **by_phase,
        "step": 4 * 2 * 4096,
    }

    # From the second microbatch on those of the host come up, one unit's at a time.
    once, twice = (of_chain(offload="cpu", accumulate_grad_batches=n) for n in (1, 2))
    assert twice.host_peak == once.host_peak
    assert twice.most["unreduced"] == once.most["unreduced"]


def test_frozen_weights_go_with_the_weights() -> None:
    def frozen() -> nn.Module:
        model = chain()
        model[0].requires_grad_(False)
        return model

    plain, states = (
        estimate(
            frozen,
            Settings(2, units=(nn.Linear,), offload=offload),
            world_size=2,
            precision="bf16-mixed",
        )
        for offload in (None, Offload("cpu"))
    )
    shard = ROWS // 2
    assert plain.resting["master"] == 4 * 5 * shard
    assert states.resting["master"] == 4 * shard
    assert states.host["master"] == 4 * 4 * shard


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # As in a run.
        ({"offload": Offload(weights="nvme")}, "weights rest beside their masters"),
        ({"offload": Offload("cpu", "cpu"), "gather_bits": 8}, "keeps them on an accelerator's"),
    ],
)
def test_a_bad_offload_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        estimate(P, Settings(**change), device="cuda")
    subject = ModelPlan(P, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"got stage=0 \(DDP\) and Offload\(optimizer='cpu'"):
        estimate_of(subject, 0, 1, offload="cpu")
    with pytest.raises(ValueError, match="Expected offload of optimizer to 'cpu' or 'nvme', got"):
        estimate_of(subject, 3, 1, offload="ram")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offload": Offload("cpu", "cpu"), "stage": 2}, "stage=2 keeps whole weights"),
        ({"offload": Offload("cpu", "nvme")}, "weights rest beside their masters"),
        (
            {"offload": Offload("nvme", "nvme"), "stochastic_rounding": True},
            "offload steps parameters where they rest",
        ),
    ],
)
def test_a_bad_offload_is_named_at_once(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Settings(**change)


def test_an_offload_of_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="Expected an offload of the optimizer, the weights"):
        Offload()


def test_columns_have_the_strategies_names() -> None:
    subject = ModelPlan(P, device=torch.device("cpu"))
    names = [
        one.name for one in compare(subject, (3,), [2], offloads=named_offloads("cpu", "nvme"))
    ]
    assert names == ["zero3", "zero2_offload", "zero3_offload", "zero3_nvme"]
    assert estimate(P, Settings(offload=Offload("nvme"))).name == "zero3, optimizer on nvme"


def test_advice_comes_to_offload_last() -> None:
    subject = ModelPlan(10**10, precision="bf16-mixed", device=torch.device("cuda"))
    stages = compare(subject, (0, 1, 2, 3), [8], offloads=named_offloads("cpu"))
    assert advise(subject, stages, Limits(20 * 10**9 + 10**6)).startswith("On 8 ranks, zero3 fits:")
    tight = Limits(10 * 10**9, host_memory=200 * 10**9)
    text = advise(subject, stages, tight)
    assert "On 8 ranks, nothing fits: zero3 needs 20.0 GB, but a device has 10.0 GB." in text
    assert " zero3_offload would fit" in text
    assert "with 22.5 GB of host memory per rank." in text
    small_host = Limits(10 * 10**9, host_memory=100 * 10**9)
    text = advise(subject, stages, small_host)
    assert "zero3_nvme would fit" in text
    assert "5.00 GB of host memory and 15.0 GB in files per rank." in text
    none = advise(subject, stages, Limits(10 * 10**9, host_memory=10**9))
    assert "would fit" not in none


def test_advice_on_a_cpu_counts_what_is_staged() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(40)])
    subject = ModelPlan(module, optimizer=torch.optim.AdamW, device=torch.device("cpu"))
    (found,) = compare(subject, (), [1], offloads=named_offloads("nvme"))
    most = found.device_peak
    assert most == found.host_peak > found.peak.total
    stages = compare(subject, (3,), [1])
    assert f"zero3_nvme would fit: at most {format_bytes(most)}" in advise(subject, stages, most)
    assert "nvme" not in advise(subject, stages, most - 1)


def test_what_does_not_step_unit_by_unit_is_refused_and_not_advised() -> None:
    subject = ModelPlan(
        lambda: nn.Linear(64, 40), optimizer="adafactor", device=torch.device("cuda")
    )
    for how in ({"offload": "cpu"}, {"offload": "nvme"}, {"stochastic_rounding": True}):
        with pytest.raises(ValueError, match=r"Adafactor .*numbers when it steps unit by unit"):
            estimate_of(subject, 3, 2, **how)  # type: ignore[arg-type]
    assert "would fit" not in advise(subject, compare(subject, (3,), [2]), 10)


def test_advice_knows_the_host() -> None:
    on_cuda = ModelPlan(10**10, precision="bf16-mixed", device=torch.device("cuda"))
    stages = compare(on_cuda, (3,), [8])
    assert stages[0].host_peak == 0
    text = advise(on_cuda, stages, Limits(24 * 10**9, 300 * 10**9))
    assert "zero3 fits" in text
    assert "8 ranks of a node hold 40.0 GB of host memory each, but a node has 300 GB" in text
    assert "Before setup" not in advise(on_cuda, stages, Limits(24 * 10**9, 300 * 10**9, 4))
    # On a CPU the device's memory is the host's.
    on_cpu = ModelPlan(10**10, precision="bf16-mixed", device=torch.device("cpu"))
    stages = compare(on_cpu, (3,), [8])
    assert stages[0].host_peak == stages[0].peak.total
    text = advise(on_cpu, stages, Limits(24 * 10**9, 100 * 10**9))
    assert "zero3 needs 160 GB of host memory per node, but a node has 100 GB." in text


def test_command_predicts_offload(capsys: Any, tmp_path: Any) -> None:
    code, out, _ = run(
        capsys, "10B", "--precision", "bf16-mixed", "--offload", "cpu", "nvme", "--stages", "3",
        "--device-memory", "6GB", "--host-memory", "1TB", "--report", str(tmp_path),
        "--device", "cuda",
    )  # fmt: skip
    assert code == 0
    assert "zero2_offload, 8 ranks  zero3_offload, 8 ranks  zero3_nvme, 8 ranks" in out
    assert (
        "zero3_nvme, 8 ranks: 8 per node, which need 40.0 GB of host memory in a step and 120 GB"
        in out
    )
    assert " zero3_offload would fit" in out
    page = (tmp_path / "memory.html").read_text()
    assert "host states" in page
    assert "disk states" in page


def test_command_tells_where_activations_wait(capsys: Any, tmp_path: Path) -> None:
    """Also with advice, which does not try files on a device that would be the host."""
    layers = ", ".join(["nn.Linear(1024, 1024), nn.Tanh()"] * 4)
    (tmp_path / "layers.py").write_text(
        f"from torch import nn\nclass Layers(nn.Sequential):\n"
        f"    def __init__(self):\n        super().__init__({layers})\n"
    )
    words = [f"{tmp_path / 'layers.py'}:Layers", "--batch", "float32[512,1024]", "--stages", "3"]
    words += ["--optimizer", "adamw", "--set", "activation_offload=True", "--device-memory", "1KB"]
    code, out, error = run(capsys, *words)
    assert (code, error) == (0, "")
    assert re.search(r"^host staging .* MB$", out, re.MULTILINE)
    assert re.search(
        r"zero3, 8 ranks: 8 per node, which need [\d.]+ MB of host memory in a step", out
    )
    assert "nothing fits" in out


def test_command_knows_the_nodes_of_a_configuration(capsys: Any, tmp_path: Any) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("trainer: {devices: 4, num_nodes: 2, precision: bf16-mixed}\n")
    words = [str(config), "--model", "torch.nn:Linear", "--args", "in_features=8"]
    words += ["out_features=8", "--offload", "cpu", "--stages", "3"]
    for more, on_node in (([], 4), (["--ranks-per-node", "2"], 2), (["--ranks", "2"], 2)):
        code, out, _ = run(capsys, *words, *more)
        assert code == 0
        assert f" ranks: {on_node} per node, which need" in out


def test_command_reads_the_offload_of_a_configuration(capsys: Any, tmp_path: Any) -> None:
    config = tmp_path / "config.yaml"
    files = "offload_optimizer: nvme, offload_weights: nvme, offload_path: /a"
    config.write_text(
        "trainer: {devices: 2, strategy: {class_path: lightning_zero.ZeROStrategy, init_args:"
        f" {{stage: 3, {files}}}}}}}\n"
    )
    words = [str(config), "--model", "torch.nn:Linear", "--args", "in_features=8"]
    code, out, _ = run(capsys, *words, "out_features=8")
    assert code == 0
    assert "zero3_nvme, 2 ranks: 2 per node, which need" in out
    assert "disk states" in out
    assert "Not read" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["10B", "--host-memory", "1TB"], "only with --device-memory"),
        (["10B", "--ranks-per-node", "0"], "Expected ranks_per_node >= 1, got 0."),
    ],
)
def test_command_names_a_mistake(capsys: Any, words: list[str], message: str) -> None:
    code, _, err = run(capsys, *words)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1


MIXED = RECIPES["bf16-mixed"]


def beside_a_run(folder: str, stage: int, medium: str) -> list[tuple[Any, Any]]:
    """Bytes at rest and on their way in files, of a run beside a host and as predicted."""
    offload = Offload.of_stage(stage, medium)
    with beside_the_host(followed=False):
        model = large()
        settings = Settings(stage, MIXED, (nn.Linear,), offload=offload, offload_path=folder)
        engine = Engine(model, settings)
        own = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        engine.adopt(own)
        for _ in range(2):
            with engine.step() as watch:
                rows = [torch.ones(1, m.in_features, dtype=m.weight.dtype) for m in model]
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    watch(
                        loss := sum(m(x).sum().double() for m, x in zip(model, rows, strict=True))
                    )
            loss.backward()
            own.step()
        held = engine.sharded.memory()
        staged = engine.comm.transport.ledger.most_staged + engine.comm.host_copies.ring_bytes
        engine.close(restore=False)
        found = estimate(
            large,
            Settings(stage, units=(nn.Linear,), offload=offload),
            world_size=default_world_size(),
            rank=engine.comm.mesh.shard.rank,
            precision="bf16-mixed",
            optimizer=lambda all_: torch.optim.Adam([p for p in all_ if p.requires_grad]),
            device="cpu",
        )
    pairs = [(held.get(row, 0), count) for row, count in found.rests.items()]
    return [*pairs, (staged, found.host["staging"])]


@pytest.mark.parametrize("world", [1, 2])
def test_an_offload_is_what_a_run_has(ranks: Pools, tmp_path: Path, world: int) -> None:
    for stage, medium in ((1, "cpu"), (3, "cpu"), (2, "nvme"), (3, "nvme")):
        for pairs in ranks(world).run(beside_a_run, str(tmp_path), stage, medium):
            assert [held for held, _ in pairs] == [count for _, count in pairs]


def large() -> nn.Module:
    """Units of several batches, of a part of one, of frozen weights and of two dtypes."""
    model = nn.Sequential(
        nn.Linear(256, 300), nn.Linear(64, 50), nn.Linear(300, 20), nn.Linear(30, 7).double()
    )
    model[2].requires_grad_(False)
    return model


class Held:
    """The staging memory of this process, now and at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.most = 0, 0
        make = StagingMemory.__init__

        def taken(memory: StagingMemory, nbytes: int) -> None:
            make(memory, nbytes)
            self._add(memory.tensor.nbytes)
            weakref.finalize(memory, self._add, -memory.tensor.nbytes)

        monkeypatch.setattr(StagingMemory, "__init__", taken)

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


def staged(folder: str, optimizer: str, batch_bytes: int) -> tuple[int, int, int, int]:
    """Staging memory: at most, after the step, by the ledger, and as predicted."""
    make = MAKERS[optimizer]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(staging, "_BATCH_BYTES", batch_bytes)
        held = Held(monkeypatch)
        model = large()
        files = {"offload": Offload.of_stage(3, "nvme"), "offload_path": folder}
        engine = Engine(model, Settings(units=(nn.Linear,), **files))
        own = make([p for p in model.parameters() if p.requires_grad])
        engine.adopt(own)
        for _ in range(2):
            with engine.step() as watch:
                rows = [torch.ones(1, m.in_features, dtype=m.weight.dtype) for m in model]
                watch(
                    loss := sum(m(row).sum().double() for m, row in zip(model, rows, strict=True))
                )
            loss.backward()
            held.most = 0  # the first step makes states, and stages none
            own.step()
        found = estimate(
            large,
            Settings(units=(nn.Linear,), offload=Offload.of_stage(3, "nvme")),
            world_size=default_world_size(),
            rank=engine.comm.mesh.shard.rank,
            optimizer=lambda all_: make([p for p in all_ if p.requires_grad]),
        )
        by_ledger = engine.comm.transport.ledger.most_staged
        engine.close(restore=False)
        assert max(s.host["staging"] for s in found.snapshots if s.phase == "step") > 0
        return held.most, held.now, by_ledger, found.host["staging"]


MAKERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, 0.1),
    "amsgrad in one group": lambda p: torch.optim.Adam(
        [{"params": p[:1]}, {"params": p[1:], "amsgrad": True}]
    ),
}


@pytest.mark.parametrize(("world", "batch_bytes"), [(1, 1), (2, 10**5), (2, 2**25)])
def test_staging_memory_is_what_a_step_takes(
    ranks: Pools, tmp_path: Path, world: int, batch_bytes: int
) -> None:
    for optimizer in MAKERS:
        for most, after, by_ledger, predicted in ranks(world).run(
            staged, str(tmp_path), optimizer, batch_bytes
        ):
            assert after == 0
            assert most == by_ledger == predicted > 0
