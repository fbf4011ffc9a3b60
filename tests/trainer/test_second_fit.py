"""Optimizers that outlive the run whose parts they hold: what they refuse, and a second fit."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle.projects import Regression, fit, make_strategy, make_trainer, rows
from tests.oracle.ranks import Pools


class _Keeping(Regression):
    """Returns one optimizer for all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.parameters(), 0.01)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def _optimizers_after_fit(stage: int) -> None:
    module = _Keeping()
    trainer = make_trainer(make_strategy(stage), max_steps=2)
    trainer.fit(module, rows())
    weights = [p.clone() for p in module.parameters()]
    module(torch.randn(2, 6)).sum().backward()
    optimizer = module.optimizer
    copies = (functools.partial(use, optimizer) for use in (copy.deepcopy, pickle.dumps))
    for use in (optimizer.step, optimizer.state_dict, *copies):
        with pytest.raises(RuntimeError, match="Adam belongs to a run that has ended"):
            use()
    module.optimizer.zero_grad()
    assert [p.grad for p in module.parameters()] == [None] * len(weights)
    for strategy in ("ddp", make_strategy(stage, units=(nn.Linear,), min_num_params=0)):
        with pytest.raises((ValueError, RuntimeError), match="Return it from `configure_optimi"):
            fit(module, strategy)
    if stage == 1:  # at stage 3 the last failure has left them sharded
        assert all(map(torch.equal, module.parameters(), weights))


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_of_a_run_that_has_ended_is_refused(ranks: Pools, stage: int) -> None:
    """On a rank without a state of its own it would step otherwise than on the others."""
    ranks(2).run(_optimizers_after_fit, stage)


class _Failing(_Keeping):
    """Raises in a step of its first run."""

    def __init__(self, make: Any, fails_at: int) -> None:
        super().__init__()
        self.optimizer, self.fails_at = make(self.parameters()), fails_at

    def training_step(self, batch: Any, index: int) -> Any:
        if self.fails_at == index:
            self.fails_at = -1
            raise KeyError("once")
        return super().training_step(batch, index)


_MAKE: dict[str, Any] = {
    "by element": lambda params: torch.optim.Adam(params, 0.01),
    "by parameter": lambda params: torch.optim.Adafactor(params, 0.01),
    "all at once": lambda params: torch.optim.LBFGS(params, 0.01, max_iter=2),
}


def _second_fit(strategy: Callable[[], Any], name: str, fails_at: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = _Failing(_MAKE[name], fails_at)
    with contextlib.suppress(KeyError):
        make_trainer(strategy(), max_steps=2).fit(module, rows())
    module.optimizer.zero_grad()
    for _ in range(2 if fails_at < 0 else 1):
        trainer = make_trainer(strategy(), max_steps=2)
        trainer.fit(module, rows())
    return [p.detach().clone() for p in module.parameters()]


def _second_fits(name: str, fails_at: int, folder: str) -> None:
    expected = _second_fit(lambda: "ddp", name, fails_at)
    offload: dict[str, Any] = {"offload_optimizer": "nvme", "offload_path": folder}
    ways: list[tuple[int, dict[str, Any]]] = [(3, {}), (1 if fails_at < 0 else 2, {})]
    for stage, options in [*ways, (3, offload)] if name == "by element" else ways:
        found = _second_fit(functools.partial(make_strategy, stage, **options), name, fails_at)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fails_at", [-1, 1])
@pytest.mark.parametrize("name", _MAKE)
def test_an_optimizer_goes_on_in_a_second_fit(
    ranks: Pools, tmp_path: Path, name: str, fails_at: int
) -> None:
    """Also after a first one that an exception has ended, which leaves several ranks sharded."""
    ranks(1 if fails_at > 0 else 2).run(_second_fits, name, fails_at, str(tmp_path))
