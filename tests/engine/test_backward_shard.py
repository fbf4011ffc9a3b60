"""A second copy of weights, from which the backward pass gathers in groups of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.plan import RECIPES, Offload, Settings
from tests.oracle.models import MODELS
from tests.oracle.parity import Result, assert_parity
from tests.oracle.ranks import Pools
from tests.oracle.sharded import CPU, sgd, shard, surroundings, train, whole

WORLD, GROUP, WIDTH, NUM_BLOCKS = 4, 2, 16, 4
WAYS: dict[str, dict[str, Any]] = {
    "messages": {"num_backward_shards": GROUP},
    "backend": {"num_backward_shards": GROUP, "direct": False},
    "one each": {"num_backward_shards": 1},
}
Key = tuple[str, int, str, str | None, int | None]
KEYS: list[Key] = [
    ("odd_widths", 2, "32-true", "local", None),
    ("tied_blocks", 2, "16-mixed", None, None),
    ("nested", 2, "bf16-mixed", None, 8),
]


def _train(way: dict[str, Any], keys: list[Key]) -> dict[Key, Result]:
    found = {}
    for key in keys:
        name, accumulate, precision, policy, bits = key
        comm = Communicator(CPU, **({"reads_peers": False} if bits else {}), **way)
        found[key] = train(
            name, sgd, accumulate=accumulate, precision=precision, policy=policy, steps=2,
            clip_norm=0.5, units="leaves", gather_bits=bits, comm=comm,
        )  # fmt: skip
        assert ("backward" in comm.transports) is ("num_backward_shards" in way)
    return found


@pytest.mark.parametrize("name", list(WAYS))
def test_every_bit_is_that_of_plain_sharding(ranks: Pools, name: str) -> None:
    # Without groups ranks read each other's memory, and the backend adds up in its own order.
    way = WAYS[name]
    keys = KEYS if name == "messages" else KEYS[:1]
    plain = ranks(WORLD).run(_train, {"direct": False} if "direct" in way else {}, keys)
    found = ranks(WORLD).run(_train, way, keys)
    for key in keys:
        both = [Result.over_ranks([of_rank[key] for of_rank in run]) for run in (found, plain)]
        assert_parity(*both, ulps=0)


class Body(nn.Module):
    """Blocks that may be recomputed, or be called twice."""

    def __init__(self, *, recomputes: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)])
        self.recomputes, self.twice = recomputes, twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks, *(self.blocks[:1] if self.twice else ())):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            x = torch.tanh(x)
        return x.square().sum()


def _engine(way: dict[str, Any], precision: str = "32-true", **more: Any) -> Engine:
    torch.manual_seed(0)
    comm = Communicator(CPU, **(way or {"reads_peers": False}))
    engine = shard(Body(**more), comm=comm, recipe=RECIPES[precision])
    engine.adopt(sgd(engine.module))
    return engine


def _batch(engine: Engine, number: int = 0) -> Tensor:
    torch.manual_seed(100 * number + engine.comm.control.rank)
    return torch.randn(3, WIDTH)


def _loss(engine: Engine, precision: str = "32-true", number: int = 0) -> Tensor:
    with engine.step() as watch, surroundings(precision):
        watch(loss := engine.module(_batch(engine, number)))
    return loss


def _step(engine: Engine) -> None:
    engine.sharded.optimizers[0].step()
    engine.sharded.optimizers[0].zero_grad()


def _sent(precision: str, accumulate: int, more: dict[str, bool]) -> dict[str, Any]:
    """Elements by unit and verb in the second step, and the bytes that are held in it."""
    engine = _engine(WAYS["messages"], precision, **more)
    for _ in range(2):
        for micro in range(accumulate):
            loss = _loss(engine, precision)
            held = engine.sharded.memory()["gathered"]
            with engine.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                loss.backward()
        _step(engine)
    found = {
        "sent": {key: sent.elements for key, sent in engine.comm.traffic.items()},
        "numel": {
            u.label: sum(f.layout.numel for f in u.flat_parameters) for u in engine.sharded.units
        },
        "itemsize": engine.sharded.flats[0].plan.weight.dtype.itemsize,
        "held": (held, engine.sharded.memory()["gathered"]),
    }
    engine.close()
    return found


CASES: list[tuple[str, int, dict[str, bool]]] = [
    ("32-true", 1, {}),
    ("bf16-mixed", 3, {}),
    ("32-true", 1, {"recomputes": True}),
]


@pytest.mark.parametrize(("precision", "accumulate", "more"), CASES, ids=str)
def test_bytes_and_traffic_of_each_axis_are_the_formula(
    ranks: Pools, precision: str, accumulate: int, more: dict[str, bool]
) -> None:
    for found in ranks(WORLD).run(_sent, precision, accumulate, more):
        numel, sent = found["numel"], found["sent"]
        *inner, last = [f"blocks.{number}" for number in range(NUM_BLOCKS)]
        for unit in (*inner, last, "root"):
            assert sent[unit, "gather"] == accumulate * numel[unit] * (WORLD - 1) // WORLD
            # The last block's backward comes next, and the root stays whole.
            in_group = accumulate * numel[unit] * (GROUP - 1) // GROUP if unit in inner else None
            assert sent.get((unit, "backward gather")) == in_group
        in_step, at_rest = found["held"]
        kept = sum(numel[unit] for unit in inner) // GROUP
        assert in_step == (kept + numel[last] + numel["root"]) * found["itemsize"]
        assert at_rest == 0


def _edit(engine: Engine) -> None:
    block = engine.module.blocks[1]
    with engine.sharded.gathered(block.parameters(), modify=True):
        block.weight.data.mul_(2.0)  # of which autograd has no notice


def _touch(engine: Engine) -> None:
    engine.module.blocks[1].weight.data.mul_(2.0)


def _optimizer(engine: Engine) -> None:
    """A step of one block on what an earlier backward pass has left."""
    optimizer = sgd(engine.module.blocks[1])
    engine.adopt(optimizer)
    optimizer.step()


def _write(engine: Engine) -> None:
    """A new value for weights that are not in memory."""
    with torch.no_grad():
        engine.module.blocks[1].weight.copy_(torch.eye(WIDTH))


def _validate(engine: Engine) -> None:
    with torch.no_grad():
        engine.module(_batch(engine, 7))


def _forward_again(engine: Engine) -> None:
    engine.module(_batch(engine, 8))


BETWEEN: dict[str, Callable[[Engine], None]] = {
    "edit": _edit,
    "touch": _touch,
    "optimizer": _optimizer,
    "write": _write,
    "validate": _validate,
    "forward": _forward_again,
}


def _sent_in_groups(engine: Engine) -> int:
    """Elements since the begin."""
    transport = engine.comm.transports.get("backward")
    return 0 if transport is None else transport.ledger.elements.total()


def _changed_between(way: dict[str, Any], precision: str) -> dict[str, Any]:
    """Masters and traffic when something happens between a forward and its backward."""
    found = {}
    for name, between in BETWEEN.items():
        engine = _engine(way, precision)
        sent = []
        for number in range(3):
            loss = _loss(engine, precision, number)
            if number == 1:
                with surroundings(precision):
                    between(engine)
            loss.backward(retain_graph=number == 2)
            sent.append(_sent_in_groups(engine))
            if number == 2:
                loss.backward()
            if name != "optimizer" or number > 0:
                _step(engine)
        found[name] = ({k: v.tolist() for k, v in whole(engine).items()}, sent)
        engine.close()
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_changes_between_forward_and_backward_is_seen(ranks: Pools, precision: str) -> None:
    plain = ranks(WORLD).run(_changed_between, {}, precision)[0]
    for found in ranks(WORLD).run(_changed_between, WAYS["messages"], precision):
        for name in BETWEEN:
            masters, (first, second, third) = found[name]
            assert masters == plain[name][0], name
            # What may have changed comes from all ranks, and so does what was forgotten.
            assert (first < second) is (name in ("touch", "forward")), name
            assert 0 < first <= second < third, name


def _in_forward(way: dict[str, Any], what: str) -> dict[str, Any]:
    """Masters after steps in whose forward every rank changes weights of its own accord."""
    engine = _engine(way, twice=what == "twice")
    module = engine.module

    def noise(block: nn.Module, args: Any) -> None:
        block.weight.data.add_(0.01 * (1 + engine.comm.control.rank))  # type: ignore[operator]

    if what == "noise":
        module.blocks[1].register_forward_pre_hook(noise)
    for number in range(3):
        _loss(engine, number=number).backward()
        if number == 1:
            _loss(engine, number=9)  # nobody goes backward from it
        _step(engine)
    found = {name: value.tolist() for name, value in whole(engine).items()}
    engine.close()
    return found


@pytest.mark.parametrize("what", ["noise", "twice"])
def test_what_a_forward_does_is_seen(ranks: Pools, what: str) -> None:
    plain = ranks(WORLD).run(_in_forward, {}, what)[0]
    for found in ranks(WORLD).run(_in_forward, WAYS["messages"], what):
        assert found == plain


def _nested_case(way: dict[str, Any]) -> list[float]:
    engine = shard(MODELS["nested"].build(), comm=Communicator(CPU, **way), units="nested")
    with engine.step() as watch:
        watch(loss := MODELS["nested"].loss(engine.module, MODELS["nested"].batch(4, 0)))
    loss.backward()
    grads = [engine.sharded.full_grad(p) for p in engine.module.parameters()]
    engine.close()
    return [value for grad in grads if grad is not None for value in grad.flatten().tolist()]


def test_units_within_units(ranks: Pools) -> None:
    plain = ranks(WORLD).run(_nested_case, {})[0]
    for found in ranks(WORLD).run(_nested_case, WAYS["messages"]):
        assert found == plain


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stage": 2}, "stage=2 keeps whole weights from forward to backward"),
        ({"reshard_after_forward": False}, "reshard_after_forward=False keeps whole weights"),
        ({"shard": 4}, "shard=4 already gathers weights within a copy"),
        ({"offload": Offload("nvme", "nvme")}, "while offload_weights='nvme' moves the first"),
        ({"backward_shard": 0}, "Expected backward_shard=None, 'node' or a number of ranks"),
        ({"backward_shard": "all"}, "Expected backward_shard=None, 'node' or a number of ranks"),
    ],
)
def test_what_contradicts_it_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**{"backward_shard": 2, **more})


def test_groups_of_all_ranks_are_plain_sharding() -> None:
    assert Settings(backward_shard="node").division(4, 4)["num_backward_shards"] == 4
    assert Communicator(CPU, num_backward_shards=1).mesh.backward is None
    with pytest.raises(ValueError, match="backward_shard=3 makes groups of 3 ranks"):
        Settings(backward_shard=3).division(4)
    with pytest.raises(ValueError, match="backward_shard='node' needs the number"):
        Settings(backward_shard="node").division(4)


def _joined(where: str, **way: Any) -> list[Tensor]:
    """Gradients of a forward, behind which ranks run different numbers of others together."""
    torch.manual_seed(0)
    model, x = Body(), torch.ones(2, WIDTH)
    engine = shard(model, units="leaves", comm=Communicator(CPU, reads_peers=False, **way))
    times = 2 * (engine.comm.control.rank % 2)
    if where == "within a step":
        with engine.step() as watch:
            watch(loss := model(x).sum())
            with engine.join():
                for _ in range(times):
                    model(x)
    else:
        loss = model(x).sum()
        with torch.no_grad(), engine.join():
            for _ in range(times):
                model(x)
    loss.backward()
    grads = [engine.sharded.full_grad(parameter) for parameter in model.parameters()]
    engine.close()
    return [grad.clone() for grad in grads if grad is not None]


@pytest.mark.parametrize("where", ["within a step", "before the backward pass"])
def test_ranks_that_help_in_a_join_gather_as_the_others(ranks: Pools, where: str) -> None:
    plain = ranks(WORLD).run(_joined, where)
    found = ranks(WORLD).run(_joined, where, num_backward_shards=GROUP)
    for one, other in zip(plain, found, strict=True):
        assert len(one) == len(other) == 2 * (1 + NUM_BLOCKS)
        assert all(map(torch.equal, one, other))
