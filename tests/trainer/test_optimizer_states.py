"""Optimizers' states that users ask for in hooks, and copies of optimizers, are those under DDP."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from lightning_zero import ZeROStrategy
from tests.oracle.by_trainer import Rows, assert_close, make_trainer, world
from tests.oracle.own_optimizers import Layers, Own
from tests.oracle.ranks import Pools, RankError


class Module(Layers):
    """Asks for states after its second step, and trains on.

    Attributes:
        make: Makes the optimizer.
        ask: Returns what is compared.
        seen: What it returned.
    """

    def __init__(self, make: Callable[..., Optimizer], ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make, self.ask = make, ask
        self.seen: Any = None

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        biases = [p for p in self.parameters() if p.dim() == 1]
        optimizer = self.make([{"params": weights}, {"params": biases, "lr": 0.1}])
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.seen = copy.deepcopy(self.ask(self))  # DDP's later steps change its states


class Nested(Adam):
    """Its state dict has something of its own, made of whole states."""

    def state_dict(self) -> dict[str, Any]:
        norms = [float(state["exp_avg"].norm()) for state in self.state.values()]
        return {**super().state_dict(), "norm": sum(norms)}


class Around(Optimizer):
    """Wraps an optimizer, which has the states, and returns them in a form of its own."""

    def __init__(self, params: Any) -> None:
        self.inner = Adam(params, 0.05)
        super().__init__(self.inner.param_groups, {})
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"wrapped": self.inner.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["wrapped"])
        self.state, self.param_groups = self.inner.state, self.inner.param_groups


class InLists(Own):
    """Keeps lists of tensors, and entries that belong to no parameter."""

    def finish(self) -> None:
        self.state["of all"] = {"steps": 1}  # type: ignore[index]

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        means = self.state[p].setdefault("means", [torch.zeros_like(p), torch.zeros_like(p)])
        for mean, decay in zip(means, (0.5, 0.1), strict=True):
            mean.lerp_(grad, decay)
        p.sub_(means[0] + means[1], alpha=group["lr"])


class InNewDtypes(Own):
    """Keeps its states in dtypes that torch's pickles do not read back."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        rate = state.setdefault("rate", torch.zeros_like(p, dtype=torch.float8_e4m3fn))
        steps = state.setdefault("steps", torch.zeros_like(p, dtype=torch.uint16))
        rate.copy_(rate.float() + 0.5)
        steps.copy_(steps.int() + 1)
        p.sub_(grad * rate.float(), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda params: Adam(params, 0.05, amsgrad=True),
    "momentum": lambda params: SGD(params, 0.05, momentum=0.9),
    "without states": lambda params: SGD(params, 0.05),
    "schedule-free": lambda params: _trained(schedulefree.AdamWScheduleFree(params, 0.05)),  # type: ignore[attr-defined]
    "by parameter": lambda params: Adafactor(params, 0.05),
    "own state dict": lambda params: Nested(params, 0.05),
    "a wrapper": Around,
    "in lists": InLists,
    "in new dtypes": InNewDtypes,
}


