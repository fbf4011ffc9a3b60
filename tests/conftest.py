"""Fixtures shared by all tests."""

import resource
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Pools


def pytest_configure() -> None:
    """One thread, as the ranks have; no core files of ranks that are killed on purpose."""
    torch.set_num_threads(1)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(world_size).run(function, *args)` runs a top-level function on every rank."""
    pools = Pools()
    yield pools
    pools.close()
