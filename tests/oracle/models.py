"""Tiny models that are trouble on purpose, each with its data and its loss.

    case = MODELS["tied"]
    model = case.build()                     # the same weights at every call
    batch = case.batch(8, seed=0)            # a dict of tensors with 8 rows each
    loss = case.loss(model, batch)           # a mean over rows

The loss of a whole batch is the mean of the losses of its equal parts: a global batch may be cut
over ranks and microbatches without changing the result, but where BatchNorm looks at the rows
beside it.

Repeated blocks lie in a `ModuleList` or a `Sequential`, so that they become units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its data and its loss.

    Attributes:
        module: Makes the model.
        batch: Makes a batch of so many rows from a seed.
        loss: Mean loss of a batch.
        unsupported: Precisions in which torch on CPU refuses the model.
    """

    module: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    unsupported: tuple[str, ...] = ()

    def build(self, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """A new model with the weights of this seed; other random numbers are left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.module().to(dtype)


# ------------------------------------------------------------------------------------ data


def numbers(*shape: int, out: int, **more: Callable[[int, int], Tensor]) -> Callable[..., Batch]:
    """Rows of normal numbers "x" with targets "y", and more entries by (rows, seed)."""

    def batch(n: int, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, *shape, generator=generator)
        y = torch.randn(n, out, generator=generator)
        return {"x": x, "y": y, **{name: make(n, seed) for name, make in more.items()}}

    return batch


def tokens(vocabulary: int, length: int) -> Callable[..., Batch]:
    """Rows of tokens "x" and the tokens "y" that follow them."""

    def batch(n: int, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(vocabulary, (n, length + 1), generator=generator)
        return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}

    return batch


def expert_of_row(n: int, seed: int) -> Tensor:
    """Neighbours share an expert: over all rows each is used, by one rank often only some."""
    return (torch.arange(n) * Experts.NUM_EXPERTS // n + seed) % Experts.NUM_EXPERTS


def branch_of_step(n: int, seed: int) -> Tensor:
    """The whole batch takes the branch, or none of it."""
    return torch.full((n,), seed % 2 == 1)


# ------------------------------------------------------------------------------------ losses


def square_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean square error of `model(x)`."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the next token."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


# ------------------------------------------------------------------------------------ models


class Block(nn.Module):
    """Pre-norm residual block, the ordinary unit of the models below."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """A linear stem and `num_blocks` blocks in a row.

    The stem's output has the compute dtype, which norms with low-precision weights rely on.
    """

    def __init__(self, num_blocks: int, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class OddWidths(nn.Module):
    """Nothing divides by a world size; some parameters are smaller than one, one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 5)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = self.layers[1](x) * self.scale + self.shift
        return torch.cat([x, self.nothing])


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(6), Block(6)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedBlocks(Blocks):
    """Two units share a weight, so it belongs to neither."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.blocks[2].linear.weight = self.blocks[0].linear.weight


class Frozen(Blocks):
    """The first layers are frozen, and a block in the middle that gradients flow through.

    The last block is frozen in part, as with adapters.
    """

    def __init__(self) -> None:
        super().__init__(num_blocks=5)
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)
        self.blocks[4].linear.weight.requires_grad_(False)


class UnusedBranch(Blocks):
    """One block is never called, one parameter of a called block never used."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.blocks[2].register_parameter("spare", nn.Parameter(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](self.stem(x)))


class Experts(nn.Module):
    """Each row takes one expert: some ranks never call one that others do."""

    NUM_EXPERTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.experts = nn.ModuleList([Block(6) for _ in range(self.NUM_EXPERTS)])

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        x = self.stem(x)
        out = torch.zeros_like(x)
        for number, block in enumerate(self.experts):
            rows = (expert == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, block(x[rows]))
        return out


