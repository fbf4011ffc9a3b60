"""A small GPT that can be cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, HEADS, LENGTH = 24, 16, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # whose gradient would be rounding errors
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        parts = (one(x) for one in (self.query, self.key, self.value))
        # A rank has some of the heads.
        heads = [part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.full((), 1.5))
        self.drop = nn.Dropout(dropout)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.places(torch.arange(LENGTH).expand_as(text))
        for block in self.blocks:
            x = block(self.drop(x))
        return self.head(self.norm(x)) * self.scale


def parallelize(net: GPT, mesh: Any, *, by_sequence: bool, with_head: bool = True) -> None:
    """Cut a model; ``by_sequence`` also cuts the activations between its layers."""
    between = Shard(1) if by_sequence else Replicate()
    columns, rows = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    norms = ["norm1", "norm2"] if by_sequence else []
    for block in net.blocks:
        plan: dict[str, Any] = dict.fromkeys(("query", "key", "value", "up"), columns)
        plan |= dict.fromkeys(("out", "down"), rows) | {name: SequenceParallel() for name in norms}
        parallelize_module(block, mesh, plan)
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    plan = {"embed": embed, "places": embed} | ({"head": head} if with_head else {})
    parallelize_module(net, mesh, plan | ({"norm": SequenceParallel()} if by_sequence else {}))


class Model(LightningModule):
    def __init__(self, *, by_sequence: bool = False, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.net: Any = None
        self.by_sequence, self.optimizer = by_sequence, optimizer
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        self.net = GPT()
        if self.device_mesh is not None:
            mesh = self.device_mesh["tensor_parallel"]
            parallelize(self.net, mesh, by_sequence=self.by_sequence)

    def forward(self, text: Tensor) -> Tensor:
        return self.net(text)

    def training_step(self, batch: Any, index: int) -> Tensor:
        (text,) = batch
        loss = F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        (text,) = batch
        loss = F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        rate = 0.01 if self.optimizer == "AdamW" else 0.2
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=rate)


def loader(num_rows: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(WORDS, (num_rows, LENGTH + 1), generator=generator)
    return DataLoader(TensorDataset(text), batch_size=2)
