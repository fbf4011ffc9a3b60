"""Every path of a device, on the model of one (`tests/oracle/device.py`).

In each, nothing is read, overwritten or freed too early, the host never waits but for all offloaded
gradients at the end of a backward pass, and the peak is the one that `estimate` predicts. Offload
gives the bits of the same way without it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import estimate
from lightning_zero.comm import Traffic, sum_of
from lightning_zero.comm.transport import Collectives
from lightning_zero.engine import ActivationOffload, Engine
from lightning_zero.optimizer import clip
from lightning_zero.plan import RECIPES, Offload, Settings
from tests.oracle.device import Device, beside_the_host
from tests.oracle.projects import communicator_by
from tests.oracle.ranks import Pools

CPU = torch.device("cpu")
WIDTH, ROWS, NUM_BLOCKS = 128, 256, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.into(self.norm(x)).relu())  # type: ignore[no-any-return]


class Residual(Block):
    """Saves views, one tensor twice, its own input, and what dropout drew."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(x).chunk(2, dim=-1)
        mixed = nn.functional.dropout(torch.sigmoid(gate) * value, 0.5)
        return x + self.norm(self.out(mixed) * mixed.tanh())


def stack(kind: type[Block] = Block) -> nn.Module:
    return nn.Sequential(*[kind() for _ in range(NUM_BLOCKS)], nn.Linear(WIDTH, WIDTH))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, foreach=False, fused=True)


class Way(NamedTuple):
    """A way to train."""

    settings: dict[str, Any]
    precision: str = "32-true"
    num_microbatches: int = 1
    clips: bool = False
    world: int = 2
    rows: int = ROWS
    kind: type[Block] = Block
    sent: float = 0.8
    """The least share of what is sent that travels beside computation."""

    @property
    def offloads_activations(self) -> bool:
        return "activation_offload" in self.settings

    def without(self, *names: str) -> Way:
        """Return the way without some settings."""
        left = {key: value for key, value in self.settings.items() if key not in names}
        return self._replace(settings=left)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    @property
    def offload(self) -> Offload | None:
        return self.settings.get("offload")  # type: ignore[no-any-return]


def offloaded(stage: int, medium: str) -> dict[str, Any]:
    return {"stage": stage, "offload": Offload.of_stage(stage, medium)}


MIXED = "bf16-mixed"
ACTIVATIONS = {"activation_offload": True}
CODED = {"gather_bits": 8, "reduce_bits": 8}
WAYS = {
    "zero1 mixed": Way({"stage": 1}, MIXED, sent=0.9),
    "zero2": Way({"stage": 2}, sent=0.65),
    "zero3": Way({"stage": 3}, sent=0.9),
    "zero3 without prefetch": Way({"stage": 3, "prefetch": 0}, sent=0.2),
    "zero3 recomputed": Way({"stage": 3, "activation_checkpointing": True}, MIXED, kind=Residual),
    "zero3 accumulating": Way({"stage": 3}, MIXED, num_microbatches=2, clips=True),
    "zero3 locally": Way({"stage": 3, "accumulate": "local"}, num_microbatches=2),
    "hybrid": Way({"stage": 3, "shard": 2}, world=4),
    "quantized": Way({"stage": 3, **CODED}),
    "activations": Way({"stage": 3, **ACTIVATIONS}, MIXED, kind=Residual),
    "activations recomputed": Way(
        {"stage": 3, **ACTIVATIONS, "activation_checkpointing": True}, kind=Residual
    ),
    "zero2_offload": Way(offloaded(2, "cpu"), MIXED),
    "zero3_offload": Way(offloaded(3, "cpu"), sent=0.7),
    "zero3_offload mixed": Way(offloaded(3, "cpu"), MIXED),
    "zero3_offload activations": Way({**offloaded(3, "cpu"), **ACTIVATIONS}, MIXED, 2),
    "zero3_nvme": Way(offloaded(3, "nvme"), sent=0.7),
    "zero3_nvme mixed": Way(offloaded(3, "nvme"), MIXED, 2, clips=True),
    # Where not activations decide, but what is gathered, reduced and sent.
    "zero1 one row": Way({"stage": 1}, "16-mixed", 2, rows=1),
    "true one row": Way({"stage": 3, "activation_checkpointing": True}, "bf16-true", rows=1),
    "quantized one row": Way({"stage": 3, **CODED}, MIXED, rows=1),
    "offload one row": Way({**offloaded(3, "cpu"), "shard": 1}, MIXED, 2, rows=1),
}


