"""The time of a step on a cluster: by hand, by the ledger, and on the command line."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.comm import Communicator, Mesh
from lightning_zero.commands import main
from lightning_zero.engine import Engine
from lightning_zero.memory import TERMS, Cluster, LiveBytes, ModelPlan, Played, Timeline, play
from lightning_zero.plan import Settings
from tests.oracle.ranks import Pools

WIDTH, ROWS = 64, 8
CPU = torch.device("cpu")
NUMEL = WIDTH * WIDTH


class Chain(nn.Sequential):
    """Units that are products of matrices and nothing else."""

    def __init__(self, num: int = 3) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num)))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def _timeline(stage: int, world: int, *, num_microbatches: int = 1, **settings: Any) -> Timeline:
    plan = ModelPlan(
        Chain, Settings(units=(nn.Linear,)), optimizer="sgd", batch=torch.ones(ROWS, WIDTH),
        step=_loss, device=CPU,
    )  # fmt: skip
    timeline = Timeline()
    plan.snapshots(stage, world, timeline=timeline, num_microbatches=num_microbatches, **settings)
    return timeline


def test_the_terms_of_a_cluster() -> None:
    cluster = Cluster.parse("64x8, 400Gb/s, 450GB/s, 989 TFLOPS, 20us, 3.2TB/s")
    assert cluster == Cluster(64, 8, 50e9, 450e9, 989e12, 3.2e12, 20e-6)
    assert cluster.world_size == 512
    assert not Cluster.parse("1x2, 1GB/s, 2GB/s, 50GFLOPS, cpu").hides
    for text, message in (
        ("64x8, 400Gb/s, 989TFLOPS", "two or three bandwidths"),
        ("64x8, 400Gb/s, 450GB/s", "nodes x ranks, two or three bandwidths and FLOPS"),
        ("64x8, 400Gb/s, fast, 989TFLOPS", "got 'fast'"),
        ("0x8, 400Gb/s, 450GB/s, 989TFLOPS", "above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Cluster.parse(text)


def test_a_collective_takes_the_slower_of_two_rates() -> None:
    cluster = Cluster(2, 4, between=10.0, within=100.0, flops=1.0, latency=0.5)
    everyone = Mesh.of(0, 8).shard
    # All leaves and comes through one ring, for which the node has its whole link.
    assert cluster.seconds(everyone, 200) == 0.5 + 200 / 10
    copy, between = Mesh.of(0, 8, 4).shard, Mesh.of(0, 8, 4).replicate
    assert cluster.seconds(copy, 200) == 0.5 + 200 / 100
    # Four pairs of ranks share the link.
    assert cluster.seconds(between, 200) == 0.5 + 200 / (10 / 4)
    # Each rank sends each of 7 others 20 bytes, 4 of them beyond the link of its 4 ranks.
    assert cluster.seconds(everyone, 140, is_direct=True) == 0.5 + 4 * 80 / 10
    assert cluster.seconds(Mesh.of(0, 8, 1).shard, 0) == 0
    # Of groups of 3 in nodes of 4 the first stays in one; others do not, and all are waited for.
    assert all(
        Cluster(3, 4, 10.0, 100.0, 1.0).seconds(Mesh.of(rank, 12, 3).shard, 200) == 200 * 4 / 10
        for rank in range(12)
    )


def test_a_step_by_hand() -> None:
    """Two messages of 10 seconds behind 4 and 12 seconds of computation."""
    timeline = Timeline(axes={"shard": Mesh.of(0, 2).shard})
    timeline.optimizer_bytes = 6
    timeline.restart()
    timeline.next_microbatch()
    first = timeline.begin("shard", "gather", 100)
    second = timeline.begin("shard", "gather", 100)
    timeline.compute(4)
    first()  # 3 + 10, 6 of which are waited for
    timeline.compute(12)
    second()  # 10 more: hidden
    timeline.end()
    timeline.begin("shard", "gather", 100)()  # the next step's
    cluster = Cluster(1, 2, between=1.0, within=10.0, flops=1.0, memory=2.0)
    assert play(timeline, cluster) == Played(
        25.0, 19.0, {"shard": 20.0}, {"shard": 6.0}, {"shard": 200}
    )
    # Two microbatches more, each as long as the first, and one step.
    assert play(timeline, cluster, 3).total == 3 + 3 * 22
    assert play(timeline, cluster, 3).sent == {"shard": 600}
    # Processors that compute copy first.
    alone = Cluster(1, 2, between=1.0, within=10.0, flops=1.0, memory=2.0, hides=False)
    assert play(timeline, alone) == Played(
        39.0, 19.0, {"shard": 20.0}, {"shard": 20.0}, {"shard": 200}
    )
    assert timeline.bytes == {("shard", "gather"): 200}


def test_computation_is_that_of_the_products() -> None:
    """Each of 3 layers: forward, and two products in backward, but for the first one's input."""
    timeline = _timeline(3, 4)
    flops = sum(
        step.amount for of_one in timeline.steps for step in of_one if step.what == "compute"
    )
    assert flops == (3 * 3 - 1) * 2 * ROWS * NUMEL


