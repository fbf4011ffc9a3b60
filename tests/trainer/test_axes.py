"""Both axes of ranks: bytes and elements of each, other styles, directories of Lightning's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero import ZeROStrategy
from lightning_zero.comm import Sent
from tests.oracle.by_trainer import Stop, make_trainer
from tests.oracle.ranks import Pools
from tests.oracle.sharded import padded
from tests.oracle.tensor_parallel import (
    GPT,
    LENGTH,
    WIDTH,
    WORDS,
    Block,
    Model,
    fit,
    loader,
    parallelize,
)

CUT: dict[str, Any] = {"tensor_parallel_size": 2, "min_num_params": 0}
BATCH = 2  # of `loader`

# -- bytes and elements ----------------------------------------------------------------------------


class _Counted(TorchDispatchMode):
    """Counts the elements that DTensor gives to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # and comes again with what DTensor makes of it
        if "c10d_functional" in func.namespace and "wait" not in str(func):
            self.given[func._schema.name.split("::")[1]] += args[0].numel()
        return func(*args, **(kwargs or {}))


class _Ledger(Callback):
    """Notes what the third step sends along each axis, and what a rank holds after it."""

    def __init__(self) -> None:
        self.by_us: dict[tuple[str, str], Sent] = {}
        self.by_torch = _Counted()
        self.held: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            self.by_torch.__enter__()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            self.by_torch.__exit__(None, None, None)
            self.by_us = dict(trainer.strategy.traffic)
            self.held = trainer.strategy.engine.sharded.memory()


def _noted(folder: str, strategy: dict[str, Any]) -> Any:
    ledger = _Ledger()
    fit(folder, strategy, callbacks=[ledger], max_steps=3)
    return ledger.by_us, dict(ledger.by_torch.given), ledger.held


