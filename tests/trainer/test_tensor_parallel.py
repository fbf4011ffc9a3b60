"""Tensor parallelism where DDP is no measure: random numbers, bytes, others' files, copies.

Its numbers and files are rows of `tests/cases/tensor_parallel.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_zero import MemoryMonitor, ZeROStrategy, estimate
from lightning_zero.comm import Sent
from lightning_zero.plan import cut_of
from tests.oracle.by_trainer import Stop, make_trainer
from tests.oracle.models import GPT
from tests.oracle.models import TransformerBlock as Block
from tests.oracle.projects import Trace
from tests.oracle.ranks import Pools
from tests.oracle.sharded import padded
from tests.oracle.tensor_parallel import Model, loader, parallelize

CUT: dict[str, Any] = {"tensor_parallel_size": 2, "min_num_params": 0}


def fit(
    folder: str, model: Any, strategy: Any, path: str | None = None, callbacks: Any = ()
) -> dict[str, Any]:
    """Three steps; a dictionary has the arguments of our strategy."""
    chosen = ZeROStrategy(**strategy) if isinstance(strategy, dict) else strategy
    options: dict[str, Any] = {"max_steps": 3, "use_distributed_sampler": True}
    trainer = make_trainer(chosen, folder, callbacks=callbacks, **options)
    trainer.fit(model, loader(), ckpt_path=path, weights_only=True if path else None)
    return {"losses": model.losses, "weights": Trace.of(model).params, "trainer": trainer}


# -- random numbers --------------------------------------------------------------------------------


class _Unseeded(Model):
    """Begins with other values on each rank, and drops at random."""

    def configure_model(self) -> None:
        self.net = GPT(dropout=0.5)
        with torch.no_grad():
            self.net.scale.add_(dist.get_rank())
        parallelize(self.net, self.device_mesh["tensor_parallel"], by_sequence=False)

    def on_train_end(self) -> None:
        """Note the parameters of which each rank of a group has a copy."""
        pieces = self.trainer.strategy.engine.sharded.pieces
        copies = [piece for piece in pieces if cut_of(piece.parameter) is None]
        self.copies = {piece.range.slot.name: piece.detach().clone() for piece in copies}


def _unseeded(folder: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(dist.get_rank())
    module = _Unseeded()
    found = fit(folder, module, {"stage": 3, **CUT, "gather_bits": 8, "reduce_bits": 8})
    return found["losses"], found["weights"], module.copies


def test_ranks_of_a_group_begin_drop_and_round_alike(ranks: Pools, tmp_path: Path) -> None:
    losses, weights, copies = zip(*ranks(4).run(_unseeded, str(tmp_path)), strict=True)
    assert losses[0] == losses[1] != losses[2] == losses[3]
    assert set(copies[0]) >= {"net.scale", "net.norm.weight", "net.blocks.0.out.bias"}
    for rank in range(4):
        for found, expected in (copies[rank], copies[rank // 2 * 2]), (weights[rank], weights[0]):
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


# -- models on meta --------------------------------------------------------------------------------


class _Scaled(GPT):
    def reset_parameters(self) -> None:
        self.scale.fill_(1.5)


class _OnMeta(Model):
    """Built without memory, and initialized a unit at a time."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = _Scaled()
        if self.device_mesh is not None:
            parallelize(self.net, self.device_mesh["tensor_parallel"], by_sequence=True)


def _on_meta(folder: str, strategy: dict[str, Any]) -> Any:
    torch.manual_seed(3 + torch.distributed.get_rank())
    return fit(folder, _OnMeta(), {"stage": 3, "units": {Block}, **strategy})["weights"]


@pytest.mark.slow
def test_a_model_on_meta_has_the_values_of_one_that_is_not_cut(
    ranks: Pools, tmp_path: Path
) -> None:
    whole = ranks(2).run(_on_meta, str(tmp_path), {})[0]
    for found in ranks(4).run(_on_meta, str(tmp_path), CUT):
        torch.testing.assert_close(found, whole, rtol=2e-5, atol=2e-5)


# -- bytes -----------------------------------------------------------------------------------------


def _sent(folder: str, strategy: dict[str, Any]) -> Any:
    monitor = MemoryMonitor()
    trainer = fit(folder, Model(), strategy, callbacks=[monitor])["trainer"]
    return dict(trainer.strategy.traffic), monitor.measured["step"]