class Seen(NamedTuple):
    """What the model of the device saw of a step."""

    waits: dict[str, int]
    crossed: dict[str, int]
    overlapped: dict[str, float]
    peak: int
    sent: dict[str, int]

    @classmethod
    def of(cls, device: Device, traffic: Traffic) -> Seen:
        overlapped = {
            "up": device.overlapped("up"),
            "down": device.overlapped("down"),
            "up beside down": device.overlapped("up", "down"),
            "sent": device.overlapped("collective"),
        }
        sent = {verb: sum_of(traffic, verb).bytes for verb in ("gather", "reduce", "up", "down")}
        sent["masters"] = 4 * sum_of(traffic, "gather").elements
        return cls(dict(device.waits), dict(device.crossed), overlapped, device.peak, sent)


@contextlib.contextmanager
def autocast(precision: str) -> Iterator[None]:
    dtype = RECIPES[precision].autocast
    with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
        yield


def steps(way: Way, folder: str, device: Device | None = None) -> tuple[Any, list[Tensor]]:
    """Return what the device saw of the third step, and the weights after it."""
    torch.manual_seed(0)
    settings = Settings(
        units=[way.kind], recipe=RECIPES[way.precision], offload_path=folder, **way.settings
    )
    comm = communicator_by("backend", **settings.division(way.world))
    model, batch = stack(way.kind).to(way.dtype), torch.ones(way.rows, WIDTH, dtype=way.dtype)
    with mock.patch.object(ActivationOffload, "require"):
        engine = Engine(model, settings, comm)
    optimizer = adamw(model.parameters())
    engine.adopt(optimizer)
    for _ in range(3):
        gc.collect()
        if device is not None:
            device.restart()
        for number in range(way.num_microbatches):
            is_last = number == way.num_microbatches - 1
            with contextlib.nullcontext() if is_last else engine.no_sync():
                with engine.step() as watch, autocast(way.precision):
                    watch(loss := loss_of(model, batch))
                if number == 0:
                    optimizer.zero_grad()  # as the Trainer does
                loss.backward()
                del loss
        if way.clips:
            clip.clip_by_norm(engine.sharded.pieces, comm, 0.1)
        optimizer.step()
    seen = device and Seen.of(device, comm.traffic)
    if seen:  # new weights are sent until the next forward needs them
        with engine.step(awaits_backward=False), autocast(way.precision), torch.no_grad():
            loss_of(model, batch)
        seen.overlapped["sent"] = device.overlapped("collective")
    engine.close()
    return seen, [parameter.detach() for parameter in model.parameters()]


def seen_on(name: str, folder: str) -> Seen:
    way = WAYS[name]
    with beside_the_host() as device:
        seen, weights = steps(way, folder, device)
    if way.offload is not None or way.offloads_activations:
        plain = way.without("offload", "activation_offload", "activation_checkpointing")
        assert all(map(torch.equal, weights, steps(plain, folder)[1]))
    return seen


def predicted(way: Way) -> int:
    """The peak, by an estimate, which knows nothing of activations elsewhere."""
    if way.offloads_activations:
        way = way.without("activation_offload", "activation_checkpointing")
    with beside_the_host(followed=False):
        found = estimate(
            functools.partial(stack, way.kind),
            Settings(units=[way.kind], **way.settings),
            world_size=way.world,
            precision=way.precision,
            batch=torch.ones(way.rows, WIDTH),
            step=loss_of,
            optimizer=adamw,
            accumulate_grad_batches=way.num_microbatches,
        )
    return found.peak.total


