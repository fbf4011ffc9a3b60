"""Directories of torch.distributed.checkpoint: by us for others, by others for us."""

from __future__ import annotations

import functools
import os
import pickle
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies.fsdp import _get_sharded_state_dict_context
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
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
    Provenance,
    Saver,
    load,
    module_state,
    optimizer_state,
    read_weights,
)
from lightning_zero.checkpoint.values import boxes_in_memory
from lightning_zero.comm import Control
from lightning_zero.commands import convert, describe, main
from tests.oracle import by_trainer, resharding
from tests.oracle.checkpoints import (
    CPU,
    PROVENANCE,
    Hostile,
    damaged,
    kill_in_mid_save,
    saves_to_a_full_disk,
    some,
    told,
)
from tests.oracle.projects import Regression, fit, make_trainer, rows
from tests.oracle.ranks import Pools

# -- boxes -----------------------------------------------------------------------------------------


def test_boxes_are_the_range_in_its_order() -> None:
    for shape in [(), (5,), (3, 4), (2, 1, 3), (2, 3, 2, 2), (0, 3), (1, 1)]:
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        others = [whole.transpose(0, -1)] if shape else []
        if len(shape) == 4:
            others.append(whole.contiguous(memory_format=torch.channels_last))
        for tensor in (whole, *others):
            flat = tensor.as_strided((tensor.numel(),), (1,))
            for start in range(whole.numel() + 1):
                for stop in range(start, whole.numel() + 1):
                    found = list(boxes_in_memory(tensor.shape, tensor.stride(), start, stop))
                    assert len(found) <= max(1, 2 * len(shape) - 1)
                    parts = []
                    for offsets, sizes in found:
                        pairs = zip(offsets, sizes, strict=True)
                        part = tensor[tuple(slice(o, o + n) for o, n in pairs)].flatten()
                        parts.append(part.sort().values if tensor is not whole else part)
                    held = torch.cat([flat[:0], *parts])
                    assert torch.equal(held.sort().values, flat[start:stop].sort().values)


# -- what others read ------------------------------------------------------------------------------


def save_both(folder: str, stage: int, precision: str) -> list[float]:
    """Train, save a file and a directory, and train on."""
    model, optimizers, engine = resharding.shard(stage, precision)
    with resharding.autocast(precision):
        resharding.steps(model, optimizers, 0, resharding.NUM_BEFORE)
        states = [optimizer_state(o, engine, f"optimizer {n}") for n, o in enumerate(optimizers)]
        checkpoint = {
            "state_dict": module_state(model, engine),
            "optimizer_states": states,
            "epoch": 3,
            "global_step": 7,
            "average": {"of": {"weight": module_state(model, engine)["head.weight"]}},
        }
        names = {id(p): name for name, p in model.named_parameters()}
        parameters = [
            [names[id(p)] for group in o.param_groups for p in group["params"]] for o in optimizers
        ]
        control = engine.comm.control
        saver, provenance = Saver(control), Provenance(stage, control.world_size, precision)
        kind = functools.partial(DirectorySave, parameters=parameters)
        saver.save(checkpoint, f"{folder}.ckpt", provenance)
        saver.save(checkpoint, folder, provenance, kind=kind)
        return resharding.steps(model, optimizers, resharding.NUM_BEFORE, resharding.NUM_AFTER)


