"""The times of offloaded steps and of their files, beside what the ledger counts of bytes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.comm import StepTimes
from lightning_zero.engine import Engine
from lightning_zero.optimizer import staging
from lightning_zero.plan import Offload
from tests.oracle.models import MODELS
from tests.oracle.sharded import shard

CASE = MODELS["transformer"]


def run(
    num_steps: int, **settings: Any
) -> tuple[Engine, list[StepTimes], list[tuple[float, float]]]:
    """Returns the times of steps by the ledger, and when each was begun and over by our clock."""
    engine = shard(CASE.build(), **settings)
    optimizer = torch.optim.AdamW(engine.module.parameters())
    engine.adopt(optimizer)
    found, spans = [], []
    for _ in range(num_steps):
        CASE.loss(engine.module, CASE.batch(4, 0)).backward()
        begin = time.perf_counter()
        optimizer.step()
        spans.append((begin, time.perf_counter()))
        found.append(engine.comm.step_times)
        optimizer.zero_grad()
    engine.close()
    return engine, found, spans


def test_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of two threads go on at once: their time is counted once, and fits into the step."""
    pause, read, requests = 0.005, os.preadv, []

    def slow(*args: Any) -> int:
        requests.append(args)
        time.sleep(pause)
        return read(*args)

    monkeypatch.setattr(staging, "_BATCH_BYTES", 1)
    monkeypatch.setattr(os, "preadv", slow)
    files = {"offload": Offload.of_stage(3, "nvme"), "offload_path": str(tmp_path)}
    engine, found, spans = run(3, **files)
    num_requests = (len(requests) - 4) // 2  # of a step; both files were tried at first
    first, *others = found
    assert first == StepTimes()  # it has read nothing, and no step's end came before
    for times, before, now in zip(others, spans, spans[1:], strict=False):
        assert pause * num_requests / 2 <= times.reading <= times.stepping  # by two threads
        assert 0 < times.writing <= times.stepping
        assert pause < times.waiting <= times.stepping <= times.seconds
        # From one end of a step to the next, each within its span.
        assert now[0] - before[1] <= times.seconds <= now[1] - before[0]
        for verb, nbytes in (("read", times.bytes_read), ("write", times.bytes_written)):
            assert nbytes == engine.comm.traffic["optimizer", verb].bytes > 0
    ledger = engine.comm.transport.ledger
    assert ledger.total_times == others[0].plus(others[1])
    total, text = ledger.total_times, ledger.total_times.describe()
    assert f"{total.waiting / total.seconds:.0%} waiting for files" in text
