"""Checkpoints that are damaged, that differ between ranks, or that are something else."""

from __future__ import annotations

import functools
import itertools
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_zero import ZeROStrategy, load_weights
from lightning_zero.checkpoint import (
    Directory,
    DirectorySave,
    FileSave,
    Saver,
    ShardedValue,
    check_optimizer_states,
    load,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    read_file,
)
from lightning_zero.checkpoint.file.records import StoredRecords
from lightning_zero.checkpoint.open_file import OpenFile
from lightning_zero.checkpoint.word_sums import BLOCK_BYTES, word_sums
from lightning_zero.comm import Control, Outcome
from lightning_zero.commands import convert, damage
from lightning_zero.optimizer import members
from lightning_zero.parameters import Piece
from tests.oracle import resharding
from tests.oracle.by_trainer import Model, Rows, make_trainer, model, world
from tests.oracle.checkpoints import PROVENANCE, nothing_is_small, told
from tests.oracle.ranks import Pools

Kind = Callable[..., Any]
KINDS = pytest.mark.parametrize("kind", [FileSave, DirectorySave])


def flip(control: Control, file: Path, place: int, bit: int) -> None:
    """Change one bit of a file, which all ranks see when this returns."""
    if control.rank == 0:
        with file.open("r+b") as content:
            content.seek(place)
            byte = content.read(1)[0]
            content.seek(place)
            content.write(bytes([byte ^ 1 << bit]))
    control.gather_objects(None)


def places(path: Path) -> list[tuple[Path, int, int]]:
    """Return where the values of every tensor lie: the file, the first byte, how many."""
    if path.is_dir():
        records = [chunk.place.content for chunk in Directory.open(path).chunks]
    else:
        with zipfile.ZipFile(path) as archive:
            records = list(StoredRecords(path, archive))
    return [(each.file, each.offset, each.nbytes) for each in records if each.nbytes]


# -- every tensor ----------------------------------------------------------------------------------


def save_trained(path: str, kind: Kind, build: Any = resharding.build) -> None:
    """Save a module with two optimizers, and something of a callback."""
    module, optimizers, engine = resharding.shard(3, "32-true", build)
    resharding.steps(module, optimizers, 0, resharding.NUM_BEFORE)
    checkpoint = {
        "state_dict": module_state(module, engine),
        "optimizer_states": [
            optimizer_state(o, engine, f"optimizer {n}") for n, o in enumerate(optimizers)
        ],
        "callbacks": {"average": {"weight": module_state(module, engine)["norm.weight"]}},
    }
    Saver(engine.comm.control).save(checkpoint, path, PROVENANCE, kind=kind)


def resume_from_damage(
    path: str, seed: int, verify: bool, build: Any = resharding.build, every: int = 1
) -> list[str]:
    """The errors of loading a checkpoint with one bit changed in every tensor, one by one.

    With ``every``, one in so many tensors.
    """
    module, optimizers, engine = resharding.shard(3, "32-true", build)
    control, is_loaded = engine.comm.control, True

    def resume() -> None:
        nonlocal is_loaded
        is_loaded = False
        with nothing_is_small():
            checkpoint = load(path, control, verify=verify)
        states = checkpoint["optimizer_states"]
        check_optimizer_states(optimizers, states, lambda piece: "")
        is_loaded = True
        load_module_state(module, engine, checkpoint["state_dict"])
        for optimizer, state in zip(optimizers, states, strict=True):
            load_optimizer_state(optimizer, state, engine)

    chance, errors, num_torn = random.Random(seed), [], 0
    for file, offset, nbytes in places(Path(path))[::every]:
        place, bit = offset + chance.randrange(nbytes), chance.randrange(8)
        flip(control, file, place, bit)
        before = [piece.detach().clone() for piece in engine.sharded.pieces]
        errors.append(told(resume))
        flip(control, file, place, bit)
        if is_loaded and errors[-1] != "no error":
            # Found amid the load: what mixes old and new values is of no use.
            num_torn += 1
            for use in (
                lambda: resharding.steps(module, optimizers, 0, 1),
                lambda: module_state(module, engine),
                lambda: optimizer_state(optimizers[0], engine, "optimizer 0"),
            ):
                assert "has failed half-way, so the module mixes old and new values" in told(use)
            assert told(resume) == "no error"
        after = [piece.detach() for piece in engine.sharded.pieces]
        assert is_loaded or all(map(torch.equal, before, after))
    assert told(resume) == "no error"
    assert told(resharding.steps, module, optimizers, 0, 1) == "no error"
    assert bool(num_torn) is not verify
    return errors


