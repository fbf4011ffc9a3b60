"""What goes wrong while a checkpoint is written or read, and what is left afterwards."""

from __future__ import annotations

import functools
import os
import pickle
import random
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFile

from lightning_zero.checkpoint import DirectorySave, FileSave, Provenance, Saver, load
from lightning_zero.checkpoint.atomic import this_host
from lightning_zero.comm import Control, SyncPoint
from lightning_zero.commands import damage, describe
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

# -- errors ----------------------------------------------------------------------------------------


def fail_to_save(folder: str) -> list[str]:
    """Every way in which a save can fail on one rank."""
    control = Control()
    saver = Saver(control)
    path = f"{folder}/file.ckpt"
    found = saves_to_a_full_disk(saver.save, saver, path)
    found.append(told(saver.save, some(control, 2.0), f"{path}/under/a.ckpt", PROVENANCE))
    found.append(told(saver.save, some(control, 2.0), "/proc/file.ckpt", PROVENANCE))
    other = some(control, 2.0)
    if control.rank == 1:
        del other["state_dict"]["whole"]
    found.append(told(saver.save, other, path, PROVENANCE))
    strange = some(control, 2.0)
    if control.rank == 0:
        strange["hook"] = lambda: None
    found.append(told(saver.save, strange, path, PROVENANCE))
    return found


def test_a_save_that_fails_on_one_rank_fails_on_all(ranks: Pools, tmp_path: Path) -> None:
    first, second = ranks(2).run(fail_to_save, str(tmp_path))
    assert first == second
    limit, background, under, proc, differs, strange = first
    for text in (limit, background):
        assert text.startswith("OSError: Saving")
        assert "file.ckpt' failed: on rank 1: [Errno 27] File too large" in text
    assert "on rank 0: [Errno" in under
    assert "on rank 0: [Errno" in proc
    assert "on rank 1: this rank's checkpoint has no 'whole'" in differs
    assert "on rank 0: " in strange
    assert "lambda" in strange
    assert os.listdir(tmp_path) == ["file.ckpt"]
    assert torch.load(tmp_path / "file.ckpt", weights_only=True)["fill"] == 1.0


class RefusedAtTheEnd(MemoryFile):
    """A file of a store that takes all of it and then refuses it."""

    def commit(self) -> None:
        raise OSError("the store refuses the file")


def fail_to_upload() -> list[str]:
    control = Control()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsspec.implementations.memory.MemoryFile", RefusedAtTheEnd)
        found = [
            told(Saver(control).save, some(control, 1.0), "memory://folder/a.ckpt", PROVENANCE)
        ]
    control.call(SyncPoint.STEP).wait()  # the ranks have not diverged
    return found


def test_an_upload_that_is_refused_fails_on_all(ranks: Pools) -> None:
    first, second = ranks(2).run(fail_to_upload)
    assert first == second
    assert "on rank 0: the store refuses the file" in first[0]


def read_from_own_folder(folder: str, path: str) -> str:
    os.chdir(f"{folder}/{dist.get_rank()}")
    return told(load, path, Control())


