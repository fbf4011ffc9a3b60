"""Complex parameters give DDP's numbers, bits and checkpoints."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero import ZeROStrategy, full_grad, gathered, grad_norm
from lightning_zero.tensors import named_tensors
from tests.oracle.models import Block
from tests.oracle.parity import distance_in_ulps
from tests.oracle.projects import (
    WAYS,
    WIDTH,
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_strategy,
    make_trainer,
    rows,
    under_all,
    wired,
)
from tests.oracle.ranks import Pools


class Rotation(Block):
    """A unit with complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5 + 0.5j))

    def forward(self, x: Tensor) -> Tensor:
        turned = (x * self.phase) @ self.turn.mT * self.scale
        return super().forward(x + turned.real - turned.imag)


class Spectral(Regression):
    """Real and complex parameters, in units and in the root; one is never used, one is frozen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net.blocks.extend([Rotation(), Rotation()])
            self.tone = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.complex128))
            self.frozen = nn.Parameter(torch.randn(3, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x * self.tone).abs().float() + self.frozen.real.sum())


class Conjugating(Spectral):
    """Gradients come as conjugated views, with which torch's Adam ends in an error under DDP."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (self.tone.conj() * self.net.blocks[3].turn.mH).abs().mean())


class Looking(Spectral):
    """Reads, measures and changes weights and gradients where users do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        turn = self.net.blocks[3].turn
        self.losses += [float(turn.grad.abs().sum()), float(turn.grad.norm())]
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.requires_grad])
        self.losses.append(float(norm))
        turn.grad.mul_(1j)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.net.blocks[4].phase.mul_(0.5 + 0.5j)
            self.losses.append(float(self.net.blocks[3].turn.imag.sum()))


def train(strategy: Any, optimizer: Any, kind: type = Spectral, **options: Any) -> Run:
    return fit(kind(optimizer=optimizer), strategy, **options)


class Momentum(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1)


class Foreach(torch.optim.AdamW):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, amsgrad=True, foreach=True)


class Scaled(torch.optim.SGD):
    """Not of torch: whether it may have pieces is found in a trial."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"])
        return loss


