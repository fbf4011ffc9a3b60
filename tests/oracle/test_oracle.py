"""The oracle fails when it should: ranks, and comparisons of numbers."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.oracle.parity import distance_in_ulps, require_same
from tests.oracle.projects import Trace
from tests.oracle.ranks import Pool, RankError


def fail_alone() -> None:
    dist.barrier()
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == 1:
        assert sum([1, 2]) == dist.get_world_size() + 5
    dist.barrier()


def sleep_alone() -> None:
    time.sleep(600.0 * (1 - dist.get_rank()))


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fall_out_of_step() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def draw() -> tuple[int, Any]:
    """Leave something behind, and return what a call begins with."""
    found = os.environ.get("LEFT_BEHIND"), torch.get_default_dtype(), torch.rand(1).item()
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    return os.getpid(), found


FAILURES: list[tuple[Callable[[], None], float, tuple[str, ...]]] = [
    (
        fail_alone,
        300.0,
        (
            "--- rank 1 raised", r"assert 3 == \(2 \+ 5\)", "rank 1 was here",
            "--- rank 0 hangs: no answer within 1 s of the first failure", "in barrier",
        ),
    ),
    (sleep_alone, 5.0, ("rank 0 of 2 failed", "--- rank 0 hangs: no answer", "in sleep_alone")),
    (die, 300.0, ("rank 1 died with SIGKILL",)),
    (fall_out_of_step, 300.0, ("returned, but the ranks are out of step after it",)),
]  # fmt: skip


def test_ranks_that_fail_say_where_and_are_replaced() -> None:
    pool = Pool(2, grace=1.0)
    for function, timeout, texts in FAILURES:
        first, second = pool.run(draw), pool.run(draw)
        assert first == second
        assert first[0][1] == first[1][1] == (None, torch.float32, first[0][1][2])
        with pytest.raises(RankError) as caught:
            pool.run(function, timeout=timeout)
        for text in texts:
            assert re.search(text, str(caught.value)), str(caught.value)
        for pid, _ in first:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    pool.kill()


def test_disagreement_is_named() -> None:
    one, two = (Trace({"a": torch.ones(3), "b": torch.ones(2)}, losses=[0.5]) for _ in range(2))
    require_same(two, one)
    two.params["b"][1] *= 1.001
    with pytest.raises(AssertionError, match=r"^b is off by .* ulps"):
        require_same(two, one)
    two.params["b"][1] = torch.nan
    with pytest.raises(AssertionError, match="b is off by inf ulps"):
        require_same(two, one, ulps=1e9)
    two.params["b"][1], two.losses = 1.0, [0.6]
    with pytest.raises(AssertionError, match="losses/0 is"):
        require_same(two, one)
    target, eps = torch.tensor([1.0, 2.0**-20]), torch.finfo(torch.float32).eps
    assert distance_in_ulps(target.clone(), target) == 0
    assert distance_in_ulps(target + torch.tensor([0, eps]), target) == 1
    assert distance_in_ulps(torch.tensor([7]), torch.tensor([8])) == math.inf
    overflow = torch.tensor([math.inf, 1.0])
    assert distance_in_ulps(torch.tensor([math.inf, 1 + eps]), overflow) == 1
    assert distance_in_ulps(torch.tensor([-math.inf, 1.0]), overflow) == math.inf
