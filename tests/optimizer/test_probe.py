"""What the probe finds out about optimizers: torch's, other packages', and such as try to hide."""

import functools
import inspect
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.optimizer import Way
from lightning_zero.optimizer.probe import probe

ELEMENTWISE = [
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
OTHERS = {
    "Adafactor": "mixes the elements of a parameter .*_adafactor.py:",
    "LBFGS": "combines values of several parameters .*lbfgs.py:",
    "Muon": "mixes the elements of a parameter .*_muon.py:",
    "SparseAdam": "does not support dense gradients",
}


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 3))]


def check_can_be_cut(optimizer: Any) -> None:
    found = probe(optimizer)
    assert found.way is Way.BY_ELEMENT, found.reason


def mixed() -> list[nn.Parameter]:
    """Parameters of several shapes."""
    return [nn.Parameter(torch.randn(shape)) for shape in [(8, 6), (8,), (4, 2, 3, 3), ()]]


# ------------------------------------------------------------------------------------- torch.optim


def test_every_optimizer_of_torch_is_judged() -> None:
    classes = {
        name
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    }
    assert classes <= {*ELEMENTWISE, *OTHERS}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_may_be_cut(name: str) -> None:
    cls = getattr(torch.optim, name)
    check_can_be_cut(cls(weights(), lr=0.01))
    check_can_be_cut(cls(weights(), lr=0.01, foreach=True))
    check_can_be_cut(cls([{"params": weights()}, {"params": weights(), "weight_decay": 0.1}]))


FUSED = ["Adagrad", "Adam", "AdamW"]
"""Of the others torch has no such kernel, or one that reads memory it has not written."""
KERNELS = [
    *itertools.product([n for n in ELEMENTWISE if n != "Rprop"], ["single", "foreach"]),
    *itertools.product(FUSED, ["fused"]),
]


@pytest.mark.parametrize(("name", "kernel"), KERNELS)
def test_those_known_to_be_elementwise_are_proved_to_be(name: str, kernel: str) -> None:
    # A subclass is not known.
    cls = type("Mine", (getattr(torch.optim, name),), {})
    options = {"foreach": False} if kernel == "single" else {kernel: True}
    verdict = probe(cls(mixed(), lr=0.01, **options))
    assert (verdict.way, verdict.reason) == (Way.BY_ELEMENT, "")


def test_a_known_optimizer_is_not_stepped_in_vain(mocker: Any) -> None:
    step = mocker.spy(torch.optim.AdamW, "step")
    check_can_be_cut(torch.optim.AdamW(weights()))
    step.assert_not_called()


@pytest.mark.parametrize("name", [n for n in OTHERS if hasattr(torch.optim, n)])
def test_others_are_told_with_the_reason(name: str) -> None:
    found = probe(getattr(torch.optim, name)(weights()))
    assert found.way in (Way.BY_PARAMETER, Way.ALL_AT_ONCE)
    assert re.search(OTHERS[name], found.reason), found.reason


# ---------------------------------------------------------------------------------- other packages

VERDICTS = {
    Way.BY_ELEMENT: (
        "accsgd adabelief adabound adamax adamod adan adapnm adopt aggmo diffgrad grams lion"
        " madgrad padam pid pnm qhadam qhm sgdw signsgd tiger yogi schedulefreeadamw"
    ),
    Way.BY_PARAMETER: (
        "adafactor adalite adamp adashift amos came mars nero novograd ranger scalableshampoo"
        " shampoo sgdp sm3 soap stableadamw"
    ),
    Way.ALL_AT_ONCE: (
        "a2grad adai adahessian avagrad dadaptadagrad dadaptadam dadaptadan dadaptlion"
        " dadaptsgd fromage gravity kron lamb lars lbfgs prodigy swats"
    ),
}
LINES = {
    "prodigy": "combines values .*prodigy.py:",
    "dadaptadam": "combines values .*foreach.py:",
    "gravity": "random numbers",
}


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for way, names in VERDICTS.items() for name in names.split()]
)
def test_pytorch_optimizer(name: str, way: Way) -> None:
    found = probe(pytorch_optimizer.load_optimizer(name)(mixed()))
    assert found.way is way, found.reason
    assert bool(found.reason) == (way is not Way.BY_ELEMENT)
    if name in LINES:
        assert re.search(LINES[name], found.reason), found.reason


