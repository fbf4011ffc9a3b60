"""Masters, states and sharded weights in files: the same numbers, and no memory of the process."""

from __future__ import annotations

import errno
import fcntl
import inspect
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint import module_state, optimizer_state
from lightning_zero.engine import Engine
from lightning_zero.optimizer import Way, batches_of, kept_states, staging
from lightning_zero.optimizer.known import known_class
from lightning_zero.optimizer.staging import NUM_BUFFERS
from lightning_zero.plan import RECIPES, Offload, Settings
from lightning_zero.tensors import Scratch, StagedFile, StagingMemory, in_pages
from tests.oracle.mapped import is_in_file
from tests.oracle.models import MODELS
from tests.oracle.parity import assert_parity
from tests.oracle.ranks import Pools
from tests.oracle.sharded import shard, train

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, momentum_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
}


def offload(stage: int, folder: str) -> dict[str, Any]:
    return {"offload": Offload.of_stage(stage, "nvme"), "offload_path": folder}


def make(name: str, model: nn.Module) -> Optimizer:
    return OPTIMIZERS[name](model.parameters())


def compare(folder: str, stage: int, name: str, **how: Any) -> None:
    """A run in files against one without, on every rank."""
    run = partial(train, "transformer", partial(make, name), stage=stage, **how)
    assert_parity(run(**offload(stage, folder)), run(), ulps=0)


