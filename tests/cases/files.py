"""Optimizers with states in files, in batches of the smallest size, into which weights are cut."""

from __future__ import annotations

import errno
import fcntl
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytorch_optimizer
import torch
from torch import Tensor

from lightning_zero.optimizer import Way, staging
from lightning_zero.optimizer.known import known_class
from tests.cases.optimizers import FILES, Large, made, own
from tests.oracle.own_optimizers import OWN, Own
from tests.oracle.play import Player, by_trainer, case
from tests.oracle.projects import Noted, Regression, Trace, rows


class Named(Large):
    """Two groups with names, a frozen parameter, and one without a gradient in a step."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.head.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        weights = [(name, p) for name, p in self.named_parameters() if p.dim() > 1]
        biases = [(name, p) for name, p in self.named_parameters() if p.dim() == 1]
        return self.make([{"params": weights}, {"params": biases, "lr": 0.1}])

    def switch(self, mode: str) -> None:
        getattr(own(self), mode, lambda: None)()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.switch("train")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 2:
            self.large.grad = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.switch("eval")

    def on_train_end(self) -> None:
        kept = [getattr(own(self), name, None) for name in ("k", "rates", "warmth")]
        state = own(self).state_dict()
        by_name = {str(key): value for key, value in state["state"].items()}
        self.notes.append([kept, state["param_groups"], sorted(by_name.items())])


def in_small_batches(play: Player) -> Trace:
    """Half of the cases run where files take no direct requests."""
    refuse = mock.patch.object(fcntl, "fcntl", side_effect=OSError(errno.EINVAL, "Invalid"))
    small = mock.patch.object(staging, "_BATCH_BYTES", 1)
    with small, refuse if play.case.number % 2 else nullcontext():
        return by_trainer(play)


def torchs() -> Iterator[Any]:
    """Element-wise optimizers of torch, fused where they can be, as files have them stepped."""
    for cls in vars(torch.optim).values():
        if inspect.isclass(cls) and known_class(cls) == ("torch.optim", Way.BY_ELEMENT):
            is_fused = "fused" in inspect.signature(cls).parameters
            yield partial(cls, lr=1e-2, **({"fused": True} if is_fused else {}))


for number, make in enumerate([*OWN, pytorch_optimizer.AggMo, *torchs()]):
    stage, name = 3 - number % 3, getattr(make, "func", make).__name__
    case("optimizers", lambda m=make: Named(m), f"in_batches_{name}", loop=in_small_batches, stages=(stage,), ulps=8,
         settings=(FILES if stage == 3 else {"offload_optimizer": "nvme"},), worlds=(1 + number % 2,),
         data=lambda: (rows(32),), accumulate_grad_batches=2, gradient_clip_val=0.3, max_steps=4)  # fmt: skip


def changed(m: Any, *_: Any) -> None:
    """Change states in place, by others, by other memory, and by those of another parameter."""
    named, name = dict(m.named_parameters()), "momentum_buffer"
    states = {key: own(m).state[named[key]] for key in named if named[key].requires_grad}
    first, second, third, *_ = states.values()
    first[name].mul_(0.5)
    second[name] = second[name] * 0.25
    third[name].data = third[name] * 0.75
    one, other = (states[f"net.blocks.{number}.linear.weight"] for number in (0, 2))
    one[name], other[name] = other[name].clone(), one[name].clone()


for number in range(2):
    case("optimizers", partial(Named, partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True)), f"changed_states_{number}",
         loop=in_small_batches, stages=(3 - number,), settings=(FILES if number == 0 else {"offload_optimizer": "nvme"},),
         max_steps=4, moments={"on_train_batch_end": changed}, ulps=8)  # fmt: skip
STATES, WEIGHTS = {"offload_optimizer": "nvme"}, {"offload_weights": "nvme"}
case("optimizers", Regression, "in_files_in_part", stages=(3, 3, 1), settings=(STATES, WEIGHTS, STATES), rests=True, ulps=16)  # fmt: skip


# -- what closures and hooks change ----------------------------------------------------------------


class Scaled(Own):
    """Has a factor as an attribute, which users change."""

    scale = 1.0

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] * self.scale)


def change(m: Any, factor: float) -> None:
    own(m).param_groups[0]["lr"] *= factor
    own(m).scale = getattr(own(m), "scale", 1.0) + factor


def with_hook(kind: Any, m: Any) -> Any:
    optimizer = kind(m.parameters(), lr=0.02)
    optimizer.register_step_pre_hook(lambda *_: change(m, 0.9))
    return optimizer


def change_and_run(m: Any, batch: Any) -> Tensor:
    change(m, 0.8)
    return Noted.loss(m, batch)


# What a step is made with is changed in a hook before it, and first and last in its closure.
for kind in (Scaled, torch.optim.SGD):
    case("optimizers", made(partial(with_hook, kind), loss=change_and_run), f"changing_{kind.__name__}", settings=({}, FILES),
         stages=(2, 3), max_steps=3, ulps=8, moments={"on_after_backward": lambda m: change(m, 1.2)})  # fmt: skip