class BranchByStep(Blocks):
    """A block that is called in every other step, and in its place another order of the rest."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.branch = nn.ModuleList([Block(6)])

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        x = self.stem(x)
        if branch.any():
            return self.blocks[1](self.branch[0](self.blocks[0](x)))
        return self.blocks[0](self.blocks[1](x))


class Convolutions(nn.Module):
    """Conv2d and BatchNorm2d, whose statistics belong to a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 5, 3, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Conv2d(5, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class ChannelsLast(nn.Module):
    """Weights that are dense but not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))


class CausalAttention(nn.Module):
    """Attention as a GPT has it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.into(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, pre-norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = CausalAttention(width, num_heads)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.perceptron(self.norms[1](x))


class Transformer(nn.Module):
    """A GPT with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.position = nn.Parameter(torch.randn(6, 8) * 0.1)
        self.blocks = nn.ModuleList([TransformerBlock(8, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """LSTM and GRU, which keep a list of their weights beside `_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.LSTM(5, 4, num_layers=2, batch_first=True), nn.GRU(4, 3, batch_first=True)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x[:, -1]


class Nested(nn.Module):
    """Units inside units; the outer ones own parameters too."""

    class Stage(nn.Module):
        """A unit around units."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.full((6,), 0.9))
            self.blocks = nn.ModuleList([Block(6), Block(6)])

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.gain
            for block in self.blocks:
                x = block(x)
            return x + self.gain

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.stages = nn.ModuleList([self.Stage(), self.Stage()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


class InplaceViews(nn.Module):
    """Blocks return views, which the caller then changes in place."""

    class Layer(nn.Module):
        """Returns a view of what its linear returned."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).view(-1, 2, 6)[:, 1]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), self.Layer(), self.Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y.mul_(0.5)
        return x


class OtherMethods(nn.Module):
    """Neither the model nor its coder are called: the loss calls their methods by name."""

    class Coder(nn.Module):
        """A block with two ways in and no forward."""

        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(6, 4)
            self.up = nn.Linear(4, 6)
            self.gain = nn.Parameter(torch.ones(4))

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.down(x)) * self.gain

        def decode(self, x: Tensor) -> Tensor:
            return self.up(x / self.gain)

    def __init__(self) -> None:
        super().__init__()
        self.coders = nn.ModuleList([self.Coder(), self.Coder()])

    def encode(self, x: Tensor) -> Tensor:
        return self.coders[0].encode(x)

    def decode(self, x: Tensor) -> Tensor:
        return self.coders[1].decode(x)

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        """Reconstruct through `encode` and `decode`."""
        return F.mse_loss(model.decode(model.encode(batch["x"])), batch["y"])


def _expert_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["expert"]), batch["y"])


def _branch_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], branch=batch["branch"]), batch["y"])


def _refused_by_lstm() -> tuple[str, ...]:
    """The precisions that oneDNN's LSTM does not know; in bf16, on processors before AVX-512."""
    refused = ["16-mixed", "16-true"]
    numbers, lstm = torch.randn(2, 3, 4), nn.LSTM(4, 4)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lstm(numbers)
    except RuntimeError:
        refused.append("bf16-mixed")
    try:
        lstm.bfloat16()(numbers.bfloat16())
    except RuntimeError:
        refused.append("bf16-true")
    return tuple(refused)


MODELS: dict[str, Case] = {
    "odd_widths": Case(OddWidths, numbers(7, out=5), square_loss),
    "tied": Case(Tied, tokens(11, 4), next_token_loss),
    "tied_blocks": Case(TiedBlocks, numbers(6, out=6), square_loss),
    "frozen": Case(Frozen, numbers(6, out=6), square_loss),
    "unused_branch": Case(UnusedBranch, numbers(6, out=6), square_loss),
    "experts": Case(Experts, numbers(6, out=6, expert=expert_of_row), _expert_loss),
    "branch_by_step": Case(BranchByStep, numbers(6, out=6, branch=branch_of_step), _branch_loss),
    "batchnorm_conv": Case(Convolutions, numbers(3, 6, 6, out=3), square_loss),
    "channels_last": Case(ChannelsLast, numbers(3, 6, 6, out=4), square_loss),
    "transformer": Case(Transformer, tokens(13, 6), next_token_loss),
    "rnn": Case(Recurrent, numbers(4, 5, out=3), square_loss, unsupported=_refused_by_lstm()),
    "nested": Case(Nested, numbers(6, out=6), square_loss),
    "inplace_views": Case(InplaceViews, numbers(6, out=6), square_loss),
    "other_methods": Case(OtherMethods, numbers(6, out=6), OtherMethods.loss),
}
