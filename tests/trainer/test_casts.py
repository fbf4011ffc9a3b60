"""A language model in mixed precision: which weights arrive in half, and DDP's bits."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as OfFabric
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeROStrategy, estimate
from tests.oracle.projects import Regression, Run, fit, rows, under_all
from tests.oracle.ranks import Pools


class Projection(nn.Module):
    """GPT-2's linear: raw parameters, which `addmm` uses."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) * 0.2)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.unflatten(0, x.shape[:2])


class Layer(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.into, self.out = Projection(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.out(F.gelu(self.into(self.norms[1](x))))


class Body(nn.Module):
    """A small GPT-2; its head is the embedding's weight."""

    def __init__(self, vocabulary: int = 11, length: int = 6, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width))
        self.layers = nn.ModuleList([Layer(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class GPT(LightningModule):
    """Learns the next token, and notes the dtype of all that its modules return."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = Body()
        self.losses: list[float] = []
        self.notes: tuple[list[str], list[Any]] = ([], [])
        for name, module in self.body.named_modules():
            if not isinstance(module, nn.ModuleList):
                module.register_forward_hook(functools.partial(self._note, name))
        for name, parameter in self.body.named_parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note_grad, name))

    def _note(self, name: str, _: nn.Module, _args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self.notes[0].append(f"{name}: {output.dtype}")

    def _note_grad(self, name: str, parameter: Tensor) -> None:
        self.notes[1].append((name, parameter.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (text,) = batch
        logits = self.body(text[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, text[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _train(strategy: Any, precision: str, **options: Any) -> Run:
    module = GPT()
    text = torch.randint(11, (16, 7), generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(text), batch_size=2)
    if isinstance(strategy, int):
        units = {Layer, nn.Embedding}
        strategy = ZeROStrategy(strategy, **{"units": units, **options})
    # On CPU the Trainer itself would make "bf16-mixed" of "16-mixed".
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if precision == "16-mixed" else None
    plugin = MixedPrecision(precision, "cpu", scaler)  # type: ignore[arg-type]
    run = fit(module, strategy, plugins=[plugin], data=(data,), max_steps=4)
    run.notes = module.notes
    return run


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_language_model_has_the_bits_of_ddp(ranks: Pools, precision: str) -> None:
    """Two numbers have one order in which they can be summed."""
    for by_strategy in ranks(2).run(under_all, _train, precision, stages=(1, 2, 3)):
        ddp = by_strategy["ddp"]
        half = "bfloat16" if precision == "bf16-mixed" else "float16"
        outputs, _ = ddp.notes
        assert "embedding: torch.float32" in outputs
        assert f"layers.0.into: torch.{half}" in outputs
        for stage in (1, 2, 3):
            run = by_strategy[stage]
            assert run.losses == ddp.losses
            assert_close(run.params, ddp.params, rtol=0, atol=0)
            assert run.notes[0] == outputs
            assert {name for name, dtype in run.notes[1] if dtype == torch.float32} == FULL


FULL = {"embedding.weight", "position", "norm.weight", "norm.bias"} | {
    f"layers.{layer}.norms.{norm}.{name}"
    for layer in (0, 1)
    for norm in (0, 1)
    for name in ("weight", "bias")
}
"""The weights that autocast leaves alone, whose gradients are in fp32 too."""


def _train_in_all_ways() -> list[Run]:
    return [_train(3, "bf16-mixed", cast_weights=choice) for choice in ("all", "none")]


def test_all_or_no_weights_are_cast_on_demand(ranks: Pools) -> None:
    for all_cast, none_cast in ranks(2).run(_train_in_all_ways):
        assert "embedding: torch.bfloat16" in all_cast.notes[0]
        kept = {name for name, dtype in all_cast.notes[1] if dtype == torch.float32}
        assert kept == {name for name in FULL if "norm" in name}
        assert {dtype for _, dtype in none_cast.notes[1]} == {torch.float32}


class Using(Regression):
    """Uses the weights of its head in another way besides."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.head(y) if self.way == "two calls" else y

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.way == "a penalty":
            loss = loss + sum(p.square().sum() for p in self.head.parameters())
        return loss


def _trained(way: str, strategy: Any) -> tuple[list[float], list[str]]:
    plugins = [MixedPrecision("bf16-mixed", "cpu")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(Using(way), strategy, plugins=plugins, max_steps=3)
    return run.losses, [str(one.message) for one in caught if "several times" in str(one.message)]


def _looped(way: str) -> list[str]:
    # On CPU Fabric itself would make "bf16-true" of "bf16-mixed".
    fabric = Fabric(
        accelerator="cpu", strategy="zero3", devices=2, plugins=[OfFabric("bf16-mixed", "cpu")]
    )
    fabric.launch()
    module = Using(way)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in rows(4):
            fabric.backward(model(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "several times" in str(one.message)]


@pytest.mark.parametrize("way", ["", "a penalty", "two calls"])
def test_weights_that_are_used_otherwise_too_are_named(ranks: Pools, way: str) -> None:
    ddp = [losses for losses, _ in ranks(2).run(_trained, way, "ddp")]
    full = ranks(2).run(_trained, way, ZeROStrategy(cast_weights="none"))
    assert full == [(losses, []) for losses in ddp]
    for stage in (1, 3):
        (losses, told), (_, by_other) = ranks(2).run(_trained, way, stage)
        assert by_other == []
        assert (losses == ddp[0]) is not bool(way)
        assert len(told) == bool(way)
        for warning in told:
            assert "'head.weight'" in warning
            assert "net." not in warning
            assert "cast_weights='none'" in warning
    assert ranks(2).run(_trained, way, ZeROStrategy(cast_weights="all"))[0][1] == []


def test_loops_of_fabric_are_told_too(ranks: Pools) -> None:
    assert ranks(2).run(_looped, "") == [[], []]
    (told,), by_other = ranks(2).run(_looped, "two calls")
    assert "'head.weight'" in told
    assert by_other == []


def test_the_price_of_full_weights_is_estimated() -> None:
    weights, gathered = {}, {}
    for choice in ("all", "autocast", "none"):
        settings = {"precision": "bf16-mixed", "world_size": 2, "optimizer": "adamw"}
        resting = estimate(Body(), ZeROStrategy(2, cast_weights=choice), **settings)
        weights[choice] = resting.resting["weights"] + resting.resting["master"]
        in_use = estimate(Body(), ZeROStrategy(cast_weights=choice), **settings)
        gathered[choice] = in_use.most["gathered"]
    # On two ranks a weight in half and half a master are as large as a weight that is both.
    assert weights["all"] == weights["autocast"] == weights["none"]
    assert gathered["all"] < gathered["autocast"] < gathered["none"]


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cast_weights to be one of 'autocast', .*, got 'bf"):
        ZeROStrategy(cast_weights="bf16")  # type: ignore[arg-type]