OF_PACKAGES: dict[str, tuple[Callable[[Any], Any], Way]] = {
    "prodigyopt": (prodigyopt.Prodigy, Way.ALL_AT_ONCE),
    "schedulefree": (schedulefree.AdamWScheduleFree, Way.BY_ELEMENT),
    "schedulefree, plain": (
        functools.partial(schedulefree.SGDScheduleFree, lr=0.1),
        Way.BY_ELEMENT,
    ),
    "transformers": (transformers.Adafactor, Way.BY_PARAMETER),
    "a wrapper": (lambda p: pytorch_optimizer.Lookahead(torch.optim.AdamW(p)), Way.ALL_AT_ONCE),
    "a wrapper of Muon": (
        lambda p: pytorch_optimizer.Lookahead(torch.optim.Muon(p[:1])),
        Way.ALL_AT_ONCE,
    ),
    "two passes": (
        lambda p: pytorch_optimizer.SAM(p, base_optimizer=torch.optim.SGD, lr=0.1),
        Way.ALL_AT_ONCE,
    ),
}


@pytest.mark.parametrize("name", OF_PACKAGES)
def test_other_packages(name: str) -> None:
    make, way = OF_PACKAGES[name]
    found = probe(make(mixed()))
    assert found.way is way, found.reason


# -------------------------------------------------------------------- those that try to hide


class Stepped(Optimizer):
    """Calls :meth:`update` for each parameter with a gradient."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self.kept: Any = None
        self.number = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.number += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"])

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p.add_(grad, alpha=-lr)


class Normalizing(Stepped):
    """Divides by the norm of a gradient."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p -= lr * grad / grad.norm()


class Remembering(Stepped):
    """Keeps the last parameter's gradient for the next one."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        if self.kept is not None and self.kept.shape == grad.shape:
            p.add_(self.kept, alpha=-lr)
        self.kept = grad.clone()


class Counting(Stepped):
    """Is element-wise until its hundredth step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.param_groups[0]["step"] = 0

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        group = self.param_groups[0]
        group["step"] += 1
        if group["step"] % 100 == 0:
            grad = grad - grad.mean()
        p.add_(grad, alpha=-lr)


class DecayingMatrices(Stepped):
    """Asks for a shape."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p.mul_(1 - lr if p.ndim > 1 else 1.0).add_(grad, alpha=-lr)


class ByRows(Stepped):
    """Has a rate by the number of elements."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p.add_(grad, alpha=-lr / p.numel())


class Triangular(Stepped):
    """Treats elements differently, but mixes none."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        mask = torch.arange(p.numel()).view(p.shape) % 2
        p.sub_(grad * mask, alpha=lr)


class Listing(Stepped):
    """Reads values by a way that is no operation."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        first = grad.reshape(-1).tolist()[0]
        p.sub_(torch.full_like(p, first), alpha=lr)


class Arrays(Stepped):
    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p.sub_(float(grad.numpy().sum()), alpha=lr)


class Rolling(Stepped):
    """Draws from a generator that is not torch's."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p.sub_(grad, alpha=lr * random.random())


class Exchanging(Stepped):
    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p.data = p.data - lr * grad


class Blind(Stepped):
    """Has parameters that it does not tell of."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = lambda: self.param_groups[0]["params"]

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        for other in self.all():
            other.sub_(lr)


class Twice(Stepped):
    def step(self, closure: Any = None) -> None:
        closure()
        closure()


class Inventive(Stepped):
    """Uses an operation of its own."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        torch.ops.mkldnn._is_mkldnn_acl_supported()
        p.sub_(grad, alpha=lr)


class Asking(Stepped):
    """Decides by a value of the parameter, and scales by another."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p.sub_(grad.sign() if grad.norm() > 1 else grad, alpha=lr * (1 + p.norm().item()))


class Adding(Stepped):
    """Is scaled by the norm of all gradients, which never meet in a tensor."""

    def step(self, closure: Any = None) -> None:
        closure()
        self.norm = sum(p.grad.norm().item() for p in self.all() if p.grad is not None)
        super().step()

    def all(self) -> Any:
        return self.param_groups[0]["params"]

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        p.sub_(grad, alpha=lr / (1 + self.norm))


class Stopping(Stepped):
    """Steps nothing more when it comes to a gradient of zeros, which toys have together."""

    def step(self, closure: Any = None) -> None:
        closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                if p.grad.any():
                    p.data.sub_(p.grad, alpha=0.1)
                else:
                    break


class Slowing(Stepped):
    """Slows down for good when a gradient explodes; none of the toys' does."""

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        if grad.norm().item() > 1e5:
            self.param_groups[0]["lr"] /= 2
        p.sub_(grad, alpha=lr)


class Noting(Stepped):
    """Notes the largest norm, and does nothing by it yet."""

    largest = 0.0

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        self.largest = max(self.largest, grad.norm().item())
        p.sub_(grad, alpha=lr)


