"""Which weights mixed precision casts: those that autocast casts anyway, and no others."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_zero.plan.units import uncast_parameters

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Normalized(nn.Linear):
    """A linear whose weight is not used as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight), self.bias)


class Attention(nn.Module):
    """Self-attention of torch's own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


RECURRENT = {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}
MORE_KEYS = {"add_bias_kv": True, "kdim": 8, "vdim": 8}
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "linear": (lambda: nn.Linear(8, 8), (4, 8), set()),
    "conv1d": (lambda: nn.Conv1d(8, 4, 3), (2, 8, 9), set()),
    "conv2d": (lambda: nn.Conv2d(8, 4, 3, padding_mode="circular", padding=1), (2, 8, 9, 9), set()),
    "conv3d": (lambda: nn.Conv3d(8, 4, 3), (2, 8, 5, 5, 5), set()),
    "transposed1d": (lambda: nn.ConvTranspose1d(8, 4, 3), (2, 8, 9), set()),
    "transposed2d": (lambda: nn.ConvTranspose2d(8, 4, 3), (2, 8, 9, 9), set()),
    "transposed3d": (lambda: nn.ConvTranspose3d(8, 4, 3), (2, 8, 5, 5, 5), set()),
    "attention": (Attention, (2, 5, 8), set()),
    "more keys": (lambda: Attention(**MORE_KEYS), (2, 5, 8), {"inner.bias_k", "inner.bias_v"}),
    "embedding": (lambda: nn.Embedding(5, 8), (), {"weight"}),
    "norm": (lambda: nn.LayerNorm(8), (4, 8), {"weight", "bias"}),
    "recurrent": (lambda: nn.GRU(8, 8), (5, 2, 8), RECURRENT),
    "subclass": (lambda: Normalized(8, 8), (4, 8), {"weight", "bias"}),
    "transformers": (lambda: Conv1D(8, 4), (2, 4), set()),
    "tied": (tied, (4, 8), {"0.weight"}),
}
"""By name: a module, the shape of its input, the names of its parameters that stay in fp32."""


def uncast(module: nn.Module, choice: str = "autocast") -> set[str]:
    """The names of what stays in fp32 of a module that is a part of a model."""
    kept = uncast_parameters(nn.ModuleList([module]), choice)
    return {name for name, p in module.named_parameters() if id(p) in kept}


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output under autocast and the gradients of the parameters, in fp32."""
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    output.float().square().sum().backward()
    grads = [torch.zeros(()) if p.grad is None else p.grad for p in module.parameters()]
    return [output.detach(), *(grad.float() for grad in grads)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_cast_changes_no_bit(name: str, device: str) -> None:
    build, shape, expected = KINDS[name]
    torch.manual_seed(0)
    module = build().to(device)
    assert uncast(module) == expected
    x = torch.randn(shape, device=device) if shape else torch.arange(5, device=device)
    cast = copy.deepcopy(module)
    for key, parameter in cast.named_parameters():
        if key not in expected:
            parameter.data = parameter.bfloat16()
    for ours, theirs in zip(step(cast, x), step(module, x), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_forwards_that_were_put_in_the_place_of_others_are_not_known() -> None:
    module = nn.Linear(8, 8)
    forward = module.forward
    module.forward = lambda x: forward(x)  # type: ignore[method-assign]
    assert uncast(module) == {"weight", "bias"}


def test_other_choices() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    assert uncast(model, "all") == {"1.weight", "1.bias"}
    assert len(uncast(model, "none")) == len(list(model.parameters()))
    half = nn.Embedding(4, 8).bfloat16()
    assert uncast(half) == set()
