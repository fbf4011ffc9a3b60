"""Checkpoints that are damaged, that differ between ranks, or that are something else."""

from __future__ import annotations

import functools
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero import ZeROStrategy, load_weights
from lightning_zero.checkpoint import (
    DirectorySave,
    FileSave,
    Saver,
    load,
    load_module_state,
    module_state,
    optimizer_state,
)
from lightning_zero.comm import Control
from lightning_zero.commands import convert, damage
from lightning_zero.fabric import Checkpoints
from tests.oracle import resharding
from tests.oracle.by_trainer import Rows, make_trainer, model, world
from tests.oracle.checkpoints import PROVENANCE, told
from tests.oracle.ranks import Pools

Kind = Callable[..., Any]


def flip(control: Control, file: Path, place: int, bit: int) -> None:
    """Change one bit of a file, which all ranks see when this returns."""
    if control.rank == 0:
        with file.open("r+b") as content:
            content.seek(place)
            byte = content.read(1)[0]
            content.seek(place)
            content.write(bytes([byte ^ 1 << bit]))
    control.gather_objects(None)


def places(path: Path) -> list[tuple[int, int]]:
    """Return where each storage lies in a file: its first byte, and how many."""
    found = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            lengths = struct.unpack("<HH", file.read(4))
            if info.file_size and "/data/" in info.filename:
                found.append((info.header_offset + 30 + sum(lengths), info.file_size))
    return found


# -- every tensor ----------------------------------------------------------------------------------


def save_trained(path: str, kind: Kind) -> None:
    """Save a module with two optimizers, and something of a callback."""
    module, optimizers, engine = resharding.shard(3, "32-true")
    resharding.steps(module, optimizers, 0, resharding.NUM_BEFORE)
    checkpoint = {
        "state_dict": module_state(module, engine),
        "optimizer_states": [
            optimizer_state(o, engine, f"optimizer {n}") for n, o in enumerate(optimizers)
        ],
        "callbacks": {"average": {"weight": module_state(module, engine)["norm.weight"]}},
    }
    names = {id(p): name for name, p in module.named_parameters()}
    parameters = [[names[id(p)] for g in o.param_groups for p in g["params"]] for o in optimizers]
    if kind is DirectorySave:
        kind = functools.partial(kind, parameters=parameters)
    Saver(engine.comm.control).save(checkpoint, path, PROVENANCE, kind=kind)


def resume_from_damage(path: str, seed: int, every: int) -> list[str]:
    """The errors of loading a checkpoint with one bit changed in a storage, one by one."""
    module, optimizers, engine = resharding.shard(3, "32-true")
    control = engine.comm.control
    checkpoints = Checkpoints(control, engine.sharded.settings, [engine].copy)
    chance, errors = random.Random(seed), []
    before = [piece.detach().clone() for piece in engine.sharded.pieces]
    for offset, nbytes in places(Path(path))[::every]:
        place, bit = offset + chance.randrange(nbytes), chance.randrange(8)
        flip(control, Path(path), place, bit)
        errors.append(told(load, path, control))
        errors.append(told(load_weights, module, path))
        flip(control, Path(path), place, bit)
    assert all(map(torch.equal, before, [piece.detach() for piece in engine.sharded.pieces]))
    checkpoint = load(path, control)
    states = checkpoints.prepared(optimizers, checkpoint["optimizer_states"])
    load_module_state(module, engine, checkpoint["state_dict"])
    checkpoints.load_optimizers(zip(optimizers, states, strict=True))
    resharding.steps(module, optimizers, 0, 1)
    return errors


def save_plain(path: Path) -> None:
    module, optimizers = resharding.build()
    resharding.steps(module, optimizers, 0, resharding.NUM_BEFORE)
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"state_dict": module.state_dict(), "optimizer_states": states}, path)


