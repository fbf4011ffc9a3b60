"""``predict(ckpt_path=...)`` with weights in files: they are read where the checkpoint has them."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero.checkpoint import load, write_safetensors
from lightning_zero.comm import Control
from lightning_zero.parameters import streams
from lightning_zero.tensors import RING_BYTES, HostCopies, Scratch
from tests.oracle.by_trainer import make_trainer, world
from tests.oracle.cached import are_forgettable, cached_share, forget
from tests.oracle.device import Device, beside_the_host
from tests.oracle.ranks import Pools

WIDTH, DEPTH = 640, 3
"""A layer has 1.6 MB."""

small_parts = partial(mock.patch.object, streams, "_AT_ONCE_BYTES", 2**19)
"""A context in which less than a layer is read at once."""


def layers() -> nn.Sequential:
    return nn.Sequential(
        *[
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(DEPTH)
        ],
        nn.BatchNorm1d(WIDTH),
    )


class Net(LightningModule):
    def __init__(self, *, is_meta: bool = True) -> None:
        super().__init__()
        self.is_meta = is_meta
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.is_meta else "cpu"):
                self.net = layers()

    def forward(self, x: Tensor) -> Tensor:
        assert self.net is not None
        return self.net(x)  # type: ignore[no-any-return]

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0]).detach().clone()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self(batch[0]).square().mean())

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.validation_step(batch, index)


class Batches:
    """The same for all ranks."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(len(self)):
            yield [torch.randn(4, WIDTH, generator=generator)]


