"""What only Fabric's checkpoints have: several modules in one, and an end without a teardown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_zero.fabric import ZeROStrategy
from tests.oracle.launch import run_python
from tests.oracle.ranks import Pools

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


def save_twins(folder: str) -> None:
    """Save two modules with the same names under DDP and ours, and load them again."""
    for strategy in ("ddp", ZeROStrategy(3, min_num_params=1)):
        size = dist.get_world_size()
        fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
        fabric.launch()

        def make(seed: int, fabric: Fabric = fabric) -> list[nn.Module]:
            torch.manual_seed(seed)
            modules = [nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)) for _ in range(2)]
            return [fabric.setup(module) for module in modules]

        student, teacher = make(0)
        path = f"{folder}/twins.ckpt"
        fabric.save(path, {"student": student, "teacher": teacher})
        found = torch.load(path, weights_only=True)
        torch.manual_seed(0)
        for name in ("student", "teacher"):
            expected = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)).state_dict()
            for key, value in expected.items():
                assert torch.equal(found[name][key], value), (strategy, name, key)
        other, another = make(1)
        fabric.load(path, {"student": other, "teacher": another})
        x = torch.ones(2, 5)
        for module, loaded in ((student, other), (teacher, another)):
            assert torch.equal(module(x), loaded(x))


def test_modules_with_the_same_names_are_saved_together(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(save_twins, str(tmp_path))
