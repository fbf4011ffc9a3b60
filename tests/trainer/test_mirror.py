"""Projects that import `pytorch_lightning`: same names, same numbers, no needless import."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_zero.mirror
from tests.oracle.launch import FORGET, run_python, run_script
from tests.oracle.ranks import Pools

LOADED = "import sys; print('pytorch_lightning' in sys.modules)"
TRAINER = """
import pytorch_lightning as pl
strategy = lightning_zero.mirror.ZeROStrategy(2)
t = pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, precision="bf16-mixed")
print(isinstance(strategy, pl.strategies.DDPStrategy))
print(isinstance(strategy, lightning_zero.ZeROStrategy))
print(t.strategy.settings.stage, type(t.precision_plugin).__module__)
print(isinstance(lightning_zero.mirror.MemoryMonitor(), pl.Callback))
print(isinstance(lightning_zero.MemoryMonitor(), pl.Callback))
print('zero3' in pl.strategies.StrategyRegistry)
"""
FOUND = ["True", "False", "2 lightning_zero.mirror.trainer.precision", "True", "False", "True"]
FABRIC = """
from lightning_fabric import Fabric
fabric = Fabric(strategy="zero3", accelerator="cpu", devices=1)
print(lightning_zero.mirror.fabric.ZeROStrategy is type(fabric.strategy))
print(fabric.strategy.precision.__class__ is lightning_zero.mirror.fabric.FabricPrecision)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (
            f"import lightning_zero\n{LOADED}\nimport lightning_zero.mirror\n{TRAINER}{FABRIC}",
            ["False", *FOUND, "True", "True"],
        ),
        (f"import pytorch_lightning\nimport lightning_zero\n{TRAINER}", FOUND),
        (f"import lightning_fabric\nimport lightning_zero\n{FABRIC}", ["True", "True"]),
    ],
    ids=["by the user", "after it", "after fabric"],
)
def test_names_are_there_when_the_mirror_is(code: str, printed: list[str]) -> None:
    """A Trainer knows its own package's classes only, and no other package is imported for us."""
    assert run_python(["-c", FORGET + code]).stdout.splitlines() == printed


BRIEF: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 2,
    "limit_train_batches": 4,
    "limit_val_batches": 2,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def train(strategy: str) -> str:
    """Print the sums of weights, in a line, as scripts that launch ranks do."""
    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel

    torch.manual_seed(0)
    module, quiet = BoringModel(), {"logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=strategy, gradient_clip_val=0.1, **BRIEF, **quiet)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    return " ".join(f"{value.double().abs().sum():.6f}" for value in module.parameters())


BY_PATH = {"class_path": "lightning_zero.mirror.ZeROStrategy", "init_args": {"stage": 2}}


def run_command_line(folder: str, strategy: Any, *words: str) -> Any:
    """LightningCLI of the mirror, as a project's script would start it."""
    from pytorch_lightning.cli import LightningCLI
    from pytorch_lightning.demos.boring_classes import BoringModel

    keep = {"dirpath": folder, "filename": "{epoch}", "save_top_k": -1}
    callbacks = [
        {"class_path": "lightning_zero.mirror.MemoryMonitor"},
        {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": keep},
    ]
    logger = {"class_path": "pytorch_lightning.loggers.CSVLogger"}
    given = {**BRIEF, "strategy": strategy, "callbacks": callbacks, "log_every_n_steps": 1}
    given["logger"] = [{**logger, "init_args": {"save_dir": folder}}]
    config = Path(folder) / f"{dist.get_rank()}.yaml"
    config.write_text(json.dumps({"trainer": given}))
    sys.argv = ["main"]  # LightningCLI warns of arguments that it was given twice
    torch.manual_seed(0)
    args = ["fit", "--config", str(config), *words]
    return LightningCLI(BoringModel, args=args, save_config_callback=None)


def resume_from_command_line(folder: str) -> set[str]:
    """Train, resume half-way under another name and under DDP; returns what is logged."""
    cli = run_command_line(folder, BY_PATH)
    assert isinstance(cli.trainer.strategy, lightning_zero.mirror.ZeROStrategy)
    assert cli.trainer.strategy.settings.stage == 2
    assert cli.trainer.global_step == 8
    expected = dict(cli.model.named_parameters())
    for other, words in (("zero3", ()), ("ddp", ("--trainer.callbacks=null",))):
        resumed = run_command_line(folder, other, f"--ckpt_path={folder}/epoch=0.ckpt", *words)
        assert resumed.trainer.global_step == 8
        torch.testing.assert_close(
            dict(resumed.model.named_parameters()), expected, rtol=1e-6, atol=1e-7
        )
    metrics = Path(cli.trainer.loggers[0].log_dir) / "metrics.csv"
    return set(metrics.read_text().splitlines()[0].split(",")) if dist.get_rank() == 0 else set()


def test_command_line_monitors_and_checkpoints_of_the_mirror(ranks: Pools, tmp_path: Path) -> None:
    names = ranks(2).run(resume_from_command_line, str(tmp_path))[0]
    assert {"memory/step/weights", "memory/backward/gradients"} <= names


LAUNCH = """
from tests.trainer.test_mirror import train

if __name__ == "__main__":
    print(train("zero2_fork"))
"""


def test_ranks_are_forked_under_the_mirror(ranks: Pools) -> None:
    assert ranks(2).run(train, "ddp")[0] in run_script(LAUNCH).stdout.splitlines()
