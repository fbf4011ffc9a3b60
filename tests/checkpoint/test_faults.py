"""What goes wrong while a checkpoint is written or read, and what is left afterwards."""

from __future__ import annotations

import functools
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFile

from lightning_zero import ZeROStrategy, load_weights
from lightning_zero.checkpoint import (
    DirectorySave,
    FileSave,
    Provenance,
    Saver,
    existing,
    load,
)
from lightning_zero.checkpoint.files import this_host
from lightning_zero.comm import Control, SyncPoint
from lightning_zero.commands.checkpoints import convert, damage, describe
from tests.oracle.by_trainer import Everything, Model, Rows, Run, brief, model
from tests.oracle.checkpoints import (
    PROVENANCE,
    Hostile,
    damaged,
    kill_in_mid_save,
    saves_to_a_full_disk,
    some,
    told,
)
from tests.oracle.messages import messages
from tests.oracle.ranks import Pools
from tests.oracle.sharded import shard

Kind = Callable[..., Any]
KINDS = [FileSave, DirectorySave]


def save_here(path: Path, checkpoint: Any, origin: Provenance = PROVENANCE, **how: Any) -> None:
    Saver(Control()).save(checkpoint, str(path), origin, **how)


def fill_of(path: Path) -> float:
    """The number that a checkpoint by ``some`` is full of."""
    found = load(str(path), Control())
    for value in found["state_dict"].values():
        assert value.eq(found["fill"]).all()
    return float(found["fill"])


# -- saves that fail -------------------------------------------------------------------------------


def fail_to_save(folder: str, kind: Kind) -> list[str]:
    """Every way in which a save can fail on one rank."""
    control = Control()
    saver = Saver(control)
    save = functools.partial(saver.save, kind=kind)
    path = f"{folder}/name"
    found = saves_to_a_full_disk(save, saver, path)
    changed = [some(control, 2.0) for _ in range(4)]
    if control.rank == 1:
        del changed[0]["state_dict"]["whole"]
    if control.rank == 0:
        changed[1]["hook"] = lambda: None
    changed[2]["more"] = [changed[2]["state_dict"]["whole"]]
    changed[3]["model"] = {"whole": changed[3]["state_dict"]["whole"]}
    # A file has a place for the last two.
    for checkpoint in changed if kind is DirectorySave else changed[:2]:
        found.append(told(save, checkpoint, path, PROVENANCE))
    for place in (f"{folder}/mine", f"{folder}/mine/notes.txt/under", "/proc/name"):
        found.append(told(save, some(control, 2.0), place, PROVENANCE))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_fails_on_one_rank_fails_on_all(
    ranks: Pools, tmp_path: Path, kind: Kind
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    first, second = ranks(2).run(fail_to_save, str(tmp_path), kind)
    assert first == second
    limit, background, differs, strange, *others, mine, under, proc = first
    for text in (limit, background):
        assert "name' failed: on rank 1: " in text
        assert kind is DirectorySave or "[Errno 27] File too large" in text
    assert re.search(r"on rank 1: this rank's checkpoint has no '(state_dict\.)?whole'", differs)
    assert "on rank 0: " in strange
    assert "lambda" in strange
    if kind is DirectorySave:
        assert "the sharded tensor 'whole' is inside an object" in others[0]
        assert "two entries of the checkpoint would be named 'model.whole'" in others[1]
    assert "mine' is a folder that holds something other than a checkpoint" in mine
    assert "on rank 0: [Errno" in under
    assert "on rank 0: [Errno" in proc
    assert sorted(os.listdir(tmp_path)) == ["mine", "name"]
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]
    assert fill_of(tmp_path / "name") == 1.0


class RefusedAtTheEnd(MemoryFile):
    """A file of a store that takes all of it and then refuses it."""

    def commit(self) -> None:
        raise OSError("the store refuses the file")


def fail_to_upload() -> str:
    control = Control()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsspec.implementations.memory.MemoryFile", RefusedAtTheEnd)
        found = told(Saver(control).save, some(control, 1.0), "memory://folder/a.ckpt", PROVENANCE)
    control.call(SyncPoint.STEP).wait()  # the ranks have not diverged
    return found


