"""Checkpoints by the Trainer: as under DDP, whatever writes them and whoever resumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_zero import ZeROStrategy
from lightning_zero.commands import convert
from tests.oracle.by_trainer import (
    Model,
    Rows,
    Stop,
    assert_close,
    brief,
    model,
    resume,
    train,
)
from tests.oracle.checkpoints import ordered
from tests.oracle.ranks import Pools


class Trust:
    """Something that weights_only=True refuses to make."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trust)

    def __hash__(self) -> int:
        return 0


@pytest.fixture(scope="module")
def ddp(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Train with DDP, the oracle."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, ranks(2).run(train, str(folder), "ddp")[0]


@pytest.mark.parametrize("name", ["ddp", "zero1", "async3", "dcp2", "async-dcp3"])
def test_what_callbacks_leave_and_a_run_that_resumes_in_mid_epoch(
    ranks: Pools, tmp_path: Path, ddp: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, expected = ddp
    if name != "ddp":
        folder = tmp_path
        found = ranks(2).run(train, str(tmp_path), name)[0]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for key in ("files", "best", "last", "top"):
            assert found[key] == expected[key]
        for file in found["files"]:
            assert_same_file(tmp_path / file, ddp[0] / file, is_folder="dcp" in name)
    # Another stage and number of ranks, whatever the strategy's own kind of checkpoint.
    for file, done, size in (("mid.ckpt", 5, 3), ("last.ckpt", 12, 2)):
        reader = {"zero1": "ddp", "async3": "zero2"}.get(name, "zero3") if size == 2 else "zero1"
        for found in ranks(size).run(resume, f"{folder}/{file}", reader):
            assert found["step"] == 12
            assert found["losses"] == pytest.approx(expected["losses"][done:], rel=1e-5)
            assert found["loaded"] == list(expected["weights"])
            for key, value in found["weights"].items():
                torch.testing.assert_close(value, expected["weights"][key], rtol=1e-4, atol=1e-6)
    if name == "async3":
        restored = Model.load_from_checkpoint(tmp_path / "after.ckpt")
        for key, value in restored.state_dict().items():
            torch.testing.assert_close(value, expected["weights"][key], rtol=1e-4, atol=1e-6)
        assert restored.net.head.weight is restored.net.embedding.weight


def assert_same_file(path: Path, other: Path, *, is_folder: bool) -> None:
    expected = torch.load(other, weights_only=True)
    assert path.is_dir() == is_folder
    if is_folder:  # which need not keep the order of keys
        convert(path, plain := path.with_name("plain.ckpt"))
        assert_close(ordered(torch.load(plain)), ordered(expected), path.name)
        return
    found = torch.load(path, weights_only=True)
    state = found["state_dict"]
    assert state["net.head.weight"].data_ptr() == state["net.embedding.weight"].data_ptr()
    assert_close(found, expected, path.name)


# -- trust -----------------------------------------------------------------------------------------


def refuse_and_trust(path: str) -> str:
    module = Model(extra=Trust())
    trainer = brief(ZeROStrategy(3), 2)
    trainer.fit(module, Rows())
    trainer.save_checkpoint(path)
    told = ""
    trainer = brief(ZeROStrategy(3), 4)
    try:
        trainer.fit(model(), Rows(), ckpt_path=path)
    except ValueError as error:
        told = str(error)
    trainer = brief(ZeROStrategy(3), 4)
    module = model()
    trainer.fit(module, Rows(), ckpt_path=path, weights_only=False)
    assert len(module.losses) == 2
    return told


def test_other_objects_are_made_only_on_request(ranks: Pools, tmp_path: Path) -> None:
    for told in ranks(2).run(refuse_and_trust, str(tmp_path / "file.ckpt")):
        assert "holds more than tensors and plain values" in told
        assert "tests.checkpoint.test_trainer.Trust" in told
        assert "weights_only=False" in told


# -- places ----------------------------------------------------------------------------------------


def save_elsewhere(folder: str) -> list[str]:
    """To a URL, and after a fit that left the weights at rest."""
    strategy = ZeROStrategy(3, restore_weights=False)
    module = model()
    trainer = brief(
        strategy, 5, callbacks=[Stop("memory://folder/file.ckpt", 5), Stop(f"{folder}/at5.ckpt", 5)]
    )
    trainer.fit(module, Rows())
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    if trainer.is_global_zero:
        remote = fsspec.filesystem("memory").cat("/folder/file.ckpt")
        Path(f"{folder}/remote.ckpt").write_bytes(remote)
    trainer.strategy.barrier()
    return os.listdir(folder)


def test_urls_and_weights_that_stay_at_rest(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(save_elsewhere, str(tmp_path))
    found, remote, after = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        for name in ("at5", "remote", "after")
    )
    assert_close(remote, found, "remote")
    assert_close(after["state_dict"], found["state_dict"], "after")
    assert_close(after["optimizer_states"], found["optimizer_states"], "after")