def test_a_rank_that_cannot_see_the_file_ends_on_all(ranks: Pools, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    torch.save({"state_dict": {}}, tmp_path / "0" / "file.ckpt")
    # Each process has its own working directory: for once the same path is not the same file.
    for text in ranks(2).run(read_from_own_folder, str(tmp_path), "/proc/self/cwd/file.ckpt"):
        assert text.startswith("FileNotFoundError: Loading")
        assert "on rank 1: Checkpoint file not found" in text


class Slow:
    """A save that ends only when it may."""

    def __init__(self, may_end: threading.Event, said: list[str], path: str) -> None:
        self.may_end, self.said, self.name = may_end, said, Path(path).name
        said.append(f"{self.name} begun")

    def detach(self, control: Control) -> None:
        """Nothing to copy."""

    def run(self) -> None:
        self.may_end.wait()
        self.said.append(f"{self.name} written")


def save_behind() -> list[str]:
    saver, said, may_end = Saver(Control()), [], threading.Event()

    def slow(checkpoint: Any, path: str, *_: Any) -> Slow:
        return Slow(may_end, said, path)

    saver.save({}, "/a.ckpt", PROVENANCE, in_background=True, kind=slow)
    said.append("returned")
    threading.Timer(0.3, may_end.set).start()
    saver.save({}, "/b.ckpt", PROVENANCE, in_background=True, kind=slow)
    saver.close()
    return said


def test_a_save_behind_returns_and_the_next_one_waits(ranks: Pools) -> None:
    [said] = ranks(1).run(save_behind)
    assert said == ["a.ckpt begun", "returned", "a.ckpt written", "b.ckpt begun", "b.ckpt written"]


# -- targets that ranks do not share ---------------------------------------------------------------


def save_to_own_folder(folder: str) -> tuple[bytes, list[str]]:
    """The streamed file, and what the log says about two saves to one place."""
    os.chdir(f"{folder}/{dist.get_rank()}")
    control = Control()
    Saver(control).save(some(control, 3.0), "/proc/self/cwd/new/file.ckpt", PROVENANCE)
    path = f"memory:/{folder}/file.ckpt"
    with messages("lightning_zero.checkpoint.save") as records:
        for _ in range(2):
            Saver(control).save(some(control, 3.0), path, PROVENANCE)
    if control.rank:
        return b"", records
    assert load(path, Control(alone=True))["state_dict"]["whole"].eq(3).all()
    return bytes(fsspec.filesystem("memory").cat(f"{folder}/file.ckpt")), records


@pytest.mark.parametrize("world", [1, 3])
def test_streamed_file_is_the_same_file(ranks: Pools, tmp_path: Path, world: int) -> None:
    for rank in range(world):
        (tmp_path / str(rank)).mkdir()
    (remote, told_first), *others = ranks(world).run(save_to_own_folder, str(tmp_path))
    assert len(told_first) == 1
    assert "rank 0 writes it for all" in told_first[0]
    assert str(tmp_path) in told_first[0]
    assert all(len(records) <= 1 for _, records in others)
    ranks(world).run(save_in, str(tmp_path / "shared.ckpt"), 3.0)
    expected = (tmp_path / "shared.ckpt").read_bytes()
    assert (tmp_path / "0" / "new" / "file.ckpt").read_bytes() == expected
    assert remote == expected
    assert "written by ZeRO stage 3 on 2 ranks, precision 32-true" in list(
        describe(tmp_path / "shared.ckpt")
    )
    assert damage(tmp_path / "shared.ckpt") == []
    for rank in range(1, world):
        assert os.listdir(tmp_path / str(rank)) == []


def save_in(path: str, fill: float) -> None:
    control = Control()
    Saver(control).save(some(control, fill), path, PROVENANCE)


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_rank_leaves_the_last_file_whole(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    path = tmp_path / "file.ckpt"
    for _ in range(kills):
        path.unlink(missing_ok=True)
        kill_in_mid_save(path, chance, in_background=chance.random() < 0.5)
        found = torch.load(path, weights_only=True)
        assert found["state_dict"]["whole"].eq(found["fill"]).all()
        assert found["state_dict"]["plain"].eq(found["fill"]).all()
        assert damage(path) == []
        left = [name for name in os.listdir(tmp_path) if name != path.name]
        assert all(name.startswith(".file.ckpt.") and name.endswith(".saving") for name in left)
    save_in(str(tmp_path / "other.ckpt"), 1.0)
    assert sorted(os.listdir(tmp_path)) == ["file.ckpt", "other.ckpt"]


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
    save_in(str(tmp_path / "file.ckpt"), 1.0)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "file.ckpt"])


def test_only_what_a_save_has_written_is_removed(tmp_path: Path) -> None:
    control, path = Control(), tmp_path / "name"
    saver = Saver(control)
    saver.save(some(control, 1.0), str(path), PROVENANCE, kind=DirectorySave)
    (path / "notes.txt").write_text("mine")
    for kind in (FileSave, DirectorySave):
        error = told(saver.save, some(control, 2.0), str(path), PROVENANCE, kind=kind)
        assert "holds something other than a checkpoint ('notes.txt')" in error
    assert load(str(path), control)["fill"] == 1.0
    saver.remove(str(path))
    assert os.listdir(path) == ["notes.txt"]


