"""What a step does, in which order and how often: counted things, never times."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lightning_zero
from lightning_zero.buffer import Buffer
from lightning_zero.engine import Engine
from lightning_zero.ledger import sum_of
from lightning_zero.settings import Settings
from lightning_zero.unit import Unit
from lightning_zero.window import Window
from tests.ranks import Pools

BLOCKS = 4
WIDTH = 32


class Block(nn.Linear):
    """Notes when it computes."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.name, self.events = name, events

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(f"forward {self.name}")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.events.append(f"backward {self.name}"))
        return y


class Chain(nn.Module):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(f"blocks.{i}", events) for i in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).relu()
        return x


@contextlib.contextmanager
def _noted(events: list[str]) -> Iterator[None]:
    """Enter what units do into ``events``."""
    verbs = {"_gather": "gather", "reduce": "reduce", "finish_reduce": "finish", "wait": "wait"}
    originals = {name: getattr(Unit, name) for name in verbs}

    def noting(name: str) -> Any:
        def method(unit: Unit, **how: Any) -> Any:
            is_idle = name == "finish_reduce" and not unit._finishes
            if not is_idle:
                events.append(f"{verbs[name]} {unit.label}")
            return originals[name](unit, **how)

        return method

    for name in verbs:
        setattr(Unit, name, noting(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Unit, name, original)


class Job:
    """A chain of blocks under a stage, one step at a time."""

    def __init__(
        self, model: nn.Module | None = None, units: Any = (Block,), **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.events: list[str] = []
        self.model = Chain(self.events) if model is None else model
        self.engine = Engine(self.model, Settings(units=units, **settings))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.engine.adopt(self.optimizer)

    def step(self, microbatches: int = 1) -> list[str]:
        self.events.clear()
        with _noted(self.events):
            self.optimizer.zero_grad()
            for number in range(microbatches):
                is_last = number == microbatches - 1
                with contextlib.nullcontext() if is_last else self.engine.no_sync():
                    self.model(torch.randn(4, WIDTH)).sum().backward()
            self.optimizer.step()
        return list(self.events)


def _third_step(stage: int, prefetch: int) -> list[str]:
    job = Job(stage=stage, prefetch=prefetch)
    job.step()
    job.step()
    return job.step()


def _before(events: list[str], *names: str) -> bool:
    places = [events.index(name) for name in names]
    return places == sorted(places)


def test_stage_3_gathers_ahead_and_reduces_behind(ranks: Pools) -> None:
    for events in ranks(2).run(_third_step, 3, 1):
        for i in range(BLOCKS - 1):
            # Forward: the next block is under way before this one computes.
            assert _before(events, f"gather blocks.{i + 1}", f"forward blocks.{i}")
            assert _before(events, f"forward blocks.{i}", f"wait blocks.{i + 1}")
        backward = events[events.index(f"backward blocks.{BLOCKS - 1}") :]
        for i in range(BLOCKS - 2):
            # Backward: likewise, while a block's gradients are computed.
            assert _before(backward, f"gather blocks.{i}", f"reduce blocks.{i + 1}")
        for i in range(1, BLOCKS):
            # A reduction ends behind the backward of the block before it.
            assert _before(
                backward, f"reduce blocks.{i}", f"backward blocks.{i - 1}", f"finish blocks.{i}"
            )


def test_without_prefetch_nothing_is_gathered_ahead(ranks: Pools) -> None:
    for events in ranks(2).run(_third_step, 3, 0):
        for i in range(BLOCKS - 1):
            assert _before(events, f"forward blocks.{i}", f"gather blocks.{i + 1}")


@pytest.mark.parametrize("stage", [1, 2])
def test_new_weights_are_gathered_behind_the_step_and_awaited_by_unit(
    ranks: Pools, stage: int
) -> None:
    for events in ranks(2).run(_third_step, stage, 1):
        forward, after = (
            events[: events.index(f"forward blocks.{BLOCKS - 1}")],
            events[events.index("backward blocks.0") :],
        )
        assert not [event for event in forward if event.startswith("gather")]
        for i in range(BLOCKS - 1):
            assert _before(forward, f"forward blocks.{i}", f"wait blocks.{i + 1}")
        gathers = [event for event in after if event.startswith("gather")]
        assert gathers == [*(f"gather blocks.{i}" for i in range(BLOCKS)), "gather root"]


def _collectives(stage: int, microbatches: int, accumulate: str | None) -> Counter[str]:
    job = Job(stage=stage, accumulate=accumulate)
    job.step(microbatches)
    job.step(microbatches)
    job.step(microbatches)
    counts: Counter[str] = Counter()
    for (_, verb), sent in job.engine.comm.ledger.last_step.items():
        counts[verb] += sent.collectives
    return counts


@pytest.mark.parametrize("microbatches", [1, 3])
def test_collectives_are_those_of_the_stage_table(ranks: Pools, microbatches: int) -> None:
    units, m = BLOCKS + 1, microbatches
    # At stage 3 the root is gathered once, and the last block stays whole into its backward.
    stage_3_gathers = m * (2 * units - 2)
    expected = {
        (1, None): (units, units),
        (2, None): (units, m * units),
        (2, "local"): (units, units),
        (3, None): (stage_3_gathers, m * units),
        (3, "local"): (stage_3_gathers, units),
    }
    for (stage, accumulate), (gathers, reduces) in expected.items():
        for counts in ranks(2).run(_collectives, stage, m, accumulate):
            assert counts == {"gather": gathers, "reduce": reduces}, (stage, accumulate)


def _made_in_a_step(stage: int) -> tuple[int, int, int, int]:
    """Windows, page faults and gathered bytes of a step that has warmed up."""
    job = Job(stage=stage)
    for _ in range(3):
        job.step()
    windows, buffers = [], []
    create, init = Window.create, Buffer.__init__
    Window.create = lambda *a: windows.append(a) or create(*a)  # type: ignore[assignment, func-returns-value]
    Buffer.__init__ = lambda *a: buffers.append(a) or init(*a)  # type: ignore[assignment, func-returns-value, method-assign]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    try:
        job.step()
    finally:
        Window.create, Buffer.__init__ = create, init  # type: ignore[method-assign]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return len(windows), len(buffers), faults, sum_of(job.engine.comm.ledger.last_step).bytes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buffers_are_reused_from_step_to_step(ranks: Pools, stage: int) -> None:
    for windows, buffers, faults, sent in ranks(2).run(_made_in_a_step, stage):
        # Now and then a rank is ahead of its readers and needs a third window; it is kept.
        assert windows <= 1
        # The views of a reduce buffer; its memory is a window that exists.
        assert buffers <= BLOCKS + 1
        page = resource.getpagesize()
        assert faults <= 2 * sent / page + 500


class Stack(nn.Sequential):
    """Layers that are one unit."""


def _calls(num_units: int, num_layers: int, stage: int) -> int:
    """Calls of the package's functions in a step that has warmed up."""
    layers = [[nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)] for _ in range(num_units)]
    model = nn.Sequential(*(Stack(*stack) for stack in layers), nn.Linear(WIDTH, WIDTH))
    job = Job(model, units=[Stack], stage=stage)
    package = lightning_zero.__path__[0]
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(package)

    for _ in range(3):
        job.step()
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        job.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    job.engine.close()
    return calls


@pytest.mark.parametrize(
    ("stage", "per_unit", "per_parameter"), [(1, 190, 12), (2, 190, 12), (3, 250, 12)]
)
def test_python_per_unit_is_bounded(stage: int, per_unit: int, per_parameter: int) -> None:
    few, more, larger = (_calls(*how, stage) for how in ((2, 1), (6, 1), (6, 5)))
    in_a_parameter = (larger - more) / (6 * 8)
    in_a_unit = (more - few) / 4 - 2 * in_a_parameter
    assert in_a_unit <= per_unit
    assert in_a_parameter <= per_parameter


def test_a_profile_reads_like_the_source() -> None:
    job = Job(stage=3)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        job.step()
    ranges = Counter(e.name for e in seen.events() if e.name.startswith("zero."))
    job.engine.close()
    for unit in [f"blocks.{i}" for i in range(BLOCKS)]:
        for verb in ("unshard", "wait", "reshard", "reduce", "finish_reduce"):
            assert ranges[f"zero.{verb} {unit}"] >= 1