@pytest.mark.parametrize(
    ("kind", "world", "build"),
    [
        (FileSave, 1, resharding.build),
        (FileSave, 3, resharding.build_mixing),
        (DirectorySave, 1, resharding.build_mixing),
        (DirectorySave, 3, resharding.build),
    ],
)
def test_every_damaged_tensor_is_refused_by_all(
    ranks: Pools, tmp_path: Path, kind: Kind, world: int, build: Any
) -> None:
    path = tmp_path / "name"
    ranks(2).run(save_trained, str(path), kind, build)
    # On one rank each tensor is damaged, and in a directory each part of one.
    every = 6 if world > 1 else 1
    found = ranks(world).run(resume_from_damage, str(path), world, False, build, every)
    assert len(found[0]) * every > 25
    assert all(errors == found[0] for errors in found)
    for error in found[0]:
        assert error.split(":")[0] in ("DamageError", "ValueError")
        assert "is damaged: bytes [" in error
        assert str(path) in error


def test_files_of_other_programs_are_checked(ranks: Pools, tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    module, optimizers = resharding.build()
    resharding.steps(module, optimizers, 0, resharding.NUM_BEFORE)
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"state_dict": module.state_dict(), "optimizer_states": states}, path)
    for number, verify in ((1, False), (3, True)):
        given = str(path), number, verify
        for errors in ranks(number).run(resume_from_damage, *given, every=number):
            found = [error for error in errors if error != "no error"]
            assert all("is damaged: bytes [0, " in error for error in found)
            # The step of a parameter without elements is read by none.
            assert len(errors) - len(found) == (0 if verify else 1)
    with nothing_is_small():
        weight = read_file(str(path))["state_dict"]["head.weight"]
    (record,) = [each for each in places(path) if each[1] == weight.offset(weight.dtype)]
    flip(Control(), path, record[1], 0)
    assert "'state_dict/head.weight'" in told(weight.clone)
    assert "'state_dict/head.weight'" in told(weight.double)
    # A rank that reads a part of a record cannot know.
    assert told(weight.part(1, 9, weight.stride()).clone) == "no error"


@pytest.mark.parametrize("again", ["in the same run", "in another run"])
def test_another_checkpoint_follows_a_damaged_one(ranks: Pools, tmp_path: Path, again: str) -> None:
    ranks(2).run(fit_after_damage, str(tmp_path), again == "in another run")


def fit_after_damage(folder: str, in_another_run: bool) -> None:
    options = {"enable_checkpointing": False}
    trainer = make_trainer(world(), ZeROStrategy(3), folder, max_steps=2, **options)
    trainer.fit(Large(), Rows())
    for name in ("good", "bad"):
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
    control = Control()
    bad = Path(folder, "bad.ckpt")
    largest = max(places(bad), key=lambda place: place[2])
    flip(control, bad, largest[1] + largest[2] - 3, 3)
    good = torch.load(f"{folder}/good.ckpt")["state_dict"]
    module = Large()
    if in_another_run:
        trainer = make_trainer(world(), ZeROStrategy(3), folder, max_steps=3, **options)
        assert "bad.ckpt' is damaged" in told(trainer.fit, module, Rows(), ckpt_path=str(bad))
    else:
        module.loads = [str(bad), f"{folder}/good.ckpt"]
    path = f"{folder}/good.ckpt" if in_another_run else None
    trainer = make_trainer(world(), ZeROStrategy(3), folder, max_steps=3, **options)
    trainer.fit(module, Rows(), ckpt_path=path)
    if in_another_run:
        assert trainer.global_step == 3
    else:
        first, second = module.errors
        assert "bad.ckpt' is damaged" in first
        assert second == "no error"
    found = module.state_dict()
    moved = max((found[name] - value).abs().max().item() for name, value in good.items())
    assert 0 < moved < 1


