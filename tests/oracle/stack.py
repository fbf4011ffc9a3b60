"""A small stack of blocks, its rows and its loss, for tests of single steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.oracle.models import Block


def rows(rank: int, seed: int = 0) -> Tensor:
    """One rank's input."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * seed + rank))


class Stack(nn.Module):
    """A stem, three blocks that are units, a head in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(6) for _ in range(3)])
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.default_generator.manual_seed(7)
    return make()


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()
