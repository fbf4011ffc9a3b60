"""The lines that a strategy prints when training begins, and whether what they predict is true."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_zero.engine import Engine, open_engines
from lightning_zero.memory import explained_memory, summary
from lightning_zero.memory.summary import free_of_host, of_device
from lightning_zero.plan import Settings
from tests.oracle.models import Blocks
from tests.oracle.projects import Regression, make_trainer, rows
from tests.oracle.ranks import Pools

WIDTH = 64


def _lines(stage: int) -> list[str]:
    module = Blocks(3, WIDTH)
    matrices = [p for p in module.parameters() if p.ndim == 2]
    vectors = [torch.optim.SGD([p]) for p in module.parameters() if p.ndim < 2]
    engine = Engine(module, Settings(stage, min_num_params=1))
    for one in (*vectors, torch.optim.Muon(matrices)):
        engine.adopt(one)
    text = summary(engine, "a plain file", 2)
    engine.close()
    return text.splitlines()


def test_a_summary_is_short(ranks: Pools) -> None:
    for head, *lines in ranks(2).run(_lines, 3):
        assert head == "ZeRO stage 3 over 2 ranks"
        assert len(lines) < 8
        assert all(len(line) <= 88 for line in lines if "optimizer" not in line)
        assert all(line[:2] == "  " and line[13] == " " != line[14] for line in lines)
        first, second = [line[14:] for line in lines if line.startswith("  optimizer")]
        assert first.startswith("10 x SGD")
        assert second.startswith("Muon")


class Dice(torch.optim.SGD):
    """Draws numbers in a step."""

    def step(self, closure: Any = None) -> Any:
        random.random()
        torch.rand(1)
        return super().step(closure)


def _unforeseen() -> list[tuple[str, bool]]:
    found = []
    for make in (torch.optim.LBFGS, Dice):
        module = Blocks(1, WIDTH)
        engine = Engine(module, Settings(3, min_num_params=1))
        engine.adopt(make(module.parameters(), lr=0.1))
        before = random.getstate(), torch.get_rng_state().tolist()
        text = summary(engine, "a plain file", 2)
        found.append((text, before == (random.getstate(), torch.get_rng_state().tolist())))
        engine.close()
    return found


def test_an_optimizer_that_cannot_be_foretold_is_named_and_draws_nothing(ranks: Pools) -> None:
    for (lbfgs, *_), (dice, is_as_before) in ranks(2).run(_unforeseen):
        assert " + activations and states (" in lbfgs
        assert " + activations (" in dice
        assert is_as_before


def test_what_torch_has_reserved_on_a_device_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    gigabytes = 10**9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * gigabytes, 80 * gigabytes))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20 * gigabytes)
    assert of_device(torch.device("cuda", 0)) == " (70.0 GB available)"
    assert of_device(torch.device("meta")) == ""


def test_what_is_free_on_a_host_and_in_a_container(tmp_path: Path) -> None:
    assert free_of_host(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 700 kB\nX: 1 kB\n")
    assert free_of_host(tmp_path) == 700 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("5000\n")
    (group / "memory.stat").write_text("anon 1000\ninactive_file 3000\n")
    (group / "memory.max").write_text("max\n")
    assert free_of_host(tmp_path) == 700 * 1024
    (group / "memory.max").write_text("12000\n")
    assert free_of_host(tmp_path) == 10000
    (group / "memory.max").write_text("1000\n")
    assert free_of_host(tmp_path) == 0


GB = 10**9
OUT_OF_MEMORY = """
lightning_zero: this rank holds 8.00 GB of weights, 4.00 GB of gradients, 8.00 GB of optimizer
states, 3.00 GB of gathered units, {} GB of activations and temporary tensors. Try {} GB.
"""


@pytest.mark.parametrize(
    ("stage", "checkpointing", "activations", "tries"),
    [
        (3, False, 20, "activation_checkpointing=True, which would save up to 15.0"),
        (3, True, 20, 'strategy="zero3_offload", which would save up to 20.0'),
        (2, True, 20, 'strategy="zero3", which would save up to 4.00'),
        (2, False, 1, 'strategy="zero3", which would save up to 4.00'),
    ],
)
def test_running_out_of_memory_says_what_to_try(
    monkeypatch: pytest.MonkeyPatch, stage: int, checkpointing: bool, activations: int, tries: str
) -> None:
    held = {"weights": 8, "gradients": 3, "unreduced": 1, "states": 8, "gathered": 3, "host x": 9}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: (23 + activations) * GB)
    engine: Any = mock.Mock()
    engine.sharded.memory.return_value = {kind: count * GB for kind, count in held.items()}
    engine.sharded.units = [None] * 4
    engine.sharded.settings = Settings(
        stage, device=torch.device("cuda"), activation_checkpointing=checkpointing
    )
    engine.comm.mesh.shard.size = 2
    module = sys.modules[explained_memory.__module__]
    monkeypatch.setattr(module, "open_engines", lambda: [engine])
    error = torch.OutOfMemoryError("no memory")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError), explained_memory():
            raise error
    (note,) = error.__notes__
    assert (
        note.split()
        == OUT_OF_MEMORY.format(f"{activations}.0" + "0" * (activations < 10), tries).split()
    )
    with pytest.raises(RuntimeError) as caught, explained_memory():
        raise RuntimeError("another error")
    assert not hasattr(caught.value, "__notes__")


class _RunsOut(Regression):
    """Runs out of memory in forward, or after backward."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def training_step(self, *args: Any) -> Any:
        if self.place == "forward":
            raise torch.OutOfMemoryError("no memory")
        return super().training_step(*args)

    def on_after_backward(self) -> None:
        raise torch.OutOfMemoryError("no memory")


def _noted() -> list[list[str]]:
    found, earlier = [], open_engines()  # of earlier tests in this process
    module = sys.modules[explained_memory.__module__]
    new = lambda: [engine for engine in open_engines() if engine not in earlier]  # noqa: E731
    for place in ("forward", "backward"):
        with (
            mock.patch.object(module, "open_engines", new),
            pytest.raises(torch.OutOfMemoryError) as caught,
        ):
            make_trainer(3, max_epochs=1).fit(_RunsOut(place), rows())
        found.append(caught.value.__notes__)
    return found


def test_a_run_that_runs_out_of_memory_says_what_it_holds(ranks: Pools) -> None:
    for (forward,), (backward,) in ranks(1).run(_noted):
        assert forward.startswith("lightning_zero: this rank holds ")
        assert " 0 B of gradients, " in forward
        assert " 0 B of gathered units, " not in forward
        assert " 0 B of gradients, " not in backward
