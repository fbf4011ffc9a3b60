"""Loops of Fabric under ZeRO: the numbers of DDP, and what only a loop of one's own does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import open_engines
from lightning_zero.fabric import ZeROStrategy
from lightning_zero.memory import format_bytes
from tests.cases.fabric_loops import WIDTH, batch, begun, output, step_with
from tests.oracle.launch import run_python, run_script
from tests.oracle.messages import messages
from tests.oracle.models import Blocks
from tests.oracle.ranks import Pools


def fabric_of(strategy: str, precision: Any = "32-true", **more: Any) -> Fabric:
    chosen: Any = strategy
    if strategy != "ddp":
        chosen = ZeROStrategy(int(strategy[4]), min_num_params=1)
    world = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=world, strategy=chosen, precision=precision, **more)
    fabric.launch()
    return fabric


def values(module: nn.Module) -> list[Tensor]:
    with lightning_zero.gathered(module):
        return [parameter.detach().clone() for parameter in module.parameters()]


# -- loops -----------------------------------------------------------------------------------------


def non_finite(strategy: str) -> str:
    fabric = fabric_of(strategy)
    model, optimizer = begun(fabric)
    loss = output(fabric, model, 0) * (torch.inf if fabric.global_rank == 1 else 1.0)
    fabric.backward(loss)
    with pytest.raises(RuntimeError, match="not finite") as error:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    return str(error.value)


def test_clipping_to_a_norm_that_is_not_finite_raises_on_all_ranks(ranks: Pools) -> None:
    assert all("error_if_nonfinite=False" in text for text in ranks(2).run(non_finite, "zero3"))


class _RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise torch.OutOfMemoryError("no memory")


def out_of_memory() -> tuple[list[str], int]:
    """Also return the bytes of the weights of all modules, with those of earlier tests."""
    fabric = fabric_of("zero3")
    model, _ = begun(fabric)
    begun(fabric)
    output(fabric, model, 0).backward()  # which Fabric refuses under some strategies
    with pytest.raises(torch.OutOfMemoryError) as error:
        fabric.backward(_RunsOut.apply(output(fabric, model, 0)))
    held = [engine.sharded.memory() for engine in open_engines()]
    return error.value.__notes__, sum(one["weights"] + one["master"] for one in held)


def test_running_out_of_memory_in_backward_says_what_is_held(ranks: Pools) -> None:
    for (note,), weights in ranks(1).run(out_of_memory):
        head = f"lightning_zero: this rank holds {format_bytes(weights)} of weights, "
        assert note.startswith(head)


# -- setup -----------------------------------------------------------------------------------------


def on_meta() -> Any:
    fabric = fabric_of("zero3")
    with fabric.init_module(empty_init=True):
        model = Blocks(2, WIDTH)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = fabric.setup_module(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model(batch(0, 0)).isfinite().all().item()


def test_a_module_may_begin_on_meta(ranks: Pools) -> None:
    assert all(ranks(2).run(on_meta))


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
    assert told.startswith("ZeRO stage 3 over 2 ranks\n  model       6 units, ")
    assert "\n  optimizer   AdamW: element-wise, sharded\n" in told
    (first, second) = ranks(2).run(_told, False)
    assert second == []
    assert [text.splitlines()[0] for text in first] == [
        "ZeRO stage 3 over 2 ranks",
        "AdamW: element-wise, sharded",
    ]


def set_up_again() -> None:
    """An optimizer that comes later, with the module or a second one, steps the same sharding."""
    fabric = fabric_of("zero3")
    model, optimizer = begun(fabric)
    twice, again, other = fabric.setup(
        model.module, optimizer.optimizer, torch.optim.SGD(model.module.parameters(), 0.01)
    )
    assert len(fabric.strategy.engines) == 1
    before = values(model)
    step_with(fabric, again, output(fabric, twice, 0))
    trained = values(model)
    assert any(not torch.equal(one, two) for one, two in zip(before, trained, strict=True))
    fabric.backward(twice(torch.ones(2, WIDTH)).sum())
    other.step()
    assert any(not torch.equal(one, two) for one, two in zip(trained, values(model), strict=True))


def test_a_module_may_be_set_up_again(ranks: Pools) -> None:
    ranks(2).run(set_up_again)


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
        if os.environ.get("FAILS") == str(step) and fabric.global_rank:
            raise ValueError("out of luck")  # after the last step, rank 0 waits in `all_reduce`
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
    assert "[c10d]" not in printed.stderr  # nobody asks the store of a process that has exited


@pytest.mark.parametrize("last", [2, 3])
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, last: int) -> None:
    """Under a launcher that ends nobody; in a step, and in `fabric.all_reduce` after the last."""
    env = {"STRATEGY": "zero3", "FAILS": str(last)}
    ended = run_script(SCRIPT, launcher="srun", env=env, cwd=tmp_path, check=False)
    assert ended.code != 0
    assert f"RuntimeError: Rank 1 failed in step {last + 1} at" in ended.output  # by rank 0
    assert "[c10d]" not in ended.output


KILLED = """
import os, signal, torch
from lightning.fabric import Fabric
from tests.oracle.launch import say
import lightning_zero

life = os.environ["TORCHELASTIC_RESTART_COUNT"]
fabric = Fabric(accelerator="cpu", devices=2, strategy="zero3")
fabric.launch()
net = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
for step in range(3):
    if (life, step, fabric.global_rank) == ("0", 1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
say(f"life {life} ends")
"""


def test_torchrun_restarts_the_ranks_of_a_loop(tmp_path: Path) -> None:
    """The agents' store still has the addresses of the first life."""
    ended = run_script(KILLED, launcher="torchrun", restarts=1, timeout=120, cwd=tmp_path)
    assert ended.stdout.count("life 1 ends") == 2, ended.output


SAVES = """
import resource, sys
import torch
from lightning.fabric import Fabric
from lightning_zero.fabric import ZeROStrategy

if __name__ == "__main__":
    strategy = ZeROStrategy(3, async_checkpoint=True)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=1)
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(1000, 1000))
    if sys.argv[2] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, resource.RLIM_INFINITY))
    fabric.save(sys.argv[1], {"model": model, "more": torch.ones(2_000_000)})
    if sys.argv[3:]:
        fabric.strategy.teardown()
"""


@pytest.mark.parametrize(
    ("disk", "waits", "message"),
    [
        ("free", [], ""),
        ("full", [], "The last checkpoint was not written"),
        ("full", ["waits"], "OSError: Saving "),
    ],
)
def test_the_end_of_the_process_waits_for_the_last_save(
    tmp_path: Path, disk: str, waits: list[str], message: str
) -> None:
    """Where the program waits for it by itself, a failure is raised."""
    path = tmp_path / "file.ckpt"
    finished = run_python(["-c", SAVES, str(path), disk, *waits], fresh=True, check=False)
    assert (finished.code != 0) == bool(waits), finished.output
    if disk == "free":
        assert torch.load(path, weights_only=True)["model"]["weight"].shape == (1000, 1000)
    else:
        assert not path.exists()
        assert message in finished.stderr
        assert "File too large" in finished.stderr
