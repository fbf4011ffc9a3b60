"""Ranks that differ before a step: one error, the same on all ranks, names what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import ZeROStrategy
from lightning_zero.comm import Communicator, PendingSync
from lightning_zero.engine import Engine, rank_check
from lightning_zero.engine import engine as engine_module
from lightning_zero.plan import RECIPES, Settings
from tests.oracle.projects import WAYS, Regression, make_trainer, rows
from tests.oracle.ranks import Pools, RankError
from tests.oracle.sharded import CPU

# -- descriptions ----------------------------------------------------------------------------------


def description(**attributes: Any) -> rank_check.Description:
    return rank_check.describe({"It": attributes})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (0.1, "0.1"),
        (True, "True"),
        ((0.9, 0.999), "(0.9, 0.999)"),
        ({2: "b", 1: "a"}, "{2: 'b', 1: 'a'}"),
        (
            {nn.ReLU, nn.Linear},
            "{torch.nn.modules.activation.ReLU, torch.nn.modules.linear.Linear}",
        ),
        (torch.tensor(0.5), "0.5"),
        (torch.float16, "float16"),
        (torch.device("cuda:3"), "cuda"),
    ],
)
def test_values_have_a_text_that_every_process_shares(value: Any, text: str) -> None:
    assert description(x=value) == {"It": {"x": text}}


@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros((), device="meta"), object()])
def test_values_that_cannot_be_compared_are_left_out(value: Any) -> None:
    assert description(x=value) == {"It": {}}


def test_the_order_of_things_counts_and_that_of_attributes_does_not() -> None:
    digest = rank_check.digest
    assert digest({"a": {}, "b": {}}) != digest({"b": {}, "a": {}})
    assert digest({"a": {"x": "1", "y": "2"}}) == digest({"a": {"y": "2", "x": "1"}})


def test_differences_name_all_ranks() -> None:
    found = rank_check.differences([description(x=1), description(x=2), description(x=2)])
    assert found == ["It has x 1 on rank 0 and 2 on ranks 1, 2"]
    assert rank_check.differences([description(x=1), description(x=1)]) == []
    found = rank_check.differences([description(), description(x=1)])
    assert found == ["It has x missing on rank 0 and 1 on rank 1"]


# -- the engine ------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two linears and a buffer."""

    def __init__(self, *, width: int = 4, is_reversed: bool = False, tie: bool = False) -> None:
        super().__init__()
        for name in ("b", "a") if is_reversed else ("a", "b"):
            setattr(self, name, nn.Linear(4, width) if name == "a" else nn.Linear(width, 4))
        if tie:
            self.b.weight = self.a.weight
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def units(names: tuple[str, ...]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, nn.Linear) and "b" in names


def frozen() -> Model:
    model = Model()
    model.a.weight.requires_grad_(False)
    return model


def with_more(kind: str) -> Model:
    model = Model()
    if kind == "parameter":
        model.c = nn.Linear(4, 4, bias=False)
    elif kind == "buffer":
        model.register_buffer("shift", torch.zeros(5))
    else:
        model.a = model.a.to(torch.float64)
    return model


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    a, *others = model.parameters()
    return torch.optim.SGD([{"params": [a]}, {"params": others}], lr=0.1)


def adopts(make: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> None:
    model = Model()
    (optimizer,) = make(model)
    Engine(model, Settings()).adopt(optimizer)


def engine(model: nn.Module, **settings: Any) -> None:
    Engine(model, Settings(**settings))


def plain_model() -> None:
    engine(Model())


def plain_optimizer() -> None:
    adopts(lambda model: [sgd(model)])


OTHER_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "width": (
        lambda: engine(Model(width=5)),
        "Parameter 'a.weight' has shape (4, 4) on {usual} and (5, 4) on {odd}",
    ),
    "order": (
        lambda: engine(Model(is_reversed=True)),
        "next comes Parameter 'a.weight' on {usual} and Parameter 'b.weight' on {odd}",
    ),
    "frozen": (
        lambda: engine(frozen()),
        "Parameter 'a.weight' has requires_grad True on {usual} and False on {odd}",
    ),
    "tie": (
        lambda: engine(Model(tie=True)),
        "Parameter 'b.weight' has tie None on {usual} and 'a.weight' on {odd}",
    ),
    "extra": (
        lambda: engine(with_more("parameter")),
        "Parameter 'c.weight' exists on {odd} and not on {usual}",
    ),
    "buffer": (
        lambda: engine(with_more("buffer")),
        "Buffer 'shift' has shape (3,) on {usual} and (5,) on {odd}",
    ),
    "dtype": (
        lambda: engine(with_more("dtype")),
        "Parameter 'a.weight' has dtype float32 on {usual} and float64 on {odd}",
    ),
    "stage": (lambda: engine(Model(), stage=2), "strategy has stage 3 on {usual} and 2 on {odd}"),
    "precision": (lambda: engine(Model(), recipe=RECIPES["16-mixed"]), "The strategy has recipe"),
    "units": (
        lambda: engine(Model(), units=units(("b",))),
        "Unit 'a' exists on {odd} and not on {usual}",
    ),
    "refused": (
        lambda: engine(Model(), units=(nn.Conv2d,)),
        "units=Conv2d matches no module of Model.' exists on {odd} and not on {usual}",
    ),
}

