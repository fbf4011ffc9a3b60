"""Unmodified models of Hugging Face Transformers train under every stage as under DDP.

Each model is built from a small configuration, with its dropout as it is: the same seed gives the
same masks under every strategy. The oracle is DDP in the same ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_zero import ZeROStrategy
from tests.oracle.parity import Result
from tests.oracle.projects import make_trainer
from tests.oracle.ranks import Pools

WORLD, STEPS, ROWS, LENGTH, VOCABULARY = 2, 3, 2, 12, 128
SIZES = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    **SIZES,
}


@dataclass(frozen=True)
class Family:
    """A model class with a configuration in which every block is large enough to be a unit."""

    name: str
    config: Callable[[], PreTrainedConfig]
    block: str
    num_blocks: int = 2
    inputs: str = "text"

    def build(self) -> PreTrainedModel:
        return getattr(transformers, self.name)(self.config())


def config(name: str, **sizes: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, name)(**sizes)


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        config(
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=96,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=1,
        ),
        "GPT2Block",
    ),
    "llama": Family(
        "LlamaForCausalLM",
        config("LlamaConfig", intermediate_size=256, **DECODER),
        "LlamaDecoderLayer",
    ),
    "bert": Family(
        "BertForMaskedLM",
        config(
            "BertConfig",
            vocab_size=VOCABULARY,
            intermediate_size=256,
            max_position_embeddings=32,
            **SIZES,
        ),
        "BertLayer",
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        config(
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=96,
            d_kv=24,
            d_ff=256,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        "T5Block",
        num_blocks=4,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        config(
            "MixtralConfig",
            intermediate_size=96,
            num_local_experts=4,
            output_router_logits=True,
            **DECODER,
        ),
        "MixtralDecoderLayer",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        config(
            "Qwen2MoeConfig",
            intermediate_size=96,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=96,
            num_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            **DECODER,
        ),
        "Qwen2MoeDecoderLayer",
    ),
    "vit": Family(
        "ViTForImageClassification",
        config(
            "ViTConfig", intermediate_size=256, image_size=16, patch_size=8, num_labels=4, **SIZES
        ),
        "ViTLayer",
        inputs="images",
    ),
}


class Rows(Dataset[dict[str, Tensor]]):
    """Random tokens that are their own labels, or random images with a class each."""

    def __init__(self, inputs: str, size: int = WORLD * ROWS * STEPS) -> None:
        generator = torch.Generator().manual_seed(0)
        if inputs == "text":
            ids = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
            self.columns = {"input_ids": ids, "labels": ids}
        else:
            images = torch.randn(size, 3, 16, 16, generator=generator)
            labels = torch.randint(4, (size,), generator=generator)
            self.columns = {"pixel_values": images, "labels": labels}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class Wrapped(LightningModule):
    """An ordinary LightningModule around a model of Transformers.

    Args:
        family: Which model.
        on_meta: Build it in ``configure_model``, without memory or values.
        checkpointing: Keyword arguments of ``gradient_checkpointing_enable``.
        generates: Generate text in validation.
        start: Initial values.
    """

    def __init__(
        self,
        family: str,
        *,
        on_meta: bool = False,
        checkpointing: dict[str, Any] | None = None,
        generates: bool = False,
        start: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.family = FAMILIES[family]
        self.checkpointing = checkpointing
        self.generates = generates
        self.losses: list[float] = []
        self.texts: list[list[list[int]]] = []
        self.model = None if on_meta else self.family.build()
        if start is not None:
            self.model.load_state_dict(start, strict=False)

    def configure_model(self) -> None:
        if self.model is None:
            with self.trainer.init_module(empty_init=True):
                self.model = self.family.build()
        if self.checkpointing is not None:
            self.model.gradient_checkpointing_enable(self.checkpointing)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.generates:
            prompt = batch["input_ids"][:, :4]
            text = self.model.generate(prompt, do_sample=False, min_length=10, max_length=10)
            self.texts.append(text.tolist())
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The gradient of a key's bias is zero but for rounding; a small eps would make it a step.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Rows(self.family.inputs), batch_size=ROWS)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Rows(self.family.inputs, size=WORLD * ROWS), batch_size=ROWS)


@dataclass
class Run:
    """A rank's run: its result, the units, what was generated, what validation found.

    Attributes:
        result: Losses and final parameters and buffers.
        units: The units' names.
        texts: What was generated, by batch.
        val_loss: The last validation loss.
    """

    result: Result
    units: list[str] = field(default_factory=list)
    texts: list[list[list[int]]] = field(default_factory=list)
    val_loss: float = math.nan


def train(
    family: str,
    strategy: str | Strategy,
    *,
    precision: str = "32-true",
    accumulate: int = 1,
    **options: Any,
) -> Run:
    seed_everything(0)
    module = Wrapped(family, **options)
    trainer = make_trainer(
        strategy,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        limit_val_batches=1 if module.generates else 0,
        num_sanity_val_steps=0,
    )
    trainer.fit(module)
    engine = getattr(trainer.strategy, "engine", None)
    return Run(
        Result.of(module.model, module.losses),
        [unit.name for unit in engine.sharded.units] if engine is not None else [],
        module.texts,
        float(trainer.callback_metrics.get("val_loss", math.nan)),
    )


# ---------------------------------------------------------------------------- the three stages


def train_all(family: str, strategies: list[Any], options: dict[str, Any]) -> list[Run]:
    """One run per strategy; a dictionary holds the arguments of a ``ZeROStrategy``."""
    return [
        train(
            family, ZeROStrategy(**strategy) if isinstance(strategy, dict) else strategy, **options
        )
        for strategy in strategies
    ]


def runs_of(
    ranks: Pools, family: str, strategies: list[Any], **options: Any
) -> list[tuple[Result, Run]]:
    """Per strategy, the result over all ranks and rank 0's run."""
    over_ranks = ranks(WORLD).run(train_all, family, strategies, options)
    columns = [[rank[index] for rank in over_ranks] for index in range(len(strategies))]
    return [(Result.over_ranks([run.result for run in runs]), runs[0]) for runs in columns]


