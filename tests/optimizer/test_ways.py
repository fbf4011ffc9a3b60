"""How optimizers are stepped: by the setting, by the table, or by what a trial of toys shows."""

from __future__ import annotations

import functools
import inspect
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import pytorch_optimizer
import schedulefree
import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import ZeROStrategy
from lightning_zero.fabric import ZeROStrategy as FabricStrategy
from lightning_zero.memory import estimate
from lightning_zero.optimizer import (
    UnitStep,
    Way,
    state_bytes,
    verdict_of,
)
from lightning_zero.optimizer.known import known_class, known_way
from lightning_zero.optimizer.toys import stepping_toys
from lightning_zero.optimizer.watch import reason_against_elements
from tests.oracle.own_optimizers import Own
from tests.oracle.ranks import Pools
from tests.oracle.sharded import shard


def mixed() -> list[nn.Parameter]:
    """Parameters of several shapes."""
    return [nn.Parameter(torch.randn(shape)) for shape in [(8, 6), (8,), (4, 2, 3, 3), ()]]


# -- the table -------------------------------------------------------------------------------------


def of_package(package: Any) -> list[type[Optimizer]]:
    found = (one for one in vars(package).values() if inspect.isclass(one))
    return [one for one in found if issubclass(one, Optimizer) and one is not Optimizer]


ELEMENT_WISE = [cls for cls in of_package(torch.optim) if known_class(cls).way is Way.BY_ELEMENT]  # type: ignore[union-attr]


def test_every_optimizer_of_torch_is_known() -> None:
    assert len(ELEMENT_WISE) == 11
    assert known_class(transformers.Adafactor).way is Way.BY_PARAMETER  # type: ignore[union-attr]


@pytest.mark.parametrize("foreach", [False, True])
def test_the_trial_says_the_same_of_torchs(foreach: bool) -> None:
    for cls in set(ELEMENT_WISE) - {torch.optim.Rprop}:  # which writes by a mask
        optimizer = cls(mixed(), lr=0.01, foreach=foreach)  # type: ignore[call-arg]
        assert reason_against_elements(optimizer, lambda p: p) == ("", True)


def test_a_subclass_with_a_constructor_of_its_own_is_known() -> None:
    class Mine(torch.optim.AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)

    class Clipping(Mine):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
            return super().step(closure)

    assert known_way(Mine(mixed())) is Way.BY_ELEMENT
    assert known_way(Clipping(mixed())) is None
    assert verdict_of(Clipping(mixed())).way is Way.ALL_AT_ONCE
    assert known_way(type("AdamW", (Own,), {})(mixed())) is None  # of another package


def test_options_change_the_way() -> None:
    for option in ("adanorm", "cautious", "stable_adamw"):
        optimizer = pytorch_optimizer.ADOPT(mixed(), **{option: True})
        assert verdict_of(optimizer).way is Way.BY_PARAMETER
    assert verdict_of(pytorch_optimizer.ADOPT(mixed())) == (Way.BY_ELEMENT, "", True)
    make = pytorch_optimizer.ScalableShampoo
    assert verdict_of(make(mixed())).way is Way.BY_PARAMETER
    assert verdict_of(make(mixed(), shape_interpretation=False)).way is Way.ALL_AT_ONCE


OF_PACKAGES: dict[str, tuple[Any, Way]] = {
    "schedulefree": (schedulefree.AdamWScheduleFree, Way.BY_ELEMENT),
    "closures first": (schedulefree.SGDScheduleFreeClosure, Way.BY_ELEMENT),
    "a wrapper": (lambda p: pytorch_optimizer.Lookahead(torch.optim.AdamW(p)), Way.ALL_AT_ONCE),
    "two passes": (
        lambda p: pytorch_optimizer.SAM(p, base_optimizer=torch.optim.SGD, lr=0.1),
        Way.ALL_AT_ONCE,
    ),
}


@pytest.mark.parametrize("name", OF_PACKAGES)
def test_other_packages(name: str) -> None:
    make, way = OF_PACKAGES[name]
    found = verdict_of(make(mixed()))
    assert found.way is way, found.reason
    assert found.waits_for_closure == (name not in ("closures first", "a wrapper", "two passes"))


def test_steps_are_fused_on_cpus_only() -> None:
    """On a device torch's default is another kernel, and not every class has a fused one."""
    for device, fused in (("meta", None), ("cpu", True)):
        parameter = nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.Adagrad([parameter])
        unit_step = UnitStep(optimizer)
        unit_step.begin()
        assert optimizer.param_groups[0]["fused"] is fused
        unit_step.end()
        assert optimizer.param_groups[0]["fused"] is None


