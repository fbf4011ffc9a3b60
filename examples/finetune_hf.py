"""Fine-tune a model from a Hugging Face folder on text: all weights, or LoRA's adapters.

    python examples/finetune_hf.py
    python examples/finetune_hf.py --lora
    python examples/finetune_hf.py --lora --strategy zero2

A small Llama over bytes first learns the Python documentation, and is saved to a folder as models
of the hub are: it stands for a download. Then it is fine-tuned on source code. Without ``--lora``
it is built on the meta device, and each rank reads its part of the folder's weights only. After
each part the bytes are printed that rank 0 held, by kind: with adapters, gradients and optimizer
states are theirs alone.
"""

from __future__ import annotations

import argparse
import inspect
from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lightning_zero

LENGTH = 64


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


def windows(text: str) -> DataLoader[Tensor]:
    """Return batches of the text's first bytes; with a model of the hub, use its tokenizer."""
    size = arguments.windows * LENGTH
    rows = torch.frombuffer(bytearray(text.encode()[:size]), dtype=torch.uint8).view(-1, LENGTH)
    return DataLoader(rows.long(), 16, shuffle=True)


def train(module: LanguageModel, text: str) -> None:
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
    trainer.fit(module, windows(text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--folder", default="pretrained", help="where the first model is saved")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=4096, help=f"{LENGTH} bytes each")
    arguments = parser.parse_args()
    seed_everything(0)
    first = LanguageModel()
    train(first, "\n".join(topics.values()))
    if first.trainer.is_global_zero:  # after `fit` the weights are whole
        first.net.save_pretrained(arguments.folder)
    first.trainer.strategy.barrier()
    code = "\n".join(map(inspect.getsource, (argparse, inspect, torch.optim.Optimizer)))
    train(LanguageModel(arguments.folder, arguments.lora, lr=1e-3), code)