def _trained(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


# -- what users ask for ----------------------------------------------------------------------------


def own(module: Any) -> Optimizer:
    return module.trainer.optimizers[0]  # type: ignore[no-any-return]


def asked(module: Any) -> Any:
    schedulers = [module.lr_schedulers().state_dict()]
    return own(module).state_dict(), module.optimizers().state_dict(), schedulers


def loaded(module: Any) -> Any:
    """Values of the state dict that are changed act on the next steps."""
    state = copy.deepcopy(own(module).state_dict())
    for tensor in torch.utils._pytree.tree_leaves(state):
        if isinstance(tensor, Tensor) and tensor.dim():
            tensor.copy_(tensor.double() * 0.25)
    own(module).load_state_dict(state)
    return own(module).state_dict()


def loaded_to_the_wrapper(module: Any) -> Any:
    """What Lightning's wrapper loads does not reach the optimizer, which goes on as before."""
    wrapper = module.optimizers()
    state = copy.deepcopy(wrapper.state_dict())
    state["param_groups"][0]["lr"] = 7.0
    wrapper.load_state_dict(state)
    return own(module).state_dict()


def _stepped(optimizer: Any) -> Any:
    """Use a copy of an optimizer, whose parameters are copies, too."""
    members = [p for group in optimizer.param_groups for p in group["params"]]
    for p in members:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [p.detach().clone() for p in members], optimizer.state_dict()


def copied_with_its_module(module: Any) -> Any:
    layers, optimizer = copy.deepcopy((module.layers, own(module)))
    stepped = _stepped(optimizer)
    return stepped, [p.detach().clone() for p in layers.parameters()]


def pickled(module: Any) -> Any:
    return _stepped(pickle.loads(pickle.dumps(own(module))))


def copied_schedulers(module: Any) -> Any:
    twin: Any = copy.deepcopy(module.lr_schedulers())
    other: Any = pickle.loads(pickle.dumps(module.lr_schedulers()))
    return _stepped(twin.optimizer), twin.state_dict(), _stepped(other.optimizer)


def looked_up(module: Any) -> Any:
    states, parameters = own(module).state, [*module.parameters()]
    none = nn.Parameter(torch.ones(1))
    held = [p for group in own(module).param_groups for p in group["params"]]
    assert all(any(p is q for q in held) for p in parameters)
    return (
        [states[p] for p in parameters if p in states],
        [*states.values()],
        [[p is key for key in states] for p in held],
        [len(states), bool(states), states.get(none), none in states],
        [state for key, state in states.items() if not isinstance(key, Tensor)],
        copy.deepcopy(states[parameters[0]]),
        [*pickle.loads(pickle.dumps(states)).values()],
    )


def edited(module: Any) -> Any:
    """Changes to what a lookup returns act on the next steps."""
    states, (first, second, third, *_) = own(module).state, module.parameters()
    for value in states[first].values():
        if isinstance(value, Tensor) and value.dim():
            value.data.mul_(0.5)
    for key, value in states[second].items():
        states[second][key] = value * 0.25 if torch.is_tensor(value) and value.dim() else value
    states.pop(third)
    return own(module).state_dict()["state"], len(states)


def with_own_entries(module: Any) -> Any:
    """As sharpness-aware optimizers keep weights between two passes."""
    for p in module.parameters():
        own(module).state[p]["old"] = p.detach().clone()
    return own(module).state_dict()["state"]


def emptied(module: Any) -> Any:
    own(module).state.clear()
    return own(module).state_dict()


def assigned(module: Any) -> Any:
    states = {p: copy.deepcopy(state) for p, state in own(module).state.items()}
    del states[next(module.parameters())]
    own(module).state = collections.defaultdict(dict, states)


ASKING = [
    looked_up,
    edited,
    with_own_entries,
    emptied,
    assigned,
    asked,
    loaded,
    loaded_to_the_wrapper,
    copied_with_its_module,
    pickled,
    copied_schedulers,
]
# Masters and states are sharded alike at every stage, so stages take turns.
CASES = {("adam", ask): 3 - number % 3 for number, ask in enumerate(ASKING)}
CASES |= {
    ("by parameter", ask): 1 + number % 3
    for number, ask in enumerate((edited, assigned, pickled, copied_with_its_module))
}
CASES |= {
    (name, ask): 3 - (number + n) % 3
    for n, name in enumerate(OPTIMIZERS)
    for number, ask in enumerate((loaded, looked_up))
}
del CASES["in new dtypes", looked_up]  # it pickles them


def fit(strategy: Any, name: str, ask: Callable[[Any], Any]) -> Any:
    module = Module(OPTIMIZERS[name], ask)
    options: dict[str, Any] = {"max_steps": 3, "enable_checkpointing": False}
    trainer = make_trainer(world(), strategy, "/nowhere", **options)
    trainer.fit(module, Rows())
    return module.seen, [p.detach().clone() for p in module.parameters()]


def under(stage: int, name: str, ask: Callable[[Any], Any]) -> None:
    strategy = ZeROStrategy(stage, units=(nn.Linear,), min_num_params=0)
    assert_close(fit(strategy, name, ask), fit("ddp", name, ask), f"stage {stage}")


@pytest.mark.parametrize(("name", "ask"), CASES)
def test_states_are_those_under_ddp(ranks: Pools, name: str, ask: Callable[[Any], Any]) -> None:
    ranks(2).run(under, CASES[name, ask], name, ask)


def offloaded(folder: str, ask: Callable[[Any], Any]) -> None:
    expected = fit("ddp", "adam", ask)
    homes: Any = {"offload_optimizer": "nvme", "offload_weights": "nvme", "offload_path": folder}
    strategy = ZeROStrategy(3, units=(nn.Linear,), min_num_params=0, **homes)
    assert_close(fit(strategy, "adam", ask), expected, "offloaded")


@pytest.mark.parametrize("ask", [loaded, edited])
def test_states_in_files(ranks: Pools, tmp_path: Path, ask: Callable[[Any], Any]) -> None:
    ranks(2).run(offloaded, str(tmp_path), ask)


def all_of(optimizer: Any) -> Any:
    return optimizer.state_dict()


def one_of(optimizer: Any) -> Any:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def number_of(optimizer: Any) -> Any:
    return len(optimizer.state)


def alone(name: str, ask: Callable[[Any], Any]) -> None:
    fit(ZeROStrategy(1), name, lambda module: module.global_rank or ask(own(module)))


@pytest.mark.parametrize(
    ("name", "ask"),
    [("by parameter", all_of), ("adam", one_of), ("adam", number_of)],
)
def test_a_rank_that_asks_alone_is_named(ranks: Pools, name: str, ask: Any) -> None:
    kind = {"adam": "Adam", "by parameter": "Adafactor"}[name]
    with pytest.raises(RankError) as error:
        ranks(2).run(alone, name, ask)
    assert f"the whole states of an optimizer of {kind}" in str(error.value)