class Large(Model):
    """A model of which a tensor is read in parts, that loads weights when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(40_000))
        self.loads: list[str] = []
        self.errors: list[str] = []

    def reset_parameters(self) -> None:
        self.table.data.zero_()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.table.square().sum()

    def on_fit_start(self) -> None:
        self.errors += [told(load_weights, self, path) for path in self.loads]


# -- blocks ----------------------------------------------------------------------------------------


def swapped(one: slice, other: slice) -> Callable[[Any], None]:
    def swap(content: Any) -> None:
        content[one], content[other] = content[other].copy(), content[one].copy()

    return swap


def filled(place: slice, value: int) -> Callable[[Any], None]:
    return lambda content: content.__setitem__(place, value)


def words(index: int, count: int = 1) -> slice:
    return slice(8 * index, 8 * (index + count))


DAMAGES: dict[str, Callable[[Any], None]] = {
    "two words are swapped": swapped(words(17), words(18)),
    "two words a page apart are swapped": swapped(words(17), words(17 + 512)),
    "two sectors are swapped": swapped(words(64, 64), words(192, 64)),
    "two pages are swapped": swapped(words(512, 512), words(1024, 512)),
    "two rows are swapped": swapped(words(128, 128), words(256, 128)),
    "a page is zeroed": filled(words(1024, 512), 0),
    "a sector is zeroed": filled(words(64, 64), 0),
    "a page is repeated": lambda content: content.__setitem__(
        words(512, 512), content[words(0, 512)].copy()
    ),
    "all is moved by a word": lambda content: content.__setitem__(
        slice(8, None), content[:-8].copy()
    ),
    "all is moved by a byte": lambda content: content.__setitem__(
        slice(1, None), content[:-1].copy()
    ),
    "two signs are flipped": lambda content: content.__setitem__(
        [87, 167], content[[87, 167]] ^ 128
    ),
    "all signs are flipped": lambda content: content.__setitem__(
        slice(3, None, 4), content[3::4] ^ 128
    ),
    "one line is stuck": lambda content: content.__setitem__(
        slice(7, None, 8), content[7::8] | 128
    ),
}
CONTENTS = {
    "normal": lambda: torch.randn(BLOCK_BYTES // 4),
    "one hot": lambda: torch.eye(128).reshape(-1),
    "half": lambda: torch.randn(BLOCK_BYTES // 2).bfloat16(),
    "counted": lambda: torch.arange(BLOCK_BYTES // 8),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_sums_of_words_show_damage(kind: str) -> None:
    content = CONTENTS[kind]().view(torch.uint8).numpy()
    before = content.copy()
    right = word_sums(content.data)
    chance = random.Random(0)
    for place in (*range(0, BLOCK_BYTES, 997), BLOCK_BYTES - 1):
        content[place] ^= 1 << chance.randrange(8)
        assert word_sums(content.data) != right, place
        content[place] = before[place]
    for name, change in DAMAGES.items():
        change(content)
        is_changed = not np.array_equal(content, before)
        assert (word_sums(content.data) != right) == is_changed, name
        content[:] = before


def test_sums_of_words_are_the_same_at_any_address_and_in_any_company() -> None:
    content = torch.randint(256, (3 * BLOCK_BYTES + 8,), dtype=torch.uint8).numpy()
    right = word_sums(content.data[: 3 * BLOCK_BYTES])
    for shift in (1, 2, 4):
        content[shift : 3 * BLOCK_BYTES + shift] = content[: 3 * BLOCK_BYTES].copy()
        assert torch.equal(word_sums(content.data[shift:][: 3 * BLOCK_BYTES]), right)
        content[: 3 * BLOCK_BYTES] = content[shift : 3 * BLOCK_BYTES + shift].copy()
    ones = [word_sums(content.data[i * BLOCK_BYTES :][:BLOCK_BYTES]) for i in range(3)]
    assert torch.equal(torch.cat(ones), right)


def test_the_system_reads_ahead_of_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither all at once, nor what is summed next only."""
    path, size = tmp_path / "plain.ckpt", 40 * 32 * BLOCK_BYTES
    values = {"a": torch.arange(size // 4, dtype=torch.float32)}
    Saver(Control()).save({"state_dict": values}, str(path), PROVENANCE)
    asked: list[int] = []
    ahead: list[int] = []

    def will_read(file: OpenFile, offset: int, nbytes: int) -> None:
        asked.append(nbytes)

    def read(file: OpenFile, out: torch.Tensor, offset: int) -> None:
        ahead.append(sum(asked) - sum(done))
        done.append(len(out))
        real_read(file, out, offset)

    real_read, done = OpenFile.read_once, [0]
    value = read_file(str(path))["state_dict"]["a"]
    monkeypatch.setattr(OpenFile, "will_read", will_read)
    monkeypatch.setattr(OpenFile, "read_once", read)
    assert torch.equal(value.clone(), values["a"])
    assert sum(asked) == sum(done) == size
    assert max(ahead) <= 2**25 + 32 * BLOCK_BYTES
    assert min(ahead[:-8]) >= 2**24 - 32 * BLOCK_BYTES


def edit_and_load(path: str) -> str:
    module, optimizers, engine = resharding.shard(3, "32-true")
    before = torch.load(path)
    with nothing_is_small():
        checkpoint = load(path, engine.comm.control)
    for value in {id(each): each for each in checkpoint["state_dict"].values()}.values():
        value.mul_(2)  # a tied one once
    checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].add_(1)
    told_of = told(load_module_state, module, engine, checkpoint["state_dict"])
    load_optimizer_state(optimizers[0], checkpoint["optimizer_states"][0], engine)
    with engine.sharded.gathered():
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, 2 * before["state_dict"][name]), name
    piece, whole = members(optimizers[0])[0], before["optimizer_states"][0]["state"][0]["exp_avg"]
    assert isinstance(piece, Piece)
    if piece.range.numel:
        loaded = optimizers[0].state[piece]["exp_avg"]
        assert torch.equal(loaded, piece.range.part_of(whole + 1))
    return told_of


