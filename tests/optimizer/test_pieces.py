"""The user's own optimizers on pieces: they go on as in a plain loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.optimizer import members, stepper_of
from tests.oracle.parity import backward_of_ranks
from tests.oracle.ranks import Pools
from tests.oracle.sharded import Stack, build, rows, shard, square, whole

WORLD = 2

# -------------------------------------------------------------------------- optimizers in a loop


def plain(name: str) -> dict[str, Tensor]:
    """The parameters after the loop in plain torch, the ranks' losses averaged."""
    model = build(Stack)

    def backward(loss: Callable[[nn.Module, Tensor], Tensor], seed: int) -> None:
        backward_of_ranks(model, [loss(model, rows(rank, seed)) for rank in range(WORLD)])

    LOOPS[name](model, lambda optimizer: None, backward)
    return {key: p.detach().clone() for key, p in model.named_parameters()}


def sharded(name: str, stage: int) -> dict[str, Tensor]:
    model = build(Stack)
    engine = shard(model, stage=stage)

    def backward(loss: Callable[[nn.Module, Tensor], Tensor], seed: int) -> None:
        loss(model, rows(engine.comm.control.rank, seed)).backward()

    LOOPS[name](model, engine.adopt, backward)
    found = whole(engine)
    engine.close()
    return found


def groups(model: nn.Module, adopt: Any, backward: Any) -> None:
    """Weight decay by dimension, a tensor learning rate, a scheduler."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}],
        lr=torch.tensor(0.02),
        foreach=False,
    )
    adopt(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for seed in range(3):
        backward(square, seed)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def zeroed_not_dropped(model: nn.Module, adopt: Any, backward: Any) -> None:
    """A gradient of zeros still decays a weight; none at all does not."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    adopt(optimizer)
    for seed in range(4):
        if seed == 3:
            optimizer.zero_grad()
        if seed != 2:
            backward(square, seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def gradient_scaler(model: nn.Module, adopt: Any, backward: Any) -> None:
    """Torch's own scaler: what one rank finds in its gradients skips the step of all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    adopt(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    for seed in range(4):
        backward(lambda model, x: scaler.scale(square(model, x)), seed)
        if seed == 1:
            model.stem.weight.grad = torch.ones_like(model.stem.weight)
            model.stem.weight.grad[0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0


TORCHS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "AdamW": {"lr": 0.02, "fused": True},
    "Adam": {"lr": 0.02, "amsgrad": True, "foreach": True},
    "Adagrad": {"lr": 0.02, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.02, "centered": True, "momentum": 0.5},
    "Rprop": {"lr": 0.02},
    "ASGD": {"lr": 0.02},
    "NAdam": {"lr": 0.02},
}


def torchs(model: nn.Module, adopt: Any, backward: Any) -> None:
    """Step each parameter by one of torch's optimizers, in turns."""
    parameters = [*model.parameters()]
    optimizers = [
        getattr(torch.optim, name)(parameters[number :: len(TORCHS)], **options)
        for number, (name, options) in enumerate(TORCHS.items())
    ]
    for optimizer in optimizers:
        adopt(optimizer)
    for seed in range(3):
        backward(square, seed)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


LOOPS: dict[str, Any] = {
    "torchs": torchs,
    "groups": groups,
    "zeroed_not_dropped": zeroed_not_dropped,
    "gradient_scaler": gradient_scaler,
}


def at_stages(name: str, stages: tuple[int, ...]) -> list[dict[str, Tensor]]:
    return [sharded(name, stage) for stage in stages]


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_is_that_of_plain_torch(ranks: Pools, name: str) -> None:
    expected = plain(name)
    stages = (1 + list(LOOPS).index(name) % 2, 3)
    for by_stage in ranks(WORLD).run(at_stages, name, stages):
        for stage, found in zip(stages, by_stage, strict=True):
            for key, value in found.items():
                torch.testing.assert_close(
                    value,
                    expected[key],
                    rtol=1e-4,
                    atol=2e-6,
                    msg=lambda m, w=f"stage {stage} {key}": f"{w}: {m}",
                )


# -------------------------------------------------------------------------- objects and errors


def look_at_objects() -> None:
    model = build(Stack)
    engine = shard(model, stage=3)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adagrad(parameters, lr=0.1)
    vars(optimizer)["fast_state"] = optimizer.state  # as in Lookahead
    engine.adopt(optimizer)
    assert vars(optimizer)["fast_state"] is optimizer.state
    held = optimizer.param_groups[0]["params"]
    assert all(one is other for one, other in zip(held, parameters, strict=True))
    pieces = members(optimizer)
    # The state that Adagrad made at once was cut with its parameter.
    sizes = [piece.range.stop - piece.range.start for piece in pieces]
    assert [optimizer.state[piece]["sum"].shape for piece in pieces] == [(size,) for size in sizes]
    for _ in range(2):
        with stepper_of(optimizer).holding_parts():
            assert all(one is other for one, other in zip(held, pieces, strict=True))
            assert set(optimizer.state) == set(pieces)
        assert optimizer.state.get(nn.Parameter(torch.ones(1))) is None
        assert set(optimizer.state) == set(parameters)
        assert [optimizer.state[p]["sum"].shape for p in parameters] == [
            p.shape for p in parameters
        ]
        optimizer.load_state_dict(optimizer.state_dict())
    shards = sum(
        b.layout.shard_numel for unit in engine.sharded.units for b in unit.flat_parameters
    )
    assert sum(sizes) <= shards
    engine.close()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    parameters[0].grad = torch.ones_like(parameters[0])
    with pytest.raises(RuntimeError, match="run that has ended"):
        optimizer.step()
    other = shard(build(Stack), stage=3)
    twice = torch.optim.SGD(other.module.parameters(), lr=0.1)
    other.adopt(twice)
    twice.param_groups.append({**twice.param_groups[0], "params": [other.module.stem.weight]})
    with pytest.raises(ValueError, match="more than one param group of SGD"):
        twice.step()
    other.close()


def test_the_optimizer_stays_the_users(ranks: Pools) -> None:
    ranks(WORLD).run(look_at_objects)
