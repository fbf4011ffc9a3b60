"""Optimizers: methods that users replace, states that they ask for, what mixes elements or cannot be copied.

Where a row says nothing else, its optimizer is Adam: with gradients that are not cleared, or
cleared in part, its steps differ from the usual ones. Of the optimizers in the packages,
`test_the_page_of_optimizers_is_true` steps many more.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import errno
import fcntl
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.optimizer import Way, staging
from lightning_zero.optimizer.known import known_class
from tests.cases import FILES, SAVED, STATES, scheduled, user
from tests.oracle.eight_bits import BLOCK, EightBits, decoded
from tests.oracle.messages import messages
from tests.oracle.own_optimizers import OWN, ByNumber, Nested, Own
from tests.oracle.play import WIDE, Player, by_trainer, case, widen
from tests.oracle.projects import ByHand, Noted, Regression, Trace, rows


def of(kind: Callable[..., Any], lr: float = 0.05, **options: Any) -> Callable[[Any], Any]:
    """Return how an optimizer is made of a module."""
    return lambda m: kind(m.parameters(), lr=lr, **options)


def made(make: Callable[[Any], Any], base: Any = Noted, **members: Any) -> Any:
    """Return a class of module with the optimizer that a function makes of it."""
    return user(base, configure_optimizers=lambda m: make(m), **members)


def own(m: Any) -> Any:
    return m.trainer.optimizers[0]


# -- steps within steps ----------------------------------------------------------------------------


class Around(SGD):
    """Steps by element, and changes gradients before and weights after its base class's step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        members = [p for group in self.param_groups for p in group["params"]]
        for member in members:
            if closure is None and member.grad is not None:
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
        case("optimizers", made(of(kind, 0.1, momentum=0.9), module), f"step_in_step_{kind.__name__}_{module.__name__}", ulps=8,
             max_epochs=2)  # fmt: skip
widen("step_in_step_Around_Regression")


# -- methods that are replaced, or called through what `self.optimizers()` returns -----------------

adam = of(Adam)


def noted(m: Any, optimizer: Any, every: int = 1) -> Any:
    """Replace `zero_grad` by a function that notes its calls, of which so many clear."""
    clear = optimizer.zero_grad

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        m.notes.append("zero_grad")
        if len(m.notes) % every == 0:
            clear(*args, **kwargs)

    optimizer.zero_grad = zero_grad
    return optimizer


class Halving(SGD):
    """Keeps half of its gradients, as some ways to accumulate do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


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


class Patched(Noted):
    """The class is patched in the run; hooks on all steps are called for the user's own ones only."""

    def configure_optimizers(self) -> Any:
        self.undo = pytest.MonkeyPatch()
        self.handles = [
            register_optimizer_step_pre_hook(lambda *_: self.notes.append("pre")),
            register_optimizer_step_post_hook(lambda *_: self.notes.append("post")),
        ]
        return type("New", (Adam,), {})(self.parameters(), 0.05)  # of which no rank knows yet

    def on_train_start(self) -> None:
        self.undo.setattr(Adam, "zero_grad", lambda *_, **__: self.notes.append("patched"))

    def on_train_end(self) -> None:
        self.undo.undo()
        for handle in self.handles:
            handle.remove()