def _parts() -> dict[str, list[int]]:
    """By unit: the elements of each parameter that one rank of a tensor-parallel group has."""
    parts: dict[str, list[int]] = {}
    for name, parameter in GPT().named_parameters():
        unit = f"net.{name[:8]}" if name.startswith("blocks.") else "root"
        is_whole = "norm" in name or name.endswith(("scale", "out.bias", "down.bias"))
        parts.setdefault(unit, []).append(parameter.numel() // (1 if is_whole else 2))
    return parts


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_and_elements_are_those_of_the_formulas(
    ranks: Pools, tmp_path: Path, stage: int, copies: int
) -> None:
    """Formulas of docs/tensor_parallel.md, for 2 data-parallel and 2 tensor-parallel ranks."""
    cut = {"stage": stage, "tensor_parallel_size": 2, "units": [Block], "shard": 2 // copies}
    shards, expected = 2 // copies, dict[tuple[str, str], Sent]()
    sizes = {unit: padded(numels, shards) for unit, numels in _parts().items()}

    def note(unit: str, verb: str, elements: int, times: int = 1) -> None:
        expected[unit, verb] = Sent(times * elements, 4 * times * elements, times)

    for unit, size in sizes.items():
        send = size * (shards - 1) // shards
        note(unit, "gather", send, 2 if (stage, unit) == (3, "net.blocks.0") else 1)
        note(unit, "reduce", send)
        if copies > 1:
            for verb in ("replicate reduce", "replicate gather"):
                note(unit, verb, size // shards * (copies - 1) // copies)
    activation, blocks = BATCH * LENGTH * WIDTH, len(GPT().blocks)
    rows, columns = 2 + 2 * blocks, 4 * blocks + 1
    for rank, (sent, given, held) in enumerate(ranks(4).run(_noted, str(tmp_path), cut)):
        assert sent == expected, rank
        # One sum for each layer cut by rows, forward, and for each cut by columns, backward.
        assert given["all_reduce"] == (rows + columns) * activation
        assert given["all_gather_into_tensor"] == BATCH * LENGTH * WORDS // 2
        whole = 4 * sum(sizes.values())
        assert held["weights"] + held["master"] == (whole if stage == 1 else whole // shards)
        assert held["gradients"] == whole // shards


# -- torch's other styles --------------------------------------------------------------------------


class _LossByParts(Model):
    """A model whose head's inputs are prepared, and whose loss is taken of cut logits."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        self.net = GPT()
        del self.net.scale
        if (mesh := self.device_mesh) is not None:
            parallelize(self.net, mesh["tensor_parallel"], by_sequence=True, with_head=False)
            for style in (
                PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            ):
                parallelize_module(self.net, mesh["tensor_parallel"], {"head": style})

    def forward(self, text: Tensor) -> Any:
        net = self.net
        x = net.embed(text) + net.places(torch.arange(LENGTH).expand_as(text))
        for block in net.blocks:
            x = block(x)
        return net.head(net.norm(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        (text,) = batch
        logits = self(text[:, :-1])
        assert isinstance(logits, DTensor) == (self.device_mesh is not None)
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.losses.append(whole(loss).item())
        return loss

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        with loss_parallel():
            super().backward(loss)


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_a_loss_of_cut_logits_is_that_of_ddp(ranks: Pools, tmp_path: Path) -> None:
    ddp = ranks(2).run(_losses, str(tmp_path), _LossByParts, None)
    cut = {"stage": 3, **CUT}
    for rank, losses in enumerate(ranks(4).run(_losses, str(tmp_path), _LossByParts, cut)):
        assert losses == pytest.approx(ddp[rank // 2], rel=2e-5)


def _losses(
    folder: str,
    kind: type[Model],
    strategy: dict[str, Any] | None,
    path: str | None = None,
    **more: Any,
) -> list[float]:
    model = kind()
    chosen: Any = "ddp" if strategy is None else ZeROStrategy(**strategy)
    options = {"max_steps": 3, "use_distributed_sampler": True, **more}
    make_trainer(dist.get_world_size(), chosen, Path(folder), **options).fit(
        model, loader(), ckpt_path=path, weights_only=True
    )
    return model.losses


# -- directories -----------------------------------------------------------------------------------


class _Sharded(Model):
    """A model that is ready for ModelParallelStrategy, DDP, and ours."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        super().configure_model()
        self.net.scale = nn.Parameter(torch.full((1,), 1.5))  # none that fully_shard refuses
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh: Any = self.device_mesh
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])


def _written(folder: str, path: str) -> list[float]:
    model = _Sharded()
    options: Any = {"max_steps": 3, "use_distributed_sampler": True, "callbacks": [Stop(path, 2)]}
    make_trainer(4, ModelParallelStrategy(2, 2), Path(folder), **options).fit(model, loader())
    return model.losses


def test_a_directory_of_model_parallel_strategy_is_resumed(ranks: Pools, tmp_path: Path) -> None:
    """Its weights, its optimizer's states and its loops, over the same ranks and others."""
    path, plain = str(tmp_path / "theirs"), str(tmp_path / "ddp.ckpt")
    theirs = ranks(4).run(_written, str(tmp_path), path)
    ddp = ranks(2).run(_losses, str(tmp_path), _Sharded, None, callbacks=[Stop(plain, 2)])
    assert Path(path).is_dir()
    resumed = ranks(2).run(_losses, str(tmp_path), _Sharded, None, plain)
    ours = ranks(4).run(_losses, str(tmp_path), _Sharded, {"stage": 3, **CUT}, path)
    uncut = ranks(2).run(_losses, str(tmp_path), _Sharded, {"stage": 1}, path)
    for rank, losses in enumerate(ours):
        assert losses == pytest.approx(resumed[rank // 2], rel=2e-5)
        assert theirs[rank] == pytest.approx(ddp[rank // 2], rel=2e-5)
    for losses, expected in zip(uncut, resumed, strict=True):
        assert losses == pytest.approx(expected, rel=2e-5)
