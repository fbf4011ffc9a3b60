"""Adapters of PEFT on a frozen base: only they cost gradients and states, with DDP's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_zero.optimizer import kept_states
from tests.oracle.projects import make_trainer
from tests.oracle.ranks import Pools

WORLD, STEPS, LAYERS, WIDTH, RANK, VOCABULARY = 2, 3, 4, 96, 4, 64
ADAPTERS = LAYERS * 2 * RANK * 2 * WIDTH  # two per layer, each of two matrices
PADDING = 128  # elements by which a unit's buffer may be longer than its parameters


def model_with_adapters(base_dtype: torch.dtype) -> PeftModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    base = LlamaForCausalLM(config).to(base_dtype)
    return get_peft_model(
        base,
        LoraConfig(
            r=RANK,
            lora_alpha=8,
            lora_dropout=0.1,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
        ),
    )


class Finetune(LightningModule):
    """Trains what wants a gradient; notes losses, and bytes when all gradients are there."""

    def __init__(self, base_dtype: torch.dtype, *, checkpointing: bool) -> None:
        super().__init__()
        self.model = model_with_adapters(base_dtype)
        if checkpointing:
            self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": True})
        self.losses: list[float] = []
        self.memory: dict[str, int] = {}
        self.gathered: list[int] = []

    def on_train_start(self) -> None:
        memory = getattr(self.trainer.strategy, "memory", None)
        if memory is not None:
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda _: self.gathered.append(memory()["gathered"]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.item())
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.memory = getattr(self.trainer.strategy, "memory", dict)()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


@dataclass
class Run:
    """Observations of a rank.

    Attributes:
        losses: Of its own batches.
        adapters: Their final weights.
        base: The frozen weights at the end.
        memory: Bytes by kind between two steps.
        planned: The same by the plan.
        gathered: The most bytes of whole weights while gradients came.
        num_states: How many pieces the optimizer has a state of.
    """

    losses: list[float]
    adapters: dict[str, Tensor]
    base: dict[str, Tensor]
    memory: dict[str, int]
    planned: dict[str, int]
    gathered: int
    num_states: int


def finetune(
    strategy: str,
    *,
    base_dtype: torch.dtype = torch.float32,
    precision: str = "32-true",
    checkpointing: bool = False,
) -> Run:
    seed_everything(0)
    module = Finetune(base_dtype, checkpointing=checkpointing)
    data = TensorDataset(torch.randint(VOCABULARY, (WORLD * STEPS * 2, 12)))
    trainer = make_trainer(strategy, precision=precision, gradient_clip_val=1.0)
    trainer.fit(module, DataLoader(data, 2))
    planned = dict.fromkeys(("weights", "gradients", "master"), 0)
    engine = getattr(trainer.strategy, "engine", None)
    for unit in engine.sharded.units if engine is not None else []:
        for flat in unit.flat_parameters:
            resting = flat.plan.resting_bytes(flat.layout.numel, WORLD, trainable=flat.trainable)
            planned = {kind: count + resting[kind] for kind, count in planned.items()}
    adapters = get_peft_model_state_dict(module.model)
    return Run(
        module.losses,
        {name: value.detach().clone() for name, value in adapters.items()},
        {n: p.detach().clone() for n, p in module.model.named_parameters() if "lora" not in n},
        module.memory,
        planned,
        max(module.gathered, default=0),
        len([*kept_states(trainer.optimizers)]),
    )


def finetune_all(strategies: list[str], options: dict[str, Any]) -> list[Run]:
    return [finetune(strategy, **options) for strategy in strategies]


def runs_of(ranks: Pools, strategies: list[str], **options: Any) -> list[Run]:
    first, second = ranks(WORLD).run(finetune_all, strategies, options)
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours.adapters, theirs.adapters, rtol=0, atol=0)
        ours.losses = [sum(pair) / 2 for pair in zip(ours.losses, theirs.losses, strict=True)]
    return first


STAGES = ["zero1", "zero2", "zero3"]


@pytest.mark.parametrize("chosen", [STAGES, STAGES[::2]], ids=["plain", "checkpointing"])
def test_numbers_and_memory(ranks: Pools, chosen: list[str]) -> None:
    """Numbers are those of DDP; memory is that of the adapters."""
    ddp, *stages = runs_of(ranks, ["ddp", *chosen], checkpointing=len(chosen) < 3)
    assert len(ddp.adapters) == LAYERS * 2 * 2
    moved = [v.abs().max() for n, v in ddp.adapters.items() if "lora_B" in n]  # zero at first
    assert min(moved) > 1e-3
    for run in stages:
        torch.testing.assert_close(run.losses, ddp.losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(run.adapters, ddp.adapters, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(run.base, ddp.base, rtol=0, atol=0)
    layer, root = 12 * WIDTH * WIDTH, 2 * VOCABULARY * WIDTH
    assert 4 * layer < stages[-1].gathered < 4 * (root + 2.5 * layer)  # one and the next
    total = sum(p.numel() for p in model_with_adapters(torch.float32).parameters())
    for name, run in zip(chosen, stages, strict=True):
        padded = ADAPTERS + LAYERS * PADDING
        for kind in ("weights", "gradients", "master"):
            assert run.memory[kind] == run.planned[kind]
        assert 4 * ADAPTERS / WORLD <= run.memory["gradients"] <= 4 * padded / WORLD
        steps = 4 * LAYERS * 2 * 2
        assert run.memory["states"] <= 8 * padded / WORLD + steps
        assert run.memory["states"] > 0
        weights = total / WORLD if name == "zero3" else total
        assert run.memory["weights"] == pytest.approx(4 * weights, rel=0.01)
        assert run.num_states <= LAYERS * 2 * 2


@pytest.mark.parametrize(
    ("precision", "base_dtype"), [("bf16-mixed", torch.float32), ("32-true", torch.bfloat16)]
)
def test_half_precision(ranks: Pools, precision: str, base_dtype: torch.dtype) -> None:
    """Under mixed precision, and with a base that is bf16 while its adapters are fp32."""
    options = {"precision": precision, "base_dtype": base_dtype}
    ddp, *stages = runs_of(ranks, ["ddp", *STAGES[::2]], **options)
    for run in stages:
        torch.testing.assert_close(run.losses, ddp.losses, rtol=1e-2, atol=0)
        assert run.losses == stages[0].losses
        assert {value.dtype for value in run.base.values()} == {base_dtype}
        assert all(value.dtype == torch.float32 for value in run.adapters.values())
        assert all(math.isfinite(loss) for loss in run.losses)
        torch.testing.assert_close(run.base, ddp.base, rtol=0, atol=0)
        for kind in ("weights", "gradients", "master"):
            assert run.memory[kind] == run.planned[kind]