def counting(kind: Any, *names: str) -> Callable[[Any], Any]:
    """Return how an optimizer is made that counts the calls of its methods and hooks."""

    def counted(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return getattr(kind, name)(self, *args, **kwargs)

        return call

    def make(m: Any) -> Any:
        optimizer = cls(m.parameters(), lr=0.05)
        optimizer.calls = collections.Counter()
        for hook in ("step_pre", "step_post", "state_dict_post"):
            count = lambda *_, h=hook: optimizer.calls.update([h])  # noqa: E731
            getattr(optimizer, f"register_{hook}_hook")(count)
        return optimizer

    cls = type("Counting", (kind,), {name: counted(name) for name in names})
    return make


CALLS = {"on_fit_end": lambda m: sorted(own(m).calls.items())}
case("optimizers", made(counting(Adam, "step", "zero_grad")), "counted_calls", max_epochs=2, accumulate_grad_batches=2, save_at=1,
     ulps=16, worlds=(1, 2), stages=(3,), moments=CALLS)  # fmt: skip


def clear_by_hand(m: Any, batch: Any, batch_idx: int) -> None:
    """Under DDP the optimizer's own ``zero_grad`` is never called by this."""
    optimizer: Any = m.optimizers()
    m.manual_backward(m.loss(batch))
    optimizer.step()
    if batch_idx % 2:
        optimizer.zero_grad()
    m.notes.append([p.grad is None for p in m.parameters()])


def decay_by_zeros(m: Any, batch: Any, batch_idx: int) -> None:
    """A gradient of zeros still decays a weight; none at all does not."""
    optimizer: Any = m.optimizers()
    if batch_idx == 3:
        optimizer.zero_grad()
    if batch_idx != 2:
        m.manual_backward(m.loss(batch))
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def scale_by_hand(m: Any, batch: Any, batch_idx: int) -> None:
    """Torch's own scaler: what one rank finds in its gradients skips the step of all."""
    if not batch_idx:
        m.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    m.manual_backward(m.scaler.scale(m.loss(batch)))
    if batch_idx == 1:
        m.head.weight.grad = torch.ones_like(m.head.weight)
        m.head.weight.grad[0] = torch.inf
    m.scaler.unscale_(own(m))
    m.scaler.step(own(m))
    m.scaler.update()
    own(m).zero_grad()
    m.notes.append(m.scaler.get_scale())


TRAINS, EVALUATES = lambda m, *_: m.optimizers().train(), lambda m, *_: m.optimizers().eval()
MODES = {"on_train_start": TRAINS, "on_validation_start": EVALUATES, "on_validation_end": TRAINS, **CALLS}  # fmt: skip
KEPT = {"optimizer_zero_grad": lambda *_: None}  # the step itself drops gradients
DROPPING = of(Dropping, momentum=0.5, weight_decay=0.1)
REPLACED: dict[str, tuple[Any, dict[str, Any]]] = {
    "clears_every_second_time": (made(adam), {"on_train_start": lambda m: noted(m, own(m), 2) and None}),
    "keeps_half": (made(of(Halving, momentum=0.5)), {}),
    "drops_in_steps": (made(lambda m: noted(m, DROPPING(m)), **KEPT), {}),
    "drops_in_whole_steps": (made(lambda m: noted(m, Sign(m.parameters())), **KEPT), {}),
    "stepped_twice": (made(of(Twice)), {}),
    "stepped_by_own_rule": (made(by_own_rule), {}),
    "patched_class": (Patched, {}),
    "clears_by_hand": (made(lambda m: noted(m, adam(m)), training_step=clear_by_hand, automatic_optimization=False), {}),
    "decays_by_zeros": (made(lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.05), weight_decay=0.5, foreach=False),
                             training_step=decay_by_zeros, automatic_optimization=False), {}),
    "scales_by_hand": (made(of(SGD), training_step=scale_by_hand, automatic_optimization=False), {}),
    "schedule_free_subclass": (made(counting(schedulefree.AdamWScheduleFree, "eval", "train")), MODES),
}  # fmt: skip
# Optimizers, their states and checkpoints are sharded alike at every stage: stages take turns.
for number, (name, (module, moments)) in enumerate(REPLACED.items()):
    case("optimizers", module, name, moments=moments, stages=(3 - number % 3,), val_check_interval=2, limit_val_batches=1, ulps=16,
         data=lambda: (rows(), rows(4, seed=1)))  # fmt: skip


# -- states that users ask for, and copies of optimizers -------------------------------------------


class OwnDict(Adam):
    """Its state dict has something of its own, made of whole states."""

    def state_dict(self) -> dict[str, Any]:
        norms = [float(state["exp_avg"].norm()) for state in self.state.values()]
        return {**super().state_dict(), "norm": sum(norms)}


