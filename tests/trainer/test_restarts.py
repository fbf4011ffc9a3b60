"""Runs of torchrun of which a rank is killed: they resume, also on another number of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from tests.oracle.launch import run_script
from tests.oracle.projects import Regression, make_trainer, rows
from tests.oracle.ranks import Pools

EPOCHS, STEPS_OF_EPOCH, GLOBAL_BATCH = 8, 2, 12
PLACES = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step")


class Annealed(Regression):
    """With a schedule, which must be resumed too."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def train(world: int, *, module: LightningModule, **options: Any) -> dict[str, Tensor]:
    """Train on the same global batches, shuffled, on any number of ranks; returns the weights."""
    dataset = rows(STEPS_OF_EPOCH * GLOBAL_BATCH).dataset
    # The sampler gives rank r of n the rows r, r + n, ..., so a global batch is the same rows.
    data = DataLoader(dataset, batch_size=GLOBAL_BATCH // world, shuffle=True)
    how = {key: options.pop(key) for key in ("ckpt_path",) if key in options}
    trainer = make_trainer(3, devices=world, max_epochs=EPOCHS, precision="64-true", **options)
    trainer.fit(module, data, **how)
    return {name: value.detach().clone() for name, value in module.named_parameters()}


# The first life ends when a rank is killed. What it leaves is kept for other ranks to resume from.
RESTART = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.oracle.launch import say
from tests.trainer.test_restarts import Annealed, train

folder, kept, place, *fate = sys.argv[1:]
life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])

def die(module, hook):
    def then(*args):
        if (life, module.global_step, rank) == (0, *map(int, fate)):
            os.kill(os.getpid(), signal.SIGKILL)
        return hook(*args)
    return then

module = Annealed()
setattr(module, place, die(module, getattr(module, place)))
if life == 1 and rank == 0:
    shutil.copytree(folder, kept)
saving = dict(enable_checkpointing=True, callbacks=[ModelCheckpoint(folder, save_last=True)])
weights = train(world, module=module, ckpt_path="last", **saving)
say(f"life {life} of {world} ends after {len(module.losses)} steps")
if rank == 0:
    torch.save(weights, Path(folder) / "end.pt")
"""


def undisturbed(world: int) -> dict[str, Tensor]:
    return train(world, module=Annealed())


@pytest.mark.slow
@pytest.mark.parametrize(("world", "later"), [(2, 3), (3, 4), (4, 2)])
def test_a_killed_run_ends_at_the_numbers_of_an_undisturbed_one(
    ranks: Pools, tmp_path: Path, world: int, later: int
) -> None:
    """On as many ranks bit by bit, on more or fewer up to the order of sums in float64."""
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    step = chance.randrange(STEPS_OF_EPOCH + 1, EPOCHS * STEPS_OF_EPOCH)
    place, victim = chance.choice(PLACES), chance.randrange(world)
    print(f"seed {seed}: rank {victim} of {world} is killed in step {step} at {place}")
    folder, kept = tmp_path / "run", tmp_path / "kept"
    folder.mkdir()
    how: dict[str, Any] = {"launcher": "torchrun", "timeout": 180}
    steps = EPOCHS * STEPS_OF_EPOCH - step // STEPS_OF_EPOCH * STEPS_OF_EPOCH

    again = run_script(RESTART, folder, kept, place, step, victim, nproc=world, restarts=1, **how)
    assert "exitcode: -9" in again.output or "Signal 9" in again.output, again.output
    assert again.stdout.count(f"life 1 of {world} ends after {steps} steps") == world, again.output
    expected = ranks(world).run(undisturbed, world)[0]
    found = torch.load(folder / "end.pt")
    assert all(torch.equal(found[name], value) for name, value in expected.items())

    # Nobody is killed in the second command: the step is none.
    other = run_script(RESTART, kept, folder, place, -1, 0, nproc=later, **how)
    assert other.stdout.count(f"life 0 of {later} ends after {steps} steps") == later, other.output
    found = torch.load(kept / "end.pt")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