def test_so_is_that_of_attention_on_a_cpu() -> None:
    """Two products forward, and five in backward, which computes the scores once more."""
    heads = [torch.ones(2, 3, 16, 8, requires_grad=True) for _ in range(3)]
    with LiveBytes() as live:
        nn.functional.scaled_dot_product_attention(*heads, is_causal=True).sum().backward()
    assert live.take_flops() == (2 + 5) * 2 * (2 * 3) * 16 * 16 * 8


def test_stage_3_alone_on_the_wire() -> None:
    """Gathers of 3 units forward and 2 backward, 3 reductions, and no time to compute."""
    cluster = Cluster(1, 4, between=1.0, within=4.0 * NUMEL, flops=1e30)
    played = play(_timeline(3, 4), cluster)
    # A rank sends 3/4 of each unit.
    assert played.total == pytest.approx((3 + 2 + 3) * 3 / 4)
    assert played.total == pytest.approx(sum(played.waiting.values()))
    # Where computing takes all the time, only the first gather and the last reduction are seen.
    slow = Cluster(1, 4, between=1.0, within=4.0 * NUMEL, flops=ROWS * NUMEL)
    played = play(_timeline(3, 4), slow)
    assert played.compute == pytest.approx((3 * 3 - 1) * 2)
    assert sum(played.waiting.values()) == pytest.approx(2 * 3 / 4)


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "hybrid": (3, {"shard": 2}),
    "coded": (3, {"gather_bits": 8, "reduce_bits": 8}),
    "coded in copies": (3, {"shard": 2, "reduce_bits": 8}),
}


def _sent(stage: int, settings: dict[str, Any], accumulate: int) -> dict[tuple[str, str], int]:
    """Bytes that a rank sends in its second step, by axis and verb."""
    chosen = Settings(stage, units=(nn.Linear,), **settings)
    comm = Communicator(CPU, **{**chosen.division(4), "reads_peers": False})
    engine = Engine(Chain(), chosen, comm)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    engine.adopt(optimizer)
    for _ in range(2):
        for micro in range(accumulate):
            with engine.step() as watch:
                watch(loss := _loss(engine.module, torch.ones(ROWS, WIDTH)))
            if micro < accumulate - 1:
                with engine.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[tuple[str, str], int] = {}
    for axis, transport in comm.transports.items():
        for (_, verb), sent in transport.ledger.last_step.items():
            found[axis, verb] = found.get((axis, verb), 0) + sent.bytes
    engine.close(restore=False)
    return found


@pytest.mark.parametrize("way", list(WAYS))
def test_its_bytes_are_the_ledgers(ranks: Pools, way: str) -> None:
    stage, settings = WAYS[way]
    accumulate = 2 if way in ("stage 2", "hybrid") else 1
    found = ranks(4).run(partial(_sent, stage, settings, accumulate))[0]
    timeline = _timeline(stage, 4, num_microbatches=accumulate, **settings)
    assert timeline.bytes == found


def test_the_command_shows_the_best_choice_first(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "estimate", "tests/oracle/models.py:Tied", "--optimizer", "adamw",
        "--cluster", "2x2, 1GB/s, 10GB/s, 1TFLOPS",
    ]  # fmt: skip
    assert main(arguments) == 1
    assert "--cluster counts what a rank computes" in capsys.readouterr().err
    assert main([*arguments, "--batch", "int64[4,5]", "--device-memory", "1KB"]) == 0
    text = capsys.readouterr().out
    times = [float(line.split(" ms")[0].split()[-1]) for line in text.splitlines() if " ms" in line]
    assert len(times) == 2 * 2 + 2 * 2 + 2 * 4
    assert times == sorted(times)
    assert "On 4 ranks, best choice first" in text
    assert "shard=2, gather_bits=8" in text
    assert text.count(" *\n") == len(times)
    # What contradicts a setting is left out; what is given is not varied.
    assert main([*arguments, "--batch", "int64[4,5]", "--set", "shard=2"]) == 0
    text = capsys.readouterr().out
    assert "zero3, gather_bits=8" in text
    assert "shard=" not in text
    assert main([*arguments, "--batch", "int64[4,5]", "--set", "shard=3"]) == 1
    assert "shard=3 makes groups of 3 ranks" in capsys.readouterr().err
    for option, value in (("--offload", "nvme"), ("--ranks", "4"), ("--host-memory", "1GB")):
        assert main([*arguments, "--batch", "int64[4,5]", option, value]) == 1
        assert f"cannot be combined with {option}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["64x8, 400Gb/s, fast, 989TFLOPS", "64x8, 400Gb/s, 450GB/s"])
def test_a_mistyped_cluster_shows_the_terms(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["estimate", "10B", "--cluster", text])
    error = capsys.readouterr().err
    assert error.endswith(f":\n{TERMS}\n")
    assert "got 'fast'" in error or f"got {text!r}" in error
