"""Every way to start the ranks: scripts of their own, for what the pool cannot imitate."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.oracle.launch import FORGET, run_script
from tests.oracle.projects import Regression, fit, rows
from tests.oracle.ranks import Pools

# One process of it is the same run under every launcher, so all print the same digest.
FIT = """
import os, sys, tempfile
import torch
import lightning_zero
from lightning.pytorch import Trainer
from tests.oracle.launch import say
from tests.oracle.projects import Regression, make_trainer, rows

class Gloomy(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            raise ArithmeticError("rank 1 gave up")
        return super().training_step(batch, batch_idx)

def fail(**launch):
    try:
        make_trainer("zero3_fork", **launch).fit(Gloomy(), rows())
    except Exception as error:
        say(str(error).strip().rpartition("ArithmeticError: ")[2])

def main():
    launch = dict(devices=int(os.environ["NPROC"]), num_nodes=int(os.environ.get("NODES", 1)))
    launch["max_epochs"] = 2
    # DDP's sampler shuffles, also for one device; plain Lightning has none.
    launch["use_distributed_sampler"] = launch["devices"] * launch["num_nodes"] > 1
    for name in sys.argv[1:]:
        if name == "fail_fork":
            fail(**launch)
            continue
        module = Regression()
        trainer = make_trainer(name, **launch)
        trainer.fit(module, rows(16, batch_size=2), rows(8, batch_size=2, seed=1))
        if "_" in name:  # this process has launched the ranks, and belongs to no run
            with tempfile.TemporaryDirectory() as folder:
                trainer.save_checkpoint(f"{folder}/a.ckpt")
                trainer._checkpoint_connector.restore(f"{folder}/a.ckpt")
        weights = sum(p.detach().double().abs().sum() for p in module.parameters())
        loss = trainer.callback_metrics["val_loss"]
        say(f"rank {trainer.global_rank} {trainer.world_size} {weights:.6f} {loss:.6f}")

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def digest(ranks: Pools) -> str:
    """The line that each of two ranks prints, less its number."""
    first, second = ranks(2).run(_digest)
    assert first == second
    return first


def _digest() -> str:
    run = fit(Regression(), "zero3", max_epochs=2, data=(rows(), rows(8, seed=1)))
    weights = sum(p.double().abs().sum() for p in run.params.values())
    return f"2 {weights:.6f} {run.metrics['val_loss']:.6f}"


def _lines(stdout: str) -> list[str]:
    return sorted(line for line in stdout.splitlines() if line.startswith("rank "))


def test_two_nodes_of_torchrun(digest: str) -> None:
    finished = run_script(FIT, "zero3", nproc=1, nodes=2, launcher="torchrun", env={"NODES": "2"})
    assert _lines(finished.stdout) == [f"rank 0 {digest}", f"rank 1 {digest}"]


def test_fork_brings_weights_and_metrics_back(digest: str) -> None:
    lines = _lines(run_script(FIT, "fail_fork", "zero3_fork", "zero2_notebook").stdout)
    assert lines == [f"rank 0 {digest}", f"rank 0 {digest}", "rank 1 gave up"]  # sorted


@pytest.mark.slow
def test_spawn_brings_weights_and_metrics_back(digest: str) -> None:
    lines = _lines(run_script(FIT, "zero3_fork", "zero1_spawn", fresh=True).stdout)
    assert lines == [f"rank 0 {digest}"] * 2


ALONE = ["zero3_fork", "zero2_notebook", "zero1", "zero3"]


def test_one_device_is_plain_lightning_under_every_launcher() -> None:
    """One after another in one script, which also trains without a strategy before and after."""
    lines = _lines(run_script(FIT, "auto", *ALONE, "auto", nproc=1).stdout)
    assert len(lines) == len(ALONE) + 2
    assert len(set(lines)) == 1
    assert lines[0].startswith("rank 0 1 ")


QUEUE = """
import os, signal, sys
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from tests.oracle.launch import say
from tests.oracle.projects import Regression, make_trainer, rows

class Interrupted(Regression):
    # The signal comes to rank 0 before a step, and to rank 1 after all have answered it.
    def on_train_batch_start(self, batch, batch_idx):
        self.place = self.current_epoch, batch_idx
        if self.place == (0, 3) and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_after_backward(self):
        if self.place == (1, 1) and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

for module in (Interrupted(), Regression()):
    trainer = make_trainer("zero3", devices=2, max_epochs=2, default_root_dir=sys.argv[1])
    assert type(trainer.strategy.cluster_environment) is SLURMEnvironment
    trainer.fit(module, rows(), rows(8, seed=1))
    weights = sum(p.detach().double().abs().sum() for p in module.parameters())
    loss = trainer.callback_metrics["val_loss"]
    say(f"rank {trainer.global_rank} {trainer.world_size} {weights:.6f} {loss:.6f}")
    say(f"{len(module.losses)} steps")

class Ended(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0 and self.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_after_backward(self):
        if len(self.losses) == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

folder = sys.argv[1] + "/end"
saves = dict(callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True)
trainer = make_trainer("zero3", devices=2, default_root_dir=folder, **saves)
module = Ended()
try:
    trainer.fit(module, rows())
except SystemExit as end:
    say(f"{type(end).__name__} after {len(module.losses)}")
saved = torch.load(folder + "/on_exception.ckpt")["state_dict"]
assert all(torch.equal(saved[name], p) for name, p in module.named_parameters())
"""


def test_slurm_starts_the_ranks_and_queues_them_again(digest: str, tmp_path: Path) -> None:
    """At the signal to make room one checkpoint is written, from which the next job goes on.

    The signal finds each rank somewhere else; all answer it at the same batch. So they do the
    signal to end.
    """
    command = tmp_path / "scontrol"
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    command.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    finished = run_script(QUEUE, tmp_path, launcher="srun", env=path)
    assert _lines(finished.stdout) == [f"rank 0 {digest}"] * 2 + [f"rank 1 {digest}"] * 2
    steps = [line for line in finished.stdout.splitlines() if line.endswith("steps")]
    assert steps == ["8 steps", "4 steps"] * 2
    assert finished.stdout.count("SIGTERMException after 2") == 2
    assert (tmp_path / "asked").read_text() == "requeue 4242\n"
    assert len(list(tmp_path.glob("hpc_ckpt_*.ckpt"))) == 1


# ------------------------------------------------------------------------------- the command line


QUIET = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_zero.ZeROStrategy
    init_args: {stage: 2, reduce_dtype: float64, prefetch: 3}
"""


WITHOUT_IMPORT = """
import sys
import pytorch_lightning
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
assert "lightning_zero" not in sys.modules
cli = LightningCLI(BoringModel, args=["fit", "--config", sys.argv[1]], save_config_callback=None)
strategy = cli.trainer.strategy
settings = strategy.settings
print(type(strategy).__name__, settings.stage, settings.reduce_dtype, settings.prefetch)
print("zero3" in pytorch_lightning.strategies.StrategyRegistry)
"""


def test_yaml_needs_no_import(tmp_path: Path) -> None:
    """Our names are in the registry of the other package too, which was imported before us."""
    config = tmp_path / "zero.yaml"
    config.write_text(QUIET)
    finished = run_script(FORGET + WITHOUT_IMPORT, config, launcher="plain", cwd=tmp_path)
    assert finished.stdout.splitlines() == ["ZeROStrategy 2 torch.float64 3", "True"]
