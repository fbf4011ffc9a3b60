"""Directories of torch.distributed.checkpoint: by us for others, by others for us."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies.fsdp import _get_sharded_state_dict_context
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_zero import ZeROStrategy, load_weights
from lightning_zero.checkpoint import (
    DirectorySave,
    Saver,
    read_weights,
)
from lightning_zero.comm import Control
from lightning_zero.commands.checkpoints import convert, describe
from tests.oracle.by_trainer import Everything, Rows, assert_close, elements
from tests.oracle.checkpoints import (
    CPU,
    PROVENANCE,
    ordered,
    same,
    told,
)
from tests.oracle.projects import Regression, fit, make_trainer, rows
from tests.oracle.ranks import Pools

# -- FSDP2 programs and Lightning's strategy -------------------------------------------------------


class Sharded(Regression):
    """A project that is ready for FSDP2, and for anything else."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


def strategy(name: str) -> Any:
    if name == "fsdp2":
        return ModelParallelStrategy(dist.get_world_size(), tensor_parallel_size=1)
    return name if name == "ddp" else ZeROStrategy(int(name[-1]), checkpoint="dcp")


def exchange(folder: str) -> dict[str, list[float]]:
    """Save after an epoch under each of two strategies, and go on under others."""
    losses = {"ddp": fit(Sharded(), "ddp", max_epochs=2).losses}
    for writer in ("fsdp2", "zero3"):
        trainer = make_trainer(strategy(writer))
        trainer.fit(Sharded(), rows())
        trainer.save_checkpoint(f"{folder}/{writer}")
        trainer.save_checkpoint(f"{folder}/{writer}-weights", weights_only=True)
    for writer, reader in (("fsdp2", "zero3"), ("fsdp2", "zero1"), ("zero3", "fsdp2")):
        module = Sharded()
        trainer = make_trainer(strategy(reader), max_epochs=2)
        trainer.fit(module, rows(), ckpt_path=f"{folder}/{writer}", weights_only=True)
        assert trainer.global_step == 8
        losses[f"{writer} to {reader}"] = module.losses
    return losses


def test_fsdp2_reads_ours_and_we_read_fsdp2s(ranks: Pools, tmp_path: Path) -> None:
    for losses in ranks(2).run(exchange, str(tmp_path)):
        expected = losses.pop("ddp")[4:]
        assert len(losses) == 3
        for case, found in losses.items():
            assert found == pytest.approx(expected, rel=1e-4), case
    ours, theirs = (torch_file(tmp_path / name) for name in ("zero3", "fsdp2"))
    assert ours.keys() == theirs.keys()
    assert ours["loops"] == theirs["loops"]
    for key in ("state_dict", "optimizer_states"):
        assert_close(ordered(ours[key]), ordered(theirs[key]), key)
    lines = list(describe(tmp_path / "fsdp2"))
    assert "epoch 1, step 4" in lines
    assert any("state_dict/net.blocks.0.linear.weight" in line for line in lines)
    # Another world size, and weights alone, into a module and under `test`.
    for result in ranks(3).run(take_weights, str(tmp_path)):
        assert result == [pytest.approx(result[0], rel=1e-4)] * 4


def torch_file(path: Path) -> dict[str, Any]:
    target = path.with_name(f"{path.name}.plain.ckpt")
    convert(path, target)
    return torch.load(target, weights_only=True)  # type: ignore[no-any-return]


def take_weights(folder: str) -> list[float]:
    results = []
    for writer in ("fsdp2", "zero3"):
        module = Sharded()
        load_weights(module, f"{folder}/{writer}-weights")
        results.append(module.head.weight.double().sum().item())
        module = Sharded()
        trainer = make_trainer(strategy("zero2"))
        trainer.test(module, rows(), ckpt_path=f"{folder}/{writer}", verbose=False)
        results.append(module.head.weight.double().sum().item())
    return results