@pytest.mark.parametrize(("world", "every"), [(1, 1), (3, 5)])
def test_every_damaged_tensor_is_refused_by_all_before_anything_changes(
    ranks: Pools, tmp_path: Path, world: int, every: int
) -> None:
    ranks(2).run(save_trained, str(tmp_path / "ours.ckpt"), FileSave)
    save_plain(tmp_path / "theirs.ckpt")
    for name in ("ours", "theirs"):
        path = tmp_path / f"{name}.ckpt"
        found = ranks(world).run(resume_from_damage, str(path), world, every)
        assert len(found[0]) * every > 50
        assert all(errors == found[0] for errors in found)
        for error in found[0]:
            assert f"{name}.ckpt' is damaged: 'data/" in error


def test_files_without_checksums_are_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    torch.serialization.set_crc32_options(False)
    try:
        save_plain(path)
        save_trained(str(tmp_path / "directory"), DirectorySave)
    finally:
        torch.serialization.set_crc32_options(True)
    assert load(str(path), Control())["state_dict"]["count"].item() == resharding.NUM_BEFORE
    assert "has no checksums" in told(damage, path)
    assert "callbacks" in load(str(tmp_path / "directory"), Control())


def test_what_is_damaged_is_not_converted(ranks: Pools, tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    ranks(1).run(save_trained, str(path), FileSave)
    for offset, _ in places(path)[::9]:
        flip(Control(), path, offset, 0)
        for target in ("other.ckpt", "other.safetensors"):
            assert "is damaged" in told(convert, path, tmp_path / target)
            assert not (tmp_path / target).exists()
        assert len(damage(path)) == 1
        flip(Control(), path, offset, 0)


# -- what is no tensor -----------------------------------------------------------------------------


def test_a_damaged_pickle_is_called_damaged(ranks: Pools, tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    ranks(1).run(save_trained, str(path), FileSave)
    with zipfile.ZipFile(path) as archive:
        size = len(archive.read("archive/data.pkl"))
        begin = path.read_bytes().index(archive.read("archive/data.pkl"))
    chance, control = random.Random(0), Control()
    for _ in range(50):
        place, bit = begin + chance.randrange(size), chance.randrange(8)
        flip(control, path, place, bit)
        error = told(load, str(path), control)
        assert "file.ckpt' is damaged" in error
        assert "weights_only=False" not in error
        flip(control, path, place, bit)
    load(str(path), control)


def test_a_directory_without_one_of_its_files_is_refused(ranks: Pools, tmp_path: Path) -> None:
    path = tmp_path / "name"
    ranks(1).run(save_trained, str(path), DirectorySave)
    module, _ = resharding.build()
    readers = [
        functools.partial(load, str(path), Control()),
        functools.partial(load_weights, module, path),
    ]
    for name in ("lightning_zero.json", ".metadata", "meta.pt", "__0_0.distcp"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[: len(content) // 2])
        assert all(str(path) in told(reader) for reader in readers), name
        (path / name).write_bytes(content)
    (path / "meta.pt").unlink()
    for reader in readers:
        error = told(reader)
        assert error.startswith("FileNotFoundError")
        assert "'meta.pt'" in error
        assert str(path) in error


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ckpt")
    for path in (tmp_path / "pipe.ckpt", Path("/dev/zero")):
        for error in (
            told(load, str(path), Control()),
            told(load_weights, torch.nn.Linear(1, 1), path),
            told(Saver(Control()).save, {}, str(path), PROVENANCE),
        ):
            assert f"{str(path)!r} is a device or a pipe" in error
    assert (tmp_path / "pipe.ckpt").is_fifo()


# -- ranks that differ, and states that do not fit -------------------------------------------------


def fit_each(folder: str, paths: list[list[str | None]]) -> list[str]:
    """The errors of runs in which each rank is given a path of its own."""
    os.chdir(f"{folder}/{os.environ['RANK']}")
    errors = []
    for of_ranks in paths:
        path = of_ranks[int(os.environ["RANK"])]
        trainer = make_trainer(
            world(), ZeROStrategy(3), "/nowhere", max_steps=9, enable_checkpointing=False
        )
        module = model()
        before = {name: value.detach().clone() for name, value in module.state_dict().items()}
        errors.append(told(trainer.fit, module, Rows(), ckpt_path=path))
        # Weights are loaded before there are optimizers, as under DDP.
        if errors[-1] != "no error" and "Cannot resume" not in errors[-1]:
            assert all(torch.equal(v, before[name]) for name, v in module.state_dict().items())
    return errors


def write_files(folder: str) -> None:
    trainer = make_trainer(
        world(), ZeROStrategy(3), "/nowhere", max_steps=2, enable_checkpointing=False
    )
    trainer.fit(model(), Rows())
    trainer.save_checkpoint(f"{folder}/good.ckpt")
    trainer.fit_loop.max_epochs = None
    if not trainer.is_global_zero:
        return
    good = torch.load(f"{folder}/good.ckpt", weights_only=True)

    def write(name: str, change: Callable[[Any], object]) -> None:
        other = torch.load(f"{folder}/good.ckpt", weights_only=True)
        change(other)
        torch.save(other, f"{folder}/{name}.ckpt")

    write("list", lambda c: c.update(state_dict=list(c["state_dict"].items())))
    write("shape", lambda c: c["optimizer_states"][0]["state"][0].update(exp_avg=torch.ones(7)))
    write("text", lambda c: c.update(optimizer_states=["hello"]))
    later = {**good, "global_step": good["global_step"] + 1}
    os.makedirs(f"{folder}/0")
    os.makedirs(f"{folder}/1")
    torch.save(good, f"{folder}/0/last.ckpt")
    torch.save(later, f"{folder}/1/last.ckpt")
    torch.save(good, f"{folder}/0/one.ckpt")


def test_refusals_name_the_file_and_change_nothing(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(write_files, str(tmp_path))
    names = [f"{tmp_path}/{name}.ckpt" for name in ("list", "shape", "text", "good")]
    paths: list[list[str | None]] = [[name, name] for name in names[:3]]
    here = "/proc/self/cwd"
    paths += [
        [f"{here}/last.ckpt"] * 2,
        [f"{here}/one.ckpt"] * 2,
        [names[3], None],
        [None, names[3]],
    ]
    first, second = ranks(2).run(fit_each, str(tmp_path), paths)
    assert first == second
    assert all(error.split(":")[0].endswith("Error") for error in first)
    as_list, shape, text, last, one, none, other = first
    assert "list.ckpt' is not a Trainer checkpoint: its 'state_dict' is a list" in as_list
    assert "shape.ckpt'. " in shape
    assert "'exp_avg' of 'net.embedding.weight' has shape (7,)" in shape
    assert "text.ckpt'. " in text
    assert "the ranks see different checkpoints" in last
    assert "step 2" in last
    assert "step 3" in last
    assert "on rank 1: Checkpoint file not found" in one
    assert f"{names[3]!r}: on rank 1, ckpt_path" in none
    assert f"{names[3]!r}: on rank 0, ckpt_path" in other


def save_with_other_optimizers(folder: str) -> str:
    module, optimizers, engine = resharding.shard(3, "32-true")
    resharding.steps(module, optimizers, 0, 1)
    if engine.comm.control.rank == 1:
        for group in optimizers[0].param_groups:
            group["lr"] = 0.125
    return told(optimizer_state, optimizers[0], engine, "optimizer 0")


def test_other_optimizers_on_a_rank_are_named_when_saving(ranks: Pools, tmp_path: Path) -> None:
    first, second = ranks(2).run(save_with_other_optimizers, str(tmp_path))
    assert first == second
    assert "do not agree on optimizer 0. rank 0: Group 0 of optimizer 0: lr 0.01; rank 1" in first