# -- the setting -----------------------------------------------------------------------------------


def test_the_setting_decides() -> None:
    optimizer = Normalizing(mixed())
    assert verdict_of(optimizer).way is Way.ALL_AT_ONCE
    for name in ("Normalizing", f"{Normalizing.__module__}.Normalizing"):
        assert verdict_of(optimizer, choices={name: "parameter"}).way is Way.BY_PARAMETER
    around = pytorch_optimizer.Lookahead(torch.optim.AdamW(mixed()))
    with pytest.raises(ValueError, match="Lookahead steps another optimizer inside it"):
        verdict_of(around, choices={"Lookahead": "element"})


def test_an_estimate_follows_the_setting() -> None:
    """All ranks keep the states of what steps all at once."""
    each, all_of_it = (
        estimate(
            nn.Linear(64, 64),
            ZeROStrategy(3, optimizer_step=choice),
            world_size=2,
            optimizer="adamw",
        ).resting["states"]
        for choice in (None, {"AdamW": "model"})
    )
    assert all_of_it > 1.9 * each


@pytest.mark.parametrize("strategy", [ZeROStrategy, FabricStrategy])
def test_the_setting_is_validated(strategy: Any) -> None:
    assert strategy(optimizer_step={"Mine": "parameter"}).settings.optimizer_step
    with pytest.raises(
        ValueError, match=r"Expected optimizer_step to be .*'element', .* got {'Mine': 'rows'}"
    ):
        strategy(optimizer_step={"Mine": "rows"})
    with pytest.raises(ValueError, match="Expected optimizer_step to be names of optimizer"):
        strategy(optimizer_step="parameter")


# -- those that try to hide ------------------------------------------------------------------------


class Normalizing(Own):
    """Divides by the norm of a gradient."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p -= group["lr"] * grad / grad.norm()


class Counting(Own):
    """Is element-wise until its hundredth step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["step"] = 0

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        group = self.param_groups[0]
        group["step"] += 1
        if group["step"] % 100 == 0:
            grad = grad - grad.mean()
        p.add_(grad, alpha=-group["lr"])


class Blind(Own):
    """Has parameters that it does not tell of."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = lambda: self.param_groups[0]["params"]

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        for other in self.all():
            other.sub_(group["lr"])


class Twice(Own):
    def step(self, closure: Any = None) -> None:
        closure()
        closure()


class Stopping(Own):
    """Steps nothing more when it comes to a gradient of zeros, which toys have together."""

    def step(self, closure: Any = None) -> None:
        closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                if p.grad.any():
                    p.data.sub_(p.grad, alpha=0.1)
                else:
                    break


class Ruled(Own):
    """Steps by a rule of ``p``, its gradient and the rate, which a schedule begins at zero."""

    def __init__(self, params: Any, rule: Any) -> None:
        super().__init__(params, lr=0.0)
        self.rule = rule

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        self.rule(p, grad, group["lr"])


def assign(p: Tensor, grad: Tensor, lr: float) -> None:
    p.data = p.data - lr * grad


RULES: list[tuple[Any, str]] = [
    (
        lambda p, grad, lr: p.sub_(
            grad.sign() if grad.norm() > 1 else grad, alpha=lr * (1 + p.norm().item())
        ),
        "mixes the elements",
    ),
    (lambda p, grad, lr: p.sub_(grad[:1] * lr), "(slice)"),
    (
        lambda p, grad, lr: p.mul_(1 - lr if p.ndim > 1 else 1.0).add_(grad, alpha=-lr),
        "differently from the whole",
    ),
    (lambda p, grad, lr: p.add_(grad, alpha=-lr / p.numel()), "differently from the whole"),
    (
        lambda p, grad, lr: p.sub_(grad * (torch.arange(p.numel()).view(p.shape) % 2), alpha=lr),
        "reshapes",
    ),
    (lambda p, grad, lr: p.sub_(float(grad.numpy().sum()), alpha=lr), "on the host (numpy"),
    (lambda p, grad, lr: p.sub_(grad, alpha=lr * random.random()), "differently from the whole"),
    (lambda p, grad, lr: p.sub_(torch.randn_like(grad), alpha=lr), "(randn_like)"),
    (assign, "replaces the data"),
]


class CountingParameters(Own):
    """Counts parameters with gradients, of which ranks have different numbers, as steps."""

    count = 0

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        p.sub_(grad, alpha=group["lr"] / self.count)


class ByLoss(Own):
    def step(self, closure: Any = None) -> None:
        loss = closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=0.1 * loss.item())


HIDING: list[tuple[Any, str]] = [
    *((functools.partial(Ruled, rule=rule), reason) for rule, reason in RULES),
    (Normalizing, "mixes the elements"),
    (Stopping, "mixes the elements of a parameter"),
    (Counting, "mean"),
    (Blind, "outside of its param groups"),
    (Twice, "closure more than once"),
    (CountingParameters, "differently from the whole"),
    (ByLoss, "on meta tensors"),
]


def test_the_trial_is_not_fooled() -> None:
    for make, reason in HIDING:
        found = verdict_of(make(mixed()))
        assert found.way is Way.ALL_AT_ONCE, reason
        assert reason in found.reason
    assert verdict_of(Own(mixed())).way is Way.BY_ELEMENT


def test_sizes_count() -> None:
    class OfLarge(Own):
        def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
            p.sub_(grad / grad.norm() if p.numel() >= 4096 else grad, alpha=group["lr"])

    for size, way in ((4, Way.BY_ELEMENT), (32, Way.ALL_AT_ONCE)):
        assert verdict_of(OfLarge([nn.Parameter(torch.randn(size, size, 3, 3))])).way is way


def test_groups_count() -> None:
    class Ours(Own):
        def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
            norm = [
                group["norm"] for group in self.param_groups if any(p is q for q in group["params"])
            ]
            p.sub_(grad / grad.norm() if norm[0] else grad, alpha=group["lr"])

    for norm, way in ((False, Way.BY_ELEMENT), (True, Way.ALL_AT_ONCE)):
        groups = [{"params": mixed(), "norm": False}, {"params": mixed(), "norm": norm}]
        assert verdict_of(Ours(groups)).way is way


# -- the user's own object -------------------------------------------------------------------------


class Drawing(Own):
    """Draws by every generator."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        drawn = random.random() * float(np.random.rand()) * torch.rand(()).item()
        p.sub_(grad, alpha=group["lr"] * drawn)


