"""What the command line says to someone who tries it for the first time."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from lightning_zero.commands import main
from tests.oracle.launch import run_python, run_script


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code, and everything that is printed."""
    try:
        code = main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_help_has_a_description_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--help")
    assert code == 0
    assert "PyTorch Lightning\nmodules with weights, gradients and optimizer states" in text
    assert "lightning-zero estimate 10B --ranks 8 --device-memory 80GB" in text
    assert "``" not in text
    for command in ("estimate", "inspect", "convert"):
        assert f"    {command}" in text
        code, own = said(capsys, command, "--help")
        assert code == 0
        assert "``" not in own


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--version")
    assert code == 0
    assert text.startswith(f"lightning-zero {version('lightning-zero')}, torch ")
    assert f"lightning {version('lightning')}" in text


IMPORTS = """
import sys
sys.orig_argv[1:] = {words}
from lightning_zero.commands import main
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "words", [["-m", "lightning_zero", "estimate", "--help"], ["/bin/lightning-zero", "--version"]]
)
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    run_python(["-c", IMPORTS.format(words=words)], fresh=True)


def test_a_closed_pipe_is_no_error() -> None:
    """As in ``lightning-zero estimate 1B | head -1``."""
    script = """
import os
import sys
from lightning_zero.commands import main
receiver, sender = os.pipe()
os.close(receiver)
os.dup2(sender, 1)
sys.stdout = os.fdopen(1, "w")
sys.exit(main(["estimate", "1B"]))
"""
    assert run_script(script, launcher="plain").stderr == ""


MODULES = """
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel  # not the file's own


class Inner(torch.nn.Linear):
    pass


class Any(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = Inner(4, 4)

    def training_step(self, batch, {rest}):
        return self.layer(batch).sum()


class Another(Any):
    pass
"""


def test_estimate_lists_the_modules_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "listed_modules.py"
    path.write_text(MODULES.format(rest="batch_idx"))
    choices = f"{path}:Any or {path}:Another"
    code, text = said(capsys, "estimate", str(path))
    assert (code, text) == (1, f"lightning-zero: Expected a class of {path}: {choices}.\n")
    code, text = said(capsys, "estimate", f"{path}:Nothing")
    assert code == 1
    assert text.endswith(f"it has no 'Nothing'. Expected {choices}.\n")

    bare = tmp_path / "bare_modules.py"
    bare.write_text("import torch\nclass Net(torch.nn.Linear): pass\n")
    assert f"Expected a class of {bare}: {bare}:Net." in said(capsys, "estimate", str(bare))[1]
    empty = tmp_path / "no_modules.py"
    empty.write_text("import torch\n")
    assert "it defines no module" in said(capsys, "estimate", str(empty))[1]
    assert "there is no file gone.py" in said(capsys, "estimate", "gone.py")[1]


@pytest.mark.parametrize("rest", ["_", "*args", "i, *, flag=1"])
def test_the_step_calls_its_second_argument_as_it_likes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rest: str
) -> None:
    """The Trainer gives it by position."""
    path = tmp_path / "step.py"
    path.write_text(MODULES.format(rest=rest))
    words = ("--batch", "float32[3,4]", "--optimizer", "sgd", "--ranks", "2", "--stages", "3")
    code, text = said(capsys, "estimate", f"{path}:Any", *words)
    assert code == 0
    assert "\nAny, 20 parameters, 32-true, SGD, batch float32[3,4]\n" in text
    assert "\nactivations " in text


def test_estimate_explains_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "estimate", "1B", "--ranks", "2", "4")
    assert code == 0
    assert text.count("\npeak: the largest total at one instant") == 1
    assert "\nsaved: how much lower the peak is than that of ddp." in text
    alone = said(capsys, "estimate", "1B", "--stages", "2", "3")[1]
    assert "than that of zero2." in alone
    assert "zero1" not in alone