def _parts() -> dict[str, list[int]]:
    """By unit: the elements of each parameter that one rank of a tensor-parallel group has."""
    parts: dict[str, list[int]] = {}
    for name, parameter in GPT().named_parameters():
        unit = f"net.{name[:8]}" if name.startswith("blocks.") else "root"
        is_whole = "norm" in name or name.endswith(("scale", "out.bias", "down.bias"))
        parts.setdefault(unit, []).append(parameter.numel() // (1 if is_whole else 2))
    return parts


@pytest.mark.parametrize(("stage", "copies"), [(3, 1), (1, 2)])
def test_bytes_are_those_of_the_formulas(
    ranks: Pools, tmp_path: Path, stage: int, copies: int
) -> None:
    """Formulas of docs/tensor_parallel.md, for 2 data-parallel and 2 tensor-parallel ranks."""
    shards = 2 // copies
    cut = {"stage": stage, "tensor_parallel_size": 2, "units": [Block], "shard": shards}
    sizes = {unit: padded(numels, shards) for unit, numels in _parts().items()}
    expected: dict[tuple[str, str], Sent] = {}
    for unit, size in sizes.items():
        send = size * (shards - 1) // shards
        times = {"gather": 2 if (stage, unit) == (3, "net.blocks.0") else 1, "reduce": 1}
        for verb, number in times.items():
            expected[unit, verb] = Sent(number * send, 4 * number * send, number)
        if copies > 1:
            own = size // shards * (copies - 1) // copies
            for verb in ("replicate reduce", "replicate gather"):
                expected[unit, verb] = Sent(own, 4 * own, 1)
    strategy = ZeROStrategy(**cut)
    predicted = [estimate(Model(), strategy, world_size=4, rank=r).resting for r in range(4)]
    for rank, (sent, held) in enumerate(ranks(4).run(_sent, str(tmp_path), cut)):
        assert sent == expected, rank
        for kind in predicted[0]:
            assert held[kind] == max(one[kind] for one in predicted), kind


def test_ranks_of_a_node_or_a_number_are_one_group() -> None:
    for settings, (cut, shards) in (
        ({"tensor_parallel_size": "node"}, (4, 2)),
        ({"tensor_parallel_size": 2}, (2, 4)),
        ({"tensor_parallel_size": 2, "shard": "node"}, (2, 2)),
        ({}, (1, 8)),
    ):
        division = ZeROStrategy(**settings).settings.division(8, 4)  # type: ignore[arg-type]
        assert (division["tensor_size"], division["num_shards"]) == (cut, shards)


# -- directories of Lightning's own strategy -------------------------------------------------------


class _Sharded(Model):
    """A model that is ready for ModelParallelStrategy, DDP, and ours."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        super().configure_model()
        self.net.scale = nn.Parameter(torch.full((1,), 1.5))  # none that fully_shard refuses
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh: Any = self.device_mesh
            for block in (*self.net.blocks, self.net):
                fully_shard(block, mesh=mesh["data_parallel"])


def _losses(folder: str, strategy: Any, path: str | None = None, saved: str = "") -> list[float]:
    if strategy == "theirs":
        strategy = ModelParallelStrategy(2, 2)
    callbacks = [Stop(saved, 2)] if saved else []
    return fit(folder, _Sharded(), strategy, path, callbacks)["losses"]


def test_a_directory_of_model_parallel_strategy_is_resumed(ranks: Pools, tmp_path: Path) -> None:
    """Its weights, its optimizer's states and its loops, over the same ranks and others."""
    folder, path, plain = str(tmp_path), str(tmp_path / "theirs"), str(tmp_path / "ddp.ckpt")
    ranks(4).run(_losses, folder, "theirs", None, path)
    ranks(2).run(_losses, folder, "ddp", None, plain)
    assert Path(path).is_dir()
    resumed = ranks(2).run(_losses, folder, "ddp", plain)
    ours = ranks(4).run(_losses, folder, {"stage": 3, **CUT}, path)
    for rank, losses in enumerate(ours):
        assert losses == pytest.approx(resumed[rank // 2], rel=2e-5)
    for losses, expected in zip(ranks(2).run(_losses, folder, {}, path), resumed, strict=True):
        assert losses == pytest.approx(expected, rel=2e-5)
