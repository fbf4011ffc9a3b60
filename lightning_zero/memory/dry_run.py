"""One training step on tensors without data: what the activations weigh, and when.

The user's own ``training_step`` and its backward run on fake tensors (shapes, dtypes and storages,
no numbers), so the memory of a model that fits nowhere is known in seconds. Whatever is alive and
is not a parameter, a buffer of the module or a finished gradient counts as activations: what
forward saves for backward, intermediate results, the batch, and the gradients of activations.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.activation import ActivationCheckpointing
from lightning_zero.memory.kernel import kept_beyond
from lightning_zero.memory.live import LiveBytes
from lightning_zero.plan import Recipe
from lightning_zero.tensors import tensors_in

Step = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Event:
    """Something that becomes of gradients.

    Attributes:
        subject: The number of a parameter whose gradient is there, or the name of a unit whose
            backward ended.
        before: The most bytes of activations that were alive since the event before.
        now: Bytes of activations, with the gradient that came.
    """

    subject: int | str
    before: int = 0
    now: int = 0


@dataclass(frozen=True)
class Stretch:
    """A part of a step during which the same units are needed.

    Attributes:
        unit: The unit that runs; ``None`` for what the module does between units.
        is_backward: Whether it is the unit's backward.
        activations: The most bytes of activations that were alive in it, after its last event.
        events: What became of gradients, in order.
    """

    unit: str | None
    is_backward: bool
    activations: int
    events: tuple[Event, ...] = ()

    @property
    def most(self) -> int:
        """The most bytes of activations that were alive in it."""
        events = (max(event.before, event.now) for event in self.events)
        return max(self.activations, *events, 0)


def skeleton(
    module: nn.Module, dtype_of: Callable[[Tensor], torch.dtype] | None = None
) -> nn.Module:
    """A copy of ``module`` whose parameters and buffers lie on ``meta``; its data is not copied.

    Hooks and the Trainer are left behind.

    Args:
        module: The model, on any device; also one that an engine shards.
        dtype_of: The dtype that a parameter or buffer gets; by default its own.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        bare = torch.empty_like(tensor, device="meta", requires_grad=False)
        if dtype_of is not None:
            bare = bare.to(dtype_of(tensor))
        is_parameter = isinstance(tensor, Parameter)
        memo[id(tensor)] = Parameter(bare, tensor.requires_grad) if is_parameter else bare
    for child in module.modules():
        memo[id(getattr(child, "_trainer", None))] = None
        for name, value in vars(child).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                memo[id(value)] = type(value)()
    return copy.deepcopy(module, memo)


def dry_run(
    module: nn.Module,
    batch: Any,
    *,
    units: Mapping[str, nn.Module],
    recipe: Recipe,
    casts: Callable[[Parameter], torch.dtype],
    checkpointed: Sequence[nn.Module] = (),
    step: Step | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device,
) -> list[Stretch]:
    """The stretches of one step of ``module``, a :func:`skeleton` that is used up.

    Args:
        module: The model on ``meta``.
        batch: One rank's batch; only shapes and dtypes matter.
        units: Modules whose forward and backward begin a stretch, by name.
        recipe: Whose autocast surrounds the step.
        casts: The dtype in which forward sees a parameter.
        checkpointed: Modules whose activations are recomputed in backward.
        step: Computes the loss; by default ``training_step``, or the sum of the module's outputs.
        dtype: What floating inputs are converted to and new tensors have, as under ``*-true``.
        device: Where the tensors pretend to be; kernels are chosen by it.

    Raises:
        ValueError: The step does not run on tensors without data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recompute = ActivationCheckpointing(checkpointed)
    live = LiveBytes(kept_beyond=kept_beyond if device.type == "cpu" else None)
    log = _Log(live)
    with warnings.catch_warnings(), _default_dtype(dtype or torch.get_default_dtype()), mode:
        warnings.simplefilter("ignore")
        _fake_tensors(module, casts, device)
        batch = tree_map(functools.partial(_fake_of, float_dtype=dtype, device=device), batch)
        live.ignore((*module.parameters(), *module.buffers()))
        live.follow(tree_leaves(batch))
        module.train()
        for number, parameter in enumerate(module.parameters()):
            if parameter.requires_grad:
                arrive = functools.partial(log.take_grad, number)
                parameter.register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]
        handles = [handle for name, unit in units.items() for handle in log.listen(name, unit)]
        try:
            with live:
                with _autocast(recipe, device):
                    loss = (step or default_step)(module, batch)
                _check_loss(loss)
                log.begin_backward()
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} does not run on tensors without data, so its activations"
                f" cannot be counted: {_first_line(error)} Leave `batch` out to estimate the rest,"
                " or pass `step`, a function of the module and the batch that returns the loss."
            ) from error
        finally:
            recompute.remove()
            for handle in handles:
                handle.remove()
    return log.close()


def default_step(module: nn.Module, batch: Any) -> Tensor:
    """The loss of ``training_step``, of the output's ``loss``, or the sum of all outputs."""
    training_step = getattr(module, "training_step", None)
    if training_step is not None:
        takes_index = "batch_idx" in inspect.signature(training_step).parameters
        output = training_step(batch, **({"batch_idx": 0} if takes_index else {}))
    elif isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    if isinstance(output, Tensor):
        return output.sum()
    return sum((t.sum() for t in tensors_in(output) if t.requires_grad), torch.zeros(()))


