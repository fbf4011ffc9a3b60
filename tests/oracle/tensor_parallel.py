"""A small GPT that can be cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from tests.oracle.models import GPT


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
        self.notes: list[Any] = []

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

    def configure_optimizers(self) -> Any:
        rate = 0.01 if self.optimizer == "AdamW" else 0.2
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=rate)


def loader(num_rows: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(GPT.words, (num_rows, GPT.length + 1), generator=generator)
    return DataLoader(TensorDataset(text), batch_size=2)