def test_an_upload_that_is_refused_fails_on_all(ranks: Pools) -> None:
    first, second = ranks(2).run(fail_to_upload)
    assert first == second
    assert "on rank 0: the store refuses the file" in first


class Differing(Model):
    """Has another rate on a rank when it is saved."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.125
        self.trainer.save_checkpoint("never.ckpt")


def save_with_other_optimizers() -> str:
    return told(brief(ZeROStrategy(3), 1).fit, Differing(), Rows())


def test_other_optimizers_on_a_rank_are_named_when_saving(ranks: Pools) -> None:
    first, second = ranks(2).run(save_with_other_optimizers)
    assert first == second
    assert "do not agree on optimizer 0. rank 0: Group 0 of optimizer 0: lr 0.0" in first
    assert "; rank 1: Group 0 of optimizer 0: lr 0.125" in first


# -- targets that ranks do not share ---------------------------------------------------------------


def save_to_own_folder(folder: str) -> tuple[bytes, list[str]]:
    """The streamed file, and what the log says about two saves to one place."""
    # Each process has its own working directory: for once the same path is not the same file.
    os.chdir(f"{folder}/{dist.get_rank()}")
    control = Control()
    save = Saver(control).save
    save(some(control, 3.0), f"{folder}/shared.ckpt", PROVENANCE)
    save(some(control, 3.0), "/proc/self/cwd/new/file.ckpt", PROVENANCE)
    error = told(load, "/proc/self/cwd/new/file.ckpt", control)
    assert error.startswith("FileNotFoundError: Loading")
    assert "on ranks 1, 2: Checkpoint file not found" in error
    path = f"memory:/{folder}/file.ckpt"
    with messages("lightning_zero.checkpoint.save") as records:
        for _ in range(2):
            save(some(control, 3.0), path, PROVENANCE)
    if control.rank:
        return b"", records
    assert load(path, Control(alone=True))["state_dict"]["whole"].eq(3).all()
    return bytes(fsspec.filesystem("memory").cat(f"{folder}/file.ckpt")), records


def test_streamed_file_is_the_same_file(ranks: Pools, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    (remote, told_first), *others = ranks(3).run(save_to_own_folder, str(tmp_path))
    assert len(told_first) == 1
    assert "rank 0 writes it for all" in told_first[0]
    assert str(tmp_path) in told_first[0]
    assert all(len(records) <= 1 for _, records in others)
    expected = (tmp_path / "shared.ckpt").read_bytes()
    assert (tmp_path / "0" / "new" / "file.ckpt").read_bytes() == expected
    assert remote == expected
    words = "written by ZeRO stage 3 on 2 ranks, precision 32-true"
    assert words in list(describe(tmp_path / "shared.ckpt"))
    assert damage(tmp_path / "shared.ckpt") == []
    assert [os.listdir(tmp_path / str(rank)) for rank in (1, 2)] == [[], []]


class Counted(AbstractFileSystem):
    """A store that notes each download in a folder, for all processes."""

    protocol = "counted"

    def exists(self, path: str, **_: Any) -> bool:
        return not path.endswith(".metadata")

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        place = Path("/", self._strip_protocol(path))
        place.with_suffix(f".{os.getpid()}").touch()
        return place.open(mode)


def load_counted(path: str) -> float:
    fsspec.register_implementation("counted", Counted, clobber=True)
    return float(load(f"counted:/{path}", Control())["fill"])


def test_a_host_downloads_a_file_once(ranks: Pools, tmp_path: Path) -> None:
    save_here(tmp_path / "file.ckpt", some(Control(), 2.0))
    assert ranks(3).run(load_counted, str(tmp_path / "file.ckpt")) == [2.0] * 3
    assert len(list(tmp_path.iterdir())) == 2


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_leaves_the_last_checkpoint_whole(
    tmp_path: Path, kills: int, kind: Kind
) -> None:
    chance = random.Random(kills)
    path = tmp_path / "name.ckpt"
    for number in range(kills):
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        kill_in_mid_save(path, chance, kind=kind, in_background=number % 2 == 1)
        assert fill_of(path) >= 1.0
        assert damage(existing(path)) == []
        for name in {*os.listdir(tmp_path)} - {path.name}:
            assert re.fullmatch(r"\.name\.ckpt\..*\.saving|name\.aside-.*\.ckpt", name)
    save_here(path, some(Control(), 1.0), kind=kind)
    assert os.listdir(tmp_path) == ["name.ckpt"]


def test_leftovers_of_dead_processes_of_this_host_go(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = this_host()
    kept = [
        ".mine",
        ".mine.saving",
        f".file.ckpt.{here}-{os.getpid()}-0123abcd.saving",  # in work
        f".file.ckpt.0000{here[4:]}-{ended.pid}-0123abcd.saving",  # of another host
    ]
    for name in (*kept, f".file.ckpt.{here}-{ended.pid}-0123abcd.saving"):
        (tmp_path / name).write_bytes(b"unfinished")
    save_here(tmp_path / "file.ckpt", some(Control(), 1.0))
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "file.ckpt"])


def test_only_what_a_save_has_written_is_removed(tmp_path: Path) -> None:
    control, path = Control(), tmp_path / "name"
    save_here(path, some(control, 1.0), kind=DirectorySave)
    (path / "notes.txt").write_text("mine")
    for kind in KINDS:
        error = told(save_here, path, some(control, 2.0), kind=kind)
        assert "holds something other than a checkpoint ('notes.txt')" in error
    assert load(str(path), control)["fill"] == 1.0
    Saver(control).remove(str(path))
    assert os.listdir(path) == ["notes.txt"]


def test_a_crash_between_renames_leaves_a_checkpoint_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, path = Control(), tmp_path / "last.ckpt"
    save = functools.partial(save_here, path, kind=DirectorySave)
    save(some(control, 1.0))

    def crash(source: Any, target: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save(some(control, 2.0))
    monkeypatch.undo()
    assert not path.exists()
    assert fill_of(path) == 1.0
    (aside,) = tmp_path.iterdir()
    # By this, Lightning recognizes the file that ``ckpt_path="last"`` asks for.
    assert aside.suffix == ".ckpt"
    assert re.match(r"^last(-(\d+))?", aside.stem)
    save(some(control, 3.0))
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert fill_of(path) == 3.0


def test_a_file_and_a_directory_take_each_others_place(tmp_path: Path) -> None:
    for fill, kind in enumerate((FileSave, FileSave, DirectorySave, DirectorySave, FileSave), 1):
        save_here(tmp_path / "name", some(Control(), float(fill)), kind=kind)
        assert fill_of(tmp_path / "name") == fill
    os.symlink("name", tmp_path / "last")
    save_here(tmp_path / "last", some(Control(), 9.0), kind=DirectorySave)
    assert [fill_of(tmp_path / name) for name in ("name", "last")] == [5.0, 9.0]
    assert sorted(os.listdir(tmp_path)) == ["last", "name"]


def remove_in_vain(folder: str) -> None:
    control, path = Control(), f"{folder}/old.ckpt"
    saver = Saver(control)
    saver.save(some(control, 1.0), path, PROVENANCE)
    with (
        pytest.MonkeyPatch.context() as patch,
        messages("lightning_zero.checkpoint.save") as records,
    ):
        patch.setattr("os.unlink", lambda path: os.rmdir("/nowhere"))
        saver.remove(path)
        saver.save(some(control, 2.0), f"{folder}/new.ckpt", PROVENANCE, in_background=True)
        saver.remove(path)
        saver.close()
    assert sum("could not be removed" in one for one in records) == (0 if control.rank else 2)


def test_a_failed_removal_is_a_warning(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(remove_in_vain, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["new.ckpt", "old.ckpt"]


# -- files that are no checkpoints -----------------------------------------------------------------


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = Hostile(f"touch {mark}")
    content = {"state_dict": {"w": torch.ones(2)}, "payload": hostile}
    torch.save(content, tmp_path / "new.ckpt")
    torch.save(content, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.ckpt").write_bytes(pickle.dumps(hostile))
    save_here(tmp_path / "name", some(Control(), 1.0), kind=DirectorySave)
    for file, write in ((".metadata", pickle.dump), ("meta.pt", torch.save)):
        folder = shutil.copytree(tmp_path / "name", tmp_path / f"bad{file}")
        with (folder / file).open("wb") as stream:
            write(hostile, stream)
    held = {"state_dict": {"hook": hostile, "w": torch.ones(1)}}
    save_here(tmp_path / "object", held, kind=DirectorySave)
    more = "holds more than tensors and plain values"
    for name, words in {
        "new.ckpt": more,
        "old.ckpt": more,
        "bare.ckpt": "is not a checkpoint",
        "bad.metadata": "its table holds an object of posix.system",
        "badmeta.pt": more,
        "object": more,
    }.items():
        with pytest.raises(ValueError, match=words) as caught:
            load(str(tmp_path / name), Control())
        assert name in str(caught.value)
    assert not mark.exists()
    load(str(tmp_path / "object"), Control(), weights_only=False)
    assert mark.exists()


def test_foreign_and_later_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "empty.ckpt").write_bytes(b"")
    for name in ("text", "empty"):
        with pytest.raises(ValueError, match=f"{name}.ckpt' is not a checkpoint"):
            load(str(tmp_path / f"{name}.ckpt"), Control())
    later = Provenance(stage=3, world_size=1, precision="", format=99)
    for kind in KINDS:
        save_here(tmp_path / "later", some(Control(), 1.0), later, kind=kind)
        with pytest.raises(ValueError, match="later' has format 99 of a later lightning-zero"):
            load(str(tmp_path / "later"), Control())
    os.mkfifo(tmp_path / "pipe.ckpt")
    for path in (tmp_path / "pipe.ckpt", Path("/dev/zero")):
        for error in (
            told(load, str(path), Control()),
            told(load_weights, torch.nn.Linear(1, 1), path),
            told(save_here, path, {}),
        ):
            assert f"{str(path)!r} is a device or a pipe" in error


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_checkpoints_are_refused_or_right(tmp_path: Path, kind: Kind) -> None:
    """What loading a directory does not verify is at least of the right form."""
    control, path = Control(), tmp_path / "name"
    whole = some(control, 1.0, numel=300)
    whole["state_dict"]["more"] = {str(n): torch.full((n,), 1.0) for n in range(9)}
    save_here(path, whole, kind=kind)
    files = (
        [path] if path.is_file() else [path / n for n in ("__0_0.distcp", "meta.pt", ".metadata")]
    )
    chance, num_refused = random.Random(0), 0
    for file in files * (120 // len(files)):
        content = file.read_bytes()
        file.write_bytes(damaged(content, chance))
        error = told(load, str(path), control)
        assert error == "no error" or str(path) in error
        num_refused += error != "no error"
        if error == "no error" and kind is FileSave:
            found = load(str(path), control)
            state = found["state_dict"]
            tensors = [state["whole"], state["plain"], *state["more"].values()]
            assert found["fill"] == 1.0
            assert all(tensor.eq(1).all() for tensor in tensors)
            assert [tensor.numel() for tensor in tensors] == [300, 7, *range(9)]
        file.write_bytes(content)
    assert num_refused > 50


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


def resume_from_damage(path: str, every: int) -> list[str]:
    """The errors of loading a checkpoint with one bit changed in a storage, one by one."""
    module = Everything()
    engine = shard(module)
    control = engine.comm.control
    chance, errors = random.Random(every), []
    before = [piece.detach().clone() for piece in engine.sharded.pieces]
    for offset, nbytes in places(Path(path))[::every]:
        place, bit = offset + chance.randrange(nbytes), chance.randrange(8)
        flip(control, Path(path), place, bit)
        errors.append(told(load, path, control))
        errors.append(told(load_weights, module, path))
        flip(control, Path(path), place, bit)
    assert all(map(torch.equal, before, [piece.detach() for piece in engine.sharded.pieces]))
    load_weights(module, path)
    return errors


@pytest.mark.parametrize(("world", "every"), [(1, 1), (3, 5)])
def test_every_damaged_tensor_is_refused_by_all_before_anything_changes(
    ranks: Pools, tmp_path: Path, world: int, every: int
) -> None:
    ranks(2).run(Run(2, 3).fit, str(tmp_path / "ours"))
    Run().fit(str(tmp_path / "plain"))
    for path in (tmp_path / "ours" / "mid.ckpt", tmp_path / "plain" / "mid.ckpt"):
        found = ranks(world).run(resume_from_damage, str(path), every)
        assert len(found[0]) * every > 50
        assert all(errors == found[0] for errors in found)
        for error in found[0]:
            assert f"{path.name}' is damaged: 'data/" in error


def test_what_is_damaged_asks_for_no_trust_and_is_not_converted(
    tmp_path: Path,
) -> None:
    path, target, control = tmp_path / "file.ckpt", tmp_path / "other.safetensors", Control()
    torch.save({"state_dict": Everything().state_dict(), "epoch": 1}, path)
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("file/data.pkl")
    begin, chance = path.read_bytes().index(pickled), random.Random(0)
    for _ in range(20):
        place, bit = begin + chance.randrange(len(pickled)), chance.randrange(8)
        flip(control, path, place, bit)
        error = told(load, str(path), control)
        assert "file.ckpt' is damaged" in error
        assert "weights_only=False" not in error
        assert "is damaged" in told(convert, path, target)
        assert not target.exists()
        assert len(damage(path)) == 1
        flip(control, path, place, bit)
    load(str(path), control)


def test_files_without_checksums_are_not_called_damaged(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"count": torch.tensor(7)}}, tmp_path / "plain.ckpt")
        save_here(tmp_path / "directory", some(Control(), 1.0), kind=DirectorySave)
    finally:
        torch.serialization.set_crc32_options(True)
    found = load(str(tmp_path / "plain.ckpt"), Control())
    assert found["state_dict"]["count"].item() == 7
    assert fill_of(tmp_path / "directory") == 1.0
    for name in ("plain.ckpt", "directory"):
        assert "has no checksums" in told(damage, tmp_path / name)


def test_a_directory_without_its_objects_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "name"
    save_here(path, some(Control(), 1.0), kind=DirectorySave)
    (path / "meta.pt").unlink()
    for error in (
        told(load, str(path), Control()),
        told(load_weights, torch.nn.Linear(1, 1), path),
    ):
        assert re.match(rf"FileNotFoundError: .*'meta.pt' of '{path}' is missing", error)


# -- what does not fit, or differs between ranks ---------------------------------------------------


class Trust:
    """Something that weights_only=True refuses to make."""


class Wider(Model):
    """Another shape and another name."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head = torch.nn.Linear(6, 12)


