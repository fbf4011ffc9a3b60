"""Every private name of torch that the package uses, and why no public one would do.

Those of ``torch.distributed`` are in ``comm``, those of torch's compiler and of its file format
where they are used. Names are bound here once: to look one up costs less than at its own place.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import isabstract
from typing import Any

import torch
import torch.optim.optimizer as _optimizers
import torch.utils._foreach_utils as _foreach_utils
import torch.utils._python_dispatch as _python_dispatch
from torch import Tensor

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of tensors are what they hold: torch documents no such one."""

without_interception = torch._C.DisableTorchFunction
"""As :data:`as_plain_tensors`, and no mode intercepts a function either."""

without_modes = _python_dispatch._disable_current_modes
"""A context in which no mode sees operations."""

without_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class that has none: half the cost of torch's default one."""

hold: Callable[[Tensor], None] = Tensor._fix_weakref  # type: ignore[attr-defined]
"""Holds a tensor that a weak reference gave, also one that only C++ held; as torch's own do."""

num_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
"""Counts who holds a tensor, all of Python as one: more are its own views, or a graph."""

make_wrapper = Tensor._make_wrapper_subclass
"""Makes a tensor without memory; the only way to one, and used by DTensor."""

has_storage = torch._C._has_storage
"""Is false of sparse and functorch's tensors, whose ``untyped_storage`` raises."""

copy_each = torch._foreach_copy_
"""Copies many tensors in one call, as torch's optimizers do: a tenth of a call for each."""

version_of = Tensor._version.__get__  # type: ignore[attr-defined]
"""Reads how often a tensor was changed in place; as a function it can be mapped over many."""

queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the backward pass that runs now ends.

As in DDP and FSDP2: there is no public event for it, and nothing else notices the end of a plain
``loss.backward()`` in user code.
"""

profiler_is_enabled = torch.autograd._profiler_enabled
"""Costs a hundredth of a range of ``record_function`` that nobody reads."""

enable_profiler_ranges = torch.autograd._enable_record_function
"""Turns the ranges of torch's own works on and off, for which there is no public switch."""


@functools.cache
def _lock_of_compiler() -> AbstractContextManager[Any] | None:
    # The first optimizer imports it anyway.
    module = importlib.import_module("torch._dynamo.convert_frame")
    return getattr(module, "compile_lock", None)


def has_compile_lock() -> bool:
    """Return whether this version of torch has a :func:`compile_lock`."""
    return _lock_of_compiler() is not None


def compile_lock() -> AbstractContextManager[Any]:
    """Return the lock under which any thread of the process compiles; the same thread may again.

    ``torch.compiler.is_compiling()`` is true in all threads meanwhile, and torch's optimizers then
    compute with tensors where they else take numbers. Nothing public tells or holds it off.
    """
    lock = _lock_of_compiler()
    assert lock is not None, "has_compile_lock was not asked"
    return lock


def is_called_by(package: str) -> bool:
    """Return whether the next caller of a caller of this that is not torch is of ``package``."""
    frame: Any = sys._getframe(2)
    while frame is not None:  # a thread of torch's own may have no other caller
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name != "torch":
            return name == package
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def put_last(hook: int, tensor: Tensor) -> None:
    """Let a post-accumulate-grad hook, by its handle's ``id``, be called behind all others."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    if hook in hooks:
        hooks[hook] = hooks.pop(hook)


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, also while it has no memory and so no address."""
    with as_plain_tensors():
        return int(tensor.untyped_storage()._cdata)


def step_together(cls: type[Tensor]) -> None:
    """Let optimizers step all tensors of a class at once on a device, as they do parameters.

    Torch does the same for DTensor.
    """
    _optimizers._foreach_supported_types.append(cls)


def hook_steps(cls: type[torch.optim.Optimizer]) -> None:
    """Let the steps of a class and of those that it inherits from call hooks, as torch does.

    It does so when the first object of a class is made, so a class may call a step of another one
    that calls none yet, and does tomorrow.
    """
    for base in reversed(cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]):
        if issubclass(base, torch.optim.Optimizer) and not isabstract(base):
            object.__new__(base)._patch_step_function()


def call_last(hook: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
    """Let a step pre-hook of an optimizer be called behind all others: torch has no such order."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(next(key for key, value in hooks.items() if value == hook))


def is_called_last(hook: Callable[..., Any], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step pre-hook of an optimizer is called behind all others."""
    return bool(next(reversed(optimizer._optimizer_step_pre_hooks.values())) == hook)


def measure_together(cls: type[Any]) -> None:
    """Let ``clip_grad_norm_`` ask for the norms of all tensors of a class at once on a device.

    One after the other, each would be a message of its own. Torch does the same for DTensor.
    """
    _foreach_utils._foreach_supported_types.append(cls)