def test_what_a_hook_has_edited_is_not_called_damaged(ranks: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "name")
    ranks(2).run(save_trained, path, FileSave)
    assert ranks(2).run(edit_and_load, path) == ["no error"] * 2


NUMEL = 300_000


def save_large(path: str, kind: Kind) -> None:
    control = Control()
    edges = [NUMEL * rank // control.world_size + rank for rank in range(control.world_size)]
    start, stop = edges[control.rank], [*edges, NUMEL][control.rank + 1]
    part = torch.arange(start, stop, dtype=torch.float32)
    value = ShardedValue.of("large", part, start, (NUMEL // 100, 100), (100, 1))
    Saver(control).save({"state_dict": {"large": value}}, path, PROVENANCE, kind=kind)


def read_blocks(path: str) -> list[tuple[int, str, bool]]:
    """Of every changed byte, the error, and whether this rank alone would have found it."""
    control, found = Control(), []
    start = NUMEL * control.rank // control.world_size
    stop = NUMEL * (control.rank + 1) // control.world_size
    assert damage(Path(path)) == []
    control.gather_objects(None)
    for file, offset, nbytes in places(Path(path)):
        for place in range(7, nbytes, 100_000):
            flip(control, file, offset + place, 3)
            large = load(path, control)["state_dict"]["large"]
            part, outcome = large.part(start, stop, (100, 1)), Outcome()
            alone = told(part.clone)
            with outcome.attempt():
                part.clone()
            error = told(outcome.agree, control, "Loading")
            found.append((place, error, alone != "no error"))
            flip(control, file, offset + place, 3)
    return found


@KINDS
def test_a_rank_checks_the_blocks_that_it_reads(ranks: Pools, tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "name"
    ranks(2).run(save_large, str(path), kind)
    every = ranks(3).run(read_blocks, str(path))
    assert len(every[0]) >= 12
    for of_ranks in zip(*every, strict=True):
        place, error, _ = of_ranks[0]
        assert all(its == error for _, its, _ in of_ranks)
        first, last = error.split("bytes [")[1].split(")")[0].split(", ")
        assert int(first) <= place < int(last)
        assert int(last) - int(first) <= 2**17
        assert "'state_dict/large'" in error or "large'" in error
        # No rank reads much more than its part.
        assert 1 <= sum(is_found for *_, is_found in of_ranks) <= 2


def test_what_is_damaged_is_not_converted(ranks: Pools, tmp_path: Path) -> None:
    for kind in (FileSave, DirectorySave):
        path = tmp_path / f"{kind.__name__}.ckpt"
        ranks(1).run(save_trained, str(path), kind)
        for file, offset, _ in places(path)[::9]:
            flip(Control(), file, offset, 0)
            for target in ("other.ckpt", "other.safetensors"):
                weights_only = target.endswith("safetensors")
                error = told(convert, path, tmp_path / target, weights_only=weights_only)
                assert "is damaged: bytes [" in error or weights_only
                assert (error == "no error") == (tmp_path / target).exists()
                (tmp_path / target).unlink(missing_ok=True)
            flip(Control(), file, offset, 0)


# -- what is no tensor -----------------------------------------------------------------------------


def test_a_damaged_pickle_is_called_damaged(ranks: Pools, tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    ranks(1).run(save_trained, str(path), FileSave)
    with zipfile.ZipFile(path) as archive:
        size = len(archive.read("archive/data.pkl"))
        begin = path.read_bytes().index(archive.read("archive/data.pkl"))
    chance, control = random.Random(0), Control()
    for _ in range(100):
        place, bit = begin + chance.randrange(size), chance.randrange(8)
        flip(control, path, place, bit)
        error = told(read_file, str(path))
        assert "file.ckpt' is damaged or not a checkpoint" in error
        assert "weights_only=False" not in error
        flip(control, path, place, bit)
    read_file(str(path))


def test_a_directory_without_one_of_its_files_is_refused(ranks: Pools, tmp_path: Path) -> None:
    path = tmp_path / "name"
    ranks(1).run(save_trained, str(path), DirectorySave)
    module, _ = resharding.build()
    readers = [
        functools.partial(load, str(path), Control()),
        functools.partial(load_weights, module, path),
        functools.partial(damage, path),
    ]
    for name in ("lightning_zero.json", ".metadata", "meta.pt"):
        content = (path / name).read_bytes()
        half = content[: len(content) // 2]
        (path / name).write_bytes(half)
        for reader in readers[: 1 if name == "meta.pt" else 3]:
            assert str(path) in told(reader), name
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

    states = good["optimizer_states"][0]["state"]
    write("list", lambda c: c.update(state_dict=list(c["state_dict"].items())))
    write("lacks", lambda c: c["optimizer_states"][0]["state"][0].pop("exp_avg_sq"))
    sgd = {number: {"momentum_buffer": state["exp_avg"]} for number, state in states.items()}
    write("kind", lambda c: c["optimizer_states"][0].update(state=sgd))
    write("text", lambda c: c.update(optimizer_states=["hello"]))
    later = {**good, "global_step": good["global_step"] + 1}
    os.makedirs(f"{folder}/0")
    os.makedirs(f"{folder}/1")
    torch.save(good, f"{folder}/0/last.ckpt")
    torch.save(later, f"{folder}/1/last.ckpt")
    torch.save(good, f"{folder}/0/one.ckpt")


def test_refusals_name_the_file_and_change_nothing(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(write_files, str(tmp_path))
    names = [f"{tmp_path}/{name}.ckpt" for name in ("list", "lacks", "kind", "text", "good")]
    paths: list[list[str | None]] = [[name, name] for name in names[:4]]
    here = "/proc/self/cwd"
    paths += [
        [f"{here}/last.ckpt"] * 2,
        [f"{here}/one.ckpt"] * 2,
        [names[4], None],
        [None, names[4]],
    ]
    first, second = ranks(2).run(fit_each, str(tmp_path), paths)
    assert first == second
    assert all(error.split(":")[0].endswith("Error") for error in first)
    as_list, lacks, kind, text, last, one, none, other = first
    assert "list.ckpt' is not a Trainer checkpoint: its 'state_dict' is a list" in as_list
    assert "lacks.ckpt'. " in lacks
    assert "'exp_avg_sq' is missing" in lacks
    assert "kind.ckpt'. " in kind
    assert "'momentum_buffer'" in kind
    assert "text.ckpt'. " in text
    assert "the ranks see different checkpoints" in last
    assert "step 2" in last
    assert "step 3" in last
    assert "on rank 1: Checkpoint file not found" in one
    assert f"{names[4]!r}: on rank 1, ckpt_path" in none
    assert f"{names[4]!r}: on rank 0, ckpt_path" in other


class Optimized(Model):
    """A model with an optimizer of choice."""

    kind: Callable[..., torch.optim.Optimizer]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.01)


def resume_from_odd_states(folder: str, kind: Any, key: str, values: list[Any]) -> list[str]:
    path, errors = f"{folder}/odd.ckpt", []
    for stage, value in zip(itertools.cycle((3, 1, 2)), values, strict=False):
        trainers = [
            make_trainer(
                world(), ZeROStrategy(stage), "/nowhere", max_steps=n, enable_checkpointing=False
            )
            for n in (2, 4)
        ]
        modules = Optimized(), Optimized()
        for module in modules:
            module.kind = kind
        trainers[0].fit(modules[0], Rows())
        trainers[0].save_checkpoint(path)
        if trainers[0].is_global_zero:
            odd = torch.load(path, weights_only=True)
            odd["optimizer_states"][0]["state"][2][key] = value
            torch.save(odd, path)
        trainers[0].strategy.barrier()
        errors.append(told(trainers[1].fit, modules[1], Rows(), ckpt_path=path))
    return errors


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        (torch.optim.AdamW, "exp_avg", ["hello", 3.5, [1], {"a": 1}]),
        (torch.optim.AdamW, "step", ["2"]),
        (functools.partial(torch.optim.SGD, momentum=0.5), "momentum_buffer", ["hello", 3]),
        (torch.optim.Adafactor, "variance", ["hello", 3.5]),
        (torch.optim.Adafactor, "step", ["hello"]),
    ],
)
def test_a_state_of_the_wrong_kind_is_named(
    ranks: Pools, tmp_path: Path, kind: Any, key: str, values: list[Any]
) -> None:
    first, second = ranks(2).run(resume_from_odd_states, str(tmp_path), kind, key, values)
    assert first == second
    for error, value in zip(first, values, strict=True):
        assert "odd.ckpt'. The checkpoint does not fit optimizer 0" in error
        assert f"its {key!r} of 'net." in error
        assert f"is a {type(value).__name__}: {value!r}" in error


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
