"""What only Fabric's checkpoints have: an end without a teardown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.launch import run_python

SCRIPT = """
import resource, sys
import torch
from lightning.fabric import Fabric
from lightning_zero.fabric import ZeROStrategy

if __name__ == "__main__":
    strategy = ZeROStrategy(3, async_checkpoint=True)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=1)
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(1000, 1000))
    if sys.argv[2] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, resource.RLIM_INFINITY))
    fabric.save(sys.argv[1], {"model": model, "more": torch.ones(2_000_000)})
    if sys.argv[3:]:
        fabric.strategy.teardown()
"""


@pytest.mark.parametrize(
    ("disk", "waits", "message"),
    [
        ("free", [], ""),
        ("full", [], "The last checkpoint was not written"),
        ("full", ["waits"], "OSError: Saving "),
    ],
)
def test_the_end_of_the_process_waits_for_the_last_save(
    tmp_path: Path, disk: str, waits: list[str], message: str
) -> None:
    """Where the program waits for it by itself, a failure is raised."""
    path = tmp_path / "file.ckpt"
    finished = run_python(["-c", SCRIPT, str(path), disk, *waits], fresh=True, check=False)
    assert (finished.code != 0) == bool(waits), finished.output
    if disk == "free":
        assert torch.load(path, weights_only=True)["model"]["weight"].shape == (1000, 1000)
    else:
        assert not path.exists()
        assert message in finished.stderr
        assert "File too large" in finished.stderr
