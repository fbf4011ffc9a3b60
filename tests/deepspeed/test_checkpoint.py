"""Folders by DeepSpeed's ZeRO, converted to what DDP would have written."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW, NAdam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.checkpoint import LazyTensor
from lightning_zero.commands import convert, damage, describe, main
from lightning_zero.deepspeed import CannotConvert, DeepSpeedFolder
from tests.deepspeed.writer import Writer
from tests.oracle.projects import make_trainer
from tests.oracle.ranks import Pools


class Everything(nn.Module):
    """Ties, frozen weights, buffers, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.inner = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 5)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def get_extra_state(self) -> Any:
        return {"note": 5}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"note": 5}

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.relu(self.inner(self.embedding(x))))
        return self.head(self.norm(x.flatten(0, 1)).view_as(x) * self.scale)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    large = [p for p in trainable if p.ndim > 1]
    small = [p for p in trainable if p.ndim == 1]
    return [
        {"params": small, "weight_decay": 0.0},
        {"params": large, "lr": 0.02},
        {"params": [p for p in trainable if p.ndim == 0]},  # one element for all ranks
    ]


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    rows = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(seed))
    F.cross_entropy(model(rows).flatten(0, 1), rows.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


Make = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(groups_of(model), lr=0.01)


def trained(make: Make = adamw) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Everything()
    optimizer = make(model)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer


CLIENT = {"epoch": 1, "global_step": 2, "loops": {"fit_loop": {"x": [1, (2.0, "y")]}}}


def converted(writer: Writer, folder: Path, make: Make = adamw, **options: Any) -> dict[str, Any]:
    model, optimizer = trained(make)
    writer.write(folder / "source.ckpt", model, optimizer)
    convert(folder / "source.ckpt", folder / "target.ckpt", **options)
    assert damage(folder / "target.ckpt") == []
    return torch.load(folder / "target.ckpt", weights_only=True)


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """Fail unless nested values are the same, types and dtypes included."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, Tensor):
        assert ours.dtype is theirs.dtype, where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(one, other, f"{where}/{number}")
    else:
        assert ours == theirs, where


def assert_like_plain(found: dict[str, Any], make: Make = adamw) -> None:
    """Fail unless a checkpoint holds what the module and the optimizer would have saved whole."""
    model, optimizer = trained(make)
    assert_equal(found["state_dict"], dict(model.state_dict()))
    assert_equal(found["optimizer_states"], [optimizer.state_dict()])
    assert list(found["state_dict"]) == list(model.state_dict())
    weights = found["state_dict"]
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()


# -- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_converted_is_what_ddp_would_have_written(tmp_path: Path, stage: int, world: int) -> None:
    found = converted(Writer(stage, world, CLIENT), tmp_path)
    assert_like_plain(found)
    assert {key: found[key] for key in CLIENT} == CLIENT
    assert found["lr_schedulers"] == []
    # What is read into another program goes on in the same way.
    model, optimizer = trained()
    other = Everything()
    other.load_state_dict(found["state_dict"])
    other_optimizer = adamw(other)
    other_optimizer.load_state_dict(found["optimizer_states"][0])
    for seed in (7, 8):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(
    "writer",
    [
        Writer(1, 3, round_robin=True),
        Writer(2, 2, round_robin=True),
        Writer(2, 3, alignment=8),
        Writer(1, 2, round_robin=True, alignment=4),
        Writer(3, 3, sub_group=1),
        Writer(3, 2, sub_group=2),
    ],
)
def test_other_orders_and_places_of_parameters(tmp_path: Path, writer: Writer) -> None:
    assert_like_plain(converted(writer, tmp_path))


def test_order_is_told_by_the_module_where_the_configuration_is_a_file(tmp_path: Path) -> None:
    def single(model: nn.Module) -> Optimizer:
        return AdamW([p for p in model.parameters() if p.requires_grad])

    def backwards(model: nn.Module) -> Optimizer:
        return AdamW([p for p in model.parameters() if p.requires_grad][::-1])

    writer = Writer(2, 2, round_robin=True, config="ds.json")
    assert_like_plain(converted(writer, tmp_path / "a", single), single)
    with pytest.raises(CannotConvert, match="round_robin_gradients"):
        converted(writer, tmp_path / "b", backwards)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_in_16_bit_come_out_as_fp32(tmp_path: Path, stage: int) -> None:
    found = converted(Writer(stage, 2, dtype=torch.bfloat16), tmp_path)
    model, _ = trained()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            # The masters are exact; of frozen weights DeepSpeed keeps no more than 16 bits.
            expected = value.bfloat16().float() if name.startswith("frozen") else value
            assert_equal(found["state_dict"][name], expected, name)
    source = tmp_path / "source.ckpt"
    convert(source / "checkpoint", tmp_path / "w.ckpt", weights_only=True, dtype=torch.bfloat16)
    bare = torch.load(tmp_path / "w.ckpt", weights_only=True)
    assert list(bare) == ["state_dict"]
    assert bare["state_dict"]["inner.weight"].dtype is torch.bfloat16
    convert(source, tmp_path / "w.safetensors")
    for name, value in load_file(tmp_path / "w.safetensors").items():
        assert_equal(value, found["state_dict"][name], name)


def test_numbers_of_the_optimizer_are_each_parameters_own(tmp_path: Path) -> None:
    def nadam(model: nn.Module) -> Optimizer:
        return NAdam(groups_of(model), lr=0.01)

    found = converted(Writer(2, 2), tmp_path, nadam)
    assert_like_plain(found, nadam)
    states = found["optimizer_states"][0]["state"].values()
    places = [state[key].data_ptr() for state in states for key in ("step", "mu_product")]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_in_the_optimizer(tmp_path: Path, stage: int) -> None:
    def every(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters())

    def named(model: nn.Module) -> Optimizer:
        return AdamW(model.named_parameters())

    found = converted(Writer(stage, 2), tmp_path / "a", every, frozen_in_optimizer=True)
    assert_like_plain(found, every)
    assert_like_plain(converted(Writer(stage, 2), tmp_path / "b", named), named)
    with pytest.raises(CannotConvert, match="3 param groups"):
        converted(Writer(stage, 2), tmp_path / "c", frozen_in_optimizer=True)


def test_steps_counted_by_group_and_the_loss_scale(tmp_path: Path) -> None:
    scaler = {"dynamic": True, "cur_scale": 512.0, "scale_factor": 2.0, "scale_window": 100}
    writer = Writer(2, 2, scaler={**scaler, "cur_iter": 250, "last_overflow_iter": 19})
    model, optimizer = trained()
    for group in optimizer.param_groups:
        group["step"] = 2
    for state in optimizer.state.values():
        del state["step"]
    writer.write(tmp_path / "a", model, optimizer)
    convert(tmp_path / "a", tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert_like_plain(found)
    assert found["MixedPrecision"] == {
        "scale": 512.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 100,
        "_growth_tracker": 30,
    }


def test_older_versions(tmp_path: Path) -> None:
    model, optimizer = trained()
    tag = Writer(3, 2, CLIENT, sub_group=1).write(tmp_path / "a", model, optimizer)
    for rank in range(2):
        file = tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        content = torch.load(file, weights_only=True)
        shapes = [item for table in content["param_shapes"] for item in table.items()]
        # One table for all flat vectors, and the names that Lightning's wrapper gave.
        old = "_forward_module."
        content["param_shapes"] = {old + name: shape for name, shape in shapes}
        content["shared_params"] = {old + a: old + b for a, b in content["shared_params"].items()}
        content["buffer_names"] = [old + name for name in content["buffer_names"]]
        for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
            content[key] = {old + name: value for name, value in content[key].items()}
        torch.save(content, file)
    convert(tmp_path / "a", tmp_path / "a.ckpt")
    assert_like_plain(torch.load(tmp_path / "a.ckpt", weights_only=True))


def test_files_that_do_not_tell_the_stage(tmp_path: Path) -> None:
    model, optimizer = trained()
    tag = Writer(1, 2).write(tmp_path / "a", model, optimizer)
    for file in tag.glob("*optim_states.pt"):
        rewrite(file, lambda content: content["optimizer_state_dict"].pop("zero_stage"))
    convert(tmp_path / "a", tmp_path / "a.ckpt")
    assert_like_plain(torch.load(tmp_path / "a.ckpt", weights_only=True))


def test_schedulers_of_a_program_without_lightning(tmp_path: Path) -> None:
    scheduler = {"last_epoch": 2}
    found = converted(Writer(2, 2, {"lr_scheduler": scheduler}), tmp_path / "a")
    assert found["lr_schedulers"] == [scheduler]
    assert "ds_version" not in found


def test_nothing_is_put_together_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    Writer(3, 2).write(tmp_path / "a", model, optimizer)
    read: list[LazyTensor] = []
    real_read = LazyTensor.read_to

    def noted(self: LazyTensor, out: Tensor, start: int) -> None:
        read.append(self)
        real_read(self, out, start)

    monkeypatch.setattr(LazyTensor, "read_to", noted)
    DeepSpeedFolder(tmp_path / "a").checkpoint()
    assert not read
    convert(tmp_path / "a", tmp_path / "a.ckpt")
    assert len(set(map(id, read))) == len(read)  # each once, the tied head with the embedding
    # Weights, and of those that are trained Adam's two averages.
    assert len(read) == sum(3 if p.requires_grad else 1 for p in model.parameters())


def test_through_a_directory(tmp_path: Path) -> None:
    model, optimizer = trained()
    Writer(3, 2, CLIENT).write(tmp_path / "a", model, optimizer)
    convert(tmp_path / "a", tmp_path / "a.dcp")
    convert(tmp_path / "a.dcp", tmp_path / "b.ckpt")
    found = torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert_equal(found["state_dict"], dict(model.state_dict()))
    assert_equal(found["optimizer_states"], [optimizer.state_dict()])
    assert found["loops"] == CLIENT["loops"]


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    tag = Writer(3, 2, CLIENT).write(tmp_path / "a", model, optimizer)
    told = "\n".join(describe(tmp_path / "a"))
    assert "written by DeepSpeed 0.19.8, ZeRO stage 3, on 2 ranks" in told
    assert "epoch 1, step 2" in told
    assert "state_dict/embedding.weight" in told
    assert "optimizer_states/0/state/0/exp_avg_sq" in told
    assert main(["inspect", str(tmp_path / "a"), "--verify"]) == 0
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(file.read_bytes())
    part = torch.load(file, weights_only=False, pickle_module=_Inert)
    master = part["optimizer_state_dict"]["fp32_flat_groups"][0]
    content[content.index(master.numpy().tobytes())] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "a"), "--verify"]) == 1
    assert f"{file.name}: " in capsys.readouterr().out


class _Inert:
    """A pickle module that knows no class of DeepSpeed."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            known = not module.startswith("deepspeed")
            return (
                super().find_class(module, name) if known else type("Any", (), {"__init__": _any})
            )

    load = pickle.load


def _any(self: Any, *arguments: Any) -> None:
    """Take anything."""


# -- bad input -------------------------------------------------------------------------------------


def refused(path: Path, **options: Any) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        convert(path, path.parent / "never.ckpt", **options)
    assert not (path.parent / "never.ckpt").exists()
    return str(caught.value)


def rewrite(file: Path, change: Callable[[Any], object]) -> None:
    """Change what a file holds, which has no class of DeepSpeed's afterwards."""
    content = torch.load(file, weights_only=False, pickle_module=_Inert)
    if "optimizer_state_dict" in content:
        held = content["optimizer_state_dict"]
        held["zero_stage"] = 3 if "fp32_flat_groups" in held else 2
        held.pop("loss_scaler", None)
        held.pop("param_slice_mappings", None)
    change(content)
    torch.save(content, file)


def test_missing_and_surplus_files_are_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    tag = Writer(3, 3).write(tmp_path / "a", model, optimizer)
    keep = tmp_path / "keep"
    for kind in ("optim_states", "model_states"):
        for rank in (0, 2):
            name = f"zero_pp_rank_{rank}_mp_rank_00_{kind}.pt"
            shutil.move(tag / name, keep)
            told = refused(tmp_path / "a")
            assert "3 ranks wrote it" in told
            assert name in told
            shutil.move(keep, tag / name)
    shutil.copy(
        tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt",
        tag / f"bf16_{'zero_pp_rank_2_mp_rank_00_optim_states.pt'}",
    )
    assert "two files of rank 2" in refused(tmp_path / "a")
    os.unlink(tag / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt")
    shutil.copy(
        tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt",
        tag / "zero_pp_rank_3_mp_rank_00_optim_states.pt",
    )
    assert "left over from an earlier save" in refused(tmp_path / "a")
    (tmp_path / "a" / "latest").write_text("../elsewhere")
    assert "elsewhere" in refused(tmp_path / "a")
    (tmp_path / "a" / "latest").unlink()
    assert "left over from an earlier save" in refused(tmp_path / "a")  # the only tag there is
    for file in tag.glob("*_optim_states.pt"):
        file.unlink()
    assert "stage 0" in refused(tmp_path / "a")


@pytest.mark.parametrize("stage", [2, 3])
def test_files_that_do_not_belong_together(tmp_path: Path, stage: int) -> None:
    model, optimizer = trained()
    tag = Writer(stage, 2).write(tmp_path / "a", model, optimizer)
    files = [tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    contents = [file.read_bytes() for file in files]
    file, whole = files[1], contents[1]
    masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    base = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"

    def told(change: Callable[[Any], object], rank: int = 1) -> str:
        for place, content in zip(files, contents, strict=True):
            place.write_bytes(content)
        rewrite(files[rank], lambda content: change(content["optimizer_state_dict"]))
        return refused(tmp_path / "a")

    def shorten(held: Any) -> None:
        held[masters][1] = held[masters][1][:-7].clone()

    def shorten_state(held: Any) -> None:
        state = held[base]["state"][1]
        state["exp_avg"] = state["exp_avg"][:-9].clone()

    assert "masters of rank 1 should have" in told(shorten)
    assert "states 'exp_avg' of rank 1 should have" in told(shorten_state)
    assert "flat vectors" in told(lambda held: held[masters].pop())
    assert masters in told(lambda held: held.pop(masters))
    assert "on rank 0" in told(lambda held: held[base]["state"][1].pop("exp_avg"))
    assert "is damaged" in told(lambda held: held[base]["param_groups"][0].pop("params"))
    assert "is incomplete" in told(lambda held: held.update(partition_count=10**12), rank=0)

    def square(held: Any) -> None:
        held[base]["state"][1]["exp_avg"] = torch.ones(2, 2)

    assert "does not have one number per element" in told(square)
    if stage == 2:
        assert "elastic" in told(lambda held: held.update({base: [{}, {}]}))
        assert "except for the optimizer" in "\n".join(describe(tmp_path / "a"))
    file.write_bytes(whole[: len(whole) // 2])
    assert "is damaged or not a checkpoint" in refused(tmp_path / "a")
    file.write_bytes(whole)
    shutil.copy(file, tag / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    assert "tensor-parallel" in refused(tmp_path / "a")
    (tag / "zero_pp_rank_0_mp_rank_01_optim_states.pt").rename(tag / "layer_00-model_states.pt")
    assert "pipeline" in refused(tmp_path / "a")


class Dangerous:
    """Does damage when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return touch, (self.path,)


def touch(path: Path) -> None:
    path.touch()


class Harmless:
    """An object of the user's."""

    def __init__(self) -> None:
        self.value = 5


def test_nothing_is_unpickled_but_tensors_and_plain_values(tmp_path: Path) -> None:
    model, optimizer = trained()
    trace = tmp_path / "trace"
    for name, objects in {
        "own": {"hyper_parameters": {"x": [Dangerous(trace)]}},
        "system": {"ds_config": _System()},
        "method": {"ds_config": _Method(trace)},
    }.items():
        Writer(2, 2, objects).write(tmp_path / name, model, optimizer)
    assert "'hyper_parameters/x/0' is an object of" in refused(tmp_path / "own")
    for name in ("system", "method"):
        assert "holds more than tensors and plain values" in refused(tmp_path / name)
    convert(tmp_path / "own", tmp_path / "own.ckpt", weights_only=True)
    list(describe(tmp_path / "own"))
    assert not trace.exists()


class _Method:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class _System:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


def test_trusted_objects(tmp_path: Path) -> None:
    model, optimizer = trained()
    Writer(2, 2, {"hyper_parameters": {"x": Harmless()}}).write(tmp_path / "a", model, optimizer)
    assert "Harmless" in refused(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "a.ckpt", trust=True)
    found = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert found["hyper_parameters"]["x"].value == 5
    assert_like_plain(found)
    assert "Harmless" in refused(tmp_path / "a.ckpt")
    convert(tmp_path / "a.ckpt", tmp_path / "b.ckpt", trust=True)
    assert torch.load(tmp_path / "b.ckpt", weights_only=False)["hyper_parameters"]["x"].value == 5


# -- a Trainer resumes -----------------------------------------------------------------------------


class Words(LightningModule):
    """The model in a Trainer, with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Everything()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(groups_of(self.net), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        rows = torch.randint(0, 11, (16, 3), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(rows), batch_size=4)


def fitted(strategy: str, epochs: int, start: str | None = None) -> tuple[Any, Words]:
    module = Words()
    trainer = make_trainer(strategy, max_epochs=epochs)
    trainer.fit(module, ckpt_path=start)
    return trainer, module


def begun(folder: str) -> None:
    """Two epochs under DDP."""
    trainer, _ = fitted("ddp", 2)
    trainer.save_checkpoint(f"{folder}/plain.ckpt")


def rewritten(folder: Path, stage: int) -> None:
    """The same by DeepSpeed, converted."""
    plain = torch.load(folder / "plain.ckpt", weights_only=True)
    module = Words()
    module.load_state_dict(plain.pop("state_dict"))
    (optimizer,), _ = module.configure_optimizers()
    optimizer.load_state_dict(plain.pop("optimizer_states")[0])
    source = folder / f"by_stage_{stage}.ckpt"
    Writer(stage, 3, plain).write(source, module, optimizer)
    convert(source, folder / f"{stage}.ckpt")


def resumed(folder: str) -> list[tuple[dict[str, Tensor], list[float]]]:
    """Weights and learning rates two epochs later, from DDP's own file and from conversions."""
    ends = []
    for strategy, start in (("ddp", "plain"), ("ddp", "2"), ("zero3", "2"), ("zero2", "3")):
        trainer, module = fitted(strategy, 4, f"{folder}/{start}.ckpt")
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        weights = {k: v.detach().clone() for k, v in module.named_parameters()}
        ends.append((weights, [*rates, trainer.global_step, trainer.current_epoch]))
    with pytest.raises(RuntimeError, match="one of 2 ranks"):
        convert(Path(folder, "by_stage_3.ckpt"), Path(folder, "never.ckpt"))
    with pytest.raises(ValueError, match="convert it first"):
        fitted("zero3", 4, f"{folder}/by_stage_3.ckpt")
    return ends


def test_a_trainer_resumes_from_a_conversion(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(begun, str(tmp_path))
    for stage in (2, 3):
        rewritten(tmp_path, stage)
    for expected, *others in ranks(2).run(resumed, str(tmp_path)):
        for weights, numbers in others:
            assert numbers == expected[1]
            for name, value in expected[0].items():
                torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