def compare_all(folder: str) -> None:
    """Each case on one rank or on two; what has more to do with ranks on both."""
    cases = product((1, 2, 3), ("32-true", "bf16-mixed"), ("adamw", "sgd"))
    for number, (stage, precision, name) in enumerate(cases):
        if (number + number // 2 + stage) % 2 == dist.get_world_size() % 2:
            compare(folder, stage, name, precision=precision)
    for name in ("adagrad", "amsgrad", "nadam", "rprop")[dist.get_world_size() % 2 :: 2]:
        compare(folder, 3, name)
    compare(folder, 3, "adamw", accumulate=2, clip_norm=0.1)
    compare(folder, 2, "adamw", accumulate=2, clip_norm=0.1, policy="local")
    if dist.get_world_size() == 1:
        compare(folder, 3, "adamw", precision="bf16-true")
        compare(folder, 3, "adamw", units="root")
    else:
        compare(folder, 3, "adamw", precision="16-mixed", steps=4)


def one_of_the_two(folder: str) -> None:
    for chosen in (Offload("nvme"), Offload(weights="nvme")):
        files = {"offload": chosen, "offload_path": folder}
        for precision in ("32-true", "bf16-mixed"):
            run = partial(train, "transformer", partial(make, "adamw"), precision=precision)
            assert_parity(run(**files), run(), ulps=0)
        model = MODELS["transformer"].build()
        engine = shard(model, **files)
        optimizer = torch.optim.AdamW(model.parameters())
        engine.adopt(optimizer)
        step(engine, optimizer)
        for tensor in states(optimizer):
            assert not tensor.numel() or is_in_file(tensor, folder) == bool(chosen.optimizer)
        for flat in engine.sharded.flats:
            assert is_in_file(flat.master, folder) == bool(chosen.weights)
        memory = engine.sharded.memory()
        rows = ("disk states", "weights") if chosen.optimizer else ("states", "disk weights")
        held = {
            row for row, count in memory.items() if count and row.endswith(("states", "weights"))
        }
        assert held == set(rows)
        engine.close()


def test_states_alone_and_weights_alone(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(one_of_the_two, str(tmp_path))


@pytest.mark.parametrize("world", [1, 2])
def test_the_bits_are_those_of_memory(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks(world).run(compare_all, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- what is where


def states(optimizer: Optimizer) -> Iterator[Tensor]:
    for _, state in kept_states([optimizer]):
        yield from (value for value in state.values() if value.dim())


def step(engine: Engine, optimizer: Optimizer) -> None:
    case = MODELS["transformer"]
    case.loss(engine.module, case.batch(4, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped_once(folder: Path) -> tuple[nn.Module, Engine, Optimizer]:
    """An engine with states in files, which are there."""
    model = MODELS["transformer"].build()
    engine = shard(model, **offload(3, str(folder)))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.adopt(optimizer)
    step(engine, optimizer)
    return model, engine, optimizer


def held(folder: str, stage: int, precision: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes counted, and what the layouts say."""
    model = MODELS["transformer"].build()
    recipe = RECIPES[precision]
    engine = shard(model, stage=stage, recipe=recipe, **offload(stage, folder))
    optimizer = torch.optim.AdamW(model.parameters())
    notice = engine.adopt(optimizer)
    assert notice is not None
    assert "stepped with fused=True" in notice
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.autocast is not None):
        step(engine, optimizer)
    flats = engine.sharded.flats
    found = list(states(optimizer))
    assert all(group["fused"] is None for group in optimizer.param_groups)
    assert len(found) == 2 * sum(piece.range.numel > 0 for piece in engine.sharded.pieces)
    assert all(is_in_file(tensor, folder) for tensor in found)
    assert all(is_in_file(flat.master, folder) for flat in flats)
    assert all(
        is_in_file(part, folder) for flat in flats for part in flat.store.masters.of_ranks or ()
    )
    shards = sum(flat.master.nbytes for flat in flats)
    counters = 4 * len(found) // 2
    expected = {
        "disk weights": sum(f.master.nbytes for f in flats if not f.plan.has_master),
        "disk master": sum(f.master.nbytes for f in flats if f.plan.has_master),
        "disk states": counters + sum(8 * piece.range.numel for piece in engine.sharded.pieces),
    }
    assert expected["disk weights"] + expected["disk master"] == shards
    memory = engine.sharded.memory()
    assert memory["master"] == memory["states"] == 0
    assert (memory["weights"] == 0) == (stage == 3)
    engine.close()
    return {kind: memory.get(kind, 0) for kind in expected}, expected


@pytest.mark.parametrize("world", [1, 2])
def test_what_rests_lies_in_files(ranks: Pools, tmp_path: Path, world: int) -> None:
    for stage, precision in ((2, "32-true"), (3, "32-true"), (3, "bf16-mixed")):
        for actual, expected in ranks(world).run(held, str(tmp_path), stage, precision):
            assert actual == expected


def frozen(folder: str) -> None:
    model = MODELS["transformer"].build()
    first, *others = model.parameters()
    first.requires_grad_(False)
    engine = shard(model, **offload(3, folder))
    optimizer = torch.optim.AdamW(others)
    engine.adopt(optimizer)
    step(engine, optimizer)
    assert all(is_in_file(flat.master, folder) for flat in engine.sharded.flats)
    first.requires_grad_(True)
    optimizer.add_param_group({"params": [first]})
    step(engine, optimizer)
    assert all(is_in_file(tensor, folder) for tensor in states(optimizer))
    engine.close()


def test_frozen_weights_and_later_groups_are_in_files_too(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(frozen, str(tmp_path))


# ---------------------------------------------------------------------------- one step


def test_hooks_closures_and_schedulers_see_one_step(tmp_path: Path) -> None:
    model = MODELS["transformer"].build()
    engine = shard(model, **offload(3, str(tmp_path)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    engine.adopt(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    case = MODELS["transformer"]

    def closure() -> Tensor:
        seen.append("closure")
        optimizer.zero_grad()
        loss = case.loss(model, case.batch(4, 0))
        loss.backward()
        assert len(optimizer.param_groups[0]["params"]) == len(engine.sharded.pieces)
        return loss

    optimizer.step(closure)
    scheduler.step()
    assert seen == ["before", "closure", "after"]
    assert len(optimizer.param_groups[0]["params"]) == len(engine.sharded.pieces)
    assert all("momentum_buffer" in optimizer.state[piece] for piece in engine.sharded.pieces)
    engine.close()


class Failing(Exception):
    pass


@pytest.mark.parametrize("place", ["a unit", "the last unit"])
def test_a_torn_step_is_neither_gone_on_from_nor_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model, engine, optimizer = stepped_once(tmp_path)
    flats = engine.sharded.root.flat_parameters
    of_root = {piece.detach().data_ptr() for flat in flats for piece in flat.pieces}
    kernel = torch._fused_adamw_

    def fail(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        if (params[0].data_ptr() in of_root) == (place == "the last unit"):
            raise Failing
        kernel(params, *args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", fail)
    with pytest.raises(Failing):
        step(engine, optimizer)
    monkeypatch.undo()
    text = "ended half-way: .* Resume from the last checkpoint"
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    with pytest.raises(RuntimeError, match=text):
        module_state(model, engine)
    with pytest.raises(RuntimeError, match=text):
        optimizer_state(optimizer, engine, "optimizer 0")
    engine.close()
    assert len(optimizer.param_groups[0]["params"]) == len(engine.sharded.pieces)


def test_a_step_that_lacks_memory_may_be_taken_again(tmp_path: Path) -> None:
    expected, engine, optimizer = stepped_once(tmp_path)
    step(engine, optimizer)
    engine.close()
    model, engine, optimizer = stepped_once(tmp_path)
    lacking = mock.patch.object(staging, "StagingBuffer", side_effect=OSError("no memory"))
    with lacking, pytest.raises(MemoryError, match="Not enough memory for a step from files"):
        step(engine, optimizer)
    optimizer.step()
    engine.close()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


# ---------------------------------------------------------------------------- staging


def without_direct_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_file_shows_what_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    if not is_direct:
        without_direct_requests(monkeypatch)
    file, memory = StagedFile(Scratch(str(tmp_path)), 5000), StagingMemory(5000)
    assert not file.mapped.any()
    assert file.mapped.numel() == 8192
    memory.tensor.fill_(7)
    file.write(4096, memory.part(0, 4096))
    assert file.mapped.nonzero().flatten().tolist() == list(range(4096, 8192))
    file.mapped[:10] = 1
    file.read(0, memory.part(0, 4096))
    assert memory.tensor[:4096].nonzero().numel() == 10
    assert not (file.is_direct and not is_direct)


def change(engine: Engine, optimizer: Optimizer) -> None:
    """Change states in place, by others, by other memory, and by those of another batch."""
    last: dict[int, dict[str, Any]] = {}
    held = [
        piece for piece in engine.sharded.pieces if piece.range.numel and piece in optimizer.state
    ]
    for number, piece in enumerate(held):
        state = optimizer.state[piece]
        if number % 4 == 0:
            state["momentum_buffer"].mul_(0.5)
        elif number % 4 == 1:
            state["momentum_buffer"] = state["momentum_buffer"] * 0.25
        elif number % 4 == 2:
            state["momentum_buffer"].data = state["momentum_buffer"] * 0.75
        elif (other := last.pop(piece.range.numel, None)) is not None:
            ours, theirs = state["momentum_buffer"], other["momentum_buffer"]
            state["momentum_buffer"], other["momentum_buffer"] = theirs, ours
        else:
            last[piece.range.numel] = state


def in_small_batches(folder: str, is_direct: bool) -> None:
    """More batches than buffers; what users make of states between steps counts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(staging, "_BATCH_BYTES", 1)
        if not is_direct:
            without_direct_requests(monkeypatch)
        found = []
        for files in (offload(3, folder), {}):
            model = MODELS["transformer"].build()
            engine = shard(model, **files)
            if files:
                assert (
                    len(batches_of([unit.pieces for unit in engine.sharded.units]))
                    > 2 * NUM_BUFFERS
                )
            optimizer = make("sgd", model)
            engine.adopt(optimizer)
            for _ in range(2):
                step(engine, optimizer)
                change(engine, optimizer)
            step(engine, optimizer)
            if files:
                assert all(is_in_file(one, folder) or not one.numel() for one in states(optimizer))
            held = [optimizer.state[p] for p in engine.sharded.pieces if p in optimizer.state]
            of_states = [state["momentum_buffer"].clone() for state in held]
            engine.close()
            found.append([*of_states, *(p.detach() for p in model.parameters())])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("is_direct", [True, False])
def test_small_batches_and_changed_states(ranks: Pools, tmp_path: Path, is_direct: bool) -> None:
    ranks(2).run(in_small_batches, str(tmp_path), is_direct)


def wide() -> nn.Module:
    """Pieces of several batches of the smallest size, and of a part of one, one of them frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 130), nn.Linear(130, 9))
    model[1].weight.requires_grad_(False)
    return model


def stepped_four_times(cls: type[Optimizer], **files: Any) -> list[Tensor]:
    """Weights and states after steps between which states are changed, and one without gradient."""
    model = wide()
    engine = Engine(model, Settings(units=(nn.Linear,), **files))
    has_fused = "fused" in inspect.signature(cls).parameters
    optimizer = cls(model.parameters(), lr=1e-2, **({"fused": True} if has_fused else {}))
    engine.adopt(optimizer)
    first = next(iter(engine.sharded.pieces))
    for number in range(4):
        row = torch.full((3, 200), 0.1 * (number + 1))
        model(row).pow(2).sum().backward()
        if number == 2:
            first.parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for index, (key, value) in enumerate([*optimizer.state[first].items()]):
            if torch.is_tensor(value) and value.dim():
                optimizer.state[first][key] = value.mul_(0.9) if index % 2 else value * 0.9
    keys = {id(key) for key, _ in kept_states([optimizer])}
    assert keys <= {id(p) for p in engine.sharded.pieces}
    found = [
        torch.as_tensor(value).clone()
        for piece in engine.sharded.pieces
        for value in optimizer.state.get(piece, {}).values()
        if value is not None
    ]
    engine.close()
    return [*found, *(p.detach() for p in model.parameters())]


def test_pieces_that_are_cut_step_as_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_BATCH_BYTES", 1)
    monkeypatch.setattr(staging, "NUM_BUFFERS", 2)
    parts = batches_of([[p for p in wide().parameters() if p.requires_grad]])
    assert sum(part.is_cut for batch in parts for part in batch) == 3
    for cls in vars(torch.optim).values():
        if not inspect.isclass(cls) or known_class(cls) != ("torch.optim", Way.BY_ELEMENT):
            continue
        in_files, in_memory = (
            stepped_four_times(cls, **offload(3, str(tmp_path))),
            stepped_four_times(cls),
        )
        assert len(in_files) == len(in_memory)
        assert all(map(torch.equal, in_files, in_memory)), cls


@pytest.mark.parametrize(("method", "words"), [("preadv", "Reading"), ("pwritev", "Writing")])
def test_a_failing_disk_is_named_and_tears_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, words: str
) -> None:
    _, engine, optimizer = stepped_once(tmp_path)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, method, fail)
    told = f"{words} [0-9,]+ bytes in '{tmp_path}' failed: Input/output error"
    with pytest.raises(OSError, match=told):
        step(engine, optimizer)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="ended half-way"):
        optimizer.step()
    assert all(is_in_file(one, str(tmp_path)) for one in states(optimizer))
    engine.close()


# ---------------------------------------------------------------------------- faults and refusals


def without_room_for_all(folder: str) -> list[str]:
    """Return what two optimizers are told, of which either has room by itself."""
    model = MODELS["transformer"].build()
    engine = shard(model, **offload(3, folder))
    first, *others = model.parameters()
    batches = batches_of([unit.pieces for unit in engine.sharded.units])
    sizes = [sum(p.nbytes for p in batch if p.piece.parameter is not first) for batch in batches]
    room = 2 * 3 * sum(map(in_pages, sizes))
    real, told = os.statvfs, []
    os.statvfs = lambda _: SimpleNamespace(f_bavail=room, f_frsize=1)  # type: ignore
    try:
        for optimizer in (torch.optim.AdamW([first]), torch.optim.Adam(others, amsgrad=True)):
            try:
                engine.adopt(optimizer)
            except OSError as error:
                told.append(str(error))
    finally:
        os.statvfs = real
    engine.close()
    return told


def test_room_is_that_of_all_optimizers(ranks: Pools, tmp_path: Path) -> None:
    """Two ranks have just the room for the three states of Adam's."""
    first, second = ranks(2).run(without_room_for_all, str(tmp_path))
    assert first == second
    [told] = first
    assert "the states of Adam and other files not yet created" in told


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"800 more bytes in offload_path='.*'. Free disk space"):
        Scratch(str(tmp_path)).tensor(100, torch.float64)


def test_files_have_no_names_and_go_with_their_tensors(tmp_path: Path) -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    tensor = Scratch(str(tmp_path)).tensor(1000, torch.float32)
    assert tensor.eq(0).all()
    assert is_in_file(tensor, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= num_files  # garbage of others may close some


WIDTH, DEPTH = 3072, 4
"""Layers of 38 MB, which the allocator takes from the system and gives back one by one."""


def limited(folder: str | None) -> str:
    """Train 38 million elements with 450 MB of memory to take; returns the error, if any."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    settings = {} if folder is None else offload(3, folder)
    data = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + 450 * 10**6, before[1]))
    try:
        engine = Engine(model, Settings(units=(nn.Linear,), **settings))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine.adopt(optimizer)
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.close(restore=False)
    except (MemoryError, RuntimeError) as error:
        return str(error) or "no memory"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return ""


def test_states_that_exceed_a_limit_of_memory_train_from_files(
    ranks: Pools, tmp_path: Path
) -> None:
    """Weights and states are 430 MB, gradients 144, and what is gathered comes on top."""
    assert ranks(1).run(limited, str(tmp_path)) == [""]
    assert "memory" in ranks(1).run(limited, None)[0]


def test_an_optimizer_that_mixes_elements_is_refused(tmp_path: Path) -> None:
    model = MODELS["transformer"].build()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    engine = shard(model, **offload(3, str(tmp_path)))
    words = r"Muon mixes the elements of a parameter, but offload .* remove offload_optimizer"
    with pytest.raises(ValueError, match=words):
        engine.adopt(torch.optim.Muon(matrices))
    engine.close()


# ---------------------------------------------------------------------------- fused


def test_fused_sgd_in_16_bits_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(8, 8).bfloat16()
    engine = shard(model, recipe=RECIPES["bf16-true"], **offload(3, str(tmp_path)))
    with pytest.raises(ValueError, match="leaves most of a 16-bit parameter"):
        engine.adopt(torch.optim.SGD(model.parameters(), 0.1, fused=True))
    engine.close()
