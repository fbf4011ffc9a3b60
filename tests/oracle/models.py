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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
    return (torch.arange(n) * NUM_EXPERTS // n + seed) % NUM_EXPERTS


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
        return chained(self.blocks, self.stem(x))


class Of(nn.Module):
    """Has these parts, lists of them as lists of modules, and a forward that is a function."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.run(self, *given, **named)


def chained(modules: Iterable[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def odd_widths() -> nn.Module:
    """Nothing divides by a world size; some parameters are smaller than one, one is empty."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.layers[1](torch.tanh(m.layers[0](x))) * m.scale + m.shift
        return torch.cat([x, m.nothing])

    return Of(
        forward,
        layers=[nn.Linear(7, 13), nn.Linear(13, 5)],
        scale=nn.Parameter(torch.tensor(1.5)),
        shift=nn.Parameter(torch.zeros(1)),
        nothing=nn.Parameter(torch.empty(0, 5)),
    )


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(6), Block(6)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(chained(self.blocks, self.embedding(x)))


def tied_blocks() -> nn.Module:
    """Two units share a weight, so it belongs to neither."""
    model = Blocks(3)
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    return model


def frozen() -> nn.Module:
    """The first layers are frozen, and a block in the middle that gradients flow through.

    The last block is frozen in part, as with adapters.
    """
    model = Blocks(5)
    for part in (model.stem, model.blocks[0], model.blocks[2], model.blocks[4].linear.weight):
        part.requires_grad_(False)
    return model


def unused_branch() -> nn.Module:
    """One block is never called, one parameter of a called block never used."""
    blocks = [Block(6) for _ in range(3)]
    blocks[2].register_parameter("spare", nn.Parameter(torch.ones(3)))
    run = lambda m, x: m.blocks[2](m.blocks[0](m.stem(x)))  # noqa: E731
    return Of(run, stem=nn.Linear(6, 6), blocks=blocks)


NUM_EXPERTS = 3


def experts() -> nn.Module:
    """Each row takes one expert: some ranks never call one that others do."""

    def forward(m: Any, x: Tensor, expert: Tensor) -> Tensor:
        x = m.stem(x)
        out = torch.zeros_like(x)
        for number, block in enumerate(m.experts):
            rows = (expert == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, block(x[rows]))
        return out

    return Of(forward, stem=nn.Linear(6, 6), experts=[Block(6) for _ in range(NUM_EXPERTS)])


def branch_by_step() -> nn.Module:
    """A block that is called in every other step, and in its place another order of the rest."""

    def forward(m: Any, x: Tensor, branch: Tensor) -> Tensor:
        first, second = m.blocks
        order = (first, m.branch[0], second) if branch.any() else (second, first)
        return chained(order, m.stem(x))

    return Of(forward, stem=nn.Linear(6, 6), blocks=[Block(6), Block(6)], branch=[Block(6)])


def batchnorm_conv() -> nn.Module:
    """Conv2d and BatchNorm2d, whose statistics belong to a rank."""
    layers = nn.Sequential(
        *(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()),
        *(nn.Conv2d(5, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
    )
    return Of(lambda m, x: m.head(m.layers(x).mean((2, 3))), layers=layers, head=nn.Linear(4, 3))


def channels_last() -> nn.Module:
    """Weights that are dense but not contiguous."""
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3))

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.layers(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))

    return Of(forward, layers=layers).to(memory_format=torch.channels_last)


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, pre-norm, that may be cut over ranks."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)  # whose gradient would be rounding errors
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        parts = (one(x) for one in (self.query, self.key, self.value))
        # A rank has some of the heads.
        heads = [part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT with a head of its own."""

    words, length = 24, 8

    def __init__(self, width: int = 16, num_heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(self.words, width), nn.Embedding(self.length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.words, bias=False)
        self.scale = nn.Parameter(torch.full((), 1.5))
        self.drop = nn.Dropout(dropout)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(self.length, device=text.device).expand_as(text)
        x = self.embed(text) + self.places(places)
        for block in self.blocks:
            x = block(self.drop(x))
        return self.head(self.norm(x)) * self.scale


def rnn() -> nn.Module:
    """LSTM and GRU, which keep a list of their weights beside `_parameters`."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x, _ = layer(x)
        return x[:, -1]

    lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True)
    return Of(forward, layers=[lstm, nn.GRU(4, 3, batch_first=True)])


def nested() -> nn.Module:
    """Units inside units; the outer ones own parameters too."""

    def stage() -> nn.Module:
        run = lambda m, x: chained(m.blocks, x * m.gain) + m.gain  # noqa: E731
        return Of(run, gain=nn.Parameter(torch.full((6,), 0.9)), blocks=[Block(6), Block(6)])

    run = lambda m, x: chained(m.stages, m.stem(x))  # noqa: E731
    return Of(run, stem=nn.Linear(6, 6), stages=[stage(), stage()])


def inplace_views() -> nn.Module:
    """Blocks return views, which the caller then changes in place."""

    def layer() -> nn.Module:
        return Of(lambda m, x: m.linear(x).view(-1, 2, 6)[:, 1], linear=nn.Linear(6, 12))

    def forward(m: Any, x: Tensor) -> Tensor:
        for each in m.layers:
            y = each(x)
            y += x
            x = y.mul_(0.5)
        return x

    return Of(forward, layers=[layer(), layer(), layer()])


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


class OtherMethods(nn.Module):
    """Neither the model nor its coder are called: the loss calls their methods by name."""

    def __init__(self) -> None:
        super().__init__()
        self.coders = nn.ModuleList([Coder(), Coder()])

    def encode(self, x: Tensor) -> Tensor:
        return self.coders[0].encode(x)

    def decode(self, x: Tensor) -> Tensor:
        return self.coders[1].decode(x)


def given_by(name: str) -> Callable[[nn.Module, Batch], Tensor]:
    """The square error of a model that is given another entry of the batch, too."""
    return lambda model, batch: F.mse_loss(model(batch["x"], batch[name]), batch["y"])


def coded(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model.decode(model.encode(batch["x"])), batch["y"])


SIX = numbers(6, out=6)
RNN_REFUSES = "bf16-mixed", "bf16-true", "16-mixed", "16-true"  # in bf16, on some processors
MODELS: dict[str, Case] = {
    "odd_widths": Case(odd_widths, numbers(7, out=5), square_loss),
    "tied": Case(Tied, tokens(11, 4), next_token_loss),
    "tied_blocks": Case(tied_blocks, SIX, square_loss),
    "frozen": Case(frozen, SIX, square_loss),
    "unused_branch": Case(unused_branch, SIX, square_loss),
    "experts": Case(experts, numbers(6, out=6, expert=expert_of_row), given_by("expert")),
    "branch_by_step": Case(
        branch_by_step, numbers(6, out=6, branch=branch_of_step), given_by("branch")
    ),
    "batchnorm_conv": Case(batchnorm_conv, numbers(3, 6, 6, out=3), square_loss),
    "channels_last": Case(channels_last, numbers(3, 6, 6, out=4), square_loss),
    "transformer": Case(GPT, tokens(GPT.words, GPT.length), next_token_loss),
    "rnn": Case(rnn, numbers(4, 5, out=3), square_loss, unsupported=RNN_REFUSES),
    "nested": Case(nested, SIX, square_loss),
    "inplace_views": Case(inplace_views, SIX, square_loss),
    "other_methods": Case(OtherMethods, SIX, coded),
}
