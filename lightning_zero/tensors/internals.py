"""Every private name of torch that the package uses, and why no public one would do.

Names of ``torch.distributed`` are in ``comm``; names of torch's compiler and file format are where
they are used. Binding a name here once makes it cheaper to look up.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch._functorch.eager_transforms as _transforms
import torch._functorch.pyfunctorch as _func
import torch._functorch.vmap as _vmap
import torch.fx.experimental.proxy_tensor as _proxies
import torch.optim.optimizer as _optimizers
import torch.utils._foreach_utils as _foreach_utils
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._subclasses.functional_tensor import disable_functional_mode
from torch.utils.hooks import RemovableHandle

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context that disables ``__torch_function__`` of tensor subclasses; torch documents none."""

without_interception = torch._C.DisableTorchFunction
"""Like :data:`as_plain_tensors`, but also disables torch function modes."""

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
leave_function_mode = torch.overrides._pop_mode_temporarily
"""Counts function modes, and a context that leaves the innermost one.

Torch's context that disables them disables subclasses too.
"""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
pre_dispatch_modes: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch
"""Count dispatch modes, whether they watch or trace, which have two stacks."""

func_level: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
leave_func_levels = _func.temporarily_clear_interpreter_stack
"""The innermost transform of ``torch.func``, if any, and a context that leaves all of them."""

leave_tracing_modes = (
    _proxies.disable_proxy_modes_tracing,
    disable_functional_mode,
    unset_fake_temporarily,
)
"""Contexts that leave the dispatch modes that put other tensors in place of real ones."""

is_func_wrapper: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""A transform of ``torch.func`` wraps the tensors that its level computes."""


def before_func_wraps(note: Callable[[Tensor], None]) -> None:
    """Call ``note`` with each argument that a transform of ``torch.func`` is about to wrap.

    ``__torch_function__`` is called neither then nor for results; torch has no hook.
    """

    def noting(wrap: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wrap)
        def noted(value: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                note(value)
            return wrap(value, *args, **kwargs)

        return noted

    for module, name in ((_transforms, "_wrap_tensor_for_grad"), (_vmap, "_add_batch_dim")):
        setattr(module, name, noting(getattr(module, name)))


without_torch_function = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` for classes that need none, at half the cost of torch's default."""

hold: Callable[[Tensor], None] = Tensor._fix_weakref  # type: ignore[attr-defined]
"""Makes a tensor from a weak reference safe to hold if only C++ held it; torch does the same."""

num_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
"""The reference count in C++. Python counts as one; views and autograd graphs add to it."""


make_wrapper = Tensor._make_wrapper_subclass
"""Makes a tensor without memory. DTensor uses it too; there is no other way."""

may_hold: Callable[[Tensor, Tensor], bool] = torch._has_compatible_shallow_copy_type
"""The test by which ``nn.Module.to`` decides whether ``tensor.data`` takes another tensor.

Not a tensor on the meta device, nor on an accelerator of a backend outside of torch.
"""


def take_contents(tensor: Tensor, other: Tensor) -> None:
    """Swap a tensor's C++ implementation with another's, and keep its gradient hooks.

    ``torch.utils.swap_tensors`` loses them, and refuses tensors that an autograd graph or a weak
    reference knows; a graph keeps what it has saved.
    """
    torch._C._swap_tensor_impl(tensor, other)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(tensor, name, getattr(tensor, name))  # to C++, from where Python keeps them


