"""Fine-tune a small Llama with LoRA: frozen weights are sharded, only adapters are trained.

    python examples/finetune_lora.py
    python examples/finetune_lora.py --strategy ddp

The base model first learns sequences that count up, with all weights trained; then PEFT's adapters
teach it to count down. After each part, the bytes that rank 0 held are printed by kind: in the
second, gradients and optimizer states are those of the adapters alone.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_zero  # noqa: F401  (registers "zero1", "zero2" and "zero3" with Lightning)

VOCABULARY, LENGTH = 64, 24


class LanguageModel(LightningModule):
    """A causal language model from Transformers, with or without adapters."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.held: dict[str, int] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        if self.global_step == 0:
            self.print(f"step    0   loss {loss:.3f}")
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step:  # the first step creates the optimizer states
            self.held = getattr(self.trainer.strategy, "memory", dict)()

    def on_train_epoch_end(self) -> None:
        self.print(f"step {self.global_step:4d}   loss {self.trainer.callback_metrics['loss']:.3f}")

    def on_train_end(self) -> None:
        for kind, count in self.held.items():
            if count:
                self.print(f"  {kind:<10} {count:>12,} bytes")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, self.lr)


def counting(step: int) -> DataLoader[tuple[Tensor, ...]]:
    start = torch.randint(VOCABULARY, (arguments.sequences, 1))
    return DataLoader(TensorDataset((start + step * torch.arange(LENGTH)) % VOCABULARY), 16)


def train(model: nn.Module, data: DataLoader[tuple[Tensor, ...]], lr: float) -> None:
    trainer = Trainer(
        strategy=arguments.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=arguments.epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(LanguageModel(model, lr), data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=2048)
    arguments = parser.parse_args()
    seed_everything(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    )
    train(base, counting(1), lr=1e-3)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    train(get_peft_model(base, adapters), counting(-1), lr=5e-3)
