"""Fixtures shared by all tests."""

import gc
import os
import resource
from collections.abc import Iterator

import pytest
import torch

from tests.oracle.ranks import Pools


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is there for good: torch alone is 400,000 objects."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """One thread, as the ranks have; no core files of ranks that are killed on purpose.

    By its variable Lightning and scripts have one too: threads that outnumber the cores wait for
    each other in loops, and a step of a tiny model takes six times as long.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(world_size).run(function, *args)` runs a top-level function on every rank."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Take back what a test leaves in `os.environ`, and the number of threads.

    A Trainer that runs in this process tells its rank there, and scripts that later tests start
    would take themselves for started ones. With more threads, sums have other bits than those of
    the ranks.
    """
    before = dict(os.environ)
    yield
    torch.set_num_threads(1)
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
