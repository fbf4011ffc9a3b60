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
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.engine import checkpoint_activations
from lightning_zero.plan import Recipe, UnitSpec, cut_of, set_cut
from lightning_zero.tensors import tensors_in

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


class Event(NamedTuple):
    """An event of a step: of a call of the unit of that name, or of the gradient of a parameter.

    ``most`` is the most bytes of activations since the previous event, ``now`` those at the event,
    both with the gradient that has arrived.
    """

    kind: Kind
    name: str = ""
    most: int = 0
    now: int = 0


def copy_with(module: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of ``module`` with ``make`` of each parameter and buffer; ties stay ties.

    Modules and plain containers in their attributes are new, all other attributes are shared, as
    not all can be copied. Hooks and the Trainer are left out.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = made = make(tensor)
        if isinstance(tensor, Parameter):
            memo[id(tensor)] = own = Parameter(made, tensor.requires_grad)
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
        return type(value)((key, _renewed(item, memo)) for key, item in value.items())
    if type(value) in (list, tuple, set, deque):
        return type(value)(_renewed(item, memo) for item in value)
    return value


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward and backward, and how a rank computes them.

    Attributes:
        batch: One rank's batch, if there is one; only shapes and dtypes matter.
        step: Computes the loss; by default ``training_step``, or the sum of the module's outputs.
        checkpointing: Whether activations of units, or those of modules of some classes, are
            recomputed in backward.
        recipe: The dtypes of the precision; its autocast applies to the step.
        dtype: The dtype of the module, floating-point inputs and new tensors under ``*-true``.
        device: The device that tensors report, which decides the kernels.
    """

    batch: Any
    step: Step | None
    checkpointing: bool | Iterable[type[nn.Module]]
    recipe: Recipe
    dtype: torch.dtype | None
    device: torch.device

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of a parameter or buffer of the module under the precision."""
        return self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype

    def events(self, module: nn.Module, specs: Sequence[UnitSpec], *, is_cast: bool) -> list[Event]:
        """Return the events of a step of a copy of ``module``; the root's spec is last.

        Forward sees weights in the precision's dtype if ``is_cast``, else in their own, as under
        DDP.
        """
        dtypes = {
            id(p): flat.plan.weight.dtype
            for spec in specs
            for flat in spec.flat_parameters
            for _, p in flat.named
            if is_cast
        }

        def fake(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            dtype = dtype or dtypes.get(id(tensor), tensor.dtype)
            shape, stride = tensor.shape, tensor.stride()
            return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype or default)
        try:
            with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
                warnings.simplefilter("ignore")
                copied = copy_with(module, fake)
                for child in copied.modules():
                    if isinstance(getattr(child, "_device", None), torch.device):
                        # Modules of Lightning and torchmetrics store it besides their tensors.
                        child._device = self.device  # type: ignore[assignment]
                batch = tree_map_only(Tensor, lambda t: fake(t, self.dtype_of(t)), self.batch)
                log = _Log((*copied.parameters(), *copied.buffers()))
                log.count(tree_leaves(batch))
                self._run(copied, batch, [spec.name for spec in specs if spec.name], log)
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} does not run on tensors without data, so its activations"
                f" cannot be counted: {first_line(error)} Remove `batch` to estimate the rest,"
                " or pass `step`, a function that returns the loss of a module and a batch."
            ) from error
        finally:
            torch.set_default_dtype(default)
        return log.events

    def _run(self, module: nn.Module, batch: Any, units: Sequence[str], log: _Log) -> None:
        """Run forward and backward while ``log`` records the events."""
        modules = {name: module.get_submodule(name) for name in units}
        checkpoint_activations(self.checkpointing, module, [*modules.values()])
        for name, unit in modules.items():
            log.listen(name, unit)
        log.listen_to_grads(module)
        module.train()
        half = self.recipe.autocast
        with log:
            with torch.autocast(self.device.type, half, half is not None, cache_enabled=False):
                loss = (self.step or default_step)(module, batch)
            if not isinstance(loss, Tensor) or loss.grad_fn is None:
                raise TypeError("the step returned no loss that requires a gradient.")
            log.note(Kind.LOSS)
            loss.backward()  # type: ignore[no-untyped-call]
        log.note(Kind.END)


def default_step(module: nn.Module, batch: Any) -> Tensor:
    """Run ``training_step``, else the module; return its loss, or the sum of all outputs."""
    training_step = getattr(module, "training_step", None)
    if training_step is not None:
        given = [batch, 0]
        try:
            inspect.signature(training_step).bind(*given)
        except TypeError:
            del given[1]  # it takes no index
        output = training_step(*given)
    elif isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    if isinstance(output, Tensor):
        return output.sum()
    return sum((t.sum() for t in tensors_in(output) if t.requires_grad), torch.zeros(()))


class _Log(TorchDispatchMode):
    """Recorder of the events of a step, and of the bytes of activations at each.

    These are the storages that operations within the context create, until they are freed, each
    with the size that it had at first.

    Args:
        own: The module's own tensors, which do not count.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._own = {storage._cdata: storage for storage in map(Tensor.untyped_storage, own)}
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._now = self._most = 0  # bytes now, and the most since the last event

    def count(self, values: Iterable[Any]) -> None:
        """Count the storages of the tensors among ``values``."""
        for value in values:
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                continue
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._live and key not in self._own:
                self._now += size
                self._live[key] = weakref.ref(storage, functools.partial(self._end, key, size))
        self._most = max(self._most, self._now)

    def _end(self, key: int, size: int, _: Any) -> None:
        # As soon as a storage is gone, another may have its address.
        del self._live[key]
        self._now -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            # A number read from a tensor without data (`.item()`, `if x.any()`) is taken as zero.
            dtype = args[0].dtype
            return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        self.count(tree_leaves(out))
        return out

    def note(self, kind: Kind, name: str = "") -> None:
        """Record an event."""
        self.events.append(Event(kind, name, self._most, self._now))
        self._most = self._now

    def listen(self, name: str, unit: nn.Module) -> None:
        """Hook the unit's forward and, through its tensors, its backward."""
        begin = functools.partial(self._begin_forward, name)
        unit.register_forward_pre_hook(begin, with_kwargs=True)
        unit.register_forward_hook(lambda _, __, output: self._end_forward(name, output))

    def listen_to_grads(self, module: nn.Module) -> None:
        """Record each parameter's gradient when it arrives, then drop it."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                take = functools.partial(self._take_grad, name)
                parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take_grad(self, name: str, parameter: Tensor) -> None:
        self.note(Kind.GRAD, name)
        parameter.grad = None
        self._most = self._now

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


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its class, with a full stop."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{text}."
