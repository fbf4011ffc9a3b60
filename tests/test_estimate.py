"""Predicted bytes equal measured bytes, by kind, and the predictions stand alone as well."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.activation import ActivationCheckpointing
from lightning_zero.engine import Engine, Settings
from lightning_zero.memory import Estimate, LiveBytes, Subject, estimate, estimate_of
from lightning_zero.plan import RECIPES
from tests.models import MODELS, Case, Transformer, next_token_loss, numbers, square_loss, tokens


class LoRA(nn.Module):
    """Frozen linears with small trainable factors beside them."""

    class Layer(nn.Module):
        """One of them."""

        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 6).requires_grad_(False)
            self.down = nn.Linear(6, 2, bias=False)
            self.up = nn.Linear(2, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.base(x) + self.up(self.down(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TanhLinear(nn.Linear):
    """A unit of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class BigEmbedding(nn.Module):
    """The embedding outweighs all blocks together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.ModuleList([nn.Embedding(1000, 8)])
        self.blocks = nn.ModuleList([TanhLinear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding[0](x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama() -> nn.Module:
    """A Hugging Face model, whose loss is its output's."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def llama_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["x"], labels=batch["x"]).loss


CASES = {
    "tied": MODELS["tied"],
    "frozen": MODELS["frozen"],
    "lora": Case(LoRA, numbers(6, out=6), square_loss),
    "embedding": Case(BigEmbedding, tokens(11, 4), next_token_loss),
    "convolution": MODELS["batchnorm_conv"],
    "hugging_face": Case(llama, tokens(17, 8), llama_loss),
}

UNITS = {"Block", "Layer", "TanhLinear", "Embedding", "Conv2d", "LlamaDecoderLayer"}


def is_unit(module: nn.Module) -> bool:
    """Small blocks that the automatic choice would leave to the root."""
    return type(module).__name__ in UNITS


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass
class Measured:
    """What a rank held: between steps, and at most."""

    resting: dict[str, int]
    most: dict[str, int]


def measure(
    case: Case, precision: str, stage: int, accumulate: str | None, num_microbatches: int
) -> Measured:
    """Train three steps and keep the engine's count of the last one."""
    dtype = {"bf16-true": torch.bfloat16}.get(precision, torch.float32)
    model = case.build(dtype=dtype)
    recipe = RECIPES[precision]
    engine = Engine(model, Settings(stage, recipe, units=is_unit, accumulate=accumulate))
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    engine.adopt(optimizer)
    most = {"gathered": 0, "unreduced": 0}

    def look() -> None:
        now = [bundle.memory() for unit in engine.units for bundle in unit.bundles]
        gathered = sum(kinds.get("gathered", 0) for kinds in now)
        unreduced = sum(kinds["unreduced"] for kinds in now) + engine.comm.scratch_bytes
        most["gathered"] = max(most["gathered"], gathered)
        most["unreduced"] = max(most["unreduced"], unreduced)

    # The first step has nothing to tell it what to prefetch.
    for watch in (contextlib.nullcontext(), LiveBytes(on_operation=look)):
        with watch:
            for micro in range(num_microbatches):
                run_microbatch(engine, case, recipe.autocast, dtype, micro == num_microbatches - 1)
            optimizer.step()
            optimizer.zero_grad()
    engine._close_step()
    return Measured(engine.memory(), dict(most))


def run_microbatch(
    engine: Engine, case: Case, autocast: torch.dtype | None, dtype: torch.dtype, is_last: bool
) -> None:
    batch = case.batch(4, 0)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    with torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False):
        loss = case.loss(engine.module, batch)
    if is_last:
        loss.backward()
        return
    with engine.no_sync():
        loss.backward()


ROWS = [
    (precision, stage, accumulate, num_microbatches)
    for stage, accumulate, num_microbatches in [
        (3, None, 1), (3, "local", 2), (3, None, 2), (2, None, 2), (2, "local", 2), (1, None, 2),
        (1, None, 1),
    ]
    for precision in ("32-true", "bf16-mixed", "bf16-true")
    if precision == "32-true" or num_microbatches == 1
]  # fmt: skip
"""Precision, stage, accumulate, microbatches."""


