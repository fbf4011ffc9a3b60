"""Optimizers: methods that users replace, states that they ask for, what holds what no copy can.

Where a row says nothing else, its optimizer is Adam: with gradients that are not cleared, or
cleared in part, its steps differ from the usual ones.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map

from tests.oracle.messages import messages
from tests.oracle.own_optimizers import ByNumber, Nested, Own
from tests.oracle.play import Player, case, widen
from tests.oracle.projects import ByHand, Noted, Regression, Trace, rows

FILES = {"offload_optimizer": "nvme", "offload_weights": "nvme"}


class Made(Noted):
    """Has the optimizer that a function makes of it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def adam(m: Any) -> Any:
    return Adam(m.parameters(), 0.05)


# -- steps within steps ----------------------------------------------------------------------------


class Around(SGD):
    """Steps by element, and changes gradients before and weights after its base class's step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        members = [p for group in self.param_groups for p in group["params"]]
        if closure is None:
            for member in members:
                if member.grad is not None:
                    member.grad.mul_(0.5)
        loss = super().step(closure)
        for member in members:
            member.mul_(0.99)
        return loss


class Normalized(SGD):
    """Must see whole gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for member in (p for group in self.param_groups for p in group["params"]):
            if member.grad is not None and closure is None:
                member.grad.div_(member.grad.norm() + 1e-6)
        return super().step(closure)


class Handing(SGD):
    """Hands its closure on in another function."""

    def step(self, closure: Any = None) -> Any:
        return super().step(None if closure is None else lambda: closure())


for kind in (Around, Normalized, Handing):
    for module in (Regression, ByHand):
        case("optimizers", lambda o=kind, m=module: m(0.1, lambda p, lr: o(p, lr, momentum=0.9)),
             f"step_in_step_{kind.__name__}_{module.__name__}", ulps=8, max_epochs=2)  # fmt: skip
widen("step_in_step_Around_Regression")


# -- methods that are replaced, or called through what `self.optimizers()` returns -----------------