class _Log:
    """Cuts a step into stretches as units come up."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._now: tuple[str | None, bool] = (None, False)
        self._stretches: list[Stretch] = []
        self._events: list[Event] = []
        self._awaited: Counter[str] = Counter()

    def listen(self, name: str, unit: nn.Module) -> Iterator[Any]:
        """Hooks that notice the unit's forward and backward."""
        begin = functools.partial(self._begin_forward, name)
        yield unit.register_forward_pre_hook(begin, with_kwargs=True)
        yield unit.register_forward_hook(lambda _, __, output: self._end_forward(name, output))

    def begin_backward(self) -> None:
        """The loss is there; what follows, up to the last unit, is the root's backward."""
        self._begin(None, is_backward=True)

    def close(self) -> list[Stretch]:
        """The stretches from begin to end."""
        self._begin(None, is_backward=True)
        self._cut()
        return self._stretches

    def take_grad(self, number: int, parameter: Tensor) -> None:
        """Note that a parameter's gradient is there, and drop it."""
        self._note(number)
        parameter.grad = None
        self._live.restart()

    def _note(self, subject: int | str) -> None:
        before = self._live.restart()
        self._events.append(Event(subject, before, self._live.count()))

    def _begin(self, unit: str | None, *, is_backward: bool) -> None:
        if (unit, is_backward) != self._now:
            self._cut()
            self._now = (unit, is_backward)

    def _cut(self) -> None:
        events, self._events = tuple(self._events), []
        self._stretches.append(Stretch(*self._now, self._live.restart(), events))

    def _begin_forward(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._begin(name, is_backward=False)
        inner = [t for t in tensors_in((args, kwargs)) if t.requires_grad and not t.is_leaf]
        if inner and torch.is_grad_enabled():
            self._awaited[name] += 1
            register_multi_grad_hook(inner, lambda _: self._end_backward(name), mode="all")

    def _end_backward(self, name: str) -> None:
        self._awaited[name] -= 1
        if not self._awaited[name]:
            self._note(name)

    def _end_forward(self, name: str, output: Any) -> None:
        self._begin(None, is_backward=False)
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
        if outputs:
            register_multi_grad_hook(
                outputs, lambda _: self._begin(name, is_backward=True), mode="any"
            )


def _fake_tensors(
    module: nn.Module, casts: Callable[[Parameter], torch.dtype], device: torch.device
) -> None:
    """Put fake tensors in the place of the module's own, ties kept."""
    made: dict[int, Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fake = _fake_of(parameter, dtype=casts(parameter), device=device)
                    made[id(parameter)] = Parameter(fake, parameter.requires_grad)
                child._parameters[name] = made[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = _fake_of(buffer, device=device)
        if isinstance(getattr(child, "_device", None), torch.device):
            # Lightning's modules and torchmetrics' remember a device beside their tensors.
            child._device = device  # type: ignore[assignment]


def _fake_of(
    value: Any,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    float_dtype: torch.dtype | None = None,
) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        dtype = dtype or float_dtype
    return torch.empty_strided(
        value.shape, value.stride(), dtype=dtype or value.dtype, device=device
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    if recipe.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, recipe.autocast, cache_enabled=False)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        raise TypeError("the step returned no loss with a gradient.")


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{text}."
