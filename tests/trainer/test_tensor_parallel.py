"""Tensor parallelism beside ZeRO: the numbers and files of DDP over the data-parallel ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchmetrics import SumMetric

from lightning_zero import (
    MemoryMonitor,
    ZeROStrategy,
    estimate,
    gathered,
    grad_norm,
)
from lightning_zero.fabric import ZeROStrategy as FabricStrategy
from tests.oracle.by_trainer import make_trainer
from tests.oracle.ranks import Pools
from tests.oracle.tensor_parallel import (
    GPT,
    Model,
    assert_like_ddp,
    fit,
    loader,
    parallelize,
    weights_of,
)

CUT: dict[str, Any] = {"tensor_parallel_size": 2, "min_num_params": 0}


@pytest.fixture(scope="module")
def plain(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """A file of DDP over two ranks, the run that saved it, and one that resumed from it."""
    folder = tmp_path_factory.mktemp("plain")
    path = str(folder / "ddp.ckpt")
    whole = ranks(2).run(fit, str(folder), None, save=path)
    return path, whole, ranks(2).run(fit, str(folder), None, path)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_by_two_ranks_have_the_numbers_of_ddp(ranks: Pools, tmp_path: Path, stage: int) -> None:
    """With activations that are cut, too; in most tests below they are not."""
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "max_steps": 3}
    ddp = ranks(2).run(fit, str(tmp_path), None, **more)
    cut = {"stage": stage, **CUT}
    found = ranks(4).run(fit, str(tmp_path), cut, by_sequence=True, **more)
    assert_like_ddp(found, ddp, 2e-5)
    for one in found[1:]:
        for name, value in one["weights"].items():
            assert torch.equal(value, found[0]["weights"][name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_mixed_precision_moves_weights_as_under_ddp(
    ranks: Pools, tmp_path: Path, stage: int
) -> None:
    # Adam would amplify roundings of gradients near 0.
    more = {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "optimizer": "SGD"}
    more |= {"max_steps": 3}
    ddp = ranks(2).run(fit, str(tmp_path), None, **more)
    found = ranks(4).run(fit, str(tmp_path), {"stage": stage, **CUT}, by_sequence=True, **more)
    torch.manual_seed(0)
    before = {f"net.{name}": p.detach() for name, p in GPT().named_parameters()}
    for name, value in found[3]["weights"].items():
        expected = ddp[0]["weights"][name]
        moved, off = (expected - before[name]).norm(), (value - expected).norm()
        assert off < 0.03 * moved, name


def test_a_file_has_whole_tensors_and_is_resumed_over_other_ranks(
    ranks: Pools, tmp_path: Path, plain: tuple[str, Any, Any]
) -> None:
    """At stage 3; those of other stages and settings are resumed from below."""
    path, (whole, _, resumed) = str(tmp_path / "cut.ckpt"), plain
    cut = {"stage": 3, **CUT}
    ranks(4).run(fit, str(tmp_path), cut, save=path)
    theirs, ours = torch.load(whole), torch.load(path)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=2e-5, atol=2e-5)
    there, here = theirs["optimizer_states"][0], ours["optimizer_states"][0]
    assert here["param_groups"] == there["param_groups"]
    for number, state in there["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(here["state"][number][name], value, rtol=2e-4, atol=2e-5)
    # Two data-parallel ranks resume from either file, whole and cut.
    runs = [(path, cut, 4), (whole, cut, 4), (path, {"stage": 3}, 2), (path, None, 2)]
    for file, strategy, world in runs:
        assert_like_ddp(ranks(world).run(fit, str(tmp_path), strategy, file), resumed, 2e-5)


class Counting(Model):
    """Adds up over ranks what their batches give, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.seen.update(loss.detach())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        for way in ("mean", "sum"):
            self.log(way, loss, sync_dist=True, reduce_fx=way, on_step=False, on_epoch=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of what Lightning calls
            others = self.all_gather(loss, sync_grads=True)
        self.losses += others.tolist()
        return others.square().sum()

    def on_train_epoch_end(self) -> None:
        decide = self.trainer.strategy.reduce_boolean_decision
        self.losses += [decide(self.global_rank == 0), decide(self.global_rank == 0, all=False)]

    def on_train_end(self) -> None:
        self.losses += [
            self.trainer.callback_metrics[name].item() for name in ("mean", "sum", "seen")
        ]


def _counted(folder: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    module = Counting()
    found = fit(folder, strategy, model=module, max_epochs=1, max_steps=-1, limit_train_batches=2)
    return {**found, "is left": module.seen.dist_sync_fn is not None}


def test_ranks_of_a_group_count_once(ranks: Pools, tmp_path: Path) -> None:
    """In logged values, metrics, reductions and gathers, whose gradients are added up."""
    ddp = ranks(2).run(_counted, str(tmp_path), None)
    found = ranks(4).run(_counted, str(tmp_path), {"stage": 3, **CUT})
    assert_like_ddp(found, ddp, 2e-5)
    assert not any(one["is left"] for one in found)


class _Unseeded(Model):
    """A model whose ranks begin with other values, and drop at random."""

    def configure_model(self) -> None:
        self.net = GPT(dropout=0.5)
        with torch.no_grad():
            self.net.scale.add_(dist.get_rank())
        parallelize(self.net, self.device_mesh["tensor_parallel"], by_sequence=False)


def _unseeded(folder: str) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    model = _Unseeded()
    strategy = ZeROStrategy(stage=3, **CUT)
    make_trainer(4, strategy, folder, max_steps=3).fit(model, loader())
    parts = {name: p.detach() for name, p in model.named_parameters()}
    copies = {name: p for name, p in parts.items() if not isinstance(p, DTensor)}
    return {"losses": model.losses, "weights": weights_of(model), "copies": copies}


def test_ranks_of_a_group_begin_alike_and_drop_alike(ranks: Pools, tmp_path: Path) -> None:
    found = ranks(4).run(_unseeded, str(tmp_path))
    assert found[0]["losses"] == found[1]["losses"] != found[2]["losses"] == found[3]["losses"]
    for one in found[1:]:
        assert "net.scale" in one["copies"]
        for name, value in found[0]["copies"].items():
            assert torch.equal(one["copies"][name], value), name
        for name, value in found[0]["weights"].items():
            assert torch.equal(one["weights"][name], value), name


_FOUND = ("norms", "read", "told", "held")


class _Grouped(Model):
    """A model whose optimizer is given some parameters as attributes of their modules."""

    def configure_optimizers(self) -> Any:
        rest = [p for name, p in self.named_parameters() if name != "net.head.weight"]
        head = {"params": [self.net.head.weight], "lr": 0.002}
        return torch.optim.AdamW([head, {"params": rest}], lr=0.01)


class _Between(Callback):
    """Reads and changes weights between steps, through the module and through ``parameters()``."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.read: list[float] = []
        self.told = ""
        self.held: dict[str, int] = {}
        self.kept: Any = None

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in module.parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())
        weight = module.net.head.weight
        self.norms += [weight.grad.norm().item(), grad_norm(weight).item()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        block = module.net.blocks[0]
        if trainer.global_step == 1:
            block.up.weight.mul_(0.5)
            block.down.bias.add_(0.25)
            for parameter in module.net.head.parameters():
                parameter.mul_(2)
            block.query.weight.data.mul_(2)
            block.value.weight.t().mul_(0.5)
            block.down.weight.data = block.down.weight.data * 2
            block.out.weight.register_hook(lambda _: self.norms.append(0.0))
            self.kept = block.up.weight, block.up.weight.data
            for is_trained in (False, True):
                module.net.places.weight.requires_grad = is_trained
                (parameter,) = module.net.places.parameters()
                self.read.append(float(parameter.requires_grad))
        if trainer.global_step == 2:
            with gathered(module, modify=True):
                if trainer.global_rank < 2:  # under ZeRO the first rank of each part
                    module.net.norm.weight.mul_(1.5)
                    module.net.head.weight.mul_(0.5)
        if trainer.global_step == 3:
            for kept in self.kept:
                try:
                    kept.sum()
                except RuntimeError as error:
                    self.told += str(error)
        with gathered(module):
            value = module.net.head.weight
            value = value.full_tensor() if isinstance(value, DTensor) else value
            self.read.append(value.sum().item())
        if isinstance(trainer.strategy, ZeROStrategy) and trainer.strategy.engine is not None:
            pieces = trainer.strategy.engine.sharded.pieces
            self.held = {piece.range.slot.name: piece.range.numel for piece in pieces}


def _between(folder: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    callback = _Between()
    found = fit(folder, strategy, model=_Grouped(), callbacks=[callback])
    return {**found, **{name: getattr(callback, name) for name in _FOUND}}


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_and_gradients_between_steps(ranks: Pools, tmp_path: Path, stage: int) -> None:
    ddp = ranks(2).run(_between, str(tmp_path), None)
    found = ranks(4).run(_between, str(tmp_path), {"stage": stage, **CUT})
    assert_like_ddp(found, ddp, 5e-5)
    for one in found:
        assert one["norms"] == pytest.approx(ddp[0]["norms"], rel=1e-4)
        assert one["read"] == pytest.approx(ddp[0]["read"], rel=1e-3)
        assert one["told"] == ""  # what is kept between steps keeps its values


_FILES: dict[str, Any] = {"offload_optimizer": "nvme", "offload_weights": "nvme"}


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param({"stage": 1, "shard": 1, "async_checkpoint": True}, id="copies"),
        pytest.param({"stage": 3, "checkpoint": "dcp"}, id="directory"),
        pytest.param({"stage": 3, **_FILES}, id="all in files"),
        pytest.param({"stage": 2, "shard": 1, "offload_optimizer": "nvme"}, id="states in files"),
    ],
)
def test_other_settings_beside_it(
    ranks: Pools, tmp_path: Path, plain: tuple[str, Any, Any], beside: dict[str, Any]
) -> None:
    ours, cut, (_, ddp, resumed) = str(tmp_path / "cut.ckpt"), {**CUT, **beside}, plain
    assert_like_ddp(found := ranks(4).run(fit, str(tmp_path), cut, save=ours), ddp, 2e-5)
    for one in found[1:]:
        for name, value in one["weights"].items():
            assert torch.equal(value, found[0]["weights"][name]), name
    assert_like_ddp(ranks(4).run(fit, str(tmp_path), cut, ours), resumed, 2e-5)
    assert_like_ddp(ranks(2).run(fit, str(tmp_path), {"stage": 2}, ours), resumed, 2e-5)


def _monitored(folder: str, strategy: dict[str, Any]) -> Any:
    monitor = MemoryMonitor()
    fit(folder, strategy, callbacks=[monitor], max_steps=2)
    return monitor.measured["step"]


@pytest.mark.parametrize("stage", [1, 3])
def test_predicted_bytes_are_measured(ranks: Pools, tmp_path: Path, stage: int) -> None:
    cut = {"stage": stage, **CUT}
    found = ranks(4).run(_monitored, str(tmp_path), cut)
    predicted = [
        estimate(Model(), ZeROStrategy(**cut), world_size=4, rank=rank).resting for rank in range(4)
    ]
    for kind in predicted[0]:
        assert found[0][kind] == max(one[kind] for one in predicted), kind
    with pytest.raises(ValueError, match="Activations are not counted with tensor_parallel_size"):
        estimate(Model(), ZeROStrategy(**cut), world_size=4, batch=torch.zeros(1))


class _Finetuning(BaseFinetuning):
    """Freezes a block, and trains it from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks[1] if pl_module.net is not None else [])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[1], optimizer, lr=0.003)


