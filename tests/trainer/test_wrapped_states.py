"""Optimizers that compile their step, or keep states in a tensor class of their own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero import ZeROStrategy
from lightning_zero.checkpoint import read_file
from lightning_zero.optimizer import Way, verdict_of
from lightning_zero.trainer import checkpointing
from tests.oracle.by_trainer import Rows, make_trainer, world
from tests.oracle.own_optimizers import Layers, Own
from tests.oracle.ranks import Pools

BLOCK = 4


class InBytes(Tensor):
    """Numbers in 8 bits, with a scale for each block of elements."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=scales.dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> InBytes:
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def zeros(cls, like: Tensor) -> InBytes:
        return cls(
            torch.zeros_like(like, dtype=torch.int8),
            torch.zeros(like.numel() // BLOCK, dtype=like.dtype, device=like.device),
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            blocks = decoded(args[1]).reshape(-1, BLOCK)
            scales = blocks.abs().amax(1).clamp(min=1e-8) / 127
            args[0].scales.copy_(scales)
            args[0].codes.copy_((blocks / scales[:, None]).round().view(args[0].shape))
            return args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            given = {key: value for key, value in kwargs.items() if key == "device"}
            return cls(func(args[0].codes, **given), func(args[0].scales, **given))
        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


# A file is read with the classes only that torch knows as safe.
torch.serialization.add_safe_globals([InBytes])


def decoded(value: Any) -> Any:
    if not isinstance(value, InBytes):
        return value
    blocks = value.codes.reshape(-1, BLOCK) * value.scales[:, None]
    return blocks.view(value.shape)


def momentum_step(p: Tensor, grad: Tensor, mean: Tensor, lr: float) -> None:
    new = mean.lerp(grad, 0.25)
    mean.copy_(new)
    p.sub_(lr * new)


class Compiled(Own):
    """Compiles its step as a whole."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        step = torch.compile(momentum_step, fullgraph=True, dynamic=False, backend="eager")
        mean = self.state[p].setdefault("mean", self.zeros(p))
        step(p.detach(), grad, mean, group["lr"])

    def zeros(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)


class Wrapped(Compiled):
    """Keeps large states in bytes, and is not compiled."""

    least_numel = 0

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", self.zeros(p))
        momentum_step(p, grad, mean, group["lr"])

    def zeros(self, p: Tensor) -> Tensor:
        is_large = p.numel() >= self.least_numel and p.numel() % BLOCK == 0
        return InBytes.zeros(p) if is_large else torch.zeros_like(p)


class LargeWrapped(Wrapped):
    """As most of its kind, it keeps states in bytes only from some size on."""

    least_numel = 4096


class CompiledAndWrapped(Wrapped):
    """Both."""

    update = Compiled.update


KINDS = [Wrapped, CompiledAndWrapped]


class Module(Layers):
    """A module that also asks for the states by hand."""

    widths = (4, 8, 3, 1)

    def __init__(self, make: Callable[..., Own]) -> None:
        super().__init__()
        self.make = make
        self.asked: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            state = self.optimizers().state_dict()["state"]  # type: ignore[union-attr]
            self.asked = [leaf.clone() for leaf in plain(state)]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def plain(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, InBytes):
            yield from (leaf.codes, leaf.scales)
        elif isinstance(leaf, Tensor):
            yield leaf


def fit(cls: Any, strategy: Any, folder: str, steps: int, path: str | None = None) -> Any:
    more: Any = {"max_steps": steps, "enable_checkpointing": False}
    trainer = make_trainer(world(), strategy, folder, **more)
    module = Module(cls)
    trainer.fit(module, Rows(), ckpt_path=path)
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    trainer.strategy.barrier()
    saved = torch.load(f"{folder}/saved.ckpt", weights_only=False)
    trainer.strategy.barrier()
    kept = [saved["state_dict"], saved["optimizer_states"]]
    return [*plain(kept)], module.asked


def trained(cls: Any, folder: str) -> None:
    torch.compiler.reset()  # a function may be compiled for few sizes and classes
    half, whole = fit(cls, "ddp", folder, 2), fit(cls, "ddp", folder, 4)
    for stage in (3 - 2 * KINDS.index(cls),):
        strategy = lambda: ZeROStrategy(  # noqa: E731
            stage,  # noqa: B023
            min_num_params=0,
            optimizer_step={cls.__name__: "parameter"},
        )
        assert_equal(fit(cls, strategy(), folder, 4), whole)
        assert_equal(fit(cls, strategy(), folder, 2), half)
        assert_equal(fit(cls, strategy(), folder, 4, f"{folder}/saved.ckpt")[:1], whole[:1])


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_steps_saves_and_resumes_as_under_ddp(ranks: Pools, tmp_path: Path, cls: Any) -> None:
    ranks(2).run(trained, cls, str(tmp_path))


def refused(folder: str) -> None:
    def fit_to_directory() -> None:
        fit(Wrapped, ZeROStrategy(3, min_num_params=0, checkpoint="dcp"), folder, 2)

    match = "Wrapped keeps states in tensors that wrap others"
    with pytest.raises(ValueError, match=match):
        fit_to_directory()
    # A save tells, where a step on `meta` does not.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "wraps_states", lambda _: False)
        with pytest.raises(ValueError, match="mean' is of the class InBytes"):
            fit_to_directory()


def test_a_directory_has_no_form_for_them(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(refused, str(tmp_path))


def test_a_load_that_fails_maps_no_devices_later(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save([torch.ones(2), Module], path)
    with pytest.raises(ValueError, match="holds more than tensors"):
        read_file(path)
    there = InBytes.zeros(torch.empty(8, device="meta"))
    assert pickle.loads(pickle.dumps(there)).device.type == "meta"


def test_what_is_found() -> None:
    small, large = ([nn.Parameter(torch.randn(n, n))] for n in (8, 128))
    ways = {cls: verdict_of(cls(small)) for cls in (Compiled, *KINDS, LargeWrapped)}
    assert [verdict.way for verdict in ways.values()] == [*[Way.ALL_AT_ONCE] * 3, Way.BY_ELEMENT]
    assert ways[Compiled].reason.startswith("compiles its step at ")
    assert "keeps values in tensors of the class InBytes" in ways[Wrapped].reason
    assert verdict_of(LargeWrapped(large)).way is Way.ALL_AT_ONCE
