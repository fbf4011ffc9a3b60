"""Masters, states and sharded weights in files: the same numbers, and no memory of the process."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint import module_state, optimizer_state
from lightning_zero.comm import StepTimes
from lightning_zero.engine import Engine
from lightning_zero.optimizer import kept_states, staging
from lightning_zero.plan import RECIPES, Offload
from lightning_zero.tensors import Scratch
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools
from tests.oracle.sharded import adamw, adopted, is_in_file, shard

CASE = MODELS["transformer"]


def offload(stage: int, folder: str) -> dict[str, Any]:
    return {"offload": Offload.of_stage(stage, "nvme"), "offload_path": folder}


def states(optimizer: Optimizer) -> Iterator[Tensor]:
    for _, state in kept_states([optimizer]):
        yield from (value for value in state.values() if value.dim())


def step(engine: Engine, optimizer: Optimizer) -> None:
    CASE.loss(engine.module, CASE.batch(4, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped_once(folder: Path) -> tuple[nn.Module, Engine, Optimizer]:
    """An engine with states in files, which are there."""
    model = CASE.build()
    engine, optimizer = adopted(model, adamw, **offload(3, str(folder)))
    step(engine, optimizer)
    return model, engine, optimizer


def test_a_step_that_lacks_memory_may_be_taken_again(tmp_path: Path) -> None:
    expected, engine, optimizer = stepped_once(tmp_path)
    step(engine, optimizer)
    engine.close()
    model, engine, optimizer = stepped_once(tmp_path)
    lacking = mock.patch.object(staging, "StagingMemory", side_effect=OSError("no memory"))
    with lacking, pytest.raises(MemoryError, match="Not enough memory for a step from files"):
        step(engine, optimizer)
    optimizer.step()
    engine.close()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


# ---------------------------------------------------------------------------- staging


def test_a_failing_disk_is_named_and_tears_the_step(tmp_path: Path) -> None:
    for method, words in (("preadv", "Reading"), ("pwritev", "Writing")):
        model, engine, optimizer = stepped_once(tmp_path)
        told = f"{words} [0-9,]+ bytes in '{tmp_path}' failed: Input/output error"
        failing = OSError(errno.EIO, "Input/output error")
        with mock.patch.object(os, method, side_effect=failing), pytest.raises(OSError, match=told):
            step(engine, optimizer)
        for use in (
            optimizer.step,
            partial(module_state, model, engine),
            partial(optimizer_state, optimizer, engine, "optimizer 0"),
        ):
            text = r"half-way: .* Resume from the last checkpoint"
            with pytest.raises(RuntimeError, match=text):
                use()
        assert all(is_in_file(one, str(tmp_path)) for one in states(optimizer))
        engine.close()


def test_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pause, read = 0.005, os.preadv

    def slow(*args: Any) -> int:
        time.sleep(pause)
        return read(*args)

    monkeypatch.setattr(staging, "_BATCH_BYTES", 1)
    monkeypatch.setattr(os, "preadv", slow)
    engine, optimizer = adopted(CASE.build(), adamw, **offload(3, str(tmp_path)))
    found, clock = [], []
    for _ in range(3):
        clock.append(time.perf_counter())
        step(engine, optimizer)
        found.append(engine.comm.transport.ledger.last_times)
    first, *others = found
    assert first == StepTimes()  # it has read nothing, and no step's end came before
    for times, begin in zip(others, clock, strict=False):
        assert pause < times.waiting <= times.stepping <= times.seconds
        assert times.seconds <= time.perf_counter() - begin
        for verb, nbytes in (("read", times.bytes_read), ("write", times.bytes_written)):
            assert nbytes == engine.comm.traffic["optimizer", verb].bytes > 0
    total = engine.comm.transport.ledger.total_times
    assert total == others[0].plus(others[1])
    assert f"{total.waiting / total.seconds:.0%} waiting for files" in total.describe()
    engine.close()


# ---------------------------------------------------------------------------- faults and refusals


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"800 more bytes in offload_path='.*'. Free disk space"):
        Scratch(str(tmp_path)).tensor(100, torch.float64)


def test_files_have_no_names_and_go_with_their_tensors(tmp_path: Path) -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    tensor = Scratch(str(tmp_path)).tensor(1000, torch.float32)
    assert tensor.eq(0).all()
    assert is_in_file(tensor, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= num_files  # garbage of others may close some


WIDTH, DEPTH = 3072, 4
"""Layers of 38 MB, which the allocator takes from the system and gives back one by one."""


def limited(folder: str | None) -> str:
    """Train 38 million elements with 450 MB of memory to take; returns the error, if any."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    files = {} if folder is None else offload(3, folder)
    status = Path("/proc/self/status").read_text()
    data = 1024 * int(status.partition("VmData:")[2].split()[0])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + 450 * 10**6, before[1]))
    try:
        engine, optimizer = adopted(model, adamw, units="leaves", **files)
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close(restore=False)
    except (MemoryError, RuntimeError) as error:
        return str(error) or "no memory"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return ""


def test_states_that_exceed_a_limit_of_memory_train_from_files(
    ranks: Pools, tmp_path: Path
) -> None:
    """Weights and states are 430 MB, gradients 144, and what is gathered comes on top."""
    assert ranks(1).run(limited, str(tmp_path)) == [""]
    assert "memory" in ranks(1).run(limited, None)[0]


def test_sgd_steps_all_of_a_16_bit_parameter_on_the_host(tmp_path: Path) -> None:
    """Torch's fused step would leave most of it unchanged."""
    half = nn.Linear(64, 64).bfloat16()
    before = half.weight.detach().clone()
    engine = shard(half, recipe=RECIPES["bf16-true"], **offload(3, str(tmp_path)))
    optimizer = torch.optim.SGD(half.parameters(), 0.5, fused=True)
    engine.adopt(optimizer)
    half(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    engine.close()
    assert bool((half.weight < before).all())
    assert optimizer.param_groups[0]["fused"] is True
