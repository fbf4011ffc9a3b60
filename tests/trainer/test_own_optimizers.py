"""Users' own optimizers with states in files under a Trainer: numbers and files are zero3's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_zero import ZeROStrategy
from tests.oracle.by_trainer import Rows, make_trainer, world
from tests.oracle.own_optimizers import ByNumber, Layers, Nested, Own
from tests.oracle.ranks import Pools


class Module(Layers):
    optimizer_class: type[Own]

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Stop(Callback):
    """Saves behind the second step of two microbatches each."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 3:
            trainer.save_checkpoint(self.path)


def fit(
    cls: type[Own],
    folder: str,
    *callbacks: Any,
    files: bool = True,
    path: str | None = None,
    **more: Any,
) -> tuple[dict[str, Tensor], Any]:
    """Returns weights, and what the optimizer counted."""
    homes: Any = {"offload_optimizer": "nvme", "offload_weights": "nvme", "offload_path": folder}
    strategy = ZeROStrategy(3, units=(nn.Linear,), min_num_params=0, **(homes if files else {}))
    module = Module()
    module.optimizer_class = cls
    options = {"enable_checkpointing": False, "max_steps": 4, **more}
    trainer = make_trainer(world(), strategy, folder, callbacks=list(callbacks), **options)
    trainer.fit(module, Rows(), ckpt_path=path)
    [optimizer] = trainer.optimizers
    kept = {k: str(v) for k, v in vars(optimizer).items() if k in ("k", "rates", "warmth")}
    steps = [group.get("step") for group in optimizer.param_groups]
    return module.state_dict(), (kept, steps)


def assert_equal(found: Any, expected: Any) -> None:
    assert found[1] == expected[1]
    assert all(torch.equal(value, expected[0][key]) for key, value in found[0].items())


def resumed(folder: str) -> None:
    how: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    paths = {files: f"{folder}/{files}.ckpt" for files in (False, True)}
    whole = fit(Nested, folder, Stop(paths[False]), files=False, **how)
    assert_equal(fit(Nested, folder, Stop(paths[True]), **how), whole)
    for saved, files in ((False, True), (True, False), (True, True)):
        assert_equal(fit(Nested, folder, files=files, path=paths[saved], **how), whole)


def test_resumed_with_and_without_files(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(resumed, str(tmp_path))


def stepped_at_once(folder: str) -> None:
    """Its steps of batches would give other numbers than a step of all."""
    assert_equal(fit(ByNumber, folder), fit(ByNumber, folder, files=False))


def test_what_is_not_known_to_allow_batches(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(stepped_at_once, str(tmp_path))
