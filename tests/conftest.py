"""Fixtures shared by all tests.

The process that only hands out tests to others reads this too, so torch is imported later.
"""

from __future__ import annotations

import gc
import os
import resource
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests.oracle.forks import server

if TYPE_CHECKING:
    from tests.oracle.ranks import Pools


DURATIONS = Path(__file__).with_name("durations.tsv")
"""Seconds of each test that takes long, by `make durations`."""
LONG = 1.0
"""Seconds from which a test is listed there."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make durations` write the file."""
    parser.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name}")


def _durations() -> dict[str, float]:
    lines = DURATIONS.read_text().splitlines() if DURATIONS.exists() else []
    pairs = (line.split("\t") for line in lines)
    return {name: float(seconds) for seconds, name in pairs}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest, so that no process is left with one of them at the end."""
    known = _durations()
    items.sort(key=lambda item: -known.get(item.nodeid, 0.0))


_SECONDS: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what a test took, in whatever process."""
    _SECONDS[report.nodeid] += report.duration  # type: ignore[assignment]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the durations of what was run; what was not run, and still exists, keeps its own."""
    config = session.config
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        merged = {**_durations(), **_SECONDS}
        gone = {name for name in merged if not Path(name.partition("::")[0]).exists()}
        long = sorted((-s, name) for name, s in merged.items() if s >= LONG and name not in gone)
        DURATIONS.write_text("".join(f"{-seconds:.1f}\t{name}\n" for seconds, name in long))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what is imported for good: torch alone is 400,000 objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """One thread, as the ranks have; no core files of ranks that are killed on purpose.

    By its variable Lightning and scripts have one too: threads that outnumber the cores wait for
    each other in loops, and a step of a tiny model takes six times as long.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # Let no thread that wakes, of this process or of one that it starts, take another's core: while
    # the thread that holds the lock of a connection waits for its core, which a thread of the peer
    # has taken, gloo's thread asks for events without a pause: half of the system's time.
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if hasattr(config, "workerinput"):  # they import while tests are collected
        server(0), server(1)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(world_size).run(function, *args)` runs a top-level function on every rank."""
    from tests.oracle.ranks import Pools

    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Take back what a test leaves in `os.environ`, the number of threads and the process group.

    A Trainer that runs in this process tells its rank there, and scripts that later tests start
    would take themselves for started ones. With more threads, sums have other bits than those of
    the ranks.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with mock.patch.dict(os.environ):
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
