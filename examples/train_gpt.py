"""Train a small GPT on the bytes of a text, under the strategy that the configuration names.

    python examples/train_gpt.py fit --config examples/zero3.yaml
    python examples/train_gpt.py fit --config examples/zero3.yaml --trainer.strategy ddp
    python examples/train_gpt.py fit --config examples/zero3.yaml --data.path some.txt

The model and the data are ordinary Lightning and do not depend on the strategy. Without
`--data.path` the text is the Python documentation that ships with the interpreter.
"""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # Heads come first, so that cutting the columns of `qkv` gives each rank some of them.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.size)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, size)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalized residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(LightningModule):
    """A decoder-only transformer over bytes.

    Args:
        context: the longest text, in bytes, that the model sees at once.
        width: the size of the residual stream.
        depth: the number of blocks.
        heads: the number of attention heads.
        tie_head: whether the output layer shares the weight of the byte embedding.
        lr: the peak learning rate, after the warmup.
        weight_decay: the decay of matrices; vectors (biases, norms) are not decayed.
        warmup: the fraction of all steps in which the learning rate rises.
    """

    def __init__(
        self,
        context: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        tie_head: bool = True,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup: float = 0.05,
    ) -> None:
        super().__init__()
        self.context = context
        self.is_cut = False
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.byte_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(self._initialize)
        if tie_head:
            self.head.weight = self.byte_embedding.weight
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()

    def configure_model(self) -> None:
        """Cut the blocks over tensor-parallel ranks, if there are any."""
        if self.device_mesh is None or self.is_cut:
            return
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(),
        }
        for block in self.blocks:
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
        self.is_cut = True

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        position = torch.arange(text.shape[1], device=text.device)
        x = self.byte_embedding(text) + self.position_embedding(position)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.train_loss(loss.detach())
        self.log("loss", loss, prog_bar=True)
        self.log("train_loss", self.train_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_loss(self.loss_of(batch))
        self.log("val_loss", self.val_loss, prog_bar=True)

    def loss_of(self, batch: Tensor) -> Tensor:
        """Return the mean nats per byte, each predicted from the bytes before it."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> dict:
        parameters = list(self.parameters())
        groups = [
            {
                "params": [p for p in parameters if p.ndim >= 2],
                "weight_decay": self.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _lr_factor(self, step: int) -> float:
        """Return the factor of a linear warmup, then half a cosine down to a tenth."""
        num_steps = int(self.trainer.estimated_stepping_batches)
        num_warmup = max(1, int(self.warmup * num_steps))
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, temperature: float, seed: int) -> bytes:
        """Continue `prompt`; the same seed draws the same bytes on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        text = torch.tensor([list(prompt)], device=self.device)
        for _ in range(num_bytes):
            logits = self(text[:, -self.context :])[:, -1]
            chances = torch.softmax(logits.float() / temperature, dim=-1)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return bytes(text[0].tolist())


class TextWindows(Dataset[Tensor]):
    """A text cut into windows of `context` bytes, each with the byte that follows it."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.tensor(list(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.text[start : start + self.context + 1].long()


class Text(LightningDataModule):
    """The bytes of a text: training on its beginning, validation on its end.

    Args:
        path: a text file; the interpreter's own documentation if not given.
        context: the length of a window in bytes.
        batch_size: the number of windows in a batch of one rank.
        val_fraction: the fraction of the text, at its end, that is kept for validation.
    """

    def __init__(
        self,
        path: Path | None = None,
        context: int = 128,
        batch_size: int = 8,
        val_fraction: float = 0.1,
    ) -> None:
        super().__init__()
        self.path = path
        self.context = context
        self.batch_size = batch_size
        self.val_fraction = val_fraction

    def setup(self, stage: str) -> None:
        if self.path is None:
            text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        else:
            text = self.path.read_bytes()
        cut = int(len(text) * (1 - self.val_fraction))
        self.train_windows = TextWindows(text[:cut], self.context)
        self.val_windows = TextWindows(text[cut:], self.context)
        if not len(self.train_windows) or not len(self.val_windows):
            raise ValueError(
                f"A text of {len(text)} bytes is too short for windows of {self.context} bytes "
                f"in both parts; use a longer text or a smaller --data.context."
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train_windows, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val_windows, self.batch_size)


class LossTable(Callback):
    """Prints the loss before training and after each epoch: the means over all ranks."""

    def on_validation_end(self, trainer: Trainer, module: GPT) -> None:
        if trainer.sanity_checking:
            self._print_line(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: GPT) -> None:
        self._print_line(trainer, module)

    def _print_line(self, trainer: Trainer, module: GPT) -> None:
        metrics = trainer.callback_metrics
        losses = [
            f"{name} {metrics[name]:.3f}" for name in ("val_loss", "train_loss") if name in metrics
        ]
        module.print(f"step {trainer.global_step:5d}", *losses, sep="   ")


class Sample(Callback):
    """Prints a text that the trained model generates.

    Args:
        prompt: the beginning of the text.
        num_bytes: how many bytes follow it.
        temperature: the sampling temperature.
        seed: the sampling seed.
    """

    def __init__(
        self,
        prompt: str = "The statement",
        num_bytes: int = 300,
        temperature: float = 0.7,
        seed: int = 0,
    ) -> None:
        self.prompt = prompt
        self.num_bytes = num_bytes
        self.temperature = temperature
        self.seed = seed

    def on_train_end(self, trainer: Trainer, module: GPT) -> None:
        # All ranks generate, rank 0 prints: where weights are sharded, a forward takes all ranks.
        text = module.generate(self.prompt.encode(), self.num_bytes, self.temperature, self.seed)
        module.print(f"\n{text.decode(errors='replace')}\n")


class MemoryTable(Callback):
    """Prints rank 0's peak bytes of each kind, beside those that DDP would hold.

    The first column is empty under a strategy that does not count its bytes. Neither column counts
    activations, and the second leaves out DDP's gradient buckets.
    """

    KINDS = ("weights", "gathered", "gradients", "unreduced", "master", "states", "buffers")

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.total = 0

    def on_before_backward(self, trainer: Trainer, module: GPT, loss: Tensor) -> None:
        self._measure(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, module: GPT, optimizer: object) -> None:
        self._measure(trainer)

    def on_train_end(self, trainer: Trainer, module: GPT) -> None:
        self._measure(trainer)
        ddp = self._under_ddp(module)
        rows = [(kind, self.held.get(kind), ddp[kind]) for kind in self.KINDS]
        rows = [row for row in rows if any(row[1:])]
        rows.append(("at any moment", self.total or None, sum(ddp.values())))
        module.print(f"{'bytes, at most':<16}{'this run':>14}{'ddp':>14}")
        for kind, held, under_ddp in rows:
            module.print(f"{kind:<16}{'' if held is None else f'{held:,}':>14}{under_ddp:>14,}")

    def _measure(self, trainer: Trainer) -> None:
        if hasattr(trainer.strategy, "memory"):
            now = trainer.strategy.memory()
            self.held = {kind: max(self.held.get(kind, 0), now[kind]) for kind in self.KINDS}
            self.total = max(self.total, sum(now.values()))

    def _under_ddp(self, module: GPT) -> dict[str, int]:
        """Return whole weights, whole gradients, Adam's averages and step counts, all in fp32."""
        sizes = [p.numel() for p in module.parameters()]
        states = sum(8 * size + 4 for size in sizes)
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        known = {"weights": 4 * sum(sizes), "gradients": 4 * sum(sizes), "states": states}
        return {kind: {**known, "buffers": buffers}.get(kind, 0) for kind in self.KINDS}


class CLI(LightningCLI):
    """The command line, with one `context` for the model and the data."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.context", "model.context")


if __name__ == "__main__":
    CLI(
        GPT,
        Text,
        seed_everything_default=0,
        trainer_defaults={"callbacks": [LossTable(), Sample(), MemoryTable()]},
    )