@pytest.fixture(scope="module")
def directories(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Directories of several stages and world sizes, with the losses after."""
    folder = tmp_path_factory.mktemp("directories")
    losses = {}
    for world, stage in ((1, 2), (2, 3), (3, 1), (4, 3)):
        path = str(folder / f"stage{stage}-world{world}")
        losses[path] = ranks(world).run(save_both, path, stage, "32-true")[0]
    return losses


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, Tensor):
        assert found.dtype is expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{where}/{number}")
    else:
        assert found == expected, where


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as FSDP has it, from the names in its groups."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    assert all(isinstance(name, str) for name in names)
    groups, position = [], 0
    for group in state["param_groups"]:
        stop = position + len(group["params"])
        groups.append({**group, "params": list(range(position, stop))})
        position = stop
    ids = {name: number for number, name in enumerate(names)}
    return {"state": {ids[k]: v for k, v in state["state"].items()}, "param_groups": groups}


def test_torch_and_lightning_read_what_the_plain_file_holds(
    directories: dict[str, list[float]], tmp_path: Path
) -> None:
    for path in directories:
        plain = torch.load(f"{path}.ckpt", weights_only=True)
        dcp_to_torch_save(path, tmp_path / "whole.pt")
        whole = torch.load(tmp_path / "whole.pt", weights_only=True)
        assert_same(whole["model"], dict(plain["state_dict"]), path)
        for number, expected in enumerate(plain["optimizer_states"]):
            assert_same(by_name(whole[f"optimizer_{number}"]), expected, path)
        consolidated = _format_checkpoint(_load_distributed_checkpoint(Path(path)))
        assert_same(consolidated["state_dict"], dict(plain["state_dict"]), path)
        assert len(consolidated["optimizer_states"]) == 2
        assert consolidated["global_step"] == 7
        # Our own way there gives the plain file again, ties and ids included.
        convert(Path(path), tmp_path / "ours.ckpt")
        ours = torch.load(tmp_path / "ours.ckpt", weights_only=True)
        assert_same(ours, {**plain, "state_dict": dict(plain["state_dict"])}, path)
        weights = ours["state_dict"]
        assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_directory_resumes_at_every_stage(
    ranks: Pools, directories: dict[str, list[float]], world: int
) -> None:
    """Each directory at one of two stages, the other one at other numbers of ranks."""
    for turn, stage in enumerate((1, 3)):
        paths = list(directories)[(turn + world // 2) % 2 :: 2]
        for losses in ranks(world).run(resharding.resume, paths, stage, "32-true"):
            for path, found in zip(paths, losses, strict=True):
                assert found == pytest.approx(directories[path], rel=1e-5), (path, stage, world)


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
        by_trainer.assert_close(ordered(ours[key]), ordered(theirs[key]), key)
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


def ordered(value: Any) -> Any:
    """The same with keys in one order; those who write a directory need not keep any."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=str)}
    return [ordered(item) for item in value] if isinstance(value, list) else value


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
        assert_same(dict(module.state_dict()), expected, name)
    assert torch.equal(weights_in(tmp_path / "columns")["w"], torch.arange(30.0).view(6, 5))
    convert(tmp_path / "bare", tmp_path / "folder", max_shard_bytes=100)
    folder = weights_in(tmp_path / "folder")
    assert_same(folder, dict(sorted(expected.items())), "folder")
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
    by_trainer.assert_close(ordered(state), ordered(expected), "theirs")
    for _ in range(2):
        step(model, optimizer)
    for (name, value), theirs in zip(model.named_parameters(), after_three.values(), strict=True):
        torch.testing.assert_close(theirs, value.detach(), msg=name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plain_program(tmp_path: Path) -> None:
    model, (adam, _) = resharding.build()
    resharding.steps(model, [adam], 0, 1)
    state = {"model": model.state_dict(), "optim": adam.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    found = torch_file(tmp_path / "plain")
    assert_same(ordered(found["state_dict"]), ordered(dict(model.state_dict())))
    assert_same(ordered(found["optimizer_states"]), ordered([adam.state_dict()]))
    dcp.save({"other": {"w": torch.ones(1)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ValueError, match="under 'state_dict' or 'model', but it has 'other'"):
        weights_in(tmp_path / "other")


# -- the Trainer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dcp2", "async-dcp3"])
def test_callbacks_leave_what_ddp_leaves(
    ranks: Pools, tmp_path: Path, ddp: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, expected = ddp
    found = ranks(2).run(by_trainer.train, str(tmp_path), name)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for key in ("files", "best", "last", "top"):
        assert found[key] == expected[key]
    for file in found["files"]:
        assert (tmp_path / file).is_dir()
        plain = tmp_path / "plain.ckpt"
        convert(tmp_path / file, plain)
        theirs = torch.load(folder / file, weights_only=True)
        by_trainer.assert_close(ordered(torch.load(plain)), ordered(theirs), file)
    # Found by itself under checkpoint="file", another stage and world size; and put in its place.
    resumed = ranks(3).run(resume_and_replace, str(tmp_path / "mid.ckpt"))[0]
    assert resumed["losses"] == pytest.approx(expected["losses"][5:], rel=1e-5)
    assert resumed["loaded"] == list(expected["weights"])
    assert resumed["kinds"] == [True, False, True]
    assert sorted(os.listdir(tmp_path)) == sorted([*expected["files"], "plain.ckpt"])


def resume_and_replace(path: str) -> dict[str, Any]:
    """Resume from a directory, then save a file and a directory under its name."""
    resumed = by_trainer.resume(path, "zero1")
    kinds = [os.path.isdir(path)]
    for name in ("zero1", "dcp1"):
        trainer = by_trainer.make_trainer(
            by_trainer.world(), by_trainer.strategy_of(name), "/nowhere", max_steps=1
        )
        trainer.fit(by_trainer.model(), by_trainer.Rows())
        trainer.save_checkpoint(path)
        trainer.strategy.barrier()
        kinds.append(os.path.isdir(path))
        trainer.strategy.barrier()
    return {**resumed, "kinds": kinds}


class Plugin(TorchCheckpointIO):
    """A writer of the user's own."""


def contradict(folder: str) -> list[str]:
    found = []
    for path, plugin in ((f"{folder}/a", Plugin()), ("memory://a", None)):
        trainer = make_trainer(ZeROStrategy(3, checkpoint="dcp", checkpoint_io=plugin))
        trainer.fit(Regression(), rows(4))
        found.append(told(trainer.save_checkpoint, path))
    return found


def test_what_contradicts_is_refused(ranks: Pools, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected checkpoint to be 'file' or 'dcp', got 'zip'"):
        ZeROStrategy(3, checkpoint="zip")  # type: ignore[arg-type]
    for plugin, url in ranks(2).run(contradict, str(tmp_path)):
        assert "cannot be combined with Plugin" in plugin
        assert "needs a disk that all ranks share, not a URL" in url


# -- what goes wrong -------------------------------------------------------------------------------


def fail_to_save(folder: str) -> list[str]:
    control = Control()
    saver = Saver(control)
    save = functools.partial(saver.save, kind=DirectorySave)
    path = f"{folder}/name"
    found = saves_to_a_full_disk(save, saver, path)
    other = some(control, 2.0)
    if control.rank == 1:
        del other["state_dict"]["whole"]
    found.append(told(save, other, path, PROVENANCE))
    strange = some(control, 2.0)
    if control.rank == 0:
        strange["hook"] = lambda: None
    found.append(told(save, strange, path, PROVENANCE))
    listed = some(control, 2.0)
    listed["more"] = [listed["state_dict"]["whole"]]
    found.append(told(save, listed, path, PROVENANCE))
    named = some(control, 2.0)
    named["model"] = {"whole": named["state_dict"]["whole"]}
    found.append(told(save, named, path, PROVENANCE))
    found.append(told(save, some(control, 2.0), f"{folder}/mine", PROVENANCE))
    found.append(told(save, some(control, 2.0), "/proc/name", PROVENANCE))
    return found


def test_a_save_that_fails_on_one_rank_fails_on_all(ranks: Pools, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    first, second = ranks(2).run(fail_to_save, str(tmp_path))
    assert first == second
    limit, background, differs, strange, listed, named, mine, proc = first
    for text in (limit, background):
        assert "name' failed: on rank 1: " in text
    assert "on rank 1: this rank's checkpoint has no 'state_dict.whole'" in differs
    assert "on rank 0: " in strange
    assert "lambda" in strange
    assert "sharded tensors under 'more', in a list" in listed
    assert "two entries of the checkpoint would be named 'model.whole'" in named
    assert "mine' is a folder that holds something other than a checkpoint" in mine
    assert "on rank 0: [Errno" in proc
    assert sorted(os.listdir(tmp_path)) == ["mine", "name"]
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]
    assert fill_of(tmp_path / "name") == 1.0


def weights_in(path: Path) -> dict[str, Any]:
    return read_weights(str(path), Control())


def fill_of(path: Path) -> float:
    """The number that a directory by ``some`` is full of."""
    found = load(str(path), Control())
    for value in found["state_dict"].values():
        assert value.eq(found["fill"]).all()
    return float(found["fill"])


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_killed_rank_leaves_the_last_directory_whole(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    path = tmp_path / "name"
    for _ in range(kills):
        if path.exists():
            shutil.rmtree(path)
        kill_in_mid_save(path, chance, kind=DirectorySave)
        assert fill_of(path) >= 1.0


def test_names_are_exchanged_without_help_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    control = Control()
    for fill, kind in ((1.0, DirectorySave), (2.0, DirectorySave)):
        Saver(control).save(some(control, fill), str(tmp_path / "name"), PROVENANCE, kind=kind)
    assert fill_of(tmp_path / "name") == 2.0
    Saver(control).save(some(control, 3.0), str(tmp_path / "name"), PROVENANCE)
    assert load(str(tmp_path / "name"), control)["fill"] == 3.0
    os.symlink("name", tmp_path / "last")
    Saver(control).save(some(control, 4.0), str(tmp_path / "last"), PROVENANCE, kind=DirectorySave)
    assert load(str(tmp_path / "name"), control)["fill"] == 3.0
    assert fill_of(tmp_path / "last") == 4.0
    assert sorted(os.listdir(tmp_path)) == ["last", "name"]


class Wider(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 7)


def resume_from_bad(folder: str) -> list[str]:
    def attempt(module: Regression, path: str) -> str:
        trainer = make_trainer(ZeROStrategy(3), max_epochs=2)
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        text = told(trainer.fit, module, rows(), ckpt_path=path)
        if "does not fit" not in text:  # else the module stays sharded
            for name, parameter in module.named_parameters():
                assert torch.equal(parameter, before[name]), name
        return text

    trainer = make_trainer(ZeROStrategy(3, checkpoint="dcp"))
    trainer.fit(Regression(), rows())
    trainer.save_checkpoint(f"{folder}/good")
    if trainer.is_global_zero:
        for name in ("missing", "cut"):
            shutil.copytree(f"{folder}/good", f"{folder}/{name}")
        os.unlink(f"{folder}/missing/__1_0.distcp")
        os.truncate(f"{folder}/cut/__1_0.distcp", 100)
    trainer.strategy.barrier()
    names = ("missing", "cut", "none")
    found = [attempt(Regression(), f"{folder}/{name}") for name in names]
    return [*found, attempt(Wider(), f"{folder}/good")]


def test_a_bad_directory_is_one_clear_error_and_changes_nothing(
    ranks: Pools, tmp_path: Path
) -> None:
    first, second = ranks(2).run(resume_from_bad, str(tmp_path))
    assert first == second
    missing, cut, none, wider = first
    assert missing.startswith("FileNotFoundError: Loading")
    assert "missing/__1_0.distcp'" in missing
    assert "cut' is damaged or not a checkpoint" in cut
    assert none.startswith("FileNotFoundError")
    assert "good' does not fit" in wider
    assert "head.weight" in wider
    assert "[6, 6]" in wider


def save_here(path: Path, checkpoint: Any, provenance: Provenance = PROVENANCE) -> None:
    Saver(Control()).save(checkpoint, str(path), provenance, kind=DirectorySave)


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = Hostile(f"touch {mark}")
    save_here(tmp_path / "name", some(Control(), 1.0))
    for file, write in ((".metadata", pickle.dump), ("meta.pt", torch.save)):
        folder = shutil.copytree(tmp_path / "name", tmp_path / f"bad{file}")
        with (folder / file).open("wb") as stream:
            write(hostile, stream)
    save_here(tmp_path / "object", {"state_dict": {"hook": hostile, "w": torch.ones(1)}})
    for name, words in (
        ("bad.metadata", "its table holds an object of posix.system"),
        ("badmeta.pt", "holds more than tensors and plain values"),
        ("object", "holds more than tensors and plain values"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            load(str(tmp_path / name), Control())
        assert name in str(caught.value)
    assert not mark.exists()
    load(str(tmp_path / "object"), Control(), weights_only=False)
    assert mark.exists()


def test_later_directories_are_refused(tmp_path: Path) -> None:
    later = Provenance(stage=3, world_size=1, precision="", format=99)
    save_here(tmp_path / "later", some(Control(), 1.0), later)
    with pytest.raises(ValueError, match="later' has format 99 of a later lightning-zero"):
        load(str(tmp_path / "later"), Control())


def test_damaged_directories_are_refused_or_read(tmp_path: Path) -> None:
    """What is read of a damaged directory is of the right form; torch's have no checksums."""
    control, path = Control(), tmp_path / "name"
    checkpoint = some(control, 1.0, numel=300)
    Saver(control).save(checkpoint, str(path), PROVENANCE, kind=DirectorySave)
    chance, num_refused = random.Random(0), 0
    names = ("__0_0.distcp", "meta.pt", ".metadata")
    contents = {name: (path / name).read_bytes() for name in names}
    for name in ["__0_0.distcp"] * 40 + ["meta.pt"] * 20 + [".metadata"] * 60:
        (path / name).write_bytes(damaged(contents[name], chance))
        error = told(load, str(path), control)
        assert error == "no error" or "name" in error
        num_refused += error != "no error"
        (path / name).write_bytes(contents[name])
    assert num_refused > 50


# -- states by name --------------------------------------------------------------------------------


class Swapped(Regression):
    """A project whose layers, of equal shapes, are made in another order."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.net.blocks
        order = reversed(dict(blocks.named_children()))
        self.net.blocks = torch.nn.ModuleDict({name: blocks[int(name)] for name in order})

    def forward(self, x: Tensor) -> Tensor:
        for name in sorted(self.net.blocks):
            x = self.net.blocks[name](x)
        return x


class Ordered(Swapped):
    """The same, in the order of their names."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.net.blocks
        self.net.blocks = torch.nn.ModuleDict({name: blocks[name] for name in sorted(blocks)})


def resume_swapped(folder: str) -> list[Any]:
    """Whether moments go by name: with a directory's, and with those of torch's groups."""
    found = []
    for kind, is_named in (("dcp", False), ("file", True)):
        path, results = f"{folder}/{kind}", []
        for cls in (Ordered, Swapped):
            module = cls()

            def optimizer(module: Any = module, named: bool = is_named) -> Any:
                given = module.named_parameters() if named else module.parameters()
                return torch.optim.AdamW(given, lr=0.05)

            module.configure_optimizers = optimizer  # type: ignore[method-assign]
            trainer = make_trainer(ZeROStrategy(3, checkpoint=kind), max_epochs=2)
            if cls is Ordered:
                first = make_trainer(ZeROStrategy(3, checkpoint=kind))
                first.fit(module, rows())
                first.save_checkpoint(path)
            trainer.fit(module, rows(), ckpt_path=path)
            results.append({k: v.detach().clone() for k, v in module.named_parameters()})
        found.append(all(torch.equal(v, results[1][k]) for k, v in results[0].items()))
    return found


def test_states_are_matched_by_name(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(resume_swapped, str(tmp_path)) == [[True, True]] * 2


# -- the commands ----------------------------------------------------------------------------------


def test_convert_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizers = resharding.build()
    resharding.steps(model, optimizers, 0, 1)
    checkpoint = {
        "state_dict": dict(model.state_dict()),
        "optimizer_states": [o.state_dict() for o in optimizers],
        "lr_schedulers": [],
        "epoch": 3,
        "global_step": 7,
    }
    torch.save(checkpoint, tmp_path / "a.ckpt")
    assert main(["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "b.dcp")]) == 0
    assert main(["convert", str(tmp_path / "b.dcp"), str(tmp_path / "c.ckpt")]) == 0
    found = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert_same(found, checkpoint)
    convert(tmp_path / "b.dcp", tmp_path / "d.safetensors", dtype=torch.bfloat16)
    cast = weights_in(tmp_path / "d.safetensors")
    assert torch.equal(cast["planes"], checkpoint["state_dict"]["planes"].bfloat16())
    convert(tmp_path / "d.safetensors", tmp_path / "e.dcp", dtype=torch.float32)
    assert weights_in(tmp_path / "e.dcp")["planes"].dtype is torch.float32
    convert(tmp_path / "b.dcp", tmp_path / "f.dcp", weights_only=True)
    assert "optimizer_states" not in load(str(tmp_path / "f.dcp"), Control())
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "b.dcp")]) == 0
    text = capsys.readouterr().out
    for words in ("epoch 3, step 7", "written by `lightning-zero convert`", "(2, 3, 2, 2)"):
        assert words in text
