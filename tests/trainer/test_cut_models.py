"""What works on a model that tensor parallelism has cut as on any other, with DDP's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_zero import load_weights
from lightning_zero.plan import cut_of
from tests.oracle.ranks import Pools
from tests.oracle.tensor_parallel import GPT, Block, Model, assert_like_ddp, fit, parallelize

pytestmark = pytest.mark.slow  # test_tensor_parallel.py has each path of the package once

CUT: dict[str, Any] = {"tensor_parallel_size": 2, "min_num_params": 0}


# -- torch.compile ---------------------------------------------------------------------------------


class _Compiled(Model):
    """Compiles its blocks, one by one or with all that is around them."""

    way = ""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        super().configure_model()
        for index, block in enumerate(self.net.blocks):
            if self.way == "in place":
                block.compile(backend="aot_eager", fullgraph=True)
            elif self.way == "submodules":
                self.net.blocks[index] = torch.compile(block, backend="aot_eager")
        if self.way == "body":
            self.net = torch.compile(self.net, backend="aot_eager")


def _compiled(folder: str, strategy: dict[str, Any] | None, way: str, **more: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = _Compiled(by_sequence=more.pop("by_sequence", False))
    model.way = way
    found = fit(folder, strategy, model=model, **more)
    found["weights"] = {k.replace("_orig_mod.", ""): v for k, v in found["weights"].items()}
    counters = torch._dynamo.utils.counters
    return {
        **found,
        "graphs": counters["stats"]["unique_graphs"],
        "captured": counters["stats"]["calls_captured"],
        "breaks": dict(counters["graph_break"]),
    }


@pytest.mark.parametrize(
    ("stage", "way", "by_sequence", "copies"),
    [(1, "in place", True, 1), (3, "submodules", False, 2), (2, "body", False, 1)],
)
def test_compiled_modules(
    ranks: Pools, tmp_path: Path, stage: int, way: str, by_sequence: bool, copies: int
) -> None:
    """To compile costs seconds on each rank: at one stage there are also data-parallel ranks."""
    more = {"accumulate_grad_batches": 2, "max_steps": 2}
    ddp = ranks(copies).run(fit, str(tmp_path), None, **more)
    cut = {"stage": stage, "units": {Block}, **CUT}
    options = {**more, "by_sequence": by_sequence}
    found = ranks(2 * copies).run(_compiled, str(tmp_path), cut, way, **options)
    assert_like_ddp(found, ddp, 2e-5)
    for one in found:
        if way != "body":
            assert (one["graphs"], one["breaks"]) == (1, {}), "one for both blocks"
        assert one["captured"] > 40, "something was compiled"


# -- traffic in few bits ---------------------------------------------------------------------------


class _Watch(Callback):
    """Notes what was sent, and whether copies of a parameter on tensor-parallel ranks are alike."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.copies: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        engine = trainer.strategy.engine
        self.copies = {
            piece.range.slot.name: piece.detach().clone()
            for piece in engine.sharded.pieces
            if cut_of(piece.parameter) is None
        }
        for (_, verb), sent in trainer.strategy.traffic.items():
            self.sent[verb] = self.sent.get(verb, 0) + sent.bytes


