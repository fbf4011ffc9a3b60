"""The user's own optimizers on pieces: they go on as in a plain loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


def simple(make: Callable[[Any], Optimizer]) -> Any:
    def loop(model: nn.Module, adopt: Any, backward: Any) -> None:
        optimizer = make(model.parameters())
        adopt(optimizer)
        for seed in range(3):
            backward(square, seed)
            optimizer.step()
            optimizer.zero_grad()

    return loop


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


def one_cycle(model: nn.Module, adopt: Any, backward: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adopt(optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    for seed in range(4):
        backward(square, seed)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def two_optimizers(model: nn.Module, adopt: Any, backward: Any) -> None:
    """They take turns; what one leaves in the other's gradients adds up."""
    first = torch.optim.Adam(model.blocks[0].parameters(), lr=0.02)
    second = torch.optim.SGD(
        [*model.stem.parameters(), *model.blocks[1:].parameters(), *model.head.parameters()],
        lr=0.05,
    )
    adopt(first)
    adopt(second)
    for seed in range(4):
        backward(square, seed)
        optimizer = (first, second)[seed % 2]
        optimizer.step()
        optimizer.zero_grad()


def closure(model: nn.Module, adopt: Any, backward: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    adopt(optimizer)
    for seed in range(3):

        def run(seed: int = seed) -> float:
            optimizer.zero_grad()
            backward(square, seed)
            return 1.0

        result = optimizer.step(run) if seed % 2 else optimizer.step(closure=run)
        assert result == 1.0


def added_group(model: nn.Module, adopt: Any, backward: Any) -> None:
    """The body is frozen at first and joins the optimizer later."""
    for parameter in model.blocks.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.Adam([*model.stem.parameters(), *model.head.parameters()], lr=0.02)
    adopt(optimizer)
    for seed in range(4):
        if seed == 2:
            for parameter in model.blocks.parameters():
                parameter.requires_grad = True
            optimizer.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.01})
        backward(square, seed)
        optimizer.step()
        optimizer.zero_grad()


def frozen_through_groups(model: nn.Module, adopt: Any, backward: Any) -> None:
    """Freeze as `toggle_optimizer` does: it knows only what is in the param groups."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    adopt(optimizer)
    for seed in range(4):
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            parameter.requires_grad = seed % 2 == 0 or number > 4
        backward(square, seed)
        optimizer.step()
        optimizer.zero_grad()
    assert not model.stem.weight.requires_grad


def frozen_through_parameters(model: nn.Module, adopt: Any, backward: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    adopt(optimizer)
    for seed in range(4):
        model.blocks[1].requires_grad_(seed % 2 == 0)
        model.stem.requires_grad_(seed != 1)
        backward(square, seed)
        optimizer.step()
        optimizer.zero_grad()


def skipped_steps(model: nn.Module, adopt: Any, backward: Any) -> None:
    """Gradients add up where no step and no zero_grad comes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    adopt(optimizer)
    for seed in range(5):
        backward(square, seed)
        if seed % 2:
            optimizer.step()
        if seed in (1, 2):
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


def dropped(model: nn.Module, adopt: Any, backward: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    adopt(optimizer)
    for seed in range(3):
        if seed != 1:
            backward(square, seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def edited_gradients(model: nn.Module, adopt: Any, backward: Any) -> None:
    """Gradients in the param groups may be scaled, replaced and dropped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    adopt(optimizer)
    for seed in range(3):
        backward(square, seed)
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            if parameter.grad is None:
                continue
            if number % 3 == 0:
                parameter.grad *= 0.5
            elif number % 3 == 1:
                parameter.grad = parameter.grad * 2
            elif seed == 1:
                parameter.grad = None
        backward(square, seed + 10)
        optimizer.step()
        optimizer.zero_grad()


def between_steps(model: nn.Module, adopt: Any, backward: Any) -> None:
    """SharedState of a step the members of the groups are whole parameters to the user's code."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    adopt(optimizer)
    members = optimizer.param_groups[0]["params"]
    for seed in range(3):
        for member in members:
            member.data.clamp_(-0.2, 0.2)
        backward(square, seed)
        assert [p.shape for p in members] == [p.shape for p in model.parameters()]
        nn.utils.clip_grad_norm_([p for p in members if p.ndim > 1], 0.1)
        nn.utils.clip_grad_value_([p for p in members if p.ndim < 2], 0.01)
        members[0].grad.div_(members[0].grad.norm() + members[0].detach().norm())
        optimizer.step()
        optimizer.zero_grad()


def sharpness_aware(model: nn.Module, adopt: Any, backward: Any) -> None:
    """Go up before the gradient is taken, and back before the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    adopt(optimizer)
    members = optimizer.param_groups[0]["params"]
    for seed in range(3):
        backward(square, seed)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in members if p.grad is not None]).norm()
            before = [p.data.clone() for p in members]
            for member in members:
                if member.grad is not None:
                    member.add_(member.grad * 0.05 / norm)
        optimizer.zero_grad()
        backward(square, seed)
        for member, value in zip(members, before, strict=True):
            member.data = value
        optimizer.step()
        optimizer.zero_grad()


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


optim = torch.optim
LOOPS: dict[str, Any] = {
    "sgd": simple(lambda p: optim.SGD(p, lr=0.05)),
    "nesterov": simple(lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
    "adamw_fused": simple(lambda p: optim.AdamW(p, lr=0.02, fused=True)),
    "adamw_foreach": simple(lambda p: optim.AdamW(p, lr=0.02, foreach=True)),
    "adam_amsgrad": simple(lambda p: optim.Adam(p, lr=0.02, amsgrad=True)),
    "adagrad": simple(lambda p: optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.1)),
    "rmsprop": simple(lambda p: optim.RMSprop(p, lr=0.02, centered=True, momentum=0.5)),
    "rprop": simple(lambda p: optim.Rprop(p, lr=0.02)),
    "asgd": simple(lambda p: optim.ASGD(p, lr=0.02)),
    "nadam": simple(lambda p: optim.NAdam(p, lr=0.02)),
    "groups": groups,
    "one_cycle": one_cycle,
    "two_optimizers": two_optimizers,
    "closure": closure,
    "added_group": added_group,
    "frozen_through_groups": frozen_through_groups,
    "frozen_through_parameters": frozen_through_parameters,
    "skipped_steps": skipped_steps,
    "zeroed_not_dropped": zeroed_not_dropped,
    "dropped": dropped,
    "edited_gradients": edited_gradients,
    "between_steps": between_steps,
    "sharpness_aware": sharpness_aware,
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
            looks = ("__getitem__", "__contains__", "get")
            for look in [getattr(optimizer.state, name) for name in looks]:
                with pytest.raises(RuntimeError, match=r"rank's piece of parameter 'stem\.\w+'"):
                    look(parameters[0])
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