def noted(m: Any, method: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Return a function that calls ``method`` and notes the call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        m.notes.append(name or method.__name__)
        return method(*args, **kwargs)

    return call


def clear_every_second_time(m: Any) -> None:
    (optimizer,) = m.trainer.optimizers
    clear = optimizer.zero_grad

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        m.notes.append("sometimes")
        if len(m.notes) % 2:
            clear(*args, **kwargs)

    optimizer.zero_grad = zero_grad


class Halving(SGD):
    """Keeps half of its gradients, as some ways to accumulate do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


class PatchedClass(Made):
    """The class is patched in the run."""

    def on_train_start(self) -> None:
        self.patching = pytest.MonkeyPatch()
        self.patching.setattr(Adam, "zero_grad", lambda *_, **__: self.notes.append("patched"))

    def on_train_end(self) -> None:
        self.patching.undo()


class Dropping(SGD):
    """Drops its gradients itself, at the end of a step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.zero_grad()
        return loss


class Sign(Own):
    """The same, by steps of whole parameters."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.data.sub_(grad / (1 + grad.norm()), alpha=group["lr"])

    def finish(self) -> None:
        self.zero_grad()


class Undropped(Made):
    """Leaves it to the step to drop gradients."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.zero_grad = noted(self, optimizer.zero_grad)
        return optimizer

    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


class Twice(Adam):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        super().step()
        return loss


def by_own_rule(m: Any) -> Any:
    """Go through the param groups without the optimizer's own step."""
    optimizer = adam(m)

    def step(closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(p.grad, alpha=0.1)
        return loss

    optimizer.step = step
    return optimizer


class HooksOfAll(Made):
    """Hooks on the steps of all optimizers are called for the user's own ones only."""

    def configure_optimizers(self) -> Any:
        self.handles = [
            register_optimizer_step_pre_hook(lambda *_: self.notes.append("pre")),
            register_optimizer_step_post_hook(lambda *_: self.notes.append("post")),
        ]
        return type("New", (Adam,), {})(self.parameters(), 0.05)  # of which no rank knows yet

    def on_train_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class Bare(Optimizer):
    """Wraps an optimizer without the constructor of its base, as some do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Counted(Adam):
    """Counts the calls of its methods and hooks."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.calls = collections.Counter[str]()
        self.register_step_pre_hook(lambda *_: self.calls.update(["pre"]))
        self.register_step_post_hook(lambda *_: self.calls.update(["post"]))
        self.register_state_dict_post_hook(lambda *_: self.calls.update(["state"]))

    def step(self, closure: Any = None) -> Any:
        self.calls["step"] += 1
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls["zero_grad"] += 1
        super().zero_grad(set_to_none)


case("optimizers", lambda: Noted(0.05, Counted), "counted_calls", max_epochs=2, accumulate_grad_batches=2, save_at=1, ulps=16,
     worlds=(1, 2), stages=(3,), moments={"on_fit_end": lambda m: sorted(own(m).calls.items())})  # fmt: skip


class ClearsByHand(Made):
    """The optimizer's own ``zero_grad`` is never called so under DDP."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.zero_grad = noted(self, optimizer.zero_grad)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if batch_idx % 2:
            optimizer.zero_grad()
        self.notes.append([p.grad is None for p in self.parameters()])


class CountingModes(schedulefree.AdamWScheduleFree):  # type: ignore[name-defined, misc]
    """Counts the calls of methods that it overrides."""

    def eval(self) -> None:
        self.module.notes.append("eval")
        super().eval()

    def train(self) -> None:
        self.module.notes.append("train")
        super().train()


def counting_modes(m: Any) -> Any:
    optimizer = CountingModes(m.parameters(), 0.05)
    optimizer.__dict__["module"] = m
    return optimizer


def schedule_free(m: Any) -> Any:
    return schedulefree.AdamWScheduleFree(m.parameters(), 0.05)  # type: ignore[attr-defined]


TRAINS, EVALUATES = lambda m, *_: m.optimizers().train(), lambda m, *_: m.optimizers().eval()
MODES = {"on_train_start": TRAINS, "on_validation_start": EVALUATES, "on_validation_end": TRAINS}
FOUR: dict[str, Any] = {"val_check_interval": 2, "limit_val_batches": 1, "ulps": 16,
                        "data": lambda: (rows(), rows(4, seed=1))}  # fmt: skip
REPLACED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "clears_every_second_time": (Made, adam, {"on_train_start": clear_every_second_time}),
    "keeps_half": (Made, lambda m: Halving(m.parameters(), 0.05, momentum=0.5), {}),
    "patched_class": (PatchedClass, adam, {}),
    "drops_in_steps": (Undropped, lambda m: Dropping(m.parameters(), 0.05, momentum=0.5, weight_decay=0.1), {}),
    "drops_in_whole_steps": (Undropped, lambda m: Sign(m.parameters()), {}),
    "stepped_twice": (Made, lambda m: Twice(m.parameters(), 0.05), {}),
    "stepped_by_own_rule": (Made, by_own_rule, {}),
    "hooks_of_all": (HooksOfAll, adam, {}),
    "without_a_constructor": (Made, lambda m: Bare(adam(m)), {}),
    "clears_by_hand": (ClearsByHand, adam, {}),
    "schedule_free": (Made, schedule_free, MODES),
    "schedule_free_subclass": (Made, counting_modes, MODES),
}  # fmt: skip
# Optimizers, their states and checkpoints are sharded alike at every stage: stages take turns.
for number, (name, (module, make, moments)) in enumerate(REPLACED.items()):
    case("optimizers", lambda c=module, m=make: c(m), name, moments=moments, stages=(3 - number % 3,), **FOUR)  # fmt: skip


# -- states that users ask for, and copies of optimizers -------------------------------------------


class OwnDict(Adam):
    """Its state dict has something of its own, made of whole states."""

    def state_dict(self) -> dict[str, Any]:
        norms = [float(state["exp_avg"].norm()) for state in self.state.values()]
        return {**super().state_dict(), "norm": sum(norms)}


class Wrapper(Optimizer):
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


def _in_training(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


STATEFUL: dict[str, Callable[[Any], Any]] = {
    "adam": lambda params: Adam(params, 0.05, amsgrad=True),
    "momentum": lambda params: SGD(params, 0.05, momentum=0.9),
    "without_states": lambda params: SGD(params, 0.05),
    "schedule_free": lambda params: _in_training(schedulefree.AdamWScheduleFree(params, 0.05)),  # type: ignore[attr-defined]
    "by_parameter": lambda params: Adafactor(params, 0.05),
    "own_state_dict": lambda params: OwnDict(params, 0.05),
    "wrapper": Wrapper,
    "in_lists": InLists,
    "in_new_dtypes": InNewDtypes,
}


def own(m: Any) -> Any:
    return m.trainer.optimizers[0]


def asked(m: Any) -> Any:
    return own(m).state_dict(), m.optimizers().state_dict(), [m.lr_schedulers().state_dict()]


def loaded(m: Any) -> Any:
    """Values of the state dict that are changed act on the next steps."""
    state = copy.deepcopy(own(m).state_dict())
    for tensor in tree_leaves(state):
        if isinstance(tensor, Tensor) and tensor.dim():
            tensor.copy_(tensor.double() * 0.25)
    own(m).load_state_dict(state)
    return own(m).state_dict()


def loaded_to_the_wrapper(m: Any) -> Any:
    """Load a state through Lightning's wrapper: the optimizer goes on as before, as under DDP."""
    state = copy.deepcopy(m.optimizers().state_dict())
    state["param_groups"][0]["lr"] = 7.0
    m.optimizers().load_state_dict(state)
    return own(m).state_dict()


def _stepped(optimizer: Any) -> Any:
    """Use a copy of an optimizer, whose parameters are copies, too."""
    members = [p for group in optimizer.param_groups for p in group["params"]]
    for p in members:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [p.detach().clone() for p in members], optimizer.state_dict()


def copied_with_its_module(m: Any) -> Any:
    net, head, optimizer = copy.deepcopy((m.net, m.head, own(m)))
    return _stepped(optimizer), [
        p.detach().clone() for p in (*net.parameters(), *head.parameters())
    ]


def pickled(m: Any) -> Any:
    return _stepped(pickle.loads(pickle.dumps(own(m))))


def copied_schedulers(m: Any) -> Any:
    twin: Any = copy.deepcopy(m.lr_schedulers())
    other: Any = pickle.loads(pickle.dumps(m.lr_schedulers()))
    return _stepped(twin.optimizer), twin.state_dict(), _stepped(other.optimizer)


def looked_up(m: Any) -> Any:
    states, parameters, none = own(m).state, [*m.parameters()], nn.Parameter(torch.ones(1))
    held = [p for group in own(m).param_groups for p in group["params"]]
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


def edited(m: Any) -> Any:
    """Changes to what a lookup returns act on the next steps."""
    states, (first, second, third, *_) = own(m).state, m.parameters()
    for value in states[first].values():
        if isinstance(value, Tensor) and value.dim():
            value.data.mul_(0.5)
    for key, value in states[second].items():
        states[second][key] = value * 0.25 if torch.is_tensor(value) and value.dim() else value
    states.pop(third)
    return own(m).state_dict()["state"], len(states)


def with_own_entries(m: Any) -> Any:
    """As sharpness-aware optimizers keep weights between two passes."""
    for p in m.parameters():
        own(m).state[p]["old"] = p.detach().clone()
    return own(m).state_dict()["state"]


def emptied(m: Any) -> Any:
    own(m).state.clear()
    return own(m).state_dict()


def assigned(m: Any) -> Any:
    states = {p: copy.deepcopy(state) for p, state in own(m).state.items()}
    del states[next(m.parameters())]
    own(m).state = collections.defaultdict(dict, states)


class Grouped(Noted):
    """Two groups and a schedule."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.make = STATEFUL[name]

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        biases = [p for p in self.parameters() if p.dim() == 1]
        optimizer = self.make([{"params": weights}, {"params": biases, "lr": 0.1}])
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


ASKING = {
    "adam": (looked_up, edited, with_own_entries, emptied, assigned, asked, loaded, loaded_to_the_wrapper,
             copied_with_its_module, pickled, copied_schedulers),
    "by_parameter": (loaded, looked_up, edited, assigned, pickled, copied_with_its_module),
    "in_new_dtypes": (loaded,),  # which cannot be pickled
    **dict.fromkeys([*STATEFUL][1:4] + [*STATEFUL][5:8], (loaded, looked_up)),
}  # fmt: skip
ASKED = [(name, ask) for name, asks in ASKING.items() for ask in asks]
for number, (name, ask) in enumerate(ASKED):
    in_files = name == "adam" and ask in (loaded, edited)
    # DDP's later steps change its states.
    after_two = {"on_train_batch_end": lambda m, out, batch, i, a=ask: copy.deepcopy(a(m)) if i == 1 else None}  # fmt: skip
    case("optimizers", lambda n=name: Grouped(n), f"{name}_{ask.__name__}", moments=after_two, max_steps=3, ulps=16,
         stages=(2, 3) if in_files else (3 - number % 3,), settings=({}, FILES) if in_files else ({},))  # fmt: skip


class BeginsWithStates(Made):
    """Starts with an optimizer's states that some run has left."""

    def on_train_start(self) -> None:
        if hasattr(self, "states"):
            own(self).load_state_dict(self.states)


def begins_with_states(make: Any, play: Player) -> Trace:
    """Leave states in a file, and begin with them."""
    path, module = str(play.folder / "saved.ckpt"), BeginsWithStates(make)
    trainer = play.trainer(max_steps=2)
    trainer.fit(BeginsWithStates(make), rows())
    trainer.save_checkpoint(path)
    module.states = torch.load(path)["optimizer_states"][0]
    return play.fit(module, max_steps=2)


for make in (adam, lambda m: Adafactor(m.parameters(), 0.05)):  # by element, and by owner
    case("optimizers", name=f"begins_with_states_{make is adam}", loop=functools.partial(begins_with_states, make), stages=(3,),
         ulps=16)  # fmt: skip


# -- optimizers that hold what no copy can: they step the module's own parameters, all at once ------


def by_weight(weight: Any) -> float:
    return float(1 / (1 + weight.detach().norm() + weight.grad.norm()))


HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], float]]] = {
    "a_lock": (lambda m: threading.Lock(), lambda held, p: 1 - held.locked()),
    "a_module": (lambda m: m, lambda held, p: by_weight(held.head.weight)),
    "a_closure": (lambda m: lambda: m.net.blocks[1].linear.weight, lambda f, p: by_weight(f())),
    "parameters": (lambda m: {p: 1 / p.dim() for p in m.parameters()}, lambda held, p: held[p]),
    "their_ids": (lambda m: {id(m.head.bias): 0.1}, lambda held, p: held.get(id(p), 1.0)),
    "a_table": (lambda m: torch.linspace(0, 1, 9), lambda held, p: float(held[p.numel() % 9])),
}


