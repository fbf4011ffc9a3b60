"""Checkpoints full of one number, ways to damage them, and what is said of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint import Provenance, Saver, ShardedValue
from lightning_zero.comm import Control
from tests.oracle.ranks import Pool

CPU = torch.device("cpu")
PROVENANCE = Provenance(stage=3, world_size=2, precision="32-true")


def some(control: Control, fill: float, numel: int = 100_000) -> dict[str, Any]:
    """A checkpoint in which everything is ``fill``."""
    edges = [numel * rank // control.world_size for rank in range(control.world_size + 1)]
    start, stop = edges[control.rank], edges[control.rank + 1]
    part = torch.full((stop - start,), fill)
    whole = ShardedValue.of("whole", part, start, (numel,), (1,), control)
    return {"state_dict": {"whole": whole, "plain": torch.full((7,), fill)}, "fill": fill}


@contextlib.contextmanager
def full_disk(*, is_here: bool) -> Iterator[None]:
    """Let no file of this process become larger than 100 kB: what a full disk is to write()."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def saves_to_a_full_disk(save: Callable[..., Any], saver: Saver, path: str) -> list[str]:
    """The errors of two saves, the second in the background, for which rank 1 has no room."""
    control = saver.control
    # In the background: the channel for that is made in the pool's file, which is limited below.
    save(some(control, 1.0), path, PROVENANCE, in_background=True)
    saver.wait()
    with full_disk(is_here=control.rank == 1):
        found = [told(save, some(control, 2.0), path, PROVENANCE)]
        save(some(control, 2.0), path, PROVENANCE, in_background=True)
        found.append(told(saver.wait))
    saver.close()
    return found


def told(function: Any, *args: Any, **kwargs: Any) -> str:
    """Kind and message of the error that a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def same(found: Any, expected: Any) -> None:
    """Compare nested tensors and numbers bit by bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def ordered(value: Any) -> Any:
    """The same with keys in one order; those who write a directory need not keep any."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=str)}
    return [ordered(item) for item in value] if isinstance(value, list) else value


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def damaged(content: bytes, chance: random.Random) -> bytes:
    data = bytearray(content)
    kind = chance.randrange(5)
    place = chance.randrange(len(data))
    if kind == 0:
        del data[place:]
    elif kind == 1:
        data[place] ^= 1 << chance.randrange(8)
    elif kind == 2:
        data[place : place + chance.randrange(1, 200)] = b""
    elif kind == 3:
        data[place:place] = bytes(chance.randrange(256) for _ in range(9))
    else:
        for _ in range(8):
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


def save_forever(path: str, how: dict[str, Any]) -> None:
    """Save 1.0, 2.0, 3.0 ... to one path until somebody kills this rank."""
    control = Control()
    saver = Saver(control)
    for number in itertools.count(1):
        saver.save(some(control, float(number)), path, PROVENANCE, **how)


def kill_in_mid_save(path: Path, chance: random.Random, **how: Any) -> None:
    """Let two ranks save to a path, and kill one of them soon after something is there."""
    pool, victim = Pool(2), chance.randrange(2)
    pids, given = pool.run(os.getpid), (str(path), how)
    with ThreadPoolExecutor(1) as thread:
        ends = thread.submit(pool.answers, save_forever, *given, timeout=90, but=1 - victim)
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.1)
        os.kill(pids[victim], signal.SIGKILL)
        ends.result()
    assert path.exists(), "nothing was saved"
