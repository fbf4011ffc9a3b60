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
    "trainer: {{strategy: {{class_path: lightning_zero.ZeROStrategy, init_args: {{{0}}}}}}}"
)
LightningCLI(BoringModel, args=["fit", "--config", path])
"""
FABRIC = """
import lightning_zero
from lightning.fabric import Fabric
from torch import nn
fabric = Fabric(accelerator="cpu", devices=2, strategy="zero3")
fabric.launch()
fabric.load({0}, {{"model": fabric.setup(nn.Linear(2, 2))}})
"""

MISTAKES = {
    "a strategy that does not exist": (
        TRAINER.format('"strategy": "zero4"', ""),
        "You selected an invalid strategy name: `strategy='zero4'`",
    ),
    "a stage that does not exist": (
        TRAINER.format('"strategy": lightning_zero.ZeROStrategy(stage=4)', ""),
        "ValueError: Expected stage to be 1, 2 or 3, got 4.",
    ),
    "a stage that does not exist in YAML": (
        CLI.format("stage: 4"),
        "Expected a typing.Literal[1, 2, 3]. Got value: 4",
    ),
    "no GPU": (
        TRAINER.format('"strategy": "zero3", "accelerator": "gpu"', ""),
        "No supported gpu backend found!",
    ),
    "a misspelled setting": (
        TRAINER.format('"strategy": lightning_zero.ZeROStrategy(staeg=3)', ""),
        "TypeError: ZeROStrategy has no argument 'staeg'. Did you mean 'stage'?",
    ),
    "a misspelled setting in YAML": (CLI.format("staeg: 3"), "Option 'staeg' is not accepted"),
    "a missing checkpoint": (
        TRAINER.format('"strategy": "zero3"', ', ckpt_path="missing.ckpt"'),
        "FileNotFoundError: Checkpoint file not found: missing.ckpt",
    ),
    "a folder that is no checkpoint in Fabric": (
        FABRIC.format('"."'),
        "ValueError: '.' is not a checkpoint. Expected a .ckpt or .pt file, a safetensors file",
    ),
}


def outputs(folder: Path) -> Iterator[tuple[str, str]]:
    """Make all mistakes; yield what each prints."""
    for name, (script, _) in MISTAKES.items():
        yield name, run_script(script, launcher="plain", check=False, cwd=folder).output


def test_the_last_lines_name_the_mistake(tmp_path: Path) -> None:
    """With ``pytest -s`` they are shown. Only Fabric's are found when ranks have started."""
    for name, output in outputs(tmp_path):
        lines = output.splitlines()[-3:]
        print("\n".join([f"{name}:", *(f"    {line}" for line in lines)]))
        assert MISTAKES[name][1] in "\n".join(lines), (name, lines)
        assert ("Initializing distributed" in output) == ("Fabric" in name), name
        assert output.count("Traceback") <= 1 + ("Fabric" in name), output
