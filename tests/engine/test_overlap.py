"""What a step does, in which order and how often: counted things, never times."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lightning_zero
from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.engine.schedule import Need, Schedule
from lightning_zero.engine.unit import Unit
from lightning_zero.engine.weights import Residency, Weights
from lightning_zero.plan import Settings
from tests.oracle.ranks import Pools

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
    verbs = {
        (Weights, "unshard"): "gather",
        (Weights, "wait"): "wait",
        (Unit, "reduce"): "reduce",
        (Unit, "finish"): "finish",
    }
    originals = {(part, name): getattr(part, name) for part, name in verbs}

    def noting(part: type, name: str) -> Any:
        def method(of_unit: Any, **how: Any) -> Any:
            is_idle = name == "finish" and not of_unit._finishes
            if not is_idle:
                events.append(f"{verbs[part, name]} {of_unit.label}")
            return originals[part, name](of_unit, **how)

        return method

    for part, name in verbs:
        setattr(part, name, noting(part, name))
    try:
        yield
    finally:
        for (part, name), original in originals.items():
            setattr(part, name, original)


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
        # In the order in which the next forward needs them: devices gather one after the other.
        assert gathers == ["gather root", *(f"gather blocks.{i}" for i in range(BLOCKS))]


WIDE, NUM_WIDE = 256, 4


class Wide:
    """Layers whose buffers are large beside the flags of a step, with an engine or without."""

    def __init__(self, stage: int | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(NUM_WIDE)))
        units = {"units": [nn.Linear], "stage": stage}
        self.engine = Engine(self.model, Settings(**units)) if stage else None  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, fused=True)
        if self.engine is not None:
            self.engine.adopt(self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, WIDE)).sum().backward()
        self.optimizer.step()
        for unit in self.engine.sharded.units if self.engine is not None else ():
            # A profile must not end before a message that began within it.
            unit.weights.wait()


@contextlib.contextmanager
def _first_of(world: int) -> Iterator[None]:
    """This process is rank 0 of many whose messages move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Work(NamedTuple):
    """The work that a step asks of the host."""

    calls: Counter[str]
    operations: Counter[str]
    collectives: dict[tuple[str, str], int]