@pytest.mark.parametrize("name", WAYS)
def test_path(ranks: Pools, tmp_path: Path, name: str) -> None:
    way = WAYS[name]
    foretold = predicted(way)
    for seen in ranks(way.world).run(seen_on, name, str(tmp_path)):
        print(name, *seen, foretold)  # as the table in examples/benchmarks/RESULTS.md
        # The host reads gradients that have come down: once all of them have.
        assert all(place.startswith("comm/control.py") for place in seen.waits), seen.waits
        num_waits = way.num_microbatches if way.offload is not None else 0
        assert sum(seen.waits.values()) == num_waits
        # Codes, sums over copies and what goes to the host are seen where activations are small.
        if way.offloads_activations:
            assert seen.peak < foretold
            assert way.offload is not None or seen.crossed["up"] == seen.crossed["down"] > 0
            # Only the inputs of the blocks are kept.
            is_least = seen.crossed["up"] == NUM_BLOCKS * ROWS * WIDTH * 4
            assert is_least == ("activation_checkpointing" in way.settings)
        else:
            assert seen.peak == pytest.approx(foretold, rel=0.02 if way.rows == ROWS else 0.2)
        if way.rows < ROWS:
            continue
        assert (seen.overlapped["sent"] > way.sent) == (way.settings.get("prefetch") != 0)
        # What goes up once a step from memory does so behind it, where this one is over.
        if way.offload is not None and (way.settings["stage"] == 3 or "nvme" in name):
            assert seen.overlapped["up"] > 0.3
        if way.offload is not None and way.settings["stage"] == 3 and way.world == 2:
            assert seen.overlapped["down"] > 0.6
            # Gradients that others are added to come up and go down one after the other.
            assert seen.overlapped["up beside down"] > 0.2 / way.num_microbatches
        if way.offload is not None and not way.offloads_activations:
            # With two ranks each sends its shard once, and at stage 2 casts it on the device.
            # From the second microbatch on gradients that rest come up, to be added to.
            up, down = seen.sent["gather"], seen.sent["reduce"]
            up = seen.sent["masters"] if way.settings["stage"] == 2 else up
            added = down * (way.num_microbatches - 1) // way.num_microbatches
            assert seen.crossed == {"up": up + added, "down": down}
            assert seen.crossed == {verb: seen.sent[verb] for verb in ("up", "down")}


def sums(folder: str) -> tuple[list[tuple[str, str]], set[str]]:
    """Return a step's reductions, by unit and axis, in order, and the streams of its kernels."""
    seen: list[tuple[str, str]] = []
    way = Way({"stage": 3, "shard": 2}, MIXED, num_microbatches=2, world=4)
    own = Collectives.reduce, Collectives.all_reduce

    def reduce(transport: Any, *args: Any, unit: str, tag: int) -> Any:
        seen.append((unit, "shard"))
        return own[0](transport, *args, unit=unit, tag=tag)

    def all_reduce(transport: Any, *args: Any, unit: str, tag: int) -> Any:
        seen.append((unit, "replicate"))
        return own[1](transport, *args, unit=unit, tag=tag)

    with (
        beside_the_host() as device,
        mock.patch.object(Collectives, "reduce", reduce),
        mock.patch.object(Collectives, "all_reduce", all_reduce),
    ):
        steps(way, folder, device)
    return seen[-4 * (NUM_BLOCKS + 1) :], {one.who for one in device.done if one.kind == "kernel"}


def test_sums_over_copies_begin_with_their_unit_beside_computation(
    ranks: Pools, tmp_path: Path
) -> None:
    for seen, streams in ranks(4).run(sums, str(tmp_path)):
        assert [axis for _, axis in seen] == ["shard", "replicate"] * (len(seen) // 2)
        assert [unit for unit, _ in seen[::2]] == [unit for unit, _ in seen[1::2]]
        assert len(streams) == 2, "computation's, and that of casts and sums of gradients"
