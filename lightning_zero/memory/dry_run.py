"""One training step on tensors without data: its events, and the bytes of activations at each.

The user's own ``training_step`` and its backward run on fake tensors (shapes, dtypes and storages,
no values), so the memory of a model that fits nowhere is known in seconds. Every live tensor that
is not a parameter, a buffer of the module or a finished gradient counts as activations: what
forward saves for backward, intermediate results, the batch, and the gradients of activations.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.comm import DryHostCopies
from lightning_zero.engine import ActivationCheckpointing, ActivationOffload
from lightning_zero.memory.live_bytes import LiveBytes
from lightning_zero.memory.trace import Event, Kind, in_order
from lightning_zero.plan import Recipe, UnitSpec, cut_of, set_cut
from lightning_zero.tensors import tensors_in

Step = Callable[[nn.Module, Any], Tensor]


def meta_copy(
    module: nn.Module, dtype_of: Callable[[Tensor], torch.dtype] | None = None
) -> nn.Module:
    """Return a copy of ``module`` with parameters and buffers on ``meta``; no data is copied.

    Hooks and the Trainer are left out. ``dtype_of`` returns the dtype for a parameter or buffer; by
    default each keeps its own.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        bare = torch.empty_like(tensor, device="meta", requires_grad=False)
        if dtype_of is not None:
            bare = bare.to(dtype_of(tensor))
        memo[id(tensor)] = bare
        if isinstance(tensor, Parameter):
            memo[id(tensor)] = own = Parameter(bare, tensor.requires_grad)
            set_cut(own, cut_of(tensor))
    for child in module.modules():
        memo[id(getattr(child, "_trainer", None))] = None
        for name, value in vars(child).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                memo[id(value)] = type(value)()
    return copy.deepcopy(module, memo)


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward and backward, and how a rank computes them.

    Attributes:
        batch: One rank's batch, if there is one; only shapes and dtypes matter.
        step: Computes the loss; by default ``training_step``, or the sum of the module's outputs.
        checkpointing: Whether every unit's activations are recomputed in backward.
        offloading: Whether an accelerator's host keeps them until backward; not under DDP.
        recipe: The dtypes of the precision; its autocast applies to the step.
        dtype: The dtype of the module, floating-point inputs and new tensors under ``*-true``.
        device: The device that tensors report, which decides the kernels.
    """

    batch: Any
    step: Step | None
    checkpointing: bool
    offloading: bool
    recipe: Recipe
    dtype: torch.dtype | None
    device: torch.device

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of a parameter or buffer of the module under the precision."""
        return self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype

    def events(self, module: nn.Module, specs: Sequence[UnitSpec], *, is_cast: bool) -> list[Event]:
        """Return the events of a step of ``module``, a :func:`meta_copy` that is consumed.

        The root's spec is last. Forward sees weights in the precision's dtype if ``is_cast``, else
        in their own, as under DDP. Without a batch, units run in the order of registration.
        """
        if self.batch is None:
            numbers = {id(p): number for number, p in enumerate(module.parameters())}
            return list(in_order(specs, numbers))
        dtypes = {
            id(p): flat.plan.weight.dtype if is_cast else p.dtype
            for spec in specs
            for flat in spec.flat_parameters
            for _, p in flat.named
        }
        live = LiveBytes(as_on_cpu=self.device.type == "cpu")
        log = _Log(live, DryHostCopies(self.device))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        dtype = self.dtype or torch.get_default_dtype()
        with warnings.catch_warnings(), _default_dtype(dtype), mode:
            warnings.simplefilter("ignore")
            _fake_tensors(module, dtypes, self.device)
            fake = functools.partial(_fake_of, float_dtype=self.dtype, device=self.device)
            batch = tree_map(fake, self.batch)
            live.ignore((*module.parameters(), *module.buffers()))
            live.follow(tree_leaves(batch))
            units = [spec for spec in specs if spec.name]
            self._run(module, batch, units, log, offloads=self.offloading and is_cast)
        return log.events

    def _run(
        self,
        module: nn.Module,
        batch: Any,
        units: Sequence[UnitSpec],
        log: _Log,
        *,
        offloads: bool,
    ) -> None:
        """Run forward and backward while ``log`` records the events."""
        recompute = ActivationCheckpointing(u.module for u in units if self.checkpointing)
        going = [unit.module for unit in units if offloads]
        offload = ActivationOffload(going, module.parameters(), log.copies)
        handles = [handle for unit in units for handle in log.listen(unit.name, unit.module)]
        log.listen_to_grads(module)
        module.train()
        try:
            with log.live:
                autocast = self.recipe.autocast
                is_mixed = autocast is not None
                with torch.autocast(self.device.type, autocast, is_mixed, cache_enabled=False):
                    loss = (self.step or default_step)(module, batch)
                if not isinstance(loss, Tensor) or loss.grad_fn is None:
                    raise TypeError("the step returned no loss that requires a gradient.")
                log.note(Kind.LOSS)
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} does not run on tensors without data, so its activations"
                f" cannot be counted: {first_line(error)} Remove `batch` to estimate the rest,"
                " or pass `step`, a function that returns the loss of a module and a batch."
            ) from error
        finally:
            offload.remove()
            recompute.remove()
            for handle in handles:
                handle.remove()
        log.note(Kind.END)


