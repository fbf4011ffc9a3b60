"""Loops of Fabric under ZeRO: the numbers of DDP, and what only a loop of one's own does."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import lightning_zero
from lightning_zero.fabric import ZeROStrategy
from lightning_zero.plan import STRATEGIES as STRATEGIES_BY_NAME
from tests.oracle.launch import run_script
from tests.oracle.messages import messages
from tests.oracle.models import Block, Blocks
from tests.oracle.ranks import Pools

WIDTH = 8
STRATEGIES = ["zero1", "zero2", "zero3"]


def fabric_of(strategy: str, precision: Any = "32-true", **more: Any) -> Fabric:
    chosen: Any = strategy
    if strategy != "ddp":
        chosen = ZeROStrategy(int(strategy[4]), min_num_params=1)
    world = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=world, strategy=chosen, precision=precision, **more)
    fabric.launch()
    return fabric


class Normalized(torch.optim.SGD):
    """An optimizer that must see whole gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1e-6)
        return super().step(closure)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def batch(number: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator)


def values(module: nn.Module) -> list[Tensor]:
    with lightning_zero.gathered(module):
        return [parameter.detach().clone() for parameter in module.parameters()]


# -- loops -----------------------------------------------------------------------------------------


def accumulate(fabric: Fabric) -> Any:
    model = seeded(lambda: Blocks(3, WIDTH))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for step in range(4):
        for micro in range(2):
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = F.mse_loss(model(batch(2 * step + micro)), torch.ones(4, WIDTH)) / 2
                fabric.backward(loss)
        losses += [loss.item(), float(fabric.clip_gradients(model, optimizer, max_norm=0.1))]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, values(model)


def clip_by_value(fabric: Fabric) -> Any:
    model = seeded(lambda: Blocks(2, WIDTH))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for step in range(3):
        fabric.backward(model(batch(step)).square().mean())
        fabric.clip_gradients(model, optimizer, clip_val=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return [], values(model)


def inf_norm(fabric: Fabric) -> Any:
    model = seeded(lambda: Blocks(2, WIDTH))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    norms = []
    for step in range(2):
        fabric.backward(model(batch(step)).square().mean())
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=1e-3, norm_type=float("inf")))
        optimizer.step()
        optimizer.zero_grad()
    return list(map(float, norms)), values(model)


def adversaries(fabric: Fabric) -> Any:
    """Two modules with an optimizer each; one is called twice for one backward."""
    with torch.random.fork_rng(devices=[]):
        generator = seeded(lambda: Blocks(2, WIDTH))
        judge = seeded(lambda: nn.Sequential(Block(WIDTH), nn.Linear(WIDTH, 1)))
    first = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
    second = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
    generator = fabric.setup_module(generator)
    judge = fabric.setup_module(judge)
    first, second = fabric.setup_optimizers(first, second)
    losses = []
    for step in range(3):
        fake = generator(batch(step))
        second.zero_grad()
        loss = F.softplus(-judge(batch(50 + step))).mean() + F.softplus(judge(fake.detach())).mean()
        fabric.backward(loss)
        second.step()
        first.zero_grad()
        other = F.softplus(-judge(fake)).mean()
        fabric.backward(other)
        first.step()
        with torch.no_grad():
            score = judge(generator(batch(step))).mean()
        losses += [loss.item(), other.item(), score.item()]
    return losses, [*values(generator), *values(judge)]


def together(fabric: Fabric, optimizer_class: Any = torch.optim.AdamW) -> Any:
    """Modules that were set up one by one and have one optimizer; resumes from its own file."""
    encoder, decoder = seeded(lambda: Blocks(2, WIDTH)), seeded(lambda: nn.Linear(WIDTH, WIDTH))
    groups = [{"params": encoder.parameters()}, {"params": decoder.parameters(), "lr": 0.02}]
    optimizer = optimizer_class(groups, lr=0.01)
    encoder, decoder = fabric.setup_module(encoder), fabric.setup_module(decoder)
    optimizer = fabric.setup_optimizers(optimizer)
    state = {"encoder": encoder, "decoder": decoder, "optimizer": optimizer}
    path = Path(fabric.broadcast(tempfile.mkdtemp())) / "together.ckpt"
    results = []
    for step in (0, 1, 2, 3, 2, 3):
        if step == 2 and len(results) == 4:
            fabric.save(path, state)
        elif step == 2:
            fabric.load(path, state)
        loss = decoder(encoder(batch(step))).square().mean()
        fabric.backward(loss)
        norm = fabric.clip_gradients(encoder, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.item(), float(norm)]
    assert results[4:8] == results[8:]
    return results, [*values(encoder), *values(decoder)]