def num_references(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storage objects refer to the memory of a storage.

    Torch has no public call for it.
    """
    return int(torch._C._storage_Use_Count(storage._cdata))


has_storage = torch._C._has_storage
"""False for sparse and functorch tensors, whose ``untyped_storage`` raises."""

copy_each = torch._foreach_copy_
"""Copies many tensors in one call, as torch's optimizers do, at a tenth of the cost per tensor."""

keep_version = torch.autograd._unsafe_preserve_version_counter
"""A context after which a tensor has the version that it had before; torch documents none."""

version_of = Tensor._version.__get__  # type: ignore[attr-defined]
"""Reads a tensor's version counter; a function, so that it can be mapped over many tensors."""


def set_versions(tensors: Iterable[Tensor], versions: Iterable[int]) -> None:
    """Set the version counters of tensors."""
    torch._C._autograd._unsafe_set_version_counter((*tensors,), (*versions,))


queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the current backward pass ends.

DDP and FSDP2 use it too: there is no public event, and nothing else notices the end of a plain
``loss.backward()`` in user code.
"""

profiler_is_enabled = torch.autograd._profiler_enabled
"""Costs a hundredth of a ``record_function`` range that nobody reads."""

enable_profiler_ranges = torch.autograd._enable_record_function
"""Turns the profiler ranges of torch's own works on and off; there is no public switch."""


def is_in_compiled_call() -> bool:
    """Return whether a function that ``torch.compile`` returned is running, compiled or not."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and (
            frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        ):
            return True
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def will_accumulate(parameters: Iterable[Tensor]) -> list[bool]:
    """Return for each parameter whether the backward pass that runs is to bring it a gradient.

    Those of passes that run within it are not known beforehand.
    """
    with torch.enable_grad(), as_plain_tensors():
        functions: Any = [p.expand_as(p).grad_fn for p in parameters]
    nodes = [function and function.next_functions[0][0] for function in functions]
    return [bool(node) and torch._C._will_engine_execute_node(node) for node in nodes]


def has_hooks(tensor: Tensor) -> bool:
    """Return whether any gradient hook was registered; no public name tells."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def put_last(hook: int, tensor: Tensor) -> None:
    """Move a post-accumulate-grad hook, given by its handle's ``id``, behind all others."""
    hooks: Any = tensor._post_accumulate_grad_hooks
    if hook in hooks:
        hooks[hook] = hooks.pop(hook)


def storage_key(tensor: Tensor) -> int:
    """Return a key that identifies a tensor's storage even while it has no memory or address."""
    with as_plain_tensors():
        return int(tensor.untyped_storage()._cdata)


def step_together(cls: type[Tensor]) -> None:
    """Make optimizers use their foreach implementation for a class, as they do for parameters.

    Torch does the same for DTensor.
    """
    _optimizers._foreach_supported_types.append(cls)


def accept_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer have step hooks, though it has not called the constructor of its base."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = vars(optimizer).get(name, {})
        if not isinstance(hooks, OrderedDict):  # a dict cannot be referred to weakly
            setattr(optimizer, name, OrderedDict(hooks))
    optimizer._patch_step_function()


def hook_first(hook: Callable[..., Any], optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Register a step post-hook of an optimizer before all others; torch has no public way to."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def call_last(hook: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
    """Move a step pre-hook of an optimizer behind all others; torch has no public way to."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(next(key for key, value in hooks.items() if value == hook))


def update_scale(scaler: torch.amp.GradScaler, *, found_inf: bool) -> None:
    """Move to the next step's loss scale, for gradients that torch's scaler has not seen itself."""
    scaler.scale(torch.zeros(()))  # makes the tensor of its scale, here on the host
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {0: torch.tensor(float(found_inf))}
    scaler.update()


@contextlib.contextmanager
def without_hooks_of_all_steps() -> Iterator[None]:
    """Enter a context without the global step hooks of optimizers; torch has no public one."""
    places: Any = (
        _optimizers._global_optimizer_pre_hooks,
        _optimizers._global_optimizer_post_hooks,
    )
    kept = [place.copy() for place in places]
    for place in places:
        place.clear()
    try:
        yield
    finally:
        for place, hooks in zip(places, kept, strict=True):
            place.update(hooks)


def trace_as_plain(cls: type[Tensor]) -> None:
    """Let ``make_fx``, and so ``torch.func.linearize``, trace tensors of a class as plain ones."""
    handled: Any = _proxies
    handled.HANDLED_TYPES = (*handled.HANDLED_TYPES, cls)


def measure_together(cls: type[Any]) -> None:
    """Make ``clip_grad_norm_`` compute the norms of all tensors of a class in one foreach call.

    Computed one by one, each norm would be a message. Torch does the same for DTensor.
    """
    _foreach_utils._foreach_supported_types.append(cls)


@contextlib.contextmanager
def mapping_files_by(mapped: Callable[[str], torch.UntypedStorage]) -> Iterator[None]:
    """Enter a context in which ``torch.load(mmap=True)`` maps files by another function."""
    cls: Any = torch.UntypedStorage
    own = cls.from_file
    cls.from_file = lambda path, is_shared, nbytes: (
        own(path, is_shared, nbytes) if is_shared else mapped(path)
    )
    try:
        yield
    finally:
        cls.from_file = own
