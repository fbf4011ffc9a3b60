"""Fine-tune a Hugging Face model on text: all weights, or LoRA's adapters.

    python examples/finetune_hf.py                      # a small model, on two CPU processes
    python examples/finetune_hf.py --lora
    python examples/finetune_hf.py --model path/of/Llama-3.1-8B --accelerator gpu --devices 8 \\
        --precision bf16-mixed --length 2048 --batch-size 2 --activation-checkpointing

``--model`` is a folder as ``save_pretrained`` writes it, or a name on the hub. Without it, a small
Llama over bytes first learns the Python documentation and is saved to ``--folder``, in place of a
download. The text is Python's own source code.

Without ``--lora`` the model is built on the meta device, and each rank reads its shards of the
weights only. After training, rank 0 prints the bytes that it held, by kind.
"""

from __future__ import annotations

import argparse
import inspect
import os
from pydoc_data.topics import topics
from typing import Any

import torch
from huggingface_hub import snapshot_download
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import lightning_zero


class LanguageModel(LightningModule):
    """A causal language model from Transformers; with a folder, the one that was saved there."""

    def __init__(self, folder: str = "", lora: bool = False, lr: float = 3e-3) -> None:
        super().__init__()
        self.folder, self.lora, self.lr = folder, lora, lr
        self.net: nn.Module | None = None
        self.held: dict[str, int] = {}

    def configure_model(self) -> None:
        if self.net is not None:
            return
        if self.lora:
            from peft import LoraConfig, get_peft_model

            base = AutoModelForCausalLM.from_pretrained(self.folder)
            adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
            self.net = get_peft_model(base, adapters)
        elif self.folder:
            with torch.device("meta"):  # the weights are read in `on_fit_start`
                config = AutoConfig.from_pretrained(self.folder)
                self.net = AutoModelForCausalLM.from_config(config)
        else:
            self.net = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=256,
                    hidden_size=128,
                    intermediate_size=256,
                    num_hidden_layers=4,
                    num_attention_heads=4,
                )
            )

    def on_fit_start(self) -> None:
        if self.folder and not self.lora:
            lightning_zero.load_weights(self.net, self.folder)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(input_ids=batch, labels=batch).loss
        if self.global_step == 0:
            self.print(f"step    0   loss {loss:.3f}")
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step:  # the first step creates the optimizer states
            self.held = self.trainer.strategy.memory()

    def on_train_epoch_end(self) -> None:
        self.print(f"step {self.global_step:4d}   loss {self.trainer.callback_metrics['loss']:.3f}")

    def on_train_end(self) -> None:
        for kind, count in self.held.items():
            if count:
                self.print(f"  {kind:<10} {count:>12,} bytes")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, self.lr)


def windows(text: str, tokenizer: Any = None) -> DataLoader[Tensor]:
    """Return batches of the text's first tokens, or bytes without a tokenizer."""
    ids = tokenizer(text)["input_ids"] if tokenizer else [*text.encode()]
    count = min(arguments.windows, len(ids) // arguments.length)
    rows = torch.tensor(ids[: count * arguments.length]).view(count, arguments.length)
    return DataLoader(rows, arguments.batch_size, shuffle=True)


def train(module: LanguageModel, data: DataLoader[Tensor]) -> None:
    strategy = arguments.strategy
    if strategy.startswith("zero"):
        stage, _, offload = strategy.removeprefix("zero").partition("_")
        where = {"offload": "cpu", "nvme": "nvme"}.get(offload)
        strategy = lightning_zero.ZeROStrategy(
            stage=int(stage),
            offload_optimizer=where,
            offload_weights=where if stage == "3" else None,
            activation_checkpointing=arguments.activation_checkpointing,
            # A large model would be whole on every rank afterwards, which nothing here needs.
            restore_weights=not arguments.model,
        )
    trainer = Trainer(
        strategy=strategy,
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        precision=arguments.precision,
        max_epochs=arguments.epochs,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, data)


def pretrain() -> str:
    """Train a small model, save it as a model of the hub is saved, and return its folder."""
    model = LanguageModel()
    train(model, windows("\n".join(topics.values())))
    if model.trainer.is_global_zero:  # after `fit` the weights are whole
        model.net.save_pretrained(arguments.folder)
    model.trainer.strategy.barrier()
    return arguments.folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder or hub name of a pretrained model")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--folder", default="pretrained", help="where the small model is saved")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a batch, per rank")
    parser.add_argument("--windows", type=int, default=4096, help="samples of an epoch")
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    seed_everything(0)
    folder, tokenizer = arguments.model, None
    if not folder:
        folder = pretrain()
    else:
        folder = folder if os.path.isdir(folder) else snapshot_download(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    code = "\n".join(map(inspect.getsource, (argparse, inspect, torch.optim.Optimizer)))
    train(LanguageModel(folder, arguments.lora, lr=arguments.lr), windows(code, tokenizer))