def save_bare(folder: str) -> dict[str, Any]:
    """Write as a program without Lightning does; return what is written, whole."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=f"{folder}/bare")
    dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/flat")
    columns = distribute_tensor(torch.arange(30.0).view(6, 5), mesh, [Shard(1)])
    dcp.save({"w": columns}, checkpoint_id=f"{folder}/columns")
    options = StateDictOptions(full_state_dict=True)
    return dict(get_model_state_dict(model, options=options))


def test_a_program_without_lightning(ranks: Pools, tmp_path: Path) -> None:
    expected = ranks(2).run(save_bare, str(tmp_path))[0]
    for name in ("bare", "flat"):
        module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        load_weights(module, tmp_path / name)
        same(dict(module.state_dict()), expected)
    assert torch.equal(weights_in(tmp_path / "columns")["w"], torch.arange(30.0).view(6, 5))
    convert(tmp_path / "bare", tmp_path / "folder", max_shard_bytes=100)
    folder = weights_in(tmp_path / "folder")
    same(folder, dict(sorted(expected.items())))
    found = torch_file(tmp_path / "bare")
    assert found["optimizer_states"][0]["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert found["optimizer_states"][0]["state"][3]["exp_avg"].shape == (3,)
    for text in ranks(2).run(resume_from, f"{tmp_path}/bare"):
        assert "bare' is not a Trainer checkpoint" in text
        assert "load_weights" in text


def resume_from(path: str) -> str:
    return told(make_trainer(ZeROStrategy(3)).fit, Regression(), rows(), ckpt_path=path)


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()


def exchange_with_fsdp1(folder: str) -> dict[str, Tensor]:
    """Save and load a directory as Lightning's FSDPStrategy does, which needs a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        model = FSDP(small(), device_id=CPU, use_orig_params=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer)
        with _get_sharded_state_dict_context(model):
            states = {"model": model.state_dict()}
            states["optimizer_0"] = FSDP.optim_state_dict(model, optimizer)
            dcp.save(states, checkpoint_id=f"{folder}/theirs")
        if dist.get_rank() == 0:
            torch.save({"epoch": 0, "global_step": 1}, f"{folder}/theirs/meta.pt")
        plain = small()
        adam = torch.optim.Adam(plain.parameters(), lr=0.1)
        for _ in range(2):
            step(plain, adam)
        checkpoint = {"state_dict": plain.state_dict(), "optimizer_states": [adam.state_dict()]}
        names = [[name for name, _ in plain.named_parameters()]]
        kind = functools.partial(DirectorySave, parameters=names)
        Saver(Control()).save(checkpoint, f"{folder}/ours", PROVENANCE, kind=kind)
        with _get_sharded_state_dict_context(model):
            weights = {"model": model.state_dict()}
            dcp.load(weights, checkpoint_id=f"{folder}/ours")
            model.load_state_dict(weights["model"])
            found = load_sharded_optimizer_state_dict(
                weights["model"], "optimizer_0", dcp.FileSystemReader(f"{folder}/ours")
            )["optimizer_0"]
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found))
        step(model, optimizer)
        with FSDP.summon_full_params(model):
            return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_fsdp1(ranks: Pools, tmp_path: Path) -> None:
    after_three = ranks(2).run(exchange_with_fsdp1, str(tmp_path))[0]
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    found = torch_file(tmp_path / "theirs")
    expected = {"state_dict": dict(model.state_dict()), "state": optimizer.state_dict()["state"]}
    state = {"state_dict": found["state_dict"], "state": found["optimizer_states"][0]["state"]}
    assert_close(ordered(state), ordered(expected), "theirs")
    for _ in range(2):
        step(model, optimizer)
    for (name, value), theirs in zip(model.named_parameters(), after_three.values(), strict=True):
        torch.testing.assert_close(theirs, value.detach(), msg=name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plain_program(tmp_path: Path) -> None:
    model = Everything()
    adam, _ = elements(model)
    model.loss(next(iter(Rows()))).backward()
    adam.step()
    state = {"model": model.state_dict(), "optim": adam.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    found = torch_file(tmp_path / "plain")
    same(ordered(found["state_dict"]), ordered(dict(model.state_dict())))
    same(ordered(found["optimizer_states"]), ordered([adam.state_dict()]))
    dcp.save({"other": {"w": torch.ones(1)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ValueError, match="under 'state_dict' or 'model', but it has 'other'"):
        weights_in(tmp_path / "other")


def weights_in(path: Path) -> dict[str, Any]:
    return read_weights(str(path), Control())


# -- states by name --------------------------------------------------------------------------------


class Swapped(Regression):
    """A project whose layers, of equal shapes, are made in the order of their names, or another."""

    def __init__(self, *, is_swapped: bool) -> None:
        super().__init__()
        blocks = dict(self.net.blocks.named_children())
        names = sorted(blocks, reverse=is_swapped)
        self.net.blocks = torch.nn.ModuleDict({name: blocks[name] for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for name in sorted(self.net.blocks):
            x = self.net.blocks[name](x)
        return x


def resume_swapped(folder: str) -> list[Any]:
    """Whether moments go by name: with a directory's, and with those of torch's groups."""
    found = []
    for kind, is_named in (("dcp", False), ("file", True)):
        path, results = f"{folder}/{kind}", []
        for is_swapped in (False, True):
            module = Swapped(is_swapped=is_swapped)

            def optimizer(module: Any = module, named: bool = is_named) -> Any:
                given = module.named_parameters() if named else module.parameters()
                return torch.optim.AdamW(given, lr=0.05)

            module.configure_optimizers = optimizer  # type: ignore[method-assign]
            trainer = make_trainer(ZeROStrategy(3, checkpoint=kind), max_epochs=2)
            if not is_swapped:
                first = make_trainer(ZeROStrategy(3, checkpoint=kind))
                first.fit(module, rows())
                first.save_checkpoint(path)
            trainer.fit(module, rows(), ckpt_path=path)
            results.append({k: v.detach().clone() for k, v in module.named_parameters()})
        found.append(all(torch.equal(v, results[1][k]) for k, v in results[0].items()))
    return found


def test_states_are_matched_by_name(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(resume_swapped, str(tmp_path)) == [[True, True]] * 2