class InNewDtypes(Own):
    """Keeps states in dtypes that torch's pickles do not read back."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        rate = state.setdefault("rate", torch.zeros_like(p, dtype=torch.float8_e4m3fn))
        steps = state.setdefault("steps", torch.zeros_like(p, dtype=torch.uint16))
        rate.copy_(rate.float() + 0.5)
        steps.copy_(steps.int() + 1)
        p.sub_(grad * rate.float(), alpha=group["lr"])


class OfAll(Nested):
    """Keeps lists of tensors, and entries that belong to no parameter."""

    def finish(self) -> None:
        self.state["of all"] = {"steps": 1}  # type: ignore[index]


def schedule_free(params: Any, lr: float = 0.05) -> Any:
    optimizer = schedulefree.AdamWScheduleFree(params, lr)  # type: ignore[attr-defined]
    optimizer.train()
    return optimizer


def lookahead(params: Any) -> Any:
    """Wrap an optimizer by one whose states have a form of their own."""
    return pytorch_optimizer.Lookahead(torch.optim.AdamW(params), k=2)


def asked(m: Any) -> Any:
    """Ask for everything that returns states."""
    states, parameters, none = own(m).state, [*m.parameters()], nn.Parameter(torch.ones(1))
    held = [p for group in own(m).param_groups for p in group["params"]]
    assert all(any(p is q for q in held) for p in parameters)
    dicts = own(m).state_dict(), m.optimizers().state_dict(), [m.lr_schedulers().state_dict()]
    return (
        dicts,
        [states[p] for p in parameters if p in states],
        [*states.values()],
        [[p is key for key in states] for p in held],
        [len(states), bool(states), states.get(none), none in states],
        [state for key, state in states.items() if not isinstance(key, Tensor)],
        copy.deepcopy(states[parameters[0]]),
        [*pickle.loads(pickle.dumps(states)).values()],
    )


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


def copied(m: Any) -> Any:
    """Copy the optimizer alone, with its module, and with its scheduler, and step the copies."""
    net, head, optimizer = copy.deepcopy((m.net, m.head, own(m)))
    twin, other = copy.deepcopy(m.lr_schedulers()), pickle.loads(pickle.dumps(m.lr_schedulers()))
    notes = [twin.state_dict(), list(net.parameters()), list(head.parameters())]
    for each in (optimizer, twin.optimizer, other.optimizer, pickle.loads(pickle.dumps(own(m)))):
        members = [p for group in each.param_groups for p in group["params"]]
        for p in members:
            p.grad = torch.ones_like(p)
        each.step()
        notes += [members, each.state_dict()]
    return notes


def edited(m: Any) -> Any:
    """Change what a lookup returns, which acts on the next steps, and add what is kept, as SAM does."""
    states, (first, second, third, *_) = own(m).state, m.parameters()
    for value in states[first].values():
        if isinstance(value, Tensor) and value.dim():
            value.data.mul_(0.5)
    for key, value in states[second].items():
        states[second][key] = value * 0.25 if torch.is_tensor(value) and value.dim() else value
    states.pop(third)
    notes = copy.deepcopy(own(m).state_dict()["state"]), len(states)
    for p in (p for p in m.parameters() if p in states):
        states[p]["old"] = p.detach().clone()
    return notes, own(m).state_dict()["state"]


def emptied(m: Any) -> Any:
    """Empty the states, of which those of one parameter are loaded again."""
    state = copy.deepcopy(own(m).state_dict())
    own(m).state.clear()
    empty = own(m).state_dict()
    own(m).load_state_dict({**state, "state": {0: state["state"][0]}})
    return empty, own(m).state_dict()


def assigned(m: Any) -> Any:
    states = {p: copy.deepcopy(state) for p, state in own(m).state.items()}
    del states[next(m.parameters())]
    own(m).state = collections.defaultdict(dict, states)


STATEFUL: dict[str, tuple[Callable[[Any], Any], tuple[Callable[[Any], Any], ...]]] = {
    "adam": (partial(Adam, lr=0.05, amsgrad=True), (asked, edited, emptied, assigned, loaded, loaded_to_the_wrapper, copied)),
    "by_parameter": (partial(Adafactor, lr=0.05), (asked, edited, assigned, loaded, copied)),
    "without_states": (partial(SGD, lr=0.05), (asked, loaded)),
    "schedule_free": (schedule_free, (asked, loaded)),
    "own_state_dict": (partial(OwnDict, lr=0.05), (asked, loaded)),
    "wrapper": (lookahead, (asked, loaded)),
    "in_lists": (OfAll, (asked, loaded)),
    "in_new_dtypes": (InNewDtypes, (loaded,)),  # which cannot be pickled
}  # fmt: skip


def grouped(make: Callable[[Any], Any], m: Any) -> Any:
    """Make two groups and a schedule."""
    weights, biases = ([p for p in m.parameters() if p.dim() == dim] for dim in (2, 1))
    return scheduled(make([{"params": weights}, {"params": biases, "lr": 0.1}]))


ASKED = [(name, make, ask) for name, (make, asks) in STATEFUL.items() for ask in asks]
for number, (name, make, ask) in enumerate(ASKED):
    in_files = name == "adam" and ask in (loaded, edited)
    # DDP's later steps change its states.
    after_two = {"on_train_batch_end": lambda m, out, batch, i, a=ask: copy.deepcopy(a(m)) if i == 1 else None}  # fmt: skip
    case("optimizers", made(partial(grouped, make)), f"{name}_{ask.__name__}", moments=after_two, max_steps=3, ulps=16,
         stages=(2, 3) if in_files else (3 - number % 3,), settings=({}, FILES) if in_files else ({},))  # fmt: skip


# -- optimizers that hold what no copy can: they step the module's own parameters, all at once ------


HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Tensor], float]]] = {
    "a_lock": (lambda m: threading.Lock(), lambda held, p: 1 - held.locked()),
    "a_module": (lambda m: m, lambda held, p: float(1 / (1 + held.head.weight.grad.norm()))),
    "a_closure": (
        lambda m: lambda: m.head.weight,
        lambda f, p: float(1 / (1 + f().detach().norm())),
    ),
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


RESUMED: dict[str, Any] = {**SAVED, "limit_train_batches": 2}
for kind in HELD:
    case("optimizers", made(lambda m, k=kind: Holding(m, k)), f"holds_{kind}", **RESUMED, ulps=16, readers=("own", "ddp"),
         moments={"on_train_batch_end": after_a_step})  # fmt: skip


# -- optimizers that compile their step, or keep states in a tensor class of their own --------------


def momentum_step(p: Tensor, grad: Tensor, mean: Tensor, lr: float) -> None:
    new = mean.lerp(grad, 0.25)
    mean.copy_(new)
    p.sub_(lr * new)


class Wrapped(Own):
    """Keeps large states in bytes, and may compile its step as a whole."""

    least_numel, is_compiled = 0, False

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        is_large = p.numel() >= self.least_numel and p.numel() % BLOCK == 0
        zeros = EightBits.zeros if is_large else torch.zeros_like
        mean = self.state[p].setdefault("mean", zeros(p))
        how: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": "eager"}
        step = torch.compile(momentum_step, **how) if self.is_compiled else momentum_step
        step(p.detach() if self.is_compiled else p, grad, mean, group["lr"])


Large = user(
    build=lambda m: m.register_parameter("large", nn.Parameter(0.05 * torch.randn(128, 132))),
    forward=lambda m, x: Noted.forward(m, x) + F.linear(x @ m.large[:6], m.large[:6]),
)
# Most of their kind keep states in bytes only from some size on.
WRAPPED: dict[str, tuple[dict[str, Any], Any]] = {
    "Wrapped": ({}, Noted),
    "LargeWrapped": ({"least_numel": 4096}, Large),
    "Compiled": ({"is_compiled": True, "least_numel": 1 << 30}, Noted),
    "CompiledAndWrapped": ({"is_compiled": True}, Noted),
}
for name, (members, base) in WRAPPED.items():
    module = made(of(type(name, (Wrapped,), members)), base)
    # A function may be compiled for few sizes and classes.
    moments = {"on_fit_start": lambda m: torch.compiler.reset(), "on_train_batch_end": after_a_step}
    case("optimizers", module, f"states_{name}", **RESUMED, settings=({}, {"optimizer_step": {name: "parameter"}}), readers=("own",),
         ulps=16, moments=moments)  # fmt: skip


# -- an optimizer that outlives its run ------------------------------------------------------------


class Keeping(Noted):
    """Returns one optimizer for all runs, and may raise in a step of its first."""

    def __init__(self, make: Any = adam, fails_at: int = -1) -> None:
        super().__init__()
        self.made, self.fails_at = make(self), fails_at

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
    copies = (partial(use, optimizer) for use in (copy.deepcopy, pickle.dumps))
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


for name, make in {"adam": of(Adam, 0.01), "by_parameter": of(Adafactor, 0.01), "lbfgs": of(torch.optim.LBFGS, 0.01, max_iter=2)}.items():  # fmt: skip
    for fails_at in (-1, 1):
        case("optimizers", name=f"second_fit_{name}_{fails_at}", loop=partial(goes_on, make, fails_at), ulps=64,
             worlds=(1,) if fails_at > 0 else (2,), settings=({}, {}, FILES) if name == "adam" else ({},), stages=(3, 1, 3))  # fmt: skip


# -- states in files: in batches of the smallest size, into which weights are cut -------------------

IN_FILES: dict[str, Any] = {"stages": (3,), "settings": (FILES,), **RESUMED}
case("optimizers", made(of(Nested)), "own_in_files", **{**IN_FILES, "limit_train_batches": 4}, readers=("own", "of ddp", 3),
     accumulate_grad_batches=2, gradient_clip_val=0.5, ulps=16)  # fmt: skip
# Steps of batches would give other numbers than a step of all.
case("optimizers", made(of(ByNumber)), "by_number_in_files", **IN_FILES)


class Named(Large):  # type: ignore[misc]
    """Two groups with names, a frozen parameter, and one without a gradient in a step."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.head.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        named = [[(n, p) for n, p in self.named_parameters() if p.dim() == d] for d in (2, 1)]
        return self.make([{"params": named[0]}, {"params": named[1], "lr": 0.1}])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        getattr(own(self), "train", lambda: None)()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 2:
            self.large.grad = None

    def on_train_batch_end(self, *_: Any) -> None:
        getattr(own(self), "eval", lambda: None)()

    def on_train_end(self) -> None:
        kept = [getattr(own(self), name, None) for name in ("k", "rates", "warmth")]
        state = own(self).state_dict()
        by_name = {str(key): value for key, value in state["state"].items()}
        self.notes.append([kept, state["param_groups"], sorted(by_name.items())])


