"""The search for the largest batch is refused, as under DDP, by an error that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.oracle.projects import make_trainer
from tests.oracle.ranks import Pools


def refused(folder: str) -> None:
    for function in ("fit", "validate", "predict"):
        trainer = make_trainer(3, callbacks=[BatchSizeFinder()], default_root_dir=folder)
        with pytest.raises(MisconfigurationException, match=r"lightning_zero\.estimate"):
            getattr(trainer, function)(BoringModel())
    with pytest.raises(ValueError, match="not supported with distributed"):
        Tuner(make_trainer(3)).scale_batch_size(BoringModel())


def test_a_search_over_ranks_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(refused, str(tmp_path))
