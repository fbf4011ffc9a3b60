"""One training step on tensors without data: its events, and the bytes of activations at each.

The user's own ``training_step`` and its backward run on fake tensors (shapes, dtypes and storages,
no values), so the memory of a model that fits nowhere is known in seconds. Every live tensor that
is not a parameter, a buffer of the module or a finished gradient counts as activations: what
forward saves for backward, intermediate results, the batch, and the gradients of activations.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_zero.engine import ActivationCheckpointing, ActivationOffload
from lightning_zero.memory.live_bytes import LiveBytes
from lightning_zero.plan import Recipe, UnitSpec, cut_of, set_cut, stays_whole
from lightning_zero.tensors import (
    HostCopies,
    Landing,
    Storages,
    Work,
    internals,
    pinned_bytes,
    rewrapped,
    tensors_in,
)

Step = Callable[[nn.Module, Any], Tensor]


class Kind(Enum):
    """The kind of an event."""

    FORWARD = "forward"
    """A call of a unit's forward begins."""
    FORWARD_END = "end of forward"
    """The call has returned."""
    LOSS = "loss"
    """The backward pass begins."""
    BACKWARD = "backward"
    """The first gradient of a call's outputs has arrived."""
    BACKWARD_END = "end of backward"
    """All gradients of a call's inputs have arrived."""
    GRAD = "gradient"
    """A parameter's gradient has arrived."""
    END = "end"
    """The backward pass has ended."""


@dataclass(frozen=True)
class Event:
    """An event of a step: of a call of a unit, or of a parameter by its number in the module.

    Attributes:
        before: The most bytes of activations alive since the previous event, including the gradient
            that has arrived.
        now: Bytes of activations alive, without that gradient.
        away: Bytes of activations kept in the memory of an accelerator's host.
    """

    kind: Kind
    unit: str = ""
    parameter: int = -1
    before: int = 0
    now: int = 0
    away: int = 0


def in_order(specs: Sequence[UnitSpec], numbers: Mapping[int, int]) -> Iterator[Event]:
    """Yield the events of a step that runs the units in the order of registration.

    The root's gradients come first: they are then held longest, so no other order holds more.
    ``numbers`` are the parameters' numbers in the module, by id.
    """
    *inner, root = specs

    def grads(spec: UnitSpec) -> Iterator[Event]:
        named = (pair for flat in spec.flat_parameters for pair in flat.named)
        yield from (Event(Kind.GRAD, parameter=numbers[id(p)]) for _, p in named if p.requires_grad)

    for spec in inner:
        yield Event(Kind.FORWARD, spec.name)
        yield Event(Kind.FORWARD_END, spec.name)
    yield Event(Kind.LOSS)
    yield from grads(root)
    ended: list[Event] = []
    for spec in reversed(inner):
        # A unit's outputs are the next one's inputs, and its hooks on them were registered first.
        yield Event(Kind.BACKWARD, spec.name)
        yield from ended
        yield from grads(spec)
        ended = [Event(Kind.BACKWARD_END, spec.name)]
    yield from ended
    yield Event(Kind.END)


def meta_copy(
    module: nn.Module, dtype_of: Callable[[Tensor], torch.dtype] | None = None
) -> nn.Module:
    """Return a copy of ``module`` with parameters and buffers on ``meta``; no data is copied.

    Modules and plain containers in their attributes are new, all other attributes are shared, as
    not all can be copied. Hooks and the Trainer are left out. ``dtype_of`` returns the dtype for a
    parameter or buffer; by default each keeps its own.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        bare = rewrapped(tensor.detach(), functools.partial(torch.empty_like, device="meta"))
        if dtype_of is not None and not stays_whole(tensor):
            bare = bare.to(dtype_of(tensor))
        memo[id(tensor)] = bare
        if isinstance(tensor, Parameter):
            memo[id(tensor)] = own = Parameter(bare, tensor.requires_grad)
            set_cut(own, cut_of(tensor))
    copied: nn.Module = _renewed(module, memo)
    return copied


def _renewed(value: Any, memo: dict[int, Any]) -> Any:
    """Return a module or a container with new modules and tensors in it; all else as it is."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module):
        if isinstance(compiled := vars(value).get("_modules", {}).get("_orig_mod"), nn.Module):
            memo[id(value)] = found = _renewed(compiled, memo)
            return found
        memo[id(value)] = new = value.__class__.__new__(value.__class__)
        for name, item in vars(value).items():
            if name.endswith("_hooks") and isinstance(item, dict):
                vars(new)[name] = type(item)()
            else:
                vars(new)[name] = None if name == "_trainer" else _renewed(item, memo)
        return new
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if type(value) in (dict, OrderedDict):
        memo[id(value)] = made = type(value)()
        made.update((key, _renewed(item, memo)) for key, item in value.items())
        return made
    if type(value) in (list, deque):
        memo[id(value)] = made = type(value)()
        made.extend(_renewed(item, memo) for item in value)
        return made
    if type(value) in (set, tuple):
        return type(value)(_renewed(item, memo) for item in value)
    return value


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
        log = _Log(live, _KeptOnHost(self.device))
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

    def __init__(self, live: LiveBytes, copies: _KeptOnHost) -> None:
        self.live, self.copies = live, copies
        self.events: list[Event] = []

    def note(self, kind: Kind, unit: str = "", parameter: int = -1) -> None:
        """Record an event."""
        before, now = self.live.restart(), self.live.count()
        self.events.append(Event(kind, unit, parameter, before, now, self.copies.held.nbytes))

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
        self.note(Kind.FORWARD, name)
        inner = [t for t in tensors_in((args, kwargs)) if t.requires_grad and not t.is_leaf]
        if inner and torch.is_grad_enabled():
            register_multi_grad_hook(
                inner, lambda _: self.note(Kind.BACKWARD_END, name), mode="all"
            )

    def _end_forward(self, name: str, output: Any) -> None:
        self.note(Kind.FORWARD_END, name)
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
        if outputs:
            register_multi_grad_hook(outputs, lambda _: self.note(Kind.BACKWARD, name), mode="any")


class _KeptOnHost(HostCopies):
    """Copies of fake tensors to an accelerator's host, of which only the bytes are counted.

    What copies to the host read is kept on the device as long as they would need it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("meta"))
        self.device, self.held = device, Storages()

    @override
    def can_copy(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.device.type == self.device.type

    @override
    def storage_down(self, tensor: Tensor, group: object) -> tuple[Tensor, Landing]:
        with internals.without_modes():
            nbytes = pinned_bytes(tensor.untyped_storage().nbytes(), self.device)
            memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.held.add(memory)
        self._keep(group, landing := Landing(None), tensor.detach())
        return memory, landing

    @override
    def up(self, out: Tensor, source: Tensor, then: Callable[[], Work], *_: Any) -> Work:
        return then()


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