def test_the_optimizer_and_all_generators_are_left_alone() -> None:
    for cls in (Own, Drawing):
        params = mixed()
        optimizer = cls(params)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        called = mock.Mock(side_effect=AssertionError)
        optimizer.register_step_pre_hook(called)
        optimizer.step = called  # type: ignore[method-assign]
        before = [p.detach().clone() for p in params]
        drawn = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        verdict_of(optimizer)
        assert all(map(torch.equal, params, before))
        assert torch.equal(torch.get_rng_state(), drawn[0])
        assert (random.getstate(), str(np.random.get_state())) == drawn[1:]
        assert optimizer.state == {}
        assert scheduler.last_epoch == 0
        called.assert_not_called()


def test_generators_of_devices_are_left_alone() -> None:
    """Those of the devices on which toys are stepped."""
    device = mock.Mock(device=torch.device("cuda", 1))
    with mock.patch("torch.random.fork_rng") as fork, stepping_toys([device]):
        pass
    assert [call.args for call in fork.call_args_list] == [(), ([torch.device("cuda", 1)],)]
    assert fork.call_args.kwargs == {"device_type": "cuda"}


@pytest.mark.parametrize("step", [mock.Mock(side_effect=AssertionError), eval("lambda *_: 1 / 0")])
def test_a_class_whose_step_was_replaced_is_not_tried(step: Any) -> None:
    optimizer = torch.optim.AdamW(mixed())
    with mock.patch.object(torch.optim.AdamW, "step", step):
        assert verdict_of(optimizer).way is Way.ALL_AT_ONCE
        with pytest.raises(ValueError, match="a `step` that was replaced"):
            state_bytes(optimizer, optimizer.param_groups[0], torch.float32)
    assert verdict_of(optimizer).way is Way.BY_ELEMENT


# -- all ranks -------------------------------------------------------------------------------------


class FailingOnOne(Own):
    """Runs out of memory, or raises, on one rank."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params)
        self.rank = rank

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if self.rank == 1 and p.numel() not in (8, 64):
            raise MemoryError
        super().update(p, grad, group)


def way_with_one_failing() -> tuple[Any, str]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    engine = shard(model, stage=3)
    optimizer = FailingOnOne(model.parameters(), engine.comm.control.rank)
    engine.adopt(optimizer)
    notice = engine.steps[-1]
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    engine.close()
    return [p.tolist() for p in model.parameters()], notice


def test_ranks_agree_if_the_trial_fails_on_one(ranks: Pools) -> None:
    (first, notice), (second, _) = ranks(2).run(way_with_one_failing)
    assert first == second
    assert "fails to step a toy parameter (MemoryError: )" in notice
    assert 'optimizer_step={"FailingOnOne": "parameter"}' in notice
