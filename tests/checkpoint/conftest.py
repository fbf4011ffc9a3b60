"""Fixtures of the tests of checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from tests.oracle.by_trainer import train
from tests.oracle.ranks import Pools


@pytest.fixture(scope="session")
def ddp(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Train with DDP, the oracle."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, ranks(2).run(train, str(folder), "ddp")[0]