def in_small_batches(play: Player) -> Trace:
    """Half of the cases run where files take no direct requests."""
    refuse = mock.patch.object(fcntl, "fcntl", side_effect=OSError(errno.EINVAL, "Invalid"))
    small = mock.patch.object(staging, "_BATCH_BYTES", 1)
    with small, refuse if play.case.number % 2 else contextlib.nullcontext():
        return by_trainer(play)


def torchs() -> Iterator[Any]:
    """Element-wise optimizers of torch, fused where they can be, as files have them stepped."""
    for cls in vars(torch.optim).values():
        if inspect.isclass(cls) and known_class(cls) == ("torch.optim", Way.BY_ELEMENT):
            is_fused = "fused" in inspect.signature(cls).parameters
            yield partial(cls, lr=1e-2, **({"fused": True} if is_fused else {}))


def changed(m: Any, *_: Any) -> None:
    """Change states in place, by others, by other memory, and by those of another parameter."""
    if m.global_step == 0:
        return
    named, name = dict(m.named_parameters()), "momentum_buffer"
    states = {key: own(m).state[named[key]] for key in named if named[key].requires_grad}
    first, second, third, *_ = states.values()
    first[name].mul_(0.5)
    second[name] = second[name] * 0.25
    third[name].data = third[name] * 0.75
    one, other = (states[f"net.blocks.{number}.linear.weight"] for number in (0, 2))
    one[name], other[name] = other[name].clone(), one[name].clone()


