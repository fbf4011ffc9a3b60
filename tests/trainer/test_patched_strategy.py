"""Methods of Lightning's ``Strategy`` that are patched by ones that call the instance's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.strategies import Strategy

from tests.oracle.projects import Regression, make_trainer, rows
from tests.oracle.ranks import Pools

COUNTED = ("backward", "validation_step", "test_step", "predict_step")
"""Methods that Lightning's hooks leave to it, so a patch is called as often as under DDP."""
OVERRIDDEN = (
    "training_step",
    "lightning_module_state_dict",
    "save_checkpoint",
    "remove_checkpoint",
    "load_checkpoint",
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "optimizer_state",
    "pre_backward",
)
"""Methods of ours: a patch of Lightning's has no effect, and no recursion."""


class Manual(Regression):
    """Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def run_all(trainer: Any, module: Any, path: str) -> list[float]:
    trainer.fit(module, rows(8), rows(4))
    trainer.save_checkpoint(path)
    trainer.test(module, rows(4), ckpt_path=path, verbose=False)
    trainer.predict(module, rows(4))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rows(8), rows(4), ckpt_path=path)
    trainer.strategy.remove_checkpoint(path)
    return [value.detach().sum().item() for value in module.state_dict().values()]


def patched(folder: str) -> list[list[Any]]:
    found = []
    for kind in (Regression, Manual):
        results: list[Any] = []
        for strategy in ("ddp", 1, 3):
            trainer = make_trainer(strategy, enable_checkpointing=False)
            with ExitStack() as patches:
                mocks = []
                for name in (*COUNTED, *OVERRIDDEN):
                    given: dict[str, Any] = {"wraps": getattr(trainer.strategy, name)}
                    if strategy == "ddp":  # its own methods call these
                        given = {"autospec": True, "side_effect": getattr(Strategy, name)}
                    patch = mock.patch.object(Strategy, name, **given)
                    mocks.append(patches.enter_context(patch))
                values = run_all(trainer, kind(), f"{folder}/{strategy}.ckpt")
                results.append((values, [each.call_count for each in mocks[: len(COUNTED)]]))
        found.append(results)
    return found


def test_a_patch_that_calls_the_instances_method(ranks: Pools, tmp_path: Path) -> None:
    for results in ranks(2).run(patched, str(tmp_path)):
        for (expected, calls), *others in results:
            for values, numbers in others:
                assert values == pytest.approx(expected, rel=1e-5, abs=1e-6)
                assert numbers == calls
                assert all(numbers)
