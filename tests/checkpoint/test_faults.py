"""What goes wrong while a checkpoint is written or read, and what is left afterwards."""

from __future__ import annotations

import os
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFile

from lightning_zero.checkpoint import DamageError, Provenance, Saver, load, read_file
from lightning_zero.checkpoint.file.format import FORMAT
from lightning_zero.comm import Control, SyncPoint
from lightning_zero.commands import damage, describe
from tests.oracle.checkpoints import (
    PROVENANCE,
    Hostile,
    damaged,
    kill_in_mid_save,
    nothing_is_small,
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
    with messages("lightning_zero.checkpoint.file.file_save") as records:
        for _ in range(2):
            Saver(control).save(some(control, 3.0), path, PROVENANCE)
    if control.rank:
        return b"", records
    assert read_file(path)["state_dict"]["whole"].eq(3).all()
    return bytes(fsspec.filesystem("memory").cat(f"{folder}/file.ckpt")), records


@pytest.mark.parametrize("world", [1, 3])
def test_streamed_file_is_the_same_file(ranks: Pools, tmp_path: Path, world: int) -> None:
    for rank in range(world):
        (tmp_path / str(rank)).mkdir()
    (remote, told_first), *others = ranks(world).run(save_to_own_folder, str(tmp_path))
    assert len(told_first) == 1
    assert "streamed through rank 0" in told_first[0]
    assert str(tmp_path) in told_first[0]
    assert all(records == [] for _, records in others)
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


def test_leftovers_go_and_files_in_work_stay(tmp_path: Path) -> None:
    (tmp_path / ".file.ckpt.0123abcd.saving").write_bytes(b"of a dead process")
    (tmp_path / ".mine").write_bytes(b"of the user")
    (tmp_path / ".mine.saving").write_bytes(b"of another program")
    save_in(str(tmp_path / "file.ckpt"), 1.0)
    assert sorted(os.listdir(tmp_path)) == [".mine", ".mine.saving", "file.ckpt"]


# -- bad files -------------------------------------------------------------------------------------


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = {"state_dict": {"w": torch.ones(2)}, "payload": Hostile(f"touch {mark}")}
    torch.save(hostile, tmp_path / "a.ckpt")
    torch.save(hostile, tmp_path / "b.ckpt", _use_new_zipfile_serialization=False)
    (tmp_path / "c.ckpt").write_bytes(pickle.dumps(hostile["payload"]))
    for name in "abc":
        with pytest.raises(ValueError, match=f"{name}.ckpt"):
            read_file(str(tmp_path / f"{name}.ckpt"))
    assert not mark.exists()


def test_foreign_and_later_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "empty.ckpt").write_bytes(b"")
    for name in ("text", "empty"):
        with pytest.raises(ValueError, match=f"{name}.ckpt' is not a checkpoint"):
            read_file(str(tmp_path / f"{name}.ckpt"))
    control = Control()
    later = Provenance(stage=3, world_size=1, precision="", format=FORMAT + 1)
    Saver(control).save(some(control, 1.0), str(tmp_path / "later.ckpt"), later)
    with pytest.raises(ValueError, match=r"later\.ckpt' has format 2 of a later lightning-zero"):
        read_file(str(tmp_path / "later.ckpt"))


def read_damaged(folder: str, count: int) -> dict[str, int]:
    """Count damaged files that are refused, right all the same, or known by their checksums."""
    control = Control()
    path = Path(folder) / "file.ckpt"
    whole = some(control, 1.0, numel=300)
    whole["state_dict"]["more"] = {str(n): torch.full((n,), 1.0) for n in range(9)}
    Saver(control).save(whole, str(path), PROVENANCE)
    content, chance = path.read_bytes(), random.Random(0)
    outcomes = {"refused": 0, "right": 0, "found": 0}
    for _ in range(count):
        path.write_bytes(damaged(content, chance))
        try:
            with nothing_is_small():
                found = load(str(path), control)
        except (ValueError, FileNotFoundError) as error:
            outcomes["refused"] += "file.ckpt" in str(error)
            continue
        try:
            state = found["state_dict"]
            tensors = [state["whole"], state["plain"], *state["more"].values()]
            is_right = found["fill"] == 1.0 and all(t.eq(1).all() for t in tensors)
            is_right = is_right and [t.numel() for t in tensors] == [300, 7, *range(9)]
        except (KeyError, TypeError, AttributeError, DamageError):
            is_right = False
        if is_right:
            outcomes["right"] += 1
        else:
            assert damage(path), "wrong values that no checksum shows"
            outcomes["found"] += 1
    return outcomes


def test_damaged_files_are_refused_or_found(ranks: Pools, tmp_path: Path) -> None:
    outcomes = ranks(1).run(read_damaged, str(tmp_path), 200)[0]
    assert sum(outcomes.values()) == 200
    assert outcomes["refused"] > 60
    assert outcomes["found"] > 10