def _coded(folder: str, strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
    watch = _Watch()
    found = fit(folder, strategy, callbacks=[watch], **more)
    return {**found, "sent": watch.sent, "copies": watch.copies}


@pytest.mark.parametrize(
    "bits",
    [
        pytest.param({"stage": 3, "gather_bits": 8, "reduce_bits": 8}, id="stage 3"),
        pytest.param({"stage": 1, "shard": 1, "reduce_bits": 8}, id="copies at stage 1"),
    ],
)
def test_traffic_in_few_bits(ranks: Pools, tmp_path: Path, bits: dict[str, Any]) -> None:
    """Rounding differs from rank to rank along data, and not along tensor-parallel ranks."""
    more: dict[str, Any] = {"by_sequence": True, "optimizer": "SGD"}
    plain = {name: value for name, value in bits.items() if "bits" not in name}
    exact = ranks(4).run(_coded, str(tmp_path), {**CUT, **plain}, **more)
    ddp = ranks(2).run(fit, str(tmp_path), None, optimizer="SGD")
    found = ranks(4).run(_coded, str(tmp_path), {**CUT, **bits}, **more)
    for rank, one in enumerate(found):
        assert one["losses"] == pytest.approx(ddp[rank // 2]["losses"], rel=0.02)
        assert one["losses"] != exact[rank]["losses"]
        for verb, sent in exact[rank]["sent"].items():
            # A scale for each 64 elements, or fewer where copies divide a part.
            most = sent * (18 if "shard" in bits else 17) // 64
            assert sent * 17 // 64 <= one["sent"][verb] <= most
        beside = found[rank // 2 * 2]["copies"]
        assert set(one["copies"]) >= {"net.scale", "net.norm.weight", "net.blocks.0.out.bias"}
        for name, value in one["copies"].items():
            assert torch.equal(value, beside[name]), name


# -- optimizers that look at whole parameters ------------------------------------------------------


class _Optimized(Model):
    """Steps by an optimizer of ``make``."""

    make: Any = None

    def configure_optimizers(self) -> Any:
        return self.make(self)


def muon(model: Any) -> Any:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)


def adafactor(model: Any) -> Any:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def lbfgs(model: Any) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)


class _States(Callback):
    """Looks up a state between steps: it is that of the whole parameter, as under DDP."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        weight = dict(module.named_parameters())["net.blocks.0.down.weight"]
        self.last = {**trainer.optimizers[0].state.get(weight, {})}


def _whole(
    folder: str, strategy: dict[str, Any] | None, make: Any, path: str | None = None, **more: Any
) -> dict[str, Any]:
    model = _Optimized(by_sequence=True)
    model.make = make
    states = _States()
    found = fit(folder, strategy, path, model=model, callbacks=[states], **more)
    return {**found, "state": states.last}


@pytest.mark.parametrize(
    ("make", "strategy", "near"),
    [
        # It rounds to bf16 in between, a hundredth of what a step moves.
        pytest.param(muon, {"stage": 3}, 1e-3, id="Muon"),
        pytest.param(adafactor, {"stage": 1, "shard": 1}, 2e-5, id="Adafactor in copies"),
        pytest.param(adafactor, {"stage": 3, "checkpoint": "dcp"}, 2e-5, id="in directories"),
        pytest.param(lbfgs, {"stage": 2}, 2e-5, id="LBFGS"),
    ],
)
def test_optimizers_that_look_at_whole_parameters(
    ranks: Pools, tmp_path: Path, make: Any, strategy: dict[str, Any], near: float
) -> None:
    theirs, ours = str(tmp_path / "ddp.ckpt"), str(tmp_path / "cut.ckpt")
    ddp = ranks(2).run(_whole, str(tmp_path), None, make, save=theirs)
    cut = {**CUT, **strategy}
    found = ranks(4).run(_whole, str(tmp_path), cut, make, save=ours)
    assert_like_ddp(found, ddp, near)
    for one in found[1:]:
        for name, value in one["weights"].items():
            assert torch.equal(value, found[0]["weights"][name]), name
    for one in found:
        torch.testing.assert_close(one["state"], ddp[0]["state"], rtol=near, atol=near)
    resumed = ranks(2).run(_whole, str(tmp_path), None, make, theirs)
    assert_like_ddp(ranks(4).run(_whole, str(tmp_path), cut, make, ours), resumed, near)
    if "checkpoint" in strategy:
        return
    if make is not lbfgs:  # whose file has the loss of rank 0 alone
        held, expected = (torch.load(path)["optimizer_states"][0] for path in (ours, theirs))
        torch.testing.assert_close(held["state"], expected["state"], rtol=2e-4, atol=2e-5)
    assert_like_ddp(ranks(2).run(_whole, str(tmp_path), None, make, ours), resumed, near)


# -- models on meta --------------------------------------------------------------------------------


class _Scaled(GPT):
    def reset_parameters(self) -> None:
        self.scale.fill_(1.5)


class _OnMeta(Model):
    """Built without memory, and initialized a unit at a time."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        with torch.device("meta"):
            self.net = _Scaled()
        if self.device_mesh is not None:
            parallelize(self.net, self.device_mesh["tensor_parallel"], by_sequence=True)


def _on_meta(folder: str, strategy: dict[str, Any], path: str = "", **more: Any) -> dict[str, Any]:
    class Load(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            load_weights(module, path)

    torch.manual_seed(3 + torch.distributed.get_rank())
    return fit(folder, strategy, model=_OnMeta(), callbacks=[Load()] if path else [], **more)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_on_meta_has_the_values_of_one_that_is_not_cut(
    ranks: Pools, tmp_path: Path, stage: int
) -> None:
    path, settings = str(tmp_path / "whole.ckpt"), {"stage": stage, "units": {Block}}
    whole = ranks(2).run(_on_meta, str(tmp_path), settings, save=path)
    cut = {**CUT, **settings}
    assert_like_ddp(ranks(4).run(_on_meta, str(tmp_path), cut), whole, 2e-5)
    if stage == 3:
        again = ranks(2).run(_on_meta, str(tmp_path), settings, path)
        found = ranks(4).run(_on_meta, str(tmp_path), cut, path)
        assert_like_ddp(found, again, 2e-5)