OTHER_OPTIMIZERS: dict[str, tuple[Callable[[], Any], str]] = {
    "class": (
        lambda: adopts(lambda model: [torch.optim.AdamW(model.parameters(), lr=0.1)]),
        "Optimizer 0 has class torch.optim.sgd.SGD on {usual} and torch.optim.adamw.AdamW on {odd}",
    ),
    "lr": (
        lambda: adopts(lambda model: [sgd(model, lr=torch.tensor(0.25))]),
        "Group 0 of optimizer 0 has lr 0.1 on {usual} and 0.25 on {odd}",
    ),
    "groups": (
        lambda: adopts(lambda model: [two_groups(model)]),
        "Parameter 'a.bias' of optimizer 0 has group 0 on {usual} and 1 on {odd}",
    ),
    "members": (
        lambda: adopts(lambda model: [sgd(model.b)]),
        "Parameter 'a.bias' of optimizer 0 exists on {usual} and not on {odd}",
    ),
}


def differs(way: str) -> dict[str, str]:
    """The last rank does each thing otherwise; every rank returns its errors."""
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    errors = {}
    for name, (otherwise, _) in (OTHER_MODELS | OTHER_OPTIMIZERS).items():
        comm = Communicator(CPU, **WAYS[way])
        engine_module.Communicator = lambda device, comm=comm, **_: comm  # type: ignore[assignment]
        try:
            usual = plain_optimizer if name in OTHER_OPTIMIZERS else plain_model
            with pytest.raises(RuntimeError, match="The ranks differ") as caught:
                (otherwise if is_odd else usual)()
        finally:
            engine_module.Communicator = Communicator
            comm.control.watchdog.leave()
            comm.transport.release()
        errors[name] = str(caught.value)
    return errors


@pytest.mark.parametrize(("world", "way"), [*((2, way) for way in WAYS), (3, "point to point")])
def test_a_rank_that_differs_is_named_on_all_ranks(ranks: Pools, world: int, way: str) -> None:
    first, *others = ranks(world).run(differs, way)
    assert all(other == first for other in others)
    names = {"usual": "rank 0" if world == 2 else "ranks 0, 1", "odd": f"rank {world - 1}"}
    for name, (_, text) in (OTHER_MODELS | OTHER_OPTIMIZERS).items():
        assert text.format(**names) in first[name]


# -- groups that are added -------------------------------------------------------------------------


def adds_group(kind: str, way: str) -> str:
    """All ranks add a group after a step, the last one otherwise; returns the error."""
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    model = Model()
    sharded = Engine(model, Settings(), Communicator(CPU, **WAYS[way]))
    optimizer = sgd(model.a)
    sharded.adopt(optimizer)
    error = ""
    try:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            if step == 1 and not (is_odd and kind == "none"):
                lr = 0.5 if is_odd and kind == "lr" else 0.25
                optimizer.add_param_group({"params": list(model.b.parameters()), "lr": lr})
            optimizer.step()
    except RuntimeError as caught:
        error = str(caught)
        sharded.reset()
        sharded.comm.control.watchdog.leave()
    else:
        sharded.close()
    return error


@pytest.mark.parametrize("way", WAYS)
def test_groups_that_are_added_are_compared(ranks: Pools, way: str) -> None:
    assert ranks(2).run(adds_group, "equal", way) == ["", ""]
    first, second = ranks(2).run(adds_group, "lr", way)
    assert first == second
    assert "Group 1 of optimizer 0 has lr 0.25 on rank 0 and 0.5 on rank 1" in first


# -- what one rank alone changes -------------------------------------------------------------------