def frozen_teacher(fabric: Fabric) -> Any:
    teacher = seeded(lambda: Blocks(2, WIDTH)).requires_grad_(False).eval()
    if isinstance(fabric.strategy, ZeROStrategy):  # DDP refuses it
        teacher = fabric.setup_module(teacher)
    student = seeded(lambda: Blocks(1, WIDTH))
    student, optimizer = fabric.setup(student, torch.optim.AdamW(student.parameters(), 0.01))
    losses = []
    for step in range(3):
        x = batch(step)
        with torch.no_grad():
            target = teacher(x)
        loss = F.mse_loss(student(x), target)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(student)


def closures(fabric: Fabric) -> Any:
    model = seeded(lambda: Blocks(2, WIDTH))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    losses = []
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            fabric.backward(loss)
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses, values(model)


class Lit(LightningModule):
    """A LightningModule, whose step methods Fabric sends through the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Blocks(2, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, x: Tensor) -> Tensor:
        self.seen += x.sum()
        return self.scale * self.net(x).square().mean()

    def other(self, x: Tensor) -> Tensor:
        return self.training_step(x) * 2


def lightning_module(fabric: Fabric) -> Any:
    model = seeded(Lit)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    model.mark_forward_method("other")
    losses = []
    for step in range(4):
        loss = model.training_step(batch(step)) if step % 2 else model.other(batch(step))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), model.seen.item()]
    return losses, values(model)


def plain_backward(fabric: Fabric) -> Any:
    model = seeded(lambda: Blocks(2, WIDTH))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [], values(model)


LOOPS = [
    accumulate,
    clip_by_value,
    inf_norm,
    adversaries,
    together,
    partial(together, optimizer_class=Normalized),
    frozen_teacher,
    closures,
    lightning_module,
    plain_backward,
]


def offloaded(strategy: str, folder: str) -> Any:
    chosen = dict(STRATEGIES_BY_NAME[strategy][1])
    if strategy == "zero3_nvme":
        chosen["offload_path"] = folder
    made = ZeROStrategy(**chosen)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=made)
    fabric.launch()
    return together(fabric)


def looped(loop: Callable[[Fabric], Any], strategy: str, precision: str = "32-true") -> Any:
    return loop(fabric_of(strategy, precision))


def looped_by_each(loop: Callable[[Fabric], Any], strategies: list[str]) -> list[Any]:
    return [looped(loop, strategy) for strategy in strategies]


@pytest.mark.parametrize(("loop", "stage"), list(zip(LOOPS, cycle((1, 2)), strict=False)))
def test_numbers_are_those_of_ddp(ranks: Pools, loop: Callable[[Fabric], Any], stage: int) -> None:
    strategies = ["ddp", f"zero{stage}", "zero3"]
    for (others, wanted), *found in ranks(2).run(looped_by_each, loop, strategies):
        for losses, parameters in found:
            torch.testing.assert_close(losses, others, rtol=2e-6, atol=1e-6)
            torch.testing.assert_close(parameters, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_are_those_of_ddp(ranks: Pools, precision: str) -> None:
    expected = ranks(2).run(looped, accumulate, "ddp", precision)
    for (losses, parameters), (others, wanted) in zip(
        ranks(2).run(looped, accumulate, "zero3", precision), expected, strict=True
    ):
        assert [one.dtype for one in parameters] == [one.dtype for one in wanted]
        torch.testing.assert_close(losses, others, rtol=2e-2, atol=1e-3)
        torch.testing.assert_close(parameters, wanted, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("strategy", ["zero3_offload", "zero3_nvme"])
def test_offloaded_modules_with_one_optimizer_have_the_numbers_of_ddp(
    ranks: Pools, strategy: str, tmp_path: Path
) -> None:
    expected = ranks(2).run(looped, together, "ddp")
    for (losses, parameters), (others, wanted) in zip(
        ranks(2).run(offloaded, strategy, str(tmp_path)), expected, strict=True
    ):
        torch.testing.assert_close(losses, others, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(parameters, wanted, rtol=2e-6, atol=1e-6)


def overflowing(strategy: str) -> Any:
    """A scale so large that the first steps are skipped, on all ranks alike."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fabric = fabric_of(strategy, None, plugins=[plugin])
    model = seeded(lambda: Blocks(2, WIDTH))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    scales = []
    for step in range(30):
        fabric.backward(model(batch(step)).square().mean())
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(fabric.strategy.precision.state_dict()["scale"])
    return scales, values(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_scales_are_those_of_ddp(ranks: Pools, strategy: str) -> None:
    expected = ranks(2).run(overflowing, "ddp")
    for (scales, parameters), (others, wanted) in zip(
        ranks(2).run(overflowing, strategy), expected, strict=True
    ):
        assert scales == others
        assert len(set(scales)) > 3
        torch.testing.assert_close(parameters, wanted, rtol=2e-3, atol=1e-3)


def non_finite(strategy: str) -> str:
    fabric = fabric_of(strategy)
    model = seeded(lambda: Blocks(1, WIDTH))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    loss = model(batch(0)).mean() * (torch.inf if fabric.global_rank == 1 else 1.0)
    fabric.backward(loss)
    with pytest.raises(RuntimeError, match="not finite") as error:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    return str(error.value)


def test_clipping_to_a_norm_that_is_not_finite_raises_on_all_ranks(ranks: Pools) -> None:
    assert all("error_if_nonfinite=False" in text for text in ranks(2).run(non_finite, "zero3"))


# -- setup -----------------------------------------------------------------------------------------


def on_meta() -> Any:
    fabric = fabric_of("zero3")
    with fabric.init_module(empty_init=True):
        model = Blocks(2, WIDTH)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = fabric.setup_module(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model(batch(0, rank=0)).isfinite().all().item()


def test_a_module_may_begin_on_meta(ranks: Pools) -> None:
    assert all(ranks(2).run(on_meta))


def nothing_to_shard() -> str:
    with pytest.raises(ValueError, match="no parameters") as error:
        fabric_of("zero2").setup_module(nn.ReLU())
    return str(error.value)


def test_what_cannot_be_set_up_is_refused_by_name(ranks: Pools) -> None:
    assert "ReLU" in ranks(2).run(nothing_to_shard)[0]
    with pytest.raises(TypeError, match="unknown_setting"):
        ZeROStrategy(unknown_setting=1)
    for name in ("checkpoint", "restore_weights", "device"):
        with pytest.raises(TypeError, match=name):
            ZeROStrategy(**{name: "dcp"})
    with pytest.raises(ValueError, match="stage"):
        ZeROStrategy(stage=4)
    with pytest.raises(TypeError, match="no_backward_sync"):
        ZeROStrategy()._backward_sync_control.no_backward_sync(nn.Linear(1, 1), True)


def _told(is_together: bool) -> list[str]:
    fabric, model = fabric_of("zero3"), Blocks(2, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    with messages() as said:
        if is_together:
            fabric.setup(model, optimizer)
        else:
            fabric.setup_module(model)
            fabric.setup_optimizers(optimizer)
    return [text for text in said if "ZeRO" in text or "AdamW" in text]


def test_a_run_is_summed_up_once(ranks: Pools) -> None:
    ((told,), second) = ranks(2).run(_told, True)
    assert second == []
    assert told.startswith("ZeRO stage 3 over 2 ranks\n  units       6, the largest ")
    assert "\n  optimizer   AdamW steps by element, each rank its own part\n" in told
    (first, second) = ranks(2).run(_told, False)
    assert second == []
    assert [text.splitlines()[0] for text in first] == [
        "ZeRO stage 3 over 2 ranks",
        "AdamW steps by element, each rank its own part",
    ]


# -- checkpoints -----------------------------------------------------------------------------------


def saved(strategy: str, path: str, steps: int = 3) -> Any:
    fabric, model, optimizer = begun(strategy)
    state = {"model": model, "optimizer": optimizer, "step": steps, "rng": torch.arange(3)}
    train(fabric, model, optimizer, range(steps))
    fabric.save(path, state)
    train(fabric, model, optimizer, range(steps, 2 * steps))
    return values(model)


def begun(strategy: str) -> Any:
    fabric = fabric_of(strategy)
    model = seeded(lambda: Blocks(2, WIDTH))
    return fabric, *fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.01))


def train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        fabric.backward(model(batch(step, rank=0)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def resumed(strategy: str, path: str) -> Any:
    fabric, model, optimizer = begun(strategy)
    train(fabric, model, optimizer, range(1))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(path, state)
    assert rest.keys() == {"rng"}
    assert rest["rng"].tolist() == [0, 1, 2]
    assert state["model"] is model
    train(fabric, model, optimizer, range(state["step"], 2 * state["step"]))
    return values(model)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("zero3", 2), ("ddp", 2)),
        (("ddp", 2), ("zero3", 2)),
        (("zero3", 2), ("zero2", 3)),
        (("zero1", 3), ("zero3", 1)),
    ],
)
def test_a_checkpoint_is_resumed_by_others(
    ranks: Pools, tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    path = str(tmp_path / "state.ckpt")
    expected = ranks(before[1]).run(saved, before[0], path)[0]
    for found in ranks(after[1]).run(resumed, after[0], path):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)