def rows_of(world: int) -> list[tuple[Any, ...]]:
    """All rows on two ranks, and half of them on others."""
    return ROWS if world == 2 else ROWS[world % 2 :: 2]


def measure_all(name: str) -> list[Measured]:
    """Every policy and precision of one model."""
    return [measure(CASES[name], *row) for row in rows_of(dist.get_world_size())]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_prediction_is_what_the_engine_holds(ranks: Any, name: str, world: int) -> None:
    measured = ranks(world).run(measure_all, name)
    case, subjects = CASES[name], {}
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        subjects[precision] = Subject(
            case.build(), precision=precision, optimizer=adamw, units=is_unit,
            batch=case.batch(4, 0), step=case.loss, device=torch.device("cpu"),
        )  # fmt: skip
    wrong = []
    for number, where in enumerate(rows_of(world)):
        precision, stage, accumulate, num_microbatches = where
        for rank in range(world):
            predicted = estimate_of(
                subjects[precision], stage, world, rank=rank, accumulate=accumulate,
                num_microbatches=num_microbatches,
            )  # fmt: skip
            actual = measured[rank][number]
            wrong += [
                f"{where} rank {rank}: {kind} predicted {count}, measured {is_held}"
                for kind, count, is_held in [
                    *((kind, n, actual.resting[kind]) for kind, n in predicted.resting.items()),
                    ("gathered", predicted.most["gathered"], actual.most["gathered"]),
                ]
                if count != is_held
            ]
            # Counted as if the root's gradients came first and all at once.
            count, is_held = predicted.most["unreduced"], actual.most["unreduced"]
            if not is_held <= count <= 1.5 * is_held:
                wrong.append(f"{where} unreduced predicted {count}, measured {is_held}")
    assert not wrong, "\n".join(wrong)


class Tower(nn.Module):
    """Wide enough that weights, gradients and activations all count."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([TowerBlock(64) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class TowerBlock(nn.Module):
    """Two linears around a nonlinearity, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


PEAKS = {
    "tower": Case(Tower, numbers(64, out=64), square_loss),
    "transformer": MODELS["transformer"],
    "hugging_face": CASES["hugging_face"],
    "convolution": CASES["convolution"],
}


def is_block(module: nn.Module) -> bool:
    return type(module).__name__ in {"TowerBlock", "TransformerBlock", "Conv2d", *UNITS}


def live_peak(name: str, rows: int, precision: str, checkpointing: bool) -> dict[str, int]:
    """The most bytes alive in the second step at stage 3, counted without asking the engine."""
    case, recipe = PEAKS[name], RECIPES[precision]
    model = case.build()
    live = LiveBytes(resizing=True)
    live.ignore(model.parameters())
    live.follow(model.buffers())
    with live:
        engine = Engine(model, Settings(3, recipe, units=is_block))
        recompute = ActivationCheckpointing(
            [unit.module for unit in engine.units[:-1]] if checkpointing else []
        )
        optimizer = adamw(model.parameters())
        engine.adopt(optimizer)
        for _ in range(2):
            live.restart()
            batch = case.batch(rows, 0)
            with torch.autocast("cpu", recipe.autocast, enabled=recipe.autocast is not None,
                                cache_enabled=False):  # fmt: skip
                loss = case.loss(model, batch)
            loss.backward()
            del loss, batch
            peak = live.restart()
            optimizer.step()
            optimizer.zero_grad()
        held, alive = sum(engine.memory().values()), live.count()
    recompute.remove()
    return {"peak": peak, "held": held, "alive": alive}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", PEAKS)
def test_peak_of_all_live_tensors(
    ranks: Any, name: str, precision: str, checkpointing: bool
) -> None:
    case, world = PEAKS[name], 2
    for rows in (4, 512):
        predicted = estimate(
            case.build(), stage=3, world_size=world, precision=precision, optimizer=adamw,
            batch=case.batch(rows, 0), step=case.loss, units=is_block,
            activation_checkpointing=checkpointing,
        )  # fmt: skip
        measured = ranks(world).run(live_peak, name, rows, precision, checkpointing)
        print(rows, measured, predicted.peak.total, predicted.peak)