class Holding(Own):
    """SGD with momentum, at rates that follow from what an attribute holds."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        super().__init__(module.parameters())
        make, self.factor_of = HELD[kind]
        self.held = make(module)

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(grad, 0.5)
        p.sub_(mean, alpha=group["lr"] * self.factor_of(self.held, p))
        grad.mul_(2)  # as under DDP, code after the step sees it


def after_a_step(m: Any, *_: Any) -> Any:
    copied = lambda v: decoded(v).detach().clone() if isinstance(v, Tensor) else v  # noqa: E731
    return [p.grad.clone() for p in m.parameters()], tree_map(copied, m.optimizers().state_dict())


RESUMED: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": 2, "save_at": 1}
for kind in HELD:
    case("optimizers", lambda k=kind: Made(lambda m: Holding(m, k)), f"holds_{kind}", **RESUMED, ulps=16,
         readers=("own", "ddp"), moments={"on_train_batch_end": after_a_step})  # fmt: skip


# -- in files --------------------------------------------------------------------------------------

IN_FILES: dict[str, Any] = {"stages": (3,), "settings": (FILES,), **RESUMED}
case("optimizers", lambda: Made(lambda m: Nested(m.parameters())), "own_in_files", **{**IN_FILES, "limit_train_batches": 4},
     readers=("own", "of ddp", 3), accumulate_grad_batches=2, gradient_clip_val=0.5, ulps=16)  # fmt: skip
# Steps of batches would give other numbers than a step of all.
case(
    "optimizers", lambda: Made(lambda m: ByNumber(m.parameters())), "by_number_in_files", **IN_FILES
)


# -- optimizers that compile their step, or keep states in a tensor class of their own --------------

BLOCK = 4


class InBytes(Tensor):
    """Numbers in 8 bits, with a scale for each block of elements."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=scales.dtype, device=codes.device
        )

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> InBytes:
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def zeros(cls, like: Tensor) -> InBytes:
        scales = torch.zeros(like.numel() // BLOCK, dtype=like.dtype, device=like.device)
        return cls(torch.zeros_like(like, dtype=torch.int8), scales)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            blocks = decoded(args[1]).reshape(-1, BLOCK)
            scales = blocks.abs().amax(1).clamp(min=1e-8) / 127
            args[0].scales.copy_(scales)
            args[0].codes.copy_((blocks / scales[:, None]).round().view(args[0].shape))
            return args[0]
        is_cast = kwargs.get("dtype") not in (None, args[0].dtype)
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default) and not is_cast:
            given = {key: value for key, value in kwargs.items() if key == "device"}
            return cls(func(args[0].codes, **given), func(args[0].scales, **given))
        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


