"""Checkpoints of hybrid sharding: what plain sharding would write, resumed either way."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.checkpoint import (
    DirectorySave,
    Provenance,
    Saver,
    module_state,
    optimizer_state,
)
from tests.oracle.ranks import Pools
from tests.oracle.resharding import (
    NUM_AFTER,
    NUM_BEFORE,
    build,
    build_mixing,
    resume,
    shard,
    steps,
)


def _save(path: str, stage: int, build: Any, how: dict[str, Any], num_shards: Any) -> list[float]:
    """Train, save, and train on: the uninterrupted run."""
    model, optimizers, engine = shard(stage, "32-true", build, shard=num_shards)
    steps(model, optimizers, 0, NUM_BEFORE)
    states = [optimizer_state(o, engine, f"optimizer {n}") for n, o in enumerate(optimizers)]
    checkpoint = {"state_dict": module_state(model, engine), "optimizer_states": states}
    provenance = Provenance(stage, engine.comm.control.world_size, "32-true")
    Saver(engine.comm.control).save(checkpoint, path, provenance, **how)
    return steps(model, optimizers, NUM_BEFORE, NUM_AFTER)


@pytest.mark.parametrize("build", [build, build_mixing])
def test_the_file_is_that_of_one_copy(ranks: Pools, tmp_path: Path, build: Any) -> None:
    of_copies, of_one = str(tmp_path / "copies.ckpt"), str(tmp_path / "one.ckpt")
    copies = ranks(4).run(_save, of_copies, 3, build, {}, 2)
    one = ranks(4).run(_save, of_one, 3, build, {}, "all")
    # All ranks train on the same rows, so that no sum has a rounding.
    assert copies == one
    found, expected = (torch.load(path, weights_only=True) for path in (of_copies, of_one))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if build is not build_mixing:
        for world, num_shards in ((4, 2), (4, "all"), (2, 1)):
            resumed = ranks(world).run(resume, [of_copies], 3, "32-true", shard=num_shards)
            assert resumed[0][0] == pytest.approx(copies[0], rel=1e-6)


def test_the_directory_has_each_shard_once(ranks: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "copies")
    module, optimizers = build()
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    names = [[known[id(p)] for g in o.param_groups for p in g["params"]] for o in optimizers]
    how = {"kind": partial(DirectorySave, parameters=names)}
    before = ranks(4).run(_save, path, 2, build, how, 2)
    resumed = ranks(4).run(resume, [path], 3, "32-true", shard=2)
    assert resumed[0][0] == pytest.approx(before[0], rel=1e-6)