MOMENTUM = partial(SGD, lr=0.05, momentum=0.9, fused=True)
BATCHED = [*((make, {}) for make in (*OWN, pytorch_optimizer.AggMo, *torchs())), *[(MOMENTUM, {"on_train_batch_end": changed})] * 2]  # fmt: skip
for number, (make, moments) in enumerate(BATCHED):
    stage, name = (
        3 - number % 3,
        f"{getattr(make, 'func', make).__name__}{number * bool(moments) or ''}",
    )
    case("optimizers", partial(Named, make), f"in_batches_{name}", loop=in_small_batches, stages=(stage,), ulps=8,
         settings=(FILES if stage == 3 else STATES,), worlds=(1 + number % 2,), moments=moments,
         data=lambda: (rows(32),), accumulate_grad_batches=2, gradient_clip_val=0.3, max_steps=4)  # fmt: skip


class Factored(Own):
    """Has a factor as an attribute, which users change."""

    scale = 1.0

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] * self.scale)


def change(m: Any, factor: float) -> None:
    own(m).param_groups[0]["lr"] *= factor
    own(m).scale = getattr(own(m), "scale", 1.0) + factor


def with_hook(kind: Any, m: Any) -> Any:
    optimizer = kind(m.parameters(), lr=0.02)
    optimizer.register_step_pre_hook(lambda *_: change(m, 0.9))
    return optimizer


def change_and_run(m: Any, batch: Any) -> Tensor:
    change(m, 0.8)
    return Noted.loss(m, batch)