def assert_same(actual: Result, expected: Result) -> None:
    """Losses and weights agree to a small part of a step; the biases of keys start at zero."""
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(actual.params, expected.params, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.buffers, expected.buffers, rtol=0, atol=0)


DDP = "ddp_find_unused_parameters_true"


@pytest.mark.parametrize(("family", "stage"), list(zip(FAMILIES, cycle((1, 2)), strict=False)))
def test_every_stage_is_ddp(ranks: Pools, family: str, stage: int) -> None:
    strategies = [DDP, f"zero{stage}", "zero3"]
    (ddp, _), *stages = runs_of(ranks, family, strategies)
    assert len(ddp.losses) == STEPS
    for result, run in stages:
        assert_same(result, ddp)
        blocks = [name for name in run.units if name]
        assert len(blocks) == FAMILIES[family].num_blocks, run.units


SMALL_UNITS = {
    "gpt2": ["Conv1D"],
    "llama": ["LlamaMLP", "LlamaAttention", "Linear"],
    "t5": ["T5Attention", "T5DenseActDense"],
    "mixtral": ["MixtralExperts", "MixtralTopKRouter"],
}


def is_small_unit(module: torch.nn.Module, *, names: list[str]) -> bool:
    return type(module).__name__ in names


@pytest.mark.parametrize(
    ("family", "others"),
    [(f, {"gpt2": ["zero2"], "llama": ["zero1"]}.get(f, [])) for f in FAMILIES],
)
def test_bf16_mixed(ranks: Pools, family: str, others: list[str]) -> None:
    strategies = [DDP, *others, "zero3"]
    (ddp, _), *stages = runs_of(ranks, family, strategies, precision="bf16-mixed")
    for result, _ in stages:
        torch.testing.assert_close(result.losses, ddp.losses, rtol=3e-2, atol=0)
        assert result.losses == stages[0][0].losses
        assert all(value.dtype == torch.float32 for value in result.params.values())


# ---------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "mixtral"])
def test_text_is_generated_in_validation(ranks: Pools, family: str) -> None:
    strategies = [DDP, "zero1", {"stage": 3, "units": "auto", "prefetch": 2}]
    (ddp, expected), *stages = runs_of(ranks, family, strategies, generates=True)
    assert [len(text) for text in expected.texts[0]] == [10] * ROWS
    for result, run in stages:
        assert_same(result, ddp)
        assert run.texts == expected.texts
        assert run.val_loss == pytest.approx(expected.val_loss, rel=1e-5)


# ---------------------------------------------------------------------------- built on meta


def start_of(family: str, stage: int, units: list[str], *, precision: str) -> dict[str, Tensor]:
    """Parameters and buffers of a model built on ``meta``, as they are when training begins."""
    seed_everything(0)
    module = Wrapped(family, on_meta=True)
    chosen = functools.partial(is_small_unit, names=units) if units else "auto"
    strategy = ZeROStrategy(stage=stage, units=chosen)
    trainer = make_trainer(strategy, precision=precision, max_steps=0)
    trainer.fit(module)
    tensors = {**dict(module.model.named_parameters()), **dict(module.model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_a_model_built_on_meta(ranks: Pools, family: str) -> None:
    """Every tensor has the distribution that ``_init_weights`` gives it; constants are equal."""
    torch.manual_seed(0)
    model = FAMILIES[family].build()
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ways = [[], SMALL_UNITS[family]] if family in SMALL_UNITS else [[]]
    for number, units in enumerate(ways, start=list(FAMILIES).index(family)):
        precision = ("32-true", "bf16-mixed")[number % 2]
        first, second = ranks(WORLD).run(start_of, family, 3, units, precision=precision)
        assert first.keys() == expected.keys()
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=0, atol=0)
            assert_same_distribution(name, value, expected[name].detach())


def assert_same_distribution(name: str, value: Tensor, expected: Tensor) -> None:
    is_constant = not expected.is_floating_point() or expected.unique().numel() < 20
    if is_constant or "inv_freq" in name:
        torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)
        return
    std, error = float(expected.std()), 5 / math.sqrt(expected.numel())
    assert float(value.std()) == pytest.approx(std, rel=error), name
    assert float(value.mean()) == pytest.approx(float(expected.mean()), abs=2 * std * error), name
    zero_rows = (expected == 0).all(-1)
    assert torch.equal((value == 0).all(-1), zero_rows), f"{name}: another padding row"