BAD: dict[str, tuple[str | tuple[str | None, str | None], str]] = {
    "none": ("none.ckpt", r"FileNotFoundError: .*none.ckpt"),
    "cut": ("cut.ckpt", r"cut.ckpt' is not a checkpoint, or it is truncated"),
    "bare": ("bare.ckpt", r"bare.ckpt' is not a Trainer checkpoint"),
    "weights": ("weights.ckpt", r"contains only the model"),
    "list": ("list.ckpt", r"list.ckpt' is not a Trainer checkpoint: its 'state_dict' is a list"),
    "wider": ("good.ckpt", r"(?s)good.ckpt' does not fit.*net.head.bias.*\[11, 6\]"),
    "missing part": ("missing", r"FileNotFoundError: .*missing/__1_0.distcp'"),
    "cut part": ("short", r"short' is damaged or not a checkpoint"),
    "wider directory": ("good", r"(?s)good' does not fit.*net.head.bias.*\[11, 6\]"),
    "states as text": ("text.ckpt", r"resume from .*text.ckpt'. .*optimizer states are a dict"),
    "no state": ("string.ckpt", r"string.ckpt'. .*optimizer 0 \(AdamW\): it is not an"),
    "shape of a state": ("shape.ckpt", r"'exp_avg' of 'net.embedding.weight' has shape \(7,\)"),
    "groups": ("groups.ckpt", r"it has 2 param groups, but the optimizer has 1"),
    "parameters": ("fewer.ckpt", r"its param group 0 has 1 parameters, but the optimizer's has"),
    "objects": ("objects.ckpt", r"objects.ckpt' holds more than.*test_faults.Trust.*_only=False"),
    "other files": (("0/last.ckpt", "1/last.ckpt"), r"see different checkpoints.*step 2.*step 3"),
    "not on rank 1": (("good.ckpt", None), r"good.ckpt': on rank 1, ckpt_path"),
    "not on rank 0": ((None, "good.ckpt"), r"good.ckpt': on rank 0, ckpt_path"),
}  # fmt: skip
"""Paths, of all ranks or of each, and what the error says."""