def filtered(path: str) -> Any:
    fabric, model, optimizer = begun("zero3")
    state = {"model": model, "optimizer": optimizer}
    fabric.save(path, state, filter={"model": lambda name, _: "weight" in name})
    wanted = {name for name, _ in Blocks(2, WIDTH).named_parameters() if "weight" in name}
    held = torch.load(path, weights_only=True)
    assert set(held["model"]) == wanted
    assert fabric.load(path).keys() == held.keys()
    with pytest.raises(RuntimeError, match="Missing key"):
        fabric.load(path, state)
    fabric.load(path, state, strict=False)
    with pytest.raises(KeyError, match="'other'"):
        fabric.load(path, {"model": model, "other": 1})


def test_filters_and_strictness_are_those_of_fabric(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(filtered, str(tmp_path / "some.ckpt"))


def raw(path: str) -> Any:
    fabric, model, _ = begun("zero3")
    if fabric.global_rank == 0:
        torch.save({k: torch.ones_like(v) for k, v in Blocks(2, WIDTH).state_dict().items()}, path)
    fabric.barrier()
    fabric.load_raw(path, model)
    assert all((value == 1).all() for value in values(model))


def test_a_bare_state_dict_is_loaded(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(raw, str(tmp_path / "raw.pt"))


def set_up_again() -> None:
    """An optimizer that comes later, with the module or a second one, steps the same sharding."""
    fabric, model, optimizer = begun("zero3")
    twice, again, other = fabric.setup(
        model.module, optimizer.optimizer, torch.optim.SGD(model.module.parameters(), 0.01)
    )
    assert len(fabric.strategy.engines) == 1
    before = values(model)
    train(fabric, twice, again, range(1))
    trained = values(model)
    assert any(not torch.equal(one, two) for one, two in zip(before, trained, strict=True))
    fabric.backward(twice(torch.ones(2, WIDTH)).sum())
    other.step()
    assert any(not torch.equal(one, two) for one, two in zip(trained, values(model), strict=True))


def test_a_module_may_be_set_up_again(ranks: Pools) -> None:
    ranks(2).run(set_up_again)


def other_optimizer(path: str) -> Any:
    fabric, model, optimizer = begun("zero3")
    fabric.save(path, {"model": model, "optimizer": optimizer})
    before = values(model)
    train(fabric, model, optimizer, range(1))
    after = values(model)
    narrow = seeded(lambda: Blocks(1, WIDTH))
    narrow, other = fabric.setup(narrow, torch.optim.AdamW(narrow.parameters(), 0.01))
    with pytest.raises(ValueError, match="Cannot load 'optimizer'"):
        fabric.load(path, {"model": model, "optimizer": other})
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
    torch.testing.assert_close(values(model), after, rtol=0, atol=0)


def test_an_optimizer_that_does_not_fit_changes_nothing(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(other_optimizer, str(tmp_path / "state.ckpt"))


# -- processes -------------------------------------------------------------------------------------

SCRIPT = """
import os, time, torch, lightning_zero
from lightning.fabric import Fabric

def train(fabric):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.1))
    for step in range(4):
        loss = model(torch.full((2, 8), 1.0 + fabric.global_rank)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("FAILS") and fabric.global_rank and step == 2:
            raise ValueError("out of luck")
    loss = round(fabric.all_reduce(loss.detach()).item(), 4)
    print(f"<loss {loss} of {fabric.world_size}>", flush=True)
    fabric.save("state.ckpt", {"model": model})
    time.sleep(fabric.global_rank)  # the host of the store ends first

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy=os.environ["STRATEGY"])
    if os.environ["STRATEGY"][5:]:
        fabric.launch(train)
    else:
        fabric.launch()
        train(fabric)
"""


# A store that torchrun's agent hosts is that of the Trainer's test of two nodes.
@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [
        ("zero3", "lightning"),
        pytest.param("zero3", "torchrun", marks=pytest.mark.slow),
        ("zero2_fork", "plain"),
        pytest.param("zero2_spawn", "plain", marks=pytest.mark.slow),
    ],
)
def test_each_launcher_starts_and_ends_the_ranks(
    strategy: str, launcher: Any, tmp_path: Path
) -> None:
    printed = run_script(SCRIPT, launcher=launcher, env={"STRATEGY": strategy}, cwd=tmp_path)
    found = re.findall(r"<loss ([\d.]+) of 2>", printed.stdout)
    assert len(found) == 2
    assert len(set(found)) == 1
    assert "TCPStore" not in printed.stderr  # which a watch would ask when its host has left


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    """Under a launcher that ends nobody."""
    env = {"STRATEGY": "zero3", "FAILS": "1"}
    ended = run_script(SCRIPT, launcher="srun", env=env, cwd=tmp_path, check=False)
    assert ended.code != 0
    assert "The run has lost rank 1: " in ended.output  # by rank 0
    assert "out of luck" in ended.output