# A file is read with the classes only that torch knows as safe.
torch.serialization.add_safe_globals([InBytes])


def decoded(value: Any) -> Any:
    if not isinstance(value, InBytes):
        return value
    blocks = value.codes.reshape(-1, BLOCK) * value.scales[:, None]
    return blocks.view(value.shape)


def momentum_step(p: Tensor, grad: Tensor, mean: Tensor, lr: float) -> None:
    new = mean.lerp(grad, 0.25)
    mean.copy_(new)
    p.sub_(lr * new)


class Compiled(Own):
    """Compiles its step as a whole."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        step = torch.compile(momentum_step, fullgraph=True, dynamic=False, backend="eager")
        mean = self.state[p].setdefault("mean", self.zeros(p))
        step(p.detach(), grad, mean, group["lr"])

    def zeros(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)


class Wrapped(Compiled):
    """Keeps large states in bytes, and is not compiled."""

    least_numel = 0

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", self.zeros(p))
        momentum_step(p, grad, mean, group["lr"])

    def zeros(self, p: Tensor) -> Tensor:
        is_large = p.numel() >= self.least_numel and p.numel() % BLOCK == 0
        return InBytes.zeros(p) if is_large else torch.zeros_like(p)


class LargeWrapped(Wrapped):
    """As most of its kind, it keeps states in bytes only from some size on."""

    least_numel = 4096


class CompiledAndWrapped(Wrapped):
    """Both."""

    update = Compiled.update


class Large(Made):
    """Has a weight of that size."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__(make)
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(0.05 * torch.randn(128, 132, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x @ self.large[:6], self.large[:6])


def forget(m: Any) -> None:
    torch.compiler.reset()  # a function may be compiled for few sizes and classes


for kind in (Compiled, Wrapped, LargeWrapped, CompiledAndWrapped):
    module = Large if kind is LargeWrapped else Made
    case("optimizers", lambda k=kind, c=module: c(lambda m: k(m.parameters())), f"states_{kind.__name__}", **RESUMED,
         settings=({}, {"optimizer_step": {kind.__name__: "parameter"}}), readers=("own",), ulps=16,
         moments={"on_fit_start": forget, "on_train_batch_end": after_a_step})  # fmt: skip


# -- an optimizer that outlives its run ------------------------------------------------------------


class Keeping(Noted):
    """Returns one optimizer for all runs, and may raise in a step of its first."""

    def __init__(self, make: Any = lambda p: Adam(p, 0.01), fails_at: int = -1) -> None:
        super().__init__()
        self.made, self.fails_at = make(self.parameters()), fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails_at == batch_idx:
            self.fails_at = -1
            raise KeyError("once")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.made


@case("optimizers", stages=(1, 3))
def an_optimizer_of_a_run_that_has_ended(play: Player) -> Trace:
    """On a rank without a state of its own it would step otherwise than on the others."""
    module = Keeping()
    trace = play.fit(module, max_steps=2)
    if play.is_ddp:
        return trace
    module(torch.randn(2, 6)).sum().backward()
    optimizer = module.made
    copies = (functools.partial(use, optimizer) for use in (copy.deepcopy, pickle.dumps))
    for use in (optimizer.step, optimizer.state_dict, *copies):
        with pytest.raises(RuntimeError, match="Adam belongs to a run that has ended"):
            use()
    optimizer.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    for strategy in ("ddp", play.strategy(units=(nn.Linear,), min_num_params=0)):
        with pytest.raises((ValueError, RuntimeError), match="Return it from `configure_optimi"):
            play.fit(module, strategy=strategy)
    return trace


def goes_on(make: Any, fails_at: int, play: Player) -> Trace:
    """Fit again, also after an exception, which leaves several ranks sharded."""
    module = Keeping(make, fails_at)
    with contextlib.suppress(KeyError):
        play.fit(module, max_steps=2)
    module.made.zero_grad()
    for _ in range(1 + (fails_at < 0)):
        trace = play.fit(module, max_steps=2)
    return trace


for name, make in {
    "adam": lambda params: Adam(params, 0.01),
    "by_parameter": lambda params: Adafactor(params, 0.01),
    "lbfgs": lambda params: torch.optim.LBFGS(params, 0.01, max_iter=2),
}.items():
    for fails_at in (-1, 1):
        case("optimizers", name=f"second_fit_{name}_{fails_at}", loop=functools.partial(goes_on, make, fails_at), ulps=64,
             worlds=(1,) if fails_at > 0 else (2,), settings=({}, {}, FILES) if name == "adam" else ({},), stages=(3, 1, 3))  # fmt: skip


# -- blocks of a DeepSpeed configuration -----------------------------------------------------------

WARMUP = {"warmup_max_lr": 0.05, "warmup_num_steps": 2, "warmup_type": "linear"}
BLOCKS = {
    "optimizer": {"type": "Adam", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": WARMUP},
}


class Configured(Regression):
    """Under DDP, has what the blocks ask for; else another optimizer and scheduler."""

    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)
        self.blocks, self.calls = blocks, 0

    def configure_optimizers(self) -> Any:
        self.calls += 1
        is_ddp = not hasattr(self.trainer.strategy, "settings")
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.1)
        if not is_ddp and "optimizer" in self.blocks:
            optimizer = SGD(self.parameters(), lr=3.0)
        if "scheduler" not in self.blocks:
            return optimizer
        last = self.trainer.estimated_stepping_batches

        def share(step: int) -> float:
            count = max(step - 1, 0)
            return count / 2 if count < 2 else (last - count) / (last - 2)

        scheduler: Any = {"scheduler": LambdaLR(optimizer, share), "interval": "step"}
        return [optimizer], [scheduler if is_ddp else LinearLR(optimizer, 0.125)]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(optimizer.param_groups[0]["lr"])


def by_config(blocks: tuple[str, ...], play: Player) -> Trace:
    """Blocks count more than the module, of which a line tells; and the run is resumed."""
    how: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2}
    module, again = Configured(blocks), Configured(blocks)
    config = {name: BLOCKS[name] for name in blocks}
    with messages() as said:
        play.fit(module, strategy=play.strategy(config=config), enable_checkpointing=True,
                 callbacks=[ModelCheckpoint(play.folder, "{epoch}", save_top_k=-1)], **how)  # fmt: skip
    lines = [line for line in said if "is that of the DeepSpeed configuration" in line]
    assert len(lines) == (play.rank == 0 and not play.is_ddp)
    assert module.calls == (play.is_ddp or "optimizer" not in blocks)
    path, strategy = f"{play.folder}/epoch=0.ckpt", play.strategy(config=config)
    trace = play.fit(again, strategy=strategy, ckpt_path=path, **how)
    trace.notes = [module.notes, again.notes]
    return trace


for blocks in (("optimizer", "scheduler"), ("scheduler",), ("optimizer",)):
    case("optimizers", name=f"deepspeed_{'_and_'.join(blocks)}", loop=functools.partial(by_config, blocks), ulps=256)  # fmt: skip
