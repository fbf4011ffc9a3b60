"""Checkpoints of optimizers that are stepped by parameter or all at once: DDP's own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import prodigyopt
import pytest
import pytorch_optimizer
import torch
from torch import nn

from tests.oracle import by_trainer
from tests.oracle.by_trainer import Rows, Stop, assert_close, make_trainer, strategy_of, world
from tests.oracle.ranks import Pools, RankError


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2]


def vectors(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim != 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "muon beside adamw": lambda m: [
        torch.optim.Muon(
            [
                {"params": matrices(m)[:2], "lr": 0.02},
                {"params": matrices(m)[2:], "lr": 0.01, "weight_decay": 0.0},
            ]
        ),
        torch.optim.AdamW(vectors(m), lr=0.01),
    ],
    "prodigy": lambda m: prodigyopt.Prodigy(m.parameters()),
    "lookahead": lambda m: pytorch_optimizer.Lookahead(
        torch.optim.AdamW(m.parameters(), lr=0.02), k=2, pullback_momentum="pullback"
    ),
    "lookahead of adafactor": lambda m: pytorch_optimizer.Lookahead(
        torch.optim.Adafactor(m.parameters(), lr=0.02), k=3
    ),
    "schedulefree wrapper": lambda m: pytorch_optimizer.ScheduleFreeWrapper(
        torch.optim.SGD(m.parameters(), lr=0.02)
    ),
    "sam": lambda m: pytorch_optimizer.SAM(m.parameters(), torch.optim.AdamW, lr=0.01),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2),  # one state for all
}


OWN_FORMATS = ("lookahead", "lookahead of adafactor", "schedulefree wrapper")
"""Those whose state dict is not as torch's, for which there is no place in a directory."""


class Model(by_trainer.Model):
    """The same with another optimizer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.automatic_optimization = "beside" not in name and name != "sam"

    def on_train_start(self) -> None:
        if "schedulefree" in self.name:
            self.optimizers(use_pl_optimizer=False).train()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.name](self)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        if self.name == "sam":
            self.descend_twice(loss, batch, index)
        elif not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def descend_twice(self, loss: Any, batch: Any, index: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            again = by_trainer.Model.training_step(self, batch, index)
            self.manual_backward(again)
            return again

        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step(closure)


def fit(name: str, strategy: str, path: str, ckpt_path: str | None = None) -> Any:
    """Four steps with a checkpoint after two, or those that follow after a checkpoint."""
    torch.manual_seed(0 if ckpt_path is None else 1)
    module = Model(name)
    max_steps = 8 if "beside" in name else 4  # the Trainer counts those of every optimizer
    trainer = make_trainer(
        world(),
        strategy_of(strategy),
        "/nowhere",
        enable_checkpointing=False,
        max_steps=max_steps,
        callbacks=[] if ckpt_path else [Stop(path, max_steps // 2)],
    )
    trainer.fit(module, Rows(), ckpt_path=ckpt_path)
    return module.losses, {key: p.detach().clone() for key, p in module.named_parameters()}


def test_a_directory_has_no_place_for_a_format_of_an_optimizers_own(ranks: Pools) -> None:
    match = r"Lookahead.state_dict\(\) has its own format.*checkpoint='file'"
    with pytest.raises(RankError, match=match):
        ranks(2).run(fit, "lookahead", "dcp1", "/nowhere")


def of_another_class(saved: dict[str, Any]) -> None:
    (state,) = saved["optimizer_states"]
    saved["optimizer_states"] = [state["base_optimizer"]]


def of_more_groups(saved: dict[str, Any]) -> None:
    groups = saved["optimizer_states"][0]["base_optimizer"]["param_groups"]
    groups.append({**groups[0], "params": []})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (of_another_class, "'state', 'param_groups'.* optimizer's has 'lookahead_state'"),
        (of_more_groups, "it has 2 param groups, but the optimizer has 1"),
    ],
)
def test_a_state_that_does_not_fit_a_wrapper_is_refused(
    ranks: Pools, tmp_path: Path, change: Callable[[Any], None], found: str
) -> None:
    path = str(tmp_path / "saved.ckpt")
    ranks(1).run(fit, "lookahead", "ddp", path)
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
    with pytest.raises(RankError, match=rf"does not fit optimizer 0 \(Lookahead\): .*{found}"):
        ranks(2).run(fit, "lookahead", "zero3", "", path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_files_are_those_of_ddp_and_anybody_resumes(
    ranks: Pools, tmp_path: Path, name: str
) -> None:
    third = "zero1" if name in OWN_FORMATS else "dcp1"
    paths = {writer: str(tmp_path / f"{writer}.ckpt") for writer in ("ddp", "zero3", third)}
    runs = {writer: ranks(2).run(fit, name, writer, path)[0] for writer, path in paths.items()}
    losses, weights = runs["ddp"]
    for found, _ in runs.values():
        assert found == pytest.approx(losses, rel=1e-4)
    saved, expected = (torch.load(paths[w], weights_only=True) for w in ("zero3", "ddp"))
    for key in ("state_dict", "optimizer_states"):
        assert_close(saved[key], expected[key], key)
    # DDP reads zero3's file as its own, which it is.
    for size, writer, reader in ((2, "ddp", "zero1"), (3, third, "zero3")):
        for found, after in ranks(size).run(fit, name, reader, "", paths[writer]):
            assert found == pytest.approx(losses[-len(found) :], rel=1e-4)
            for key, value in after.items():
                torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5)