def default_step(module: nn.Module, batch: Any) -> Tensor:
    """Run ``training_step``, else the module; return its loss, or the sum of all outputs."""
    training_step = getattr(module, "training_step", None)
    if training_step is not None:
        output = training_step(*[batch, 0][: _num_positional(training_step)])
    elif isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    if isinstance(output, Tensor):
        return output.sum()
    return sum((t.sum() for t in tensors_in(output) if t.requires_grad), torch.zeros(()))


def _num_positional(function: Callable[..., Any]) -> int | None:
    """Return how many positional arguments ``function`` takes; ``None`` means any number."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for kind in kinds
    )


class _Log:
    """Recorder of the events of a step."""

    def __init__(self, live: LiveBytes, copies: DryHostCopies) -> None:
        self.live, self.copies = live, copies
        self._running: list[int] = []
        self._num_calls = 0
        self.events: list[Event] = []

    def note(self, kind: Kind, unit: str = "", call: int = -1, parameter: int = -1) -> None:
        """Record an event."""
        before, flops = self.live.restart(), self.live.take_flops()
        now, away = self.live.count(), self.copies.passing
        self.events.append(Event(kind, unit, call, parameter, before, now, flops, away))

    def listen(self, name: str, unit: nn.Module) -> Iterator[Any]:
        """Hook the unit's forward and, through its tensors, its backward; yield the handles."""
        begin = functools.partial(self._begin_forward, name)
        yield unit.register_forward_pre_hook(begin, with_kwargs=True)
        yield unit.register_forward_hook(lambda _, __, output: self._end_forward(name, output))

    def listen_to_grads(self, module: nn.Module) -> None:
        """Record each parameter's gradient when it arrives, then drop it."""
        for number, parameter in enumerate(module.parameters()):
            if parameter.requires_grad:
                take = functools.partial(self._take_grad, number)
                parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take_grad(self, number: int, parameter: Tensor) -> None:
        parameter.grad = None
        self.note(Kind.GRAD, parameter=number)

    def _begin_forward(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._num_calls
        self._num_calls += 1
        self._running.append(call)
        self.note(Kind.FORWARD, name, call)
        inner = [t for t in tensors_in((args, kwargs)) if t.requires_grad and not t.is_leaf]
        if inner and torch.is_grad_enabled():
            register_multi_grad_hook(
                inner, lambda _: self.note(Kind.BACKWARD_END, name, call), mode="all"
            )

    def _end_forward(self, name: str, output: Any) -> None:
        call = self._running.pop()
        self.note(Kind.FORWARD_END, name, call)
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
        if outputs:
            register_multi_grad_hook(
                outputs, lambda _: self.note(Kind.BACKWARD, name, call), mode="any"
            )


def _fake_tensors(
    module: nn.Module, dtypes: Mapping[int, torch.dtype], device: torch.device
) -> None:
    """Replace the module's tensors by fake ones, keeping ties; ``dtypes`` are by parameter id."""
    made: dict[int, Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fake = _fake_of(parameter, dtype=dtypes[id(parameter)], device=device)
                    made[id(parameter)] = Parameter(fake, parameter.requires_grad)
                child._parameters[name] = made[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = _fake_of(buffer, device=device)
        if isinstance(getattr(child, "_device", None), torch.device):
            # Modules of Lightning and torchmetrics store a device besides their tensors.
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


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its class, with a full stop."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{text}."