def change(kind: str, who: str, stage: int, way: str) -> Engine:
    """After a step the last rank, or each, changes something."""
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    model = Model()
    settings = Settings(stage=stage, units=units(("b",)))
    sharded = Engine(model, settings, Communicator(CPU, **WAYS[way]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sharded.adopt(optimizer)
    for step in range(4):
        if step == 2 and (is_odd or who == "all"):
            if kind == "lr":
                optimizer.param_groups[0]["lr"] *= 0.5
            elif kind == "parameter":
                model.a.bias.requires_grad_(False)
            else:
                model.get_submodule(kind).requires_grad_(False)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return sharded


def change_alike(kind: str) -> None:
    change(kind, "all", 3, "windows").close()


CHANGES = {
    "lr": "Group 0 of optimizer 0 has lr 0.1 on rank 0 and 0.05 on rank 1",
    "parameter": "Parameter 'a.bias' has requires_grad True on rank 0 and False on rank 1",
    "a": "Parameter 'a.weight' has requires_grad True on rank 0 and False on rank 1",
    "b": "Parameter 'b.weight' has requires_grad True on rank 0 and False on rank 1",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_one_rank_alone_changes_is_named(ranks: Pools, kind: str) -> None:
    turns = [(1, "backend"), *((3, way) for way in WAYS if way != "windows")]  # starts cost most
    for stage, way in ((3, "windows"), turns[list(CHANGES).index(kind) % len(turns)]):
        with pytest.raises(RankError) as caught:
            ranks(2).run(change, kind, "odd", stage, way)
        text = str(caught.value)
        assert "ranks 0, 1 of 2 failed" in text, (stage, way)
        assert text.count("RuntimeError: ") == text.count(CHANGES[kind]) > 0, (stage, way, text)
    ranks(2).run(change_alike, kind)


# -- what it costs ---------------------------------------------------------------------------------


def messages() -> list[list[str]]:
    """The comparisons that equal ranks make while they set up, adopt, and train."""
    seen: list[str] = []
    begin = PendingSync.__init__

    def noting(self: Any, control: Any, sync_point: Any, *args: Any) -> None:
        seen.append(sync_point.name)
        begin(self, control, sync_point, *args)

    PendingSync.__init__ = noting  # type: ignore[method-assign]
    try:
        model = Model()
        sharded = Engine(model, Settings())
        parts = [seen.copy()]
        optimizer = sgd(model)
        seen.clear()
        sharded.adopt(optimizer)
        parts.append(seen.copy())
        seen.clear()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        parts.append(seen.copy())
        sharded.close()
    finally:
        PendingSync.__init__ = begin  # type: ignore[method-assign]
    return [[name for name in part if name == "COMPARE"] for part in parts]


def test_equal_ranks_cost_one_message_and_nothing_in_a_step(ranks: Pools) -> None:
    assert ranks(2).run(messages) == [[["COMPARE"], ["COMPARE"], []]] * 2


# -- the Trainer -----------------------------------------------------------------------------------


def trainer_differs(name: str) -> str:
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    options: dict[str, Any] = {"strategy": ZeROStrategy(3)}
    module = Regression()
    if is_odd and name == "stage":
        options["strategy"] = ZeROStrategy(2)
    elif is_odd and name == "lr":
        module.lr = 0.25
    elif is_odd:
        options |= {"precision": "bf16-mixed"} if name == "precision" else {name: 2}
    with pytest.raises(RuntimeError) as caught:
        make_trainer(**options).fit(module, rows())
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stage", "The strategy has stage 3 on rank 0 and 2 on rank 1"),
        ("lr", "Group 0 of optimizer 0 has lr 0.05 on rank 0 and 0.25 on rank 1"),
        ("precision", "The Trainer has precision '32-true' on rank 0 and 'bf16-mixed' on rank 1"),
        ("gradient_clip_val", "The Trainer has gradient_clip_val None on rank 0 and 2 on rank 1"),
        (
            "accumulate_grad_batches",
            "The Trainer has accumulate_grad_batches 1 on rank 0 and 2 on rank 1",
        ),
    ],
)
def test_trainers_that_differ(ranks: Pools, name: str, text: str) -> None:
    first, second = ranks(2).run(trainer_differs, name)
    assert first == second
    assert text in first


class Plateau(Regression):
    """Follows a metric of which each rank has its own, as ``sync_dist`` was forgotten."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "mine"},
        }

    def on_train_epoch_end(self) -> None:
        grows = self.global_rank == 1
        self.log("mine", float(self.current_epoch if grows else -self.current_epoch))


def follows_its_own_metric() -> tuple[str, int]:
    module = Plateau()
    trainer = make_trainer(3, max_epochs=5)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module, rows())
    return str(caught.value), trainer.global_step


def test_a_scheduler_that_follows_a_metric_of_one_rank_is_named(ranks: Pools) -> None:
    first, second = ranks(2).run(follows_its_own_metric)
    assert first == second
    text, step = first
    assert "Group 0 of optimizer 0 has lr 0.05 on rank 0 and 0.025 on rank 1" in text
    assert step == 8, "no step is made with it"
