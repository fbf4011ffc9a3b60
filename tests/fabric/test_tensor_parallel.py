"""Loops of Fabric over tensor-parallel ranks: the numbers and files of DDP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor

import lightning_zero
from lightning_zero.fabric import ZeROStrategy
from tests.oracle.ranks import Pools
from tests.oracle.tensor_parallel import GPT, loader, parallelize

NUM_BATCHES = 4


def _cut(net: Any, mesh: Any) -> Any:
    parallelize(net, mesh["tensor_parallel"], by_sequence=True)
    return net


def _values(net: Any) -> list[Tensor]:
    with lightning_zero.gathered(net):
        return [p.detach().clone() for p in net.parameters()]


def _loop(
    way: str, stage: int, precision: Any = "32-true", save: str = "", load: str = ""
) -> dict[str, Any]:
    """Train a GPT; ``way`` is that in which it is cut, or ``ddp``."""
    by_function = {"parallelize_fn": _cut} if way == "by the strategy" else {}
    strategy: Any = "ddp"
    if way != "ddp":
        strategy = ZeROStrategy(stage, min_num_params=0, tensor_parallel_size=2, **by_function)
    world = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=precision)
    fabric.launch()
    torch.manual_seed(0)
    net: Any = GPT()
    if way == "by hand":
        _cut(net, fabric.strategy.device_mesh)
        net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.01))
    else:
        net = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), 0.01))
    state = {"net": net, "optimizer": optimizer, "step": 0}
    if load:
        fabric.load(load, state)
    losses = []
    for step, (text,) in enumerate(fabric.setup_dataloaders(loader())):
        if step < state["step"]:
            continue
        if step == NUM_BATCHES:
            break
        with fabric.no_backward_sync(net, enabled=step % 2 == 0):
            loss = F.cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            fabric.backward(loss / 2)
        losses.append(loss.item())
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="sum")))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of what Lightning calls
            losses += fabric.all_gather(loss.detach()).tolist()
        if step % 2:
            losses.append(float(fabric.clip_gradients(net, optimizer, max_norm=0.3)))
            optimizer.step()
            optimizer.zero_grad()
        if save and step == 1:
            fabric.save(save, {**state, "step": 2})
    return {"losses": losses, "values": _values(net) if way == "ddp" else []}


@pytest.mark.parametrize(("way", "stage"), [("by hand", 2), ("by the strategy", 3)])
def test_two_by_two_ranks_have_the_numbers_and_files_of_ddp(
    ranks: Pools, tmp_path: Path, way: str, stage: int
) -> None:
    ours, theirs = str(tmp_path / "cut.ckpt"), str(tmp_path / "ddp.ckpt")
    ddp = ranks(2).run(_loop, "ddp", 0, save=theirs)
    found = ranks(4).run(_loop, way, stage, save=ours)
    for rank, one in enumerate(found):
        assert one["losses"] == pytest.approx(ddp[rank // 2]["losses"], rel=5e-5)
    held, expected = torch.load(ours), torch.load(theirs)
    for name, value in expected["net"].items():
        torch.testing.assert_close(held["net"][name], value, rtol=2e-5, atol=2e-5)
    resumed = ranks(2).run(_loop, "ddp", 0, load=ours)
    for rank, one in enumerate(ranks(4).run(_loop, way, stage, load=ours)):
        assert one["losses"] == pytest.approx(resumed[rank // 2]["losses"], rel=5e-5)


def test_mixed_precision_has_losses_like_ddp(ranks: Pools) -> None:
    ddp = ranks(2).run(_loop, "ddp", 0, "bf16-mixed")
    for rank, one in enumerate(ranks(4).run(_loop, "by the strategy", 3, "bf16-mixed")):
        assert one["losses"] == pytest.approx(ddp[rank // 2]["losses"], rel=0.03)


def _with_an_optimizer_of_old_parameters() -> str:
    strategy: Any = ZeROStrategy(3, tensor_parallel_size=2, parallelize_fn=_cut)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = GPT()
    try:
        fabric.setup(net, torch.optim.AdamW(net.parameters()))
    except ValueError as error:
        return str(error)
    return ""


def test_an_optimizer_of_parameters_that_were_replaced_is_refused(ranks: Pools) -> None:
    for told in ranks(2).run(_with_an_optimizer_of_old_parameters):
        assert "AdamW has parameters of no module that was set up. Create it after" in told