def _with_callback(
    folder: str, strategy: dict[str, Any] | None, path: str | None = None, **more: Any
) -> dict[str, Any]:
    options = {"max_epochs": 2, "max_steps": -1, "limit_train_batches": 2, **more}
    options["saves_at"] = 3  # in the middle of the second epoch
    return fit(folder, strategy, path, callbacks=[_Finetuning()], **options)


def test_a_callback_that_adds_parameters(ranks: Pools, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "cut.ckpt"), str(tmp_path / "whole.ckpt")
    ddp = ranks(2).run(_with_callback, str(tmp_path), None, save=theirs)
    cut = {"stage": 3, **CUT}
    found = ranks(4).run(_with_callback, str(tmp_path), cut, save=ours)
    assert_like_ddp(found, ddp, 5e-5)
    held, expected = (torch.load(path)["state_dict"] for path in (ours, theirs))
    assert list(held) == list(expected)
    for one, value in expected.items():
        torch.testing.assert_close(held[one], value, rtol=5e-5, atol=5e-5)
    resumed = ranks(2).run(_with_callback, str(tmp_path), None, ours)
    again = ranks(4).run(_with_callback, str(tmp_path), cut, ours)
    assert_like_ddp(again, resumed, 5e-5)


# -- what is refused -------------------------------------------------------------------------------