def _work_of_a_step(stage: int, world: int) -> Work:
    """The functions of the package and the operations of torch that a step calls, by name."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "lightning_zero" in frame.f_globals.get("__name__", ""):
            calls[frame.f_code.co_qualname if _HAS_QUALNAMES else frame.f_code.co_name] += 1

    with _first_of(world):
        job = Wide(stage)
        for _ in range(3):
            job.step()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            job.step()
        events = profile.events()
        assert events is not None
        operations = Counter(event.name for event in events if not _is_of_a_backend(event))
        # What is collected at some moment or other would be counted too.
        gc.disable()
        sys.setprofile(note)
        try:
            job.step()
        finally:
            sys.setprofile(None)
            gc.enable()
        assert job.engine is not None
        traffic = job.engine.comm.transport.ledger.last_step
        job.engine.close(restore=False)
    return Work(calls, operations, {key: sent.collectives for key, sent in traffic.items()})


def _is_of_a_backend(event: Any) -> bool:
    """Return whether a collective does it; the fake one copies a message to each place itself."""
    parent = event.cpu_parent
    return parent is not None and (parent.name.startswith("c10d::") or _is_of_a_backend(parent))


_HAS_QUALNAMES = sys.version_info >= (3, 11)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_grows_with_the_world_size(stage: int) -> None:
    # Both need padding at the ends of their buffers.
    few, many = _work_of_a_step(stage, 8), _work_of_a_step(stage, 64)
    assert sum(few.calls.values()) > 100
    # But for a step's sync point, which takes log2(N) hops between hosts.
    of_hops = {"hops", "unseen", "PendingSync._hops", "_hops"}
    assert set(many.calls - few.calls) <= of_hops
    assert many.operations - few.operations == Counter({"aten::maximum": 3})
    assert not few.calls - many.calls
    assert not few.operations - many.operations
    assert few.collectives == many.collectives


class Stack(nn.Sequential):
    """Layers that are one unit."""


def _calls(num_units: int, num_layers: int, stage: int) -> Tensor:
    """Calls of the package in a step that has warmed up, and all that Python runs."""
    layers = [[nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)] for _ in range(num_units)]
    model = nn.Sequential(*(Stack(*stack) for stack in layers), nn.Linear(WIDTH, WIDTH))
    job = Job(model, units=[Stack], stage=stage)
    package = lightning_zero.__path__[0]
    own = everything = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal own, everything
        if event == "call":
            everything += 1
            own += frame.f_code.co_filename.startswith(package)

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
    return torch.tensor([own, everything], dtype=torch.float64)


@pytest.mark.parametrize(("stage", "per_unit"), [(1, 135), (2, 135), (3, 180)])
def test_python_per_unit_is_bounded(stage: int, per_unit: int) -> None:
    """Bound the calls of a unit in a whole step, beside those of its parameters."""
    few, more, larger = (_calls(*how, stage) for how in ((2, 1), (6, 1), (6, 5)))
    in_a_parameter = (larger - more) / (6 * 8)
    in_a_unit = (more - few) / 4 - 2 * in_a_parameter
    # Torch's own functions too, of which a plain step of such a unit calls some ten.
    assert (in_a_unit <= torch.tensor([per_unit, per_unit + 45])).all(), in_a_unit
    assert in_a_parameter[0] <= 7


def _profiles_that_stop_early() -> list[set[str]]:
    """Return the names in profiles of optimizer steps, which stop while gathers are under way."""
    torch.manual_seed(0)
    model = Chain([])
    comm = Communicator(torch.device("cpu"), reads_peers=False)
    engine = Engine(model, Settings(units=(Block,), stage=1), comm)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    engine.adopt(optimizer)
    names = []
    for _ in range(3):
        model(torch.randn(4, WIDTH)).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            optimizer.step()
        assert any(unit.weights.residency is Residency.IN_FLIGHT for unit in engine.sharded.units)
        names.append({event.name for event in seen.events()})
        del seen
    engine.close()
    return names


def test_a_profile_may_stop_while_messages_are_under_way(ranks: Pools) -> None:
    """No message has a range of its own, whose end torch would write to memory that is gone."""
    for profiles in ranks(2).run(_profiles_that_stop_early):
        for names in profiles:
            assert "zero.unshard blocks.0" in names
            assert not {name for name in names if name.startswith(("gloo:", "c10d::"))}


# -- what is predicted from the last step --------------------------------------------------------


def follow(schedule: Schedule, *units: int) -> list[list[int]]:
    """Record a step; the two units predicted before it and after each need."""
    schedule.begin()
    seen = [schedule.ahead(2)]
    for unit in units:
        schedule.record(Need(unit, is_backward=False))
        seen.append(schedule.ahead(2))
    return [[need.unit for need in ahead] for ahead in seen]


def test_the_last_step_predicts_this_one() -> None:
    schedule = Schedule()
    assert follow(schedule, 0, 1, 0, 2) == [[]] * 5
    assert follow(schedule, 0, 1, 0, 2) == [[0, 1], [1, 0], [0, 2], [2], []]
    follow(schedule)  # a step without needs keeps the record
    assert follow(schedule, 0, 1, 0, 2)[0] == [0, 1]


def test_a_detour_finds_back() -> None:
    schedule = Schedule()
    follow(schedule, 0, 1, 2, 3)
    # Unit 9 is news: the place is kept; unit 2 is a jump ahead.
    assert follow(schedule, 0, 9, 2, 3) == [[0, 1], [1, 2], [1, 2], [3], []]
    assert follow(schedule, 0, 9, 2, 3) == [[0, 9], [9, 2], [2, 3], [3], []]