# What a step is made with is changed in a hook before it, and first and last in its closure.
for kind in (Factored, SGD):
    case("optimizers", made(partial(with_hook, kind), loss=change_and_run), f"changing_{kind.__name__}", settings=({}, FILES),
         stages=(2, 3), max_steps=3, ulps=8, moments={"on_after_backward": lambda m: change(m, 1.2)})  # fmt: skip


# -- optimizers that mix elements, of each kind, and what a Trainer does around their steps ---------


# Matrices, vectors and a scale of no dimension.
Scaled = user(
    build=lambda m: m.register_parameter("scale", nn.Parameter(torch.tensor(1.5))),
    forward=lambda m, x: Noted.forward(m, x) * m.scale,
)


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2 and p.requires_grad]


def muon(module: nn.Module) -> Any:
    return torch.optim.Muon(matrices(module), lr=0.02)


KINDS: dict[str, Callable[[Any], Any]] = {
    "muon": muon, "adafactor": of(Adafactor), "prodigy": of(prodigyopt.Prodigy, 1.0),
    "lookahead": lambda m: lookahead(m.parameters()),
    "schedule_free": of(schedule_free, 0.02),
    **{name: of(pytorch_optimizer.load_optimizer(name), 0.02) for name in ("adan", "shampoo", "splus")},
}  # fmt: skip
for name, make in KINDS.items():
    case("optimizers", made(make, Scaled), f"steps_{name}", ulps=64, rests=True)
widen("steps_muon", "steps_prodigy", worlds=(2, 3))


AROUND: dict[str, dict[str, Any]] = {
    "clips_the_norm": {"gradient_clip_val": 0.3, **WIDE},
    "clips_values": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value", **WIDE},
    "accumulates": {"accumulate_grad_batches": 3},
    "scales_the_loss": {"gradient_clip_val": 0.3, "precisions": ("16-mixed",)},
}  # fmt: skip
for number, (name, how) in enumerate(AROUND.items()):
    make = (muon, lambda m: prodigyopt.Prodigy(matrices(m)))[number % 2]
    case("optimizers", made(make, Scaled), f"around_a_step_{name}", ulps=64, **how)


# -- blocks of a DeepSpeed configuration -----------------------------------------------------------

WARMUP = {"warmup_max_lr": 0.05, "warmup_num_steps": 2, "warmup_type": "linear"}
BLOCKS = {
    "optimizer": {"type": "Adam", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": WARMUP},
}


def share(last: int, step: int) -> float:
    count = max(step - 1, 0)
    return count / 2 if count < 2 else (last - count) / (last - 2)


def configured(blocks: tuple[str, ...], m: Any) -> Any:
    """Return under DDP what the blocks ask for; else an optimizer and a scheduler that count less."""
    is_ddp = not hasattr(m.trainer.strategy, "settings")
    trained = [p for p in m.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.1)
    if not is_ddp and "optimizer" in blocks:
        optimizer = SGD(m.parameters(), lr=3.0)
    if "scheduler" not in blocks:
        return optimizer
    schedule = LambdaLR(optimizer, partial(share, m.trainer.estimated_stepping_batches))
    scheduler: Any = {"scheduler": schedule, "interval": "step"}
    return [optimizer], [scheduler if is_ddp else LinearLR(optimizer, 0.125)]


def told(play: Player) -> Trace:
    """A line tells that the module's own counts less."""
    with messages() as said:
        trace = by_trainer(play)
    lines = [line for line in said if "is that of the DeepSpeed configuration" in line]
    assert bool(lines) == (play.rank == 0 and not play.is_ddp)
    return dataclasses.replace(trace, saved=None)  # other schedulers have other states


for blocks in (("optimizer", "scheduler"), ("scheduler",), ("optimizer",)):
    module = user(Regression, lambda m: m.head.bias.requires_grad_(False), configure_optimizers=lambda m, b=blocks: configured(b, m))  # fmt: skip
    case("optimizers", module, f"deepspeed_{'_and_'.join(blocks)}", loop=told, settings=({"config": {b: BLOCKS[b] for b in blocks}},), save_at=1,
         readers=("again",), max_epochs=3, accumulate_grad_batches=2, ulps=256,
         moments={"on_before_optimizer_step": lambda m, optimizer: optimizer.param_groups[0]["lr"]})  # fmt: skip
