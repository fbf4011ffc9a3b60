"""How much a step asks of the host: counted things, never times."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_zero
from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.engine.schedule import Schedule
from lightning_zero.engine.unit import Residency
from lightning_zero.plan import Settings
from tests.oracle.ranks import Pools

WIDTH = 32


def chain(number: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(number)))


class Job:
    """A model under a stage, one step at a time."""

    def __init__(
        self, model: nn.Module, units: Any, comm: Communicator | None = None, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = model
        self.engine = Engine(model, Settings(units=units, **settings), comm)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        self.engine.adopt(self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, WIDTH)).sum().backward()
        self.optimizer.step()


@contextlib.contextmanager
def _first_of(world: int) -> Iterator[None]:
    """This process is rank 0 of many whose messages move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _calls(step: Callable[[], None]) -> tuple[Counter[str], int]:
    """Run a step; return calls of the package's functions by name, and the number of all calls."""
    own: Counter[str] = Counter()
    total = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal total
        if event == "call":
            total += 1
            if frame.f_code.co_filename.startswith(lightning_zero.__path__[0]):
                own[frame.f_code.co_qualname if _HAS_QUALNAMES else frame.f_code.co_name] += 1

    # What is collected at some moment or other would be counted too.
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return own, total


class Work(NamedTuple):
    """The work that a step asks of the host."""

    calls: Counter[str]
    operations: Counter[str]
    collectives: dict[tuple[str, str], int]


def _work_of_a_step(stage: int, world: int) -> Work:
    with _first_of(world):
        # Buffers that are large beside the flags of a step; both worlds pad their ends.
        first, last = nn.Linear(WIDTH, 2112), nn.Linear(2112, WIDTH)
        job = Job(nn.Sequential(first, last), [nn.Linear], stage=stage)

        def step() -> None:
            job.step()
            for unit in job.engine.sharded.units:
                # A profile must not end before a message that began within it.
                unit.weights.wait()

        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
        operations = Counter(e.name for e in seen.events() or () if not _is_of_a_backend(e))
        calls, _ = _calls(step)
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
    few, many = _work_of_a_step(stage, 8), _work_of_a_step(stage, 64)
    assert sum(few.calls.values()) > 100
    # No sync point is among them, as each takes log2(N) hops between hosts: where all ranks
    # announce the same gradients, the only one of a step belongs to another thread.
    assert few.calls == many.calls
    assert few.operations == many.operations
    assert few.collectives == many.collectives


class Stack(nn.Sequential):
    """Layers that are one unit."""


def _calls_of_units(num_units: int, num_layers: int, stage: int) -> Tensor:
    """Calls of the package in a step that has warmed up, and all that Python runs."""
    stacks = [Stack(*chain(num_layers)) for _ in range(num_units)]
    job = Job(nn.Sequential(*stacks, nn.Linear(WIDTH, WIDTH)), [Stack], stage=stage)
    for _ in range(3):
        job.step()
    own, total = _calls(job.step)
    job.engine.close()
    return torch.tensor([sum(own.values()), total], dtype=torch.float64)


@pytest.mark.parametrize(("stage", "per_unit"), [(1, 135), (2, 135), (3, 180)])
def test_python_per_unit_is_bounded(stage: int, per_unit: int) -> None:
    """Bound the calls of a unit in a whole step, beside those of its parameters."""
    few, more, larger = (_calls_of_units(*how, stage) for how in ((2, 1), (6, 1), (6, 5)))
    in_a_parameter = (larger - more) / (6 * 8)
    in_a_unit = (more - few) / 4 - 2 * in_a_parameter
    # Torch's own functions too, of which a plain step of such a unit calls some ten.
    assert (in_a_unit <= torch.tensor([per_unit, per_unit + 45])).all(), in_a_unit
    assert in_a_parameter[0] <= 7


def _profiles_that_stop_early() -> list[set[str]]:
    """Return the names in profiles of optimizer steps, which stop while gathers are under way."""
    comm, names = Communicator(torch.device("cpu"), reads_peers=False), []
    job = Job(chain(4), [nn.Linear], comm, stage=1)
    for _ in range(3):
        job.model(torch.randn(4, WIDTH)).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            job.optimizer.step()
        found = {unit.weights.residency for unit in job.engine.sharded.units}
        assert Residency.IN_FLIGHT in found
        names.append({event.name for event in seen.events()})
        del seen
    job.engine.close()
    return names


def test_a_profile_may_stop_while_messages_are_under_way(ranks: Pools) -> None:
    """No message has a range of its own, whose end torch would write to memory that is gone."""
    for profiles in ranks(2).run(_profiles_that_stop_early):
        for names in profiles:
            assert "zero.unshard 0" in names
            assert not {name for name in names if name.startswith(("gloo:", "c10d::"))}


# -- what is predicted from the last step --------------------------------------------------------


def follow(schedule: Schedule, *units: int) -> list[list[int]]:
    """Record a step; the two units predicted before it and after each need."""
    schedule.begin()
    seen = [schedule.ahead(2)]
    for unit in units:
        schedule.record((unit, False))
        seen.append(schedule.ahead(2))
    return [[unit for unit, _ in ahead] for ahead in seen]


def test_a_detour_finds_back() -> None:
    schedule = Schedule()
    follow(schedule, 0, 1, 2, 3)
    # Unit 9 is news: the place is kept; unit 2 is a jump ahead.
    assert follow(schedule, 0, 9, 2, 3) == [[0, 1], [1, 2], [1, 2], [3], []]
    assert follow(schedule, 0, 9, 2, 3) == [[0, 9], [9, 2], [2, 3], [3], []]