def test_settings_that_are_not_supported_are_refused() -> None:
    with pytest.raises(ValueError, match="over which tensor_parallel_size=2 cuts"):
        ZeROStrategy(tensor_parallel_size=2, launcher="fork")
    for size in (0, 1.5, "all"):
        with pytest.raises(ValueError, match="Expected tensor_parallel_size to be 1, 'node' or a"):
            ZeROStrategy(tensor_parallel_size=size)  # type: ignore[arg-type]


def test_ranks_of_a_node_or_a_number_are_one_group() -> None:
    division = ZeROStrategy(tensor_parallel_size="node").settings.division(8, 4)
    assert (division["tensor_size"], division["num_shards"]) == (4, 2)
    division = ZeROStrategy(tensor_parallel_size=2).settings.division(8, 4)
    assert (division["tensor_size"], division["num_shards"]) == (2, 4)
    division = ZeROStrategy(tensor_parallel_size=2, shard="node").settings.division(8, 4)
    assert (division["tensor_size"], division["num_shards"]) == (2, 2)
    assert ZeROStrategy().settings.division(8, 4)["tensor_size"] == 1


def test_other_users_of_the_settings_refuse_them() -> None:
    with pytest.raises(ValueError, match="parallelize_fn needs tensor_parallel_size > 1"):
        FabricStrategy(parallelize_fn=lambda module, mesh: module)
    with pytest.raises(ValueError, match="Pass the model instead of a number"):
        estimate(10**6, ZeROStrategy(tensor_parallel_size=2), world_size=4)