def test_a_crash_between_renames_leaves_a_checkpoint_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, path = Control(), tmp_path / "last.ckpt"
    save = functools.partial(Saver(control).save, kind=DirectorySave)
    save(some(control, 1.0), str(path), PROVENANCE)
    rename = os.rename

    def crash(source: Any, target: Any) -> None:
        if str(source).endswith(".saving"):
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr("os.rename", crash)
    with pytest.raises(KeyboardInterrupt):
        save(some(control, 2.0), str(path), PROVENANCE)
    monkeypatch.setattr("os.rename", rename)
    assert not path.exists()
    assert load(str(path), control)["fill"] == 1.0
    (aside,) = tmp_path.iterdir()
    # By this, Lightning recognizes the file that ``ckpt_path="last"`` asks for.
    assert aside.suffix == ".ckpt"
    assert re.match(r"^last(-(\d+))?", aside.stem)
    save(some(control, 3.0), str(path), PROVENANCE)
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert load(str(path), control)["fill"] == 3.0


def remove_in_vain(folder: str) -> None:
    control, path = Control(), f"{folder}/old.ckpt"
    saver = Saver(control)
    saver.save(some(control, 1.0), path, PROVENANCE)
    with (
        pytest.MonkeyPatch.context() as patch,
        messages("lightning_zero.checkpoint.saver") as records,
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


# -- URLs ------------------------------------------------------------------------------------------


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
    ranks(1).run(save_in, str(tmp_path / "file.ckpt"), 2.0)
    assert ranks(3).run(load_counted, str(tmp_path / "file.ckpt")) == [2.0] * 3
    assert len(list(tmp_path.iterdir())) == 2


# -- bad files -------------------------------------------------------------------------------------


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = {"state_dict": {"w": torch.ones(2)}, "payload": Hostile(f"touch {mark}")}
    torch.save(hostile, tmp_path / "a.ckpt")
    torch.save(hostile, tmp_path / "b.ckpt", _use_new_zipfile_serialization=False)
    (tmp_path / "c.ckpt").write_bytes(pickle.dumps(hostile["payload"]))
    for name in "abc":
        with pytest.raises(ValueError, match=f"{name}.ckpt"):
            load(str(tmp_path / f"{name}.ckpt"), Control())
    assert not mark.exists()


def test_foreign_and_later_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "empty.ckpt").write_bytes(b"")
    for name in ("text", "empty"):
        with pytest.raises(ValueError, match=f"{name}.ckpt' is not a checkpoint"):
            load(str(tmp_path / f"{name}.ckpt"), Control())
    control = Control()
    later = Provenance(stage=3, world_size=1, precision="", format=2)
    Saver(control).save(some(control, 1.0), str(tmp_path / "later.ckpt"), later)
    with pytest.raises(ValueError, match=r"later\.ckpt' has format 2 of a later lightning-zero"):
        load(str(tmp_path / "later.ckpt"), control)


def read_damaged(folder: str, count: int) -> dict[str, int]:
    """Count damaged files that are refused, and those that are right all the same."""
    control = Control()
    path = Path(folder) / "file.ckpt"
    whole = some(control, 1.0, numel=300)
    whole["state_dict"]["more"] = {str(n): torch.full((n,), 1.0) for n in range(9)}
    Saver(control).save(whole, str(path), PROVENANCE)
    content, chance = path.read_bytes(), random.Random(0)
    outcomes = {"refused": 0, "right": 0}
    for _ in range(count):
        path.write_bytes(damaged(content, chance))
        try:
            found = load(str(path), control)
        except (ValueError, FileNotFoundError) as error:
            outcomes["refused"] += "file.ckpt" in str(error)
            continue
        try:
            state = found["state_dict"]
            tensors = [state["whole"], state["plain"], *state["more"].values()]
            is_right = found["fill"] == 1.0 and all(t.eq(1).all() for t in tensors)
            is_right = is_right and [t.numel() for t in tensors] == [300, 7, *range(9)]
        except (KeyError, TypeError, AttributeError):
            is_right = False
        assert is_right, "wrong values that no checksum shows"
        outcomes["right"] += 1
    return outcomes


def test_damaged_files_are_refused_or_found(ranks: Pools, tmp_path: Path) -> None:
    outcomes = ranks(1).run(read_damaged, str(tmp_path), 200)[0]
    assert sum(outcomes.values()) == 200
    assert outcomes["refused"] > 100