_READ = "which may change how it steps another one"
HIDING = {
    Asking: (Way.BY_PARAMETER, "mixes the elements"),
    Adding: (Way.ALL_AT_ONCE, _READ),
    Stopping: (Way.ALL_AT_ONCE, _READ),
    Slowing: (Way.ALL_AT_ONCE, _READ),
    Noting: (Way.ALL_AT_ONCE, _READ),
    Normalizing: (Way.BY_PARAMETER, "mixes the elements"),
    Remembering: (Way.ALL_AT_ONCE, "combines values"),
    Counting: (Way.BY_PARAMETER, "mean"),
    DecayingMatrices: (Way.BY_PARAMETER, "differently from the whole"),
    ByRows: (Way.BY_PARAMETER, "differently from the whole"),
    Triangular: (Way.BY_PARAMETER, "treats elements differently"),
    Listing: (Way.ALL_AT_ONCE, "on the host (tolist"),
    Arrays: (Way.ALL_AT_ONCE, "on the host (numpy"),
    Rolling: (Way.ALL_AT_ONCE, "random numbers"),
    Exchanging: (Way.ALL_AT_ONCE, "replaces the data"),
    Blind: (Way.ALL_AT_ONCE, "outside of its param groups"),
    Twice: (Way.ALL_AT_ONCE, "closure more than once"),
    Inventive: (Way.ALL_AT_ONCE, "cannot be traced"),
}


@pytest.mark.parametrize("cls", HIDING, ids=lambda cls: cls.__name__)
def test_the_probe_is_not_fooled(cls: Any) -> None:
    way, reason = HIDING[cls]
    found = probe(cls(mixed()))
    assert found.way is way, found.reason
    assert reason in found.reason
    assert probe(Stepped(mixed())).way is Way.BY_ELEMENT


class Showing(Stepped):
    """Writes something into a state dict with its own format."""

    show: Callable[[Tensor, Tensor], Any]

    def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(grad, 0.1)
        p.sub_(self.state[p]["mean"], alpha=lr)

    def state_dict(self) -> Any:
        members = self.param_groups[0]["params"]
        return {"shown": [type(self).show(p, self.state[p]["mean"]) for p in members]}


@pytest.mark.parametrize(
    ("show", "way"),
    [
        (lambda p, mean: mean, Way.ALL_AT_ONCE),
        (lambda p, mean: 2 * mean, Way.ALL_AT_ONCE),
        (lambda p, mean: mean.new_tensor(float("nan")), Way.ALL_AT_ONCE),
        (lambda p, mean: p, Way.NOT_AT_ALL),
        (lambda p, mean: (p - mean).half(), Way.NOT_AT_ALL),
        (lambda p, mean: p.norm().item(), Way.NOT_AT_ALL),
    ],
)
def test_a_state_dict_of_its_own_may_show_all_but_values_of_parameters(
    show: Callable[[Tensor, Tensor], Any], way: Way
) -> None:
    found = probe(type("Showing", (Showing,), {"show": staticmethod(show)})(mixed()))
    assert found.way is way, found.reason
    end = "format" if way is Way.ALL_AT_ONCE else "format, into which it writes .* its parameters"
    assert re.search(f"its own {end}$", found.reason)


class Lookahead(Optimizer):
    """Element-wise, with another signature and state of its own."""

    def __init__(self, params: Any, *, strength: float) -> None:
        super().__init__(params, {"lr": 0.1})
        self.strength = strength

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p].setdefault("slow", p.clone())
                    p -= group["lr"] * p.grad
                    p.lerp_(slow, self.strength)


def test_the_users_arguments_and_groups_count() -> None:
    check_can_be_cut(Lookahead(weights(), strength=0.5))
    # A warm-up starts at zero.
    assert probe(torch.optim.Adafactor(weights(), lr=0.0)).way is Way.BY_PARAMETER
    only_second = [{"params": weights()}, {"params": weights(), "lr": 1.0}]
    assert probe(torch.optim.Adafactor(only_second)).way is Way.BY_PARAMETER

    class Ours(Stepped):
        def update(self, p: Tensor, grad: Tensor, lr: float) -> None:
            norm = [
                group["norm"] for group in self.param_groups if any(p is q for q in group["params"])
            ]
            p.sub_(grad / grad.norm() if norm[0] else grad, alpha=lr)

    groups = [{"params": mixed(), "norm": False}, {"params": mixed(), "norm": False}]
    assert probe(Ours(groups)).way is Way.BY_ELEMENT
    groups = [{"params": mixed(), "norm": False}, {"params": mixed(), "norm": True}]
    assert probe(Ours(groups)).way is Way.BY_PARAMETER


def test_the_probe_leaves_the_optimizer_alone() -> None:
    params = weights()
    optimizer = Lookahead(params, strength=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = params[0].detach().clone()
    drawing = Rolling(weights())
    numbers = torch.get_rng_state(), random.getstate()
    check_can_be_cut(optimizer)
    probe(drawing)
    assert torch.equal(params[0], before)
    assert optimizer.state == {}
    assert calls == []
    assert scheduler.last_epoch == 0
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