class _Initializing(nn.Module):
    """Initializes the parameters of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def _init_weights(self, module: Any) -> None:
        nn.init.ones_(self.first.weight)


class _Odd(Model):
    """Models that cannot be trained so, each for its own reason."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        torch.manual_seed(0)
        mesh: Any = self.device_mesh
        if self.kind == "plain":
            self.net = nn.Linear(4, 4)
        elif self.kind == "initializer":
            with torch.device("meta"):
                self.net = _Initializing()
            parallelize_module(self.net.first, mesh["tensor_parallel"], ColwiseParallel())
        else:
            self.net = nn.Linear(4, 4)
            axis = "data_parallel" if self.kind == "other ranks" else "tensor_parallel"
            parallelize_module(self.net, mesh[axis], ColwiseParallel())
        if self.kind == "hooks":
            self.net.weight.register_hook(lambda grad: None)


def _refused(folder: str, kind: str) -> str:
    size = 3 if kind == "size" else 2
    callbacks: list[Any] = [EMAWeightAveraging()] if kind == "averages" else []
    units = {nn.Linear} if kind == "initializer" else "auto"
    strategy = ZeROStrategy(tensor_parallel_size=size, units=units)
    trainer = make_trainer(2, strategy, folder, max_steps=1, callbacks=callbacks)
    try:
        trainer.fit(_Odd(kind), loader())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("plain", "no parameter of _Odd is cut over tensor-parallel ranks"),
        ("other ranks", "the strategy shards over the data-parallel ranks itself"),
        ("hooks", "'net.weight' has hooks"),
        ("initializer", "_Initializing initializes parameters of several units, which tensor"),
        (
            "averages",
            "EMAWeightAveraging averages whole weights, which no rank has",
        ),
        ("size", "tensor_parallel_size=3 makes groups of 3 ranks, but 2 ranks cannot be divided"),
    ],
)
def test_models_that_are_not_supported_are_refused(
    ranks: Pools, tmp_path: Path, kind: str, text: str
) -> None:
    for told in ranks(2).run(_refused, str(tmp_path), kind):
        assert text in told