def write_bad(folder: str) -> None:
    for name, kind in (("good.ckpt", "file"), ("good", "dcp")):
        trainer = brief(ZeROStrategy(3, checkpoint=kind), 2)  # type: ignore[arg-type]
        trainer.fit(model(), Rows())
        trainer.save_checkpoint(f"{folder}/{name}")
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    if not trainer.is_global_zero:
        return
    for name in ("missing", "short"):
        shutil.copytree(f"{folder}/good", f"{folder}/{name}")
    os.unlink(f"{folder}/missing/__1_0.distcp")
    os.truncate(f"{folder}/short/__1_0.distcp", 100)
    content = Path(f"{folder}/good.ckpt").read_bytes()
    Path(f"{folder}/cut.ckpt").write_bytes(content[: len(content) // 2])
    torch.save({"w": torch.ones(1)}, f"{folder}/bare.ckpt")
    for name, change in {
        "list": lambda c: c.update(state_dict=list(c["state_dict"].items())),
        "text": lambda c: c.update(optimizer_states={"AdamW": c["optimizer_states"]}),
        "string": lambda c: c.update(optimizer_states=["hello"]),
        "shape": lambda c: c["optimizer_states"][0]["state"][0].update(exp_avg=torch.ones(7)),
        "groups": lambda c: c["optimizer_states"][0]["param_groups"].append({"params": []}),
        "fewer": lambda c: c["optimizer_states"][0]["param_groups"][0].update(params=[0]),
        "objects": lambda c: c.update(more=Trust()),
        "0/last": lambda c: None,
        "1/last": lambda c: c.update(global_step=3),
    }.items():
        other = torch.load(f"{folder}/good.ckpt", weights_only=True)
        change(other)
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
        torch.save(other, f"{folder}/{name}.ckpt")


def fit_each(folder: str) -> list[str]:
    """The errors of runs that resume from each."""
    errors, rank = [], dist.get_rank()
    for name, (path, _) in BAD.items():
        trainer = brief(ZeROStrategy(3), 9)
        module = Wider() if "wider" in name else model()
        before = {key: value.detach().clone() for key, value in module.state_dict().items()}
        own = path if isinstance(path, str) else path[rank]
        errors.append(told(trainer.fit, module, Rows(), ckpt_path=own and f"{folder}/{own}"))
        # Weights are loaded before there are optimizers, as under DDP; a module that the error
        # finds sharded stays so.
        after = ("Cannot resume", "does not fit", "optimizer state")
        if not any(words in errors[-1] for words in after):
            assert all(torch.equal(v, before[key]) for key, v in module.state_dict().items()), name
    module = model()
    brief(ZeROStrategy(3), 4).fit(
        module, Rows(), ckpt_path=f"{folder}/objects.ckpt", weights_only=False
    )
    assert len(module.losses) == 2
    return errors


def test_refusals_name_the_file_and_change_nothing(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(write_bad, str(tmp_path))
    first, second = ranks(2).run(fit_each, str(tmp_path))
    for error, other, (_, words) in zip(first, second, BAD.values(), strict=True):
        assert error == other or "different checkpoints" in words
        assert re.search(words, error), error