def state(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(7)
    net = layers()
    with torch.no_grad():
        net(torch.randn(8, WIDTH))  # statistics of its own
    found = {f"net.{key}": value for key, value in net.state_dict().items()}
    return {
        key: value.to(dtype) if value.is_floating_point() and value.dim() else value
        for key, value in found.items()
    }


def as_lightning(folder: Path) -> Path:
    """A Trainer's file without checksums of blocks, as DDP writes it."""
    content = {"state_dict": state(), "pytorch-lightning_version": "2.5.0", "epoch": 1}
    torch.save({**content, "global_step": 3}, folder / "ddp.ckpt")
    return folder / "ddp.ckpt"


def as_own(folder: Path) -> Path:
    """A file of this package, in parts of two ranks."""
    return folder / "own.ckpt"


def as_safetensors(
    folder: Path, max_bytes: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Path:
    held = state(dtype)
    shapes = {key: (value.dtype, tuple(value.shape)) for key, value in held.items()}
    path = folder / ("sharded" if max_bytes else "one.safetensors")
    write_safetensors(path, shapes, held.__getitem__, max_bytes=max_bytes)
    return path


def as_folder(folder: Path) -> Path:
    return as_safetensors(folder, 2_000_000)


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "own": as_own,
    "lightning": as_lightning,
    "safetensors": as_safetensors,
    "folder": as_folder,
}


def outputs(name: str, folder: str, path: str, **more: Any) -> tuple[Any, ...]:
    """Return what a model gives for a checkpoint, and whether its weights stayed there."""
    trainer = make_trainer(world(), name, folder, **more)
    model = Net()
    predicted = trainer.predict(model, Batches(), ckpt_path=path)
    are_streams = [flat.store.is_stream for flat in trainer.strategy.engine.sharded.flats]
    losses = trainer.validate(model, Batches(), ckpt_path=path, verbose=False)
    return predicted, losses, all(are_streams)


class Writer(Net):
    def on_validation_end(self) -> None:
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/own.ckpt")


def written(folder: str) -> None:
    """``own.ckpt``, written by these ranks from a model that holds what ``ddp.ckpt`` holds."""
    trainer = make_trainer(world(), "zero3", folder)
    trainer.validate(Writer(), Batches(), ckpt_path=f"{folder}/ddp.ckpt", verbose=False)


def compare(folder: str, paths: list[str], precisions: list[str]) -> None:
    for path, precision in zip(paths, precisions, strict=True):
        *expected, is_stream = outputs("zero3", folder, path, precision=precision)
        assert not is_stream
        with small_parts():
            *found, is_stream = outputs("zero3_nvme", folder, path, precision=precision)
        assert is_stream, path
        assert all(map(torch.equal, found[0], expected[0])), (path, precision)
        assert found[1] == expected[1]


@pytest.mark.parametrize(
    ("num_ranks", "precisions"),
    [
        (1, ["32-true", "bf16-mixed", "32-true", "bf16-true"]),
        (2, ["bf16-mixed", "bf16-true", "bf16-mixed", "32-true"]),
    ],
)
def test_the_bits_are_those_of_memory(
    ranks: Pools, tmp_path: Path, num_ranks: int, precisions: list[str]
) -> None:
    paths = {name: make(tmp_path) for name, make in LAYOUTS.items()}
    ranks(num_ranks).run(written, str(tmp_path))
    ranks(num_ranks).run(compare, str(tmp_path), list(map(str, paths.values())), precisions)


class Forgotten(Net):
    """Predicts with a file of which the system keeps nothing from batch to batch."""

    def on_predict_batch_start(self, *_: Any) -> None:
        forget(Path(self.trainer.ckpt_path))


def forgotten(folder: str, path: str) -> tuple[bool, bool]:
    """Return whether the last pass has gone through the system's cache, and any to other memory."""
    trainer = make_trainer(world(), "zero3_nvme", folder)
    with small_parts(), mock.patch("ctypes.memmove", side_effect=ctypes.memmove) as copies:
        found = trainer.predict(Forgotten(), Batches(), ckpt_path=path)
    is_cached = cached_share(Path(path)) > 0.5
    assert all(map(torch.equal, found, outputs("zero3", folder, path)[0]))
    return is_cached, any(call.args[2] > 2**16 for call in copies.mock_calls)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_alone_reads_past_a_cache_that_loses_weights(
    ranks: Pools, tmp_path: Path, num_ranks: int
) -> None:
    path = as_lightning(tmp_path)
    if not are_forgettable(path):
        pytest.skip("this file system has no requests past the system's cache")
    ranks(num_ranks).run(written, str(tmp_path))
    paths = path, as_own(tmp_path), as_safetensors(tmp_path, dtype=torch.float32)
    for path in paths:
        found = ranks(num_ranks).run(forgotten, str(tmp_path), str(path))
        assert found == [(num_ranks > 1, False)] * num_ranks, path


class Mapped(Net):
    def on_predict_start(self) -> None:
        assert self.net is not None
        self.net[1].register_forward_hook(self.look)

    def look(self, module: nn.Module, *_: Any) -> None:
        address, self.flags = module[1].weight.data_ptr(), ""
        is_there = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in (place := line.split()[0]):
                start, stop = (int(end, 16) for end in place.split("-"))
                is_there = start <= address < stop
            elif is_there and place == "VmFlags:":
                self.flags = line


def mapped(folder: str, path: str) -> bool:
    model = Mapped()
    make_trainer(1, "zero3_nvme", folder).predict(model, Batches(), ckpt_path=path)
    return " dc " in model.flags


def test_children_do_not_inherit_memory_that_the_disk_writes_to(
    ranks: Pools, tmp_path: Path
) -> None:
    """Or a part of it would be the child's, where an older kernel forks amid a request."""
    assert ranks(1).run(mapped, str(tmp_path), str(as_lightning(tmp_path))) == [True]


class Restored(Net):
    """Compares its weights with those of the file between batches, where each rank may look."""

    def on_predict_batch_end(self, *_: Any) -> None:
        held = state()
        for name, parameter in self.named_parameters():
            assert torch.equal(parameter, held[name]), name


def read_in_hooks(folder: str, path: str) -> None:
    model = Restored(is_meta=False)
    trainer = make_trainer(world(), "zero3_nvme", folder)
    trainer.predict(model, Batches(), ckpt_path=path)
    engine = trainer.strategy.engine
    assert all(flat.store.is_stream for flat in engine.sharded.flats)
    assert engine.is_restored  # it came with values, so there is memory for them
    assert all(torch.equal(value, state()[key]) for key, value in model.state_dict().items())


def test_weights_are_read_in_hooks_and_whole_at_the_end(ranks: Pools, tmp_path: Path) -> None:
    ranks(1).run(read_in_hooks, str(tmp_path), str(as_lightning(tmp_path)))


class Keeping(Net):
    """Keeps views of all weights, and changes some by views after the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.views: list[Tensor] = []

    def on_predict_start(self) -> None:
        assert self.net is not None
        self.kept = self.state_dict()
        take = lambda w: w.detach(), lambda w: w.data.view(-1), lambda w: w[:]
        for layer, view in zip(self.net, take, strict=False):
            layer[1].register_forward_hook(partial(self.keep, view))

    def keep(self, view: Callable[[Tensor], Tensor], linear: nn.Linear, *_: Any) -> None:
        if len(self.views) < DEPTH:
            self.views.append(view(linear.weight))

    def on_predict_batch_end(self, _: Any, batch: Any, index: int) -> None:
        storages = {id(s): s for s in (v.untyped_storage() for v in self.kept.values())}
        whole = [storage for storage in storages.values() if storage.nbytes() >= 4 * WIDTH**2]
        assert len(whole) < DEPTH  # views keep no unit in memory
        for view in self.views if index == 0 else ():
            view.mul_(1.5)


def keep_weights(folder: str, path: str) -> None:
    runs = []
    for name in ("zero3", "zero3_nvme"):
        trainer = make_trainer(world(), name, folder, inference_mode=False)
        runs.append(trainer.predict(Keeping(), Batches(), ckpt_path=path))
    assert all(map(torch.equal, *runs))
    unchanged = trainer.predict(Net(), Batches(), ckpt_path=path)
    same = [torch.equal(one, other) for one, other in zip(runs[0], unchanged, strict=True)]
    assert same == [True, False, False]


def test_views_that_are_kept_show_and_change_weights(ranks: Pools, tmp_path: Path) -> None:
    ranks(1).run(keep_weights, str(tmp_path), str(as_lightning(tmp_path)))


def differentiate(folder: str, path: str) -> None:
    """Gradients of inputs, for which units are read again in backward."""
    expected, found = (
        make_trainer(world(), name, folder, inference_mode=False).predict(
            Sensitive(), Batches(), ckpt_path=path
        )
        for name in ("zero3", "zero3_nvme")
    )
    assert expected is not None
    assert all(map(torch.equal, found, expected))


class Sensitive(Net):
    @torch.enable_grad()
    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = batch[0].requires_grad_()
        return torch.autograd.grad(self(x).square().sum(), x)[0]


def test_gradients_of_inputs_are_those_of_memory(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(differentiate, str(tmp_path), str(as_lightning(tmp_path)))


# ---------------------------------------------------------------------------- beside a device


class Counted(Net):
    """Notes what crosses in a prediction, and the most that the device has."""

    def __init__(self, memories: Device) -> None:
        super().__init__()
        self.memories = memories

    def on_predict_start(self) -> None:
        self.memories.restart()

    def on_predict_end(self) -> None:
        self.seen = dict(self.memories.crossed), self.memories.peak


@contextlib.contextmanager
def pinned_sizes() -> Iterator[list[int]]:
    """Note the bytes of memory on the way to a device."""
    sizes, make = [], HostCopies.lasting_memory

    def lasting_memory(copies: HostCopies, numel: int, dtype: torch.dtype) -> Tensor:
        sizes.append(numel * dtype.itemsize)
        return make(copies, numel, dtype)

    with mock.patch.object(HostCopies, "lasting_memory", lasting_memory):
        yield sizes


def beside(folder: str, path: str, precision: str) -> None:
    *expected, _ = outputs("zero3", folder, path, precision=precision)
    with (
        beside_the_host() as memories,
        pinned_sizes() as sizes,
        small_parts(),
        mock.patch.object(Scratch, "file", side_effect=AssertionError("copied to a file")),
    ):
        model = Counted(memories)
        trainer = make_trainer(world(), "zero3_nvme", folder, precision=precision)
        found = trainer.predict(model, Batches(), ckpt_path=path)
        sharded = trainer.strategy.engine.sharded
        losses = trainer.validate(Net(), Batches(), ckpt_path=path, verbose=False)
    assert all(map(torch.equal, found, expected[0]))
    assert losses == expected[1]
    assert sizes == [RING_BYTES] * 2  # of predict and of validate
    assert all(flat.store.is_stream for flat in sharded.flats)
    units, going_up = [], 0
    for unit in sharded.units:
        units.append(sum(flat.weight._nbytes for flat in unit.flat_parameters))
        for flat in unit.flat_parameters:
            numel = sum(slot.numel for slot in flat.layout.slots)
            going_up += numel * flat.plan.weight.dtype.itemsize
    crossed, peak = model.seen
    assert crossed == {"up": len(Batches()) * going_up}
    # The root, a unit and the next one; small tensors of the batch and of the file.
    assert peak < units[-1] + 2 * max(units) + max(units) // 2


@pytest.mark.parametrize(
    ("num_ranks", "layout", "precision"),
    [
        (1, "lightning", "bf16-mixed"),
        (1, "lightning", "32-true"),
        (2, "own", "32-true"),
        (2, "folder", "bf16-true"),
    ],
)
def test_a_device_gets_it_from_threads_of_its_host(
    ranks: Pools, tmp_path: Path, num_ranks: int, layout: str, precision: str
) -> None:
    as_lightning(tmp_path)
    ranks(num_ranks).run(written, str(tmp_path))
    path = str(LAYOUTS[layout](tmp_path))
    ranks(num_ranks).run(beside, str(tmp_path), path, precision)


# ---------------------------------------------------------------------------- changes, damage


class Editing(Net):
    def on_predict_start(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(2)
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/edited.ckpt")


def edited(folder: str, path: str, is_beside: bool) -> list[Tensor]:
    trainer = make_trainer(world(), "zero3_nvme", folder)
    # Nothing is followed: on a CPU an edit's copy to the host is none.
    with beside_the_host(followed=False) if is_beside else contextlib.nullcontext():
        found = trainer.predict(Editing(), Batches(), ckpt_path=path)
    assert not any(flat.store.is_stream for flat in trainer.strategy.engine.sharded.flats)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_is_changed_rests_in_files_from_then_on(
    ranks: Pools, tmp_path: Path, is_beside: bool
) -> None:
    path = as_lightning(tmp_path)
    net = layers().eval()
    net.load_state_dict({key.removeprefix("net."): value for key, value in state().items()})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
        expected = [net(batch) for [batch] in Batches()]
    for found in ranks(2).run(edited, str(tmp_path), str(path), is_beside):
        assert all(map(torch.allclose, found, expected))
    saved = torch.load(tmp_path / "edited.ckpt")["state_dict"]
    for key, value in state().items():
        assert torch.equal(saved[key], value * 2 if key in dict(net_parameters()) else value)


def net_parameters() -> Iterator[tuple[str, Tensor]]:
    return layers().named_parameters("net")


def damaged(folder: str, path: str, is_beside: bool) -> str:
    try:
        with beside_the_host() if is_beside else contextlib.nullcontext():
            outputs("zero3_nvme", folder, path)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "is_beside"), [("own", False), ("lightning", False), ("own", True)]
)
def test_damage_is_noticed_before_it_is_computed_with(
    ranks: Pools, tmp_path: Path, layout: str, is_beside: bool
) -> None:
    path = as_lightning(tmp_path)
    if layout == "own":
        ranks(1).run(written, str(tmp_path))
        path = as_own(tmp_path)
    name = "net.1.1.weight"
    place = path.read_bytes().index(bytes(state()[name].view(torch.uint8).flatten()[:64].tolist()))
    with path.open("r+b") as file:
        file.seek(place + WIDTH * WIDTH)
        file.write(b"\xff\x00\xff")
    [told] = ranks(1).run(damaged, str(tmp_path), str(path), is_beside)
    assert "Reading the weights of net.1" in told
    assert f"of 'state_dict/{name}'" in told
    assert "do not match their checksum" in told


def partly(folder: str, path: str) -> None:
    """A file that lacks a weight: what it has is copied, as ever."""
    found = []
    for name in ("zero3", "zero3_nvme"):
        torch.manual_seed(3)
        model = Net()
        model.strict_loading = False
        trainer = make_trainer(world(), name, folder)
        found.append(trainer.predict(model, Batches(), ckpt_path=path))
        assert not any(flat.store.is_stream for flat in trainer.strategy.engine.sharded.flats)
    assert all(map(torch.equal, *found))


def test_a_file_that_lacks_a_weight_is_copied(ranks: Pools, tmp_path: Path) -> None:
    content = torch.load(as_lightning(tmp_path))
    del content["state_dict"]["net.1.1.weight"]
    torch.save(content, tmp_path / "part.ckpt")
    ranks(2).run(partly, str(tmp_path), str(tmp_path / "part.ckpt"))


class Again(Net):
    """One parameter is not contiguous; it is saved after each run."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.net[0][1].weight = nn.Parameter(self.net[0][1].weight.detach().t())

    def on_predict_end(self) -> None:
        self.strides = [parameter.stride() for parameter in self.parameters()]
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/again.ckpt")


def again(folder: str, path: str) -> None:
    model = Again()
    trainer = make_trainer(world(), "zero3_nvme", folder, precision="bf16-mixed")
    first = trainer.predict(model, Batches(), ckpt_path=path)
    strides = model.strides
    second = trainer.predict(model, Batches(), ckpt_path=path)
    assert all(map(torch.equal, second, first))
    assert model.strides == strides
    saved = torch.load(f"{folder}/again.ckpt")["state_dict"]
    assert all(torch.equal(saved[key], value) for key, value in state().items())


def test_a_module_that_was_left_at_rest_has_all_digits_in_another_run(
    ranks: Pools, tmp_path: Path
) -> None:
    """It computed in half precision."""
    ranks(1).run(again, str(tmp_path), str(as_lightning(tmp_path)))


class Doubling(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.0.1.weight"].mul_(2)
        checkpoint["state_dict"]["net.1.1.bias"] = torch.zeros(WIDTH)


class Looking(Net):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self.sum = sum(parameter.double().sum() for parameter in self.parameters())
        return result


def by_users(folder: str, path: str) -> None:
    """Hooks that change what was read, and a load_state_dict that looks at it."""
    for cls in (Doubling, Looking):
        models = cls(), cls()
        found = [
            make_trainer(world(), name, folder).predict(model, Batches(), ckpt_path=path)
            for name, model in zip(("zero3", "zero3_nvme"), models, strict=True)
        ]
        assert all(map(torch.equal, *found))
    assert models[0].sum == models[1].sum


def test_users_hooks_find_ordinary_tensors(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(by_users, str(tmp_path), str(as_lightning(tmp_path)))


# ---------------------------------------------------------------------------- files unread


def test_a_file_is_read_without_being_mapped(tmp_path: Path) -> None:
    """Whatever a state dict may hold; under a limit that has no room for the file."""
    big = torch.randn(900, 800)
    held = {
        "big": big,
        "tied": big,
        "transposed": torch.randn(700, 600).t(),
        "view": torch.randn(3000, 500)[10:2010],
        "parameter": nn.Parameter(torch.randn(700, 700)),
        "expanded": torch.randn(3).expand(500_000, 3),
        "half": torch.randn(1024, 1024).bfloat16(),
        "complex": torch.randn(600, 600, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0, 3),
        "small": [torch.tensor(1), torch.randn(7)],
        "sparse": torch.randn(800, 800).to_sparse(),
        "words": {"a": 1.5, "b": None},
    }
    path = tmp_path / "any.ckpt"
    torch.save(held, path)
    found = load(str(path), Control(alone=True))
    path.unlink()  # it stays open
    assert found["big"] is found["tied"]
    assert found["words"] == held["words"]
    assert type(found["small"][1]) is Tensor
    assert isinstance(found["parameter"], nn.Parameter)
    for key in held.keys() - {"words", "small", "sparse"}:
        assert found[key].shape == held[key].shape
        assert found[key].stride() == held[key].stride()
        assert torch.equal(found[key].clone(), held[key]), key
    assert torch.equal(found["sparse"].to_dense(), held["sparse"].to_dense())
    assert torch.equal(found["small"][1], held["small"][1])


def loaded_within(path: str, nbytes: int) -> str:
    held = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + nbytes, before[1]))
    try:
        found = load(path, Control(alone=True))
        return type(found["weight"]).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_a_file_that_may_not_be_mapped_is_read(ranks: Pools, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(50_000_000)}, tmp_path / "large.ckpt")
    assert ranks(1).run(loaded_within, str(tmp_path / "large.ckpt"), 10**8) == ["LazyTensor"]