class ByParameter(Scaled):
    """Mixes the elements of a parameter, so it has owners."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.mul_(0.9).add_(p.grad)
                p.sub_(0.05 * average / (p.grad.abs().square().mean().sqrt() + 1e-3))
        return loss


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, clipped": (torch.optim.AdamW, {"gradient_clip_val": 0.1}),
    "accumulated": (Momentum, {"accumulate_grad_batches": 2}),
    "foreach": (Foreach, {"gradient_clip_val": 0.1}),
    "of the user's own": (Scaled, {"kind": Conjugating}),
    "by parameter": (ByParameter, {}),
    "all at once": (partial(torch.optim.LBFGS, max_iter=10), {}),
    "looked at": (torch.optim.AdamW, {"kind": Looking}),
}


@pytest.mark.parametrize(("name", "stage"), list(zip(CASES, cycle((1, 2)), strict=False)))
def test_trains_as_under_ddp(ranks: Pools, name: str, stage: int) -> None:
    optimizer, options = CASES[name]
    runs = ranks(2).run(under_all, train, optimizer, stages=(stage, 3), **options)
    assert_like_ddp(runs, dtype=torch.float32)
    before = Spectral()
    for parameter, name in ((before.tone, "tone"), (before.net.blocks[4].turn, TURN)):
        after = runs[0]["ddp"].params[name]
        assert (
            min((parameter - after).real.abs().max(), (parameter - after).imag.abs().max()) > 0.01
        )


TURN = "net.blocks.4.turn"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "windows"])
def test_every_transport_adds_up_complex_numbers(ranks: Pools, way: str) -> None:
    runs = ranks(2).run(train_on, way)
    assert_like_ddp(runs, dtype=torch.float32)


def train_on(way: str) -> dict[str | int, Run]:
    with wired(way):
        return under_all(train, torch.optim.AdamW, stages=(2, 3), gradient_clip_val=0.1)


def train_elsewhere(folder: str) -> dict[str | int, Run]:
    """In files, on one rank; in two copies of shards, on several."""
    runs = under_all(train, torch.optim.AdamW, stages=())
    options = {"offload_optimizer": "nvme", "offload_weights": "nvme", "offload_path": folder}
    if dist.get_world_size() > 1:
        options = {"shard": dist.get_world_size() // 2}
    runs[3] = train(make_strategy(3, **options), torch.optim.AdamW)
    return runs


@pytest.mark.parametrize("world", [1, 4])
def test_in_files_and_in_copies(ranks: Pools, world: int, tmp_path: Path) -> None:
    runs = ranks(world).run(train_elsewhere, str(tmp_path))
    assert_like_ddp(runs, dtype=torch.float32)


# -- checkpoints -----------------------------------------------------------------------------------


def resumed(strategy: Any, path: str) -> Run:
    module, trainer = Spectral(), make_trainer(strategy, max_epochs=2)
    trainer.fit(module, rows(), ckpt_path=path)
    return Run.of(module, trainer)


def save_and_resume(path: str) -> dict[str | int, Run]:
    """Every strategy saves after an epoch, and goes on from what DDP has saved."""
    runs = {}
    for name in ("ddp", 1, 2, 3):
        trainer = make_trainer(name, max_epochs=1)
        trainer.fit(Spectral(), rows())
        trainer.save_checkpoint(f"{path}/{name}.ckpt")
        runs[name] = resumed(name, f"{path}/ddp.ckpt")
    return runs


def test_checkpoints_are_those_of_ddp(ranks: Pools, tmp_path: Path) -> None:
    assert_like_ddp(ranks(2).run(save_and_resume, str(tmp_path)), dtype=torch.float32)
    theirs = torch.load(tmp_path / "ddp.ckpt", weights_only=True)
    for stage in (1, 2, 3):
        ours = torch.load(tmp_path / f"{stage}.ckpt", weights_only=True)
        for key in ("state_dict", "optimizer_states"):
            one, other = dict(named_tensors(ours[key])), dict(named_tensors(theirs[key]))
            assert list(one) == list(other)
            for name, value in other.items():
                assert one[name].dtype == value.dtype
                assert distance_in_ulps(one[name], value, torch.float32) < 16, name


def resume_from_directory(path: str) -> dict[str | int, Run]:
    strategy = ZeROStrategy(3, units={Block}, checkpoint="dcp")
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(Spectral(), rows())
    trainer.save_checkpoint(f"{path}/directory")
    trainer = make_trainer("ddp", max_epochs=1)
    trainer.fit(Spectral(), rows())
    trainer.save_checkpoint(f"{path}/file")
    runs: dict[str | int, Run] = {"ddp": resumed("ddp", f"{path}/file")}
    runs[2] = resumed(2, f"{path}/directory")
    return runs


def test_a_directory_is_resumed_from(ranks: Pools, tmp_path: Path) -> None:
    assert_like_ddp(ranks(2).run(resume_from_directory, str(tmp_path)), dtype=torch.float32)


# -- gradients and weights between steps -----------------------------------------------------------


class Asking(Spectral):
    """Asks for whole gradients, their norm, and whole weights."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        turn = self.net.blocks[3].turn
        if isinstance(self.trainer.strategy, ZeROStrategy):
            self.seen = [full_grad(turn), grad_norm(self), grad_norm(self, float("inf"))]
            return
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norms = [torch.nn.utils.get_total_norm(grads, order) for order in (2.0, float("inf"))]
        self.seen = [turn.grad.clone(), *norms]

    def on_train_batch_end(self, *args: Any) -> None:
        if isinstance(self.trainer.strategy, ZeROStrategy):
            with gathered(self, modify=True):
                self._edit()
        else:
            self._edit()

    def _edit(self) -> None:
        with torch.no_grad():
            self.net.blocks[4].phase.mul_(0.5 + 0.5j)


def ask(strategy: Any) -> Run:
    module = Asking()
    run = fit(module, strategy)
    run.notes = module.seen
    return run


def test_gradients_and_weights_are_whole_where_they_are_asked_for(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, ask, stages=(1, 3)), dtype=torch.float32)
