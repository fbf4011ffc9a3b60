"""The recipes are configurations of LightningCLI, and fit the memory that they say."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero import ZeROStrategy, estimate
from lightning_zero.memory import Estimate
from lightning_zero.plan import Settings, strategy_arguments
from tests.oracle.ranks import ROOT

RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
EXAMPLE = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "train_gpt.py")))
GB = 10**9


class Parser(EXAMPLE.CLI):  # type: ignore[name-defined,misc]
    """The example's command line, which builds nothing."""

    def instantiate_classes(self) -> None:
        pass


def read(path: Path) -> tuple[Any, Settings]:
    """A recipe as the command line reads it, and the settings of its strategy."""
    config = Parser(EXAMPLE.GPT, EXAMPLE.Text, run=False, args=["--config", str(path)]).config
    strategy = config.trainer.strategy
    if isinstance(strategy, str):
        return config, Settings.of(**strategy_arguments(strategy))
    assert strategy.class_path == "lightning_zero.ZeROStrategy"
    return config, ZeROStrategy(**strategy.init_args.as_dict()).settings


def predict(config: Any, strategy: str | Settings) -> Estimate:
    """The bytes of a rank; without activations under DDP and with tensor parallelism."""
    trainer, model, data = config.trainer, config.model.as_dict(), config.data
    batch = torch.zeros(data.batch_size, data.context + 1, dtype=torch.int64, device="meta")
    if isinstance(strategy, Settings) and strategy.shard == "node":
        strategy = dataclasses.replace(strategy, shard=trainer.devices)
    has_activations = strategy != "ddp"
    if isinstance(strategy, Settings) and strategy.tensor_parallel_size > 1:
        has_activations = False
    with torch.device("meta"):
        module = EXAMPLE.GPT(**model)
    return estimate(
        module,
        strategy,
        world_size=trainer.devices * trainer.num_nodes,
        precision=trainer.precision,
        optimizer=torch.optim.AdamW,
        batch=batch if has_activations else None,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_what_it_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train_gpt.py"])  # of which Lightning warns
    text = path.read_text()
    config, settings = read(path)
    found, under_ddp = predict(config, settings), predict(config, "ddp")
    (said,) = re.findall(r"^# ([\d.]+) billion parameters", text)
    assert under_ddp.num_parameters == pytest.approx(float(said) * GB, rel=0.05)
    (limit,) = re.findall(r"GPUs? of (\d+) GB", text)
    beside = re.findall(r"([\d.]+) GB beside its activations", text)
    if beside:
        assert found.peak.total == pytest.approx(float(beside[0]) * GB, rel=0.02)
    else:
        assert found.peak.total > 0.5 * int(limit) * GB
    assert found.peak.total < 0.95 * int(limit) * GB
    assert under_ddp.peak.total > int(limit) * GB
    host = int((re.findall(r"(\d+) GB of host memory", text) or [0])[0]) * GB
    assert 0.5 * host <= sum(found.host.values()) * config.trainer.devices <= host
    if "without which they do not fit" in text:
        whole = dataclasses.replace(settings, activation_checkpointing=False)
        assert predict(config, whole).peak.total > int(limit) * GB
    for each in re.findall(r"(\d+) GB each", text):
        assert found.whole == pytest.approx(int(each) * GB, rel=0.05)
    (command,) = re.findall(r"--config (\S+)", text)
    assert ROOT / command == path
