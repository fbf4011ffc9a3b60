"""Common mistakes: the last three lines on the screen name the mistake, or the cure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.oracle.launch import run_script

TRAINER = """
import lightning_zero
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
how = dict(accelerator="cpu", devices=2, max_steps=1, logger=False, enable_checkpointing=False)
Trainer(**{{**how, {0}}}).fit(BoringModel(){1})
"""
CLI = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
path = "mistake.yaml"
open(path, "w").write(
    "trainer: {strategy: {class_path: lightning_zero.ZeROStrategy, init_args: {staeg: 3}}}"
)
LightningCLI(BoringModel, args=["fit", "--config", path])
"""

MISTAKES = {
    "a strategy that does not exist": (
        TRAINER.format('"strategy": "zero4"', ""),
        "You selected an invalid strategy name: `strategy='zero4'`",
    ),
    "a misspelled setting": (
        TRAINER.format('"strategy": lightning_zero.ZeROStrategy(staeg=3)', ""),
        "TypeError: ZeROStrategy has no argument 'staeg'. Did you mean 'stage'?",
    ),
    "a misspelled setting in YAML": (CLI, "Option 'staeg' is not accepted"),
    "a missing checkpoint": (
        TRAINER.format('"strategy": "zero3"', ', ckpt_path="missing.ckpt"'),
        "FileNotFoundError: Checkpoint file not found: missing.ckpt",
    ),
    "no GPU": (
        TRAINER.format('"strategy": "zero3", "accelerator": "gpu"', ""),
        "No supported gpu backend found!",
    ),
}


def outputs(folder: Path) -> Iterator[tuple[str, str]]:
    """Make all mistakes; yield what each prints."""
    for name, (script, _) in MISTAKES.items():
        yield name, run_script(script, launcher="plain", check=False, cwd=folder).output


def test_the_last_lines_name_the_mistake(tmp_path: Path) -> None:
    """With ``pytest -s`` they are shown. None is found only when ranks have started."""
    for name, output in outputs(tmp_path):
        lines = output.splitlines()[-3:]
        print("\n".join([f"{name}:", *(f"    {line}" for line in lines)]))
        assert MISTAKES[name][1] in "\n".join(lines), (name, lines)
        assert "Initializing distributed" not in output, name


NAMED = """
import lightning_zero, torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

class Named(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        torch.save(checkpoint, "of run 1")
    def load_checkpoint(self, path, *args, **kwargs):
        return torch.load("of run 1", weights_only=False)

how = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
for steps, path in ((1, None), (2, "run 1")):
    trainer = Trainer(strategy="zero3", max_steps=steps, plugins=[Named()], **how)
    trainer.fit(BoringModel(), ckpt_path=path)
    trainer.save_checkpoint("run 1")
print("ended after", trainer.global_step)
"""


def test_a_checkpoint_of_a_plugin_need_not_be_a_path(tmp_path: Path) -> None:
    assert "ended after 2" in run_script(NAMED, launcher="plain", cwd=tmp_path).stdout
