"""load_weights, convert and inspect, for one process and for many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_zero import load_weights
from lightning_zero.checkpoint import load, read_safetensors, write_safetensors
from lightning_zero.checkpoint.safetensors import INDEX
from lightning_zero.comm import Control
from lightning_zero.commands import main
from lightning_zero.commands.checkpoints import convert, damage, describe
from lightning_zero.engine import Engine
from lightning_zero.plan import Settings
from tests.oracle.checkpoints import same
from tests.oracle.launch import run_python
from tests.oracle.models import MODELS, Tied
from tests.oracle.ranks import Pools


def tied(seed: int = 1) -> nn.Module:
    return MODELS["tied"].build(seed=seed)


def write_kinds(folder: Path) -> list[str]:
    """The same weights as every kind of file."""
    state = {name: value.clone() for name, value in tied().state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3, "global_step": 7}, folder / "trainer.ckpt")
    torch.save(state, folder / "bare.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(state, folder / "single.safetensors")
    lone = folder / "lone"
    lone.mkdir()
    safetensors.torch.save_file(state, lone / "model.safetensors")
    sharded = folder / "sharded"
    sharded.mkdir()
    places = {}
    names = [name for name in state if name != "head.weight"]  # tied: Hugging Face leaves it out
    for number, some in enumerate((names[:3], names[3:])):
        safetensors.torch.save_file({n: state[n] for n in some}, sharded / f"{number}.safetensors")
        places.update(dict.fromkeys(some, f"{number}.safetensors"))
    (sharded / INDEX).write_text(json.dumps({"weight_map": places}))
    kinds = ["trainer.ckpt", "bare.pt", "old.pt", "single.safetensors", "lone", "sharded"]
    return [str(folder / kind) for kind in kinds]


def load_all(paths: list[str]) -> list[dict[str, Tensor]]:
    """The weights of a sharded module after loading each file."""
    results = []
    for path in paths:
        for stage in (1, 3):
            with torch.device("meta" if stage == 3 else "cpu"):
                module = Resettable()
            engine = Engine(module, Settings(stage=stage))
            load_weights(module, path)
            with engine.sharded.gathered():
                assert module.head.weight is module.embedding.weight
                results.append({k: v.detach().clone() for k, v in module.state_dict().items()})
            engine.close()
    return results


class Resettable(Tied):
    """May be built on the meta device."""

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data.fill_(1.0)


@pytest.mark.parametrize("world", [1, 3])
def test_load_weights_of_every_kind(ranks: Pools, tmp_path: Path, world: int) -> None:
    paths = write_kinds(tmp_path)
    expected = tied().state_dict()
    for of_rank in ranks(world).run(load_all, paths):
        assert len(of_rank) == 2 * len(paths)
        for found in of_rank:
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    for path in paths:
        module = tied(seed=2)
        load_weights(module, path)
        assert all(torch.equal(v, expected[k]) for k, v in module.state_dict().items())


def load_wrong(path: str) -> tuple[str, str, list[str]]:
    module = tied(seed=2)
    engine = Engine(module, Settings(stage=3))
    before = [piece.detach().clone() for piece in engine.sharded.pieces]
    told = ["", ""]
    for number, place in enumerate((path, f"{path}.missing")):
        try:
            load_weights(module, place)
        except (RuntimeError, FileNotFoundError) as error:
            told[number] = str(error)
        assert all(
            torch.equal(a, b.detach()) for a, b in zip(before, engine.sharded.pieces, strict=True)
        )
    weights = torch.load(path, weights_only=True)
    del weights["blocks.0.norm.bias"]
    torch.save(weights, f"{path}.shapes")
    result = load_weights(module, f"{path}.fits", strict=False)
    engine.close()
    return told[0], told[1], [*result.missing_keys, *result.unexpected_keys]


def test_load_weights_tells_everything_that_does_not_fit(ranks: Pools, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in tied().state_dict().items()}
    fitting = dict(state, surplus=torch.ones(1))
    del fitting["blocks.1.linear.bias"]
    torch.save(fitting, tmp_path / "file.pt.fits")
    torch.save({**fitting, "blocks.0.norm.weight": torch.ones(9)}, tmp_path / "file.pt")
    for wrong, missing, names in ranks(2).run(load_wrong, str(tmp_path / "file.pt")):
        assert "file.pt" in wrong
        for word in ("blocks.1.linear.bias", "surplus", "blocks.0.norm.weight", "[9]"):
            assert word in wrong
        assert "Checkpoint file not found" in missing
        assert names == ["blocks.1.linear.bias", "surplus"]


def test_meta_module_that_is_not_sharded_yet_is_refused(tmp_path: Path) -> None:
    torch.save(tied().state_dict(), tmp_path / "file.pt")
    with torch.device("meta"):
        module = Resettable()
    with pytest.raises(RuntimeError, match="Call load_weights in `on_fit_start`"):
        load_weights(module, tmp_path / "file.pt")


# -- safetensors -----------------------------------------------------------------------------------


def test_safetensors_files_are_those_of_the_package(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]
    state = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    state["point"], state["nothing"] = torch.tensor(2.5), torch.empty(0, 3)
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    safetensors.torch.save_file(state, tmp_path / "c.safetensors")
    found = safetensors.torch.load_file(tmp_path / "b.safetensors")
    for path in ("b.safetensors", "c.safetensors"):
        ours = read_safetensors(tmp_path / path)
        for name, value in state.items():
            for other in (found[name], ours[name]):
                assert other.dtype is value.dtype
                assert torch.equal(other.double(), value.double())


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path, value = tmp_path / "a.safetensors", torch.arange(3.0)
    write_safetensors(path, {"first": value, "second": value})
    with pytest.raises(TypeError, match="meta"):
        write_safetensors(path, {"first": -value, "second": value.to("meta")})
    assert torch.equal(read_safetensors(path)["first"], value)
    assert [*tmp_path.iterdir()] == [path]


def headed(header: str) -> bytes:
    """A file of a header and four bytes."""
    return len(header).to_bytes(8, "little") + header.encode() + bytes(4)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "damaged"),
        (b"\xff" * 20, "header would be"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a JSON object"),
        (headed('{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'), "needs 36 bytes"),
        (headed('{"a":{"dtype":"F33","shape":[0],"data_offsets":[0,0]}}'), "F33"),
        (headed('{"a":{"dtype":"F32","shape":[0]}}'), "data_offsets"),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, content: bytes, word: str) -> None:
    (tmp_path / "file.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=word):
        read_safetensors(tmp_path / "file.safetensors")


def test_what_is_written_leaves_no_other_to_be_read(tmp_path: Path) -> None:
    for fill, most in ((1.0, 16), (2.0, 99), (3.0, 16)):  # two files, one, and two again
        write_safetensors(tmp_path, dict.fromkeys("ab", torch.full((4,), fill)), max_bytes=most)
        assert read_safetensors(tmp_path)["a"].eq(fill).all()
        assert len([*tmp_path.iterdir()]) == (1 if most == 99 else 3)


# -- convert ---------------------------------------------------------------------------------------


def trainer_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    module = tied()
    optimizer = torch.optim.Adam(module.parameters())
    MODELS["tied"].loss(module, MODELS["tied"].batch(4, 0)).backward()
    optimizer.step()
    checkpoint = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "epoch": 3,
        "global_step": 7,
    }
    torch.save(checkpoint, folder / "a.ckpt")
    return folder / "a.ckpt", checkpoint


def test_convert_there_and_back(tmp_path: Path) -> None:
    path, checkpoint = trainer_file(tmp_path)
    convert(path, tmp_path / "b.ckpt")
    found = torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert found["epoch"] == 3
    assert "written by `lightning-zero convert`" in list(describe(tmp_path / "b.ckpt"))
    assert torch.equal(
        found["optimizer_states"][0]["state"][1]["exp_avg"],
        checkpoint["optimizer_states"][0]["state"][1]["exp_avg"],
    )
    weights = found["state_dict"]
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
    convert(path, tmp_path / "c.ckpt", weights_only=True, dtype=torch.bfloat16)
    cast = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert list(cast) == ["state_dict"]
    convert(path, tmp_path / "folder", max_shard_bytes=300)
    files = sorted(p.name for p in (tmp_path / "folder").iterdir())
    assert len(files) > 2
    assert files[-1] == INDEX
    convert(tmp_path / "folder", tmp_path / "d.pt")
    back = torch.load(tmp_path / "d.pt", weights_only=True)["state_dict"]
    for name, value in checkpoint["state_dict"].items():
        assert torch.equal(cast["state_dict"][name], value.bfloat16())
        assert torch.equal(weights[name], value)
        assert torch.equal(back[name], value)
    convert(path, tmp_path / "e.dcp")
    convert(tmp_path / "e.dcp", tmp_path / "f.ckpt")
    by_directory = torch.load(tmp_path / "f.ckpt", weights_only=True)
    same(by_directory, {**checkpoint, "state_dict": dict(checkpoint["state_dict"])})
    assert {"epoch 3, step 7", "written by `lightning-zero convert`"} < {
        *describe(tmp_path / "e.dcp")
    }
    convert(tmp_path / "e.dcp", tmp_path / "g.safetensors", dtype=torch.bfloat16)
    convert(tmp_path / "g.safetensors", tmp_path / "h.dcp", dtype=torch.float32)
    convert(tmp_path / "e.dcp", tmp_path / "i.dcp", weights_only=True)
    for file in ("h.dcp", "i.dcp"):
        found = load(str(tmp_path / file), Control())
        assert {value.dtype for value in found["state_dict"].values()} == {torch.float32}
        assert "optimizer_states" not in found
    for file in ("b.ckpt", "c.ckpt", "d.pt", "e.dcp", "f.ckpt"):
        assert damage(tmp_path / file) == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, checkpoint = trainer_file(tmp_path)
    target = tmp_path / "out.safetensors"
    assert main(["convert", str(path), str(target), "--dtype", "float16"]) == 0
    assert capsys.readouterr().out == f"Wrote 480 B of weights to {target}.\n"
    for dtype in ("bf16", "fp32"):
        assert main(["convert", str(path), f"{tmp_path}/v1.{dtype}/", "--dtype", dtype]) == 0
    capsys.readouterr()
    assert main(["convert", str(path), str(tmp_path / "out.safetensor")]) == 1
    assert "for example weights.safetensors, got" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensor").exists()
    assert main(["inspect", str(path), "--verify"]) == 0
    told = capsys.readouterr().out
    assert "epoch 3, step 7" in told
    assert "state_dict/embedding.weight" in told
    assert "(11, 6)" in told
    assert "All checksums match." in told
    assert main(["inspect", str(target)]) == 0
    assert "float16" in capsys.readouterr().out
    assert main(["convert", str(path), str(tmp_path / "out.dcp")]) == 0
    assert main(["inspect", str(tmp_path / "out.dcp"), "--verify"]) == 0
    assert "All checksums match." in capsys.readouterr().out
    part = tmp_path / "out.dcp" / "__0_0.distcp"
    content = bytearray(part.read_bytes())
    content[content.index(checkpoint["state_dict"]["blocks.0.linear.weight"].numpy().data)] ^= 1
    part.write_bytes(content)
    assert main(["inspect", str(tmp_path / "out.dcp"), "--verify"]) == 1
    assert "linear.weight: data/0 is damaged: Bad CRC-32" in capsys.readouterr().out
    content = bytearray(path.read_bytes())
    place = content.index(checkpoint["state_dict"]["blocks.0.linear.weight"].numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert main(["inspect", str(path), "--verify"]) == 1
    assert "Bad CRC-32" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none.ckpt")]) == 1
    assert "Checkpoint file not found" in capsys.readouterr().err
    assert main(["convert", str(path), str(target), "--dtype", "int8"]) == 1
    assert "Expected --dtype to be a floating-point dtype such as" in capsys.readouterr().err


def test_module_is_a_command(tmp_path: Path) -> None:
    path, _ = trainer_file(tmp_path)
    finished = run_python(["-m", "lightning_zero", "inspect", str(path)])
    assert "head.weight" in finished.stdout
