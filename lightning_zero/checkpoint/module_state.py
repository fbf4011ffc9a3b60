"""The state dict of a sharded module, as a single process would have it.

Saving returns the dictionary that DDP would, with a :class:`ShardedValue` in place of every sharded
tensor. Nothing is gathered.

Loading takes whole values, mapped to memory, and each rank copies its own ranges.
``load_state_dict``, which users may override, is called once: its copies are only noted, and made
once all names and shapes are known to fit.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.values import ShardedValue, dense_stride, memory_order
from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.parameters import Piece, loading_whole
from lightning_zero.plan import Cut, cut_of
from lightning_zero.tensors import (
    internals,
    lasting_tensors,
    properties,
    runs_outside,
    tensors_in,
    uncollected,
)

# -- saving ----------------------------------------------------------------------------------------


@uncollected()
@runs_outside
def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """Return ``module.state_dict()`` with sharded values in the master's precision; a collective.

    Tied names share one value, as they do in the module.
    """
    engine.require_whole()
    engine.sharded.keep_edits()
    state = module.state_dict(keep_vars=True)
    values: dict[int, ShardedValue] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter):
            piece = engine.sharded.piece(value)
            if piece is not None:
                if id(value) not in values:
                    part = piece if holds(piece, engine.comm) else piece[:0]
                    values[id(value)] = sharded(key, piece, part, engine.comm)
                state[key] = values[id(value)]
                continue
        if isinstance(value, Tensor):
            state[key] = value.detach()
    return state


def holds(piece: Piece, comm: Communicator) -> bool:
    """Return whether this rank writes its piece: of copies, one is written."""
    return comm.is_in_first_copy and not piece.is_copy


def sharded(key: str, piece: Piece, part: Tensor, comm: Communicator) -> ShardedValue:
    """Return a value of the whole shape of the piece's parameter, with this rank's ``part``.

    A collective for parameters that tensor parallelism has cut.
    """
    slot = piece.range.slot
    if (cut := cut_of(piece.parameter)) is not None:
        return _joined(key, piece, part, cut, comm)
    start = piece.range.start
    return ShardedValue.of(key, part, start, slot.shape, slot.stride, control=comm.control)


def _joined(key: str, piece: Piece, part: Tensor, cut: Cut, comm: Communicator) -> ShardedValue:
    """Return the whole value of a parameter that tensor parallelism has cut; a collective.

    One range along the first dimension is a range of the whole tensor, and each rank writes its
    piece of it. Any other part is scattered over the whole tensor. All ranks then put the whole
    together, one tensor at a time, and each keeps an equal range of it to write.
    """
    slot = piece.range.slot
    shape = cut.whole_shape(slot.shape)
    stride = torch.empty(shape, device="meta").stride()
    ((first, _), *others) = cut.ranges(cut.rank)
    if cut.dim == 0 and not others and slot.stride == stride:
        start = first * stride[0] + piece.range.start
        return ShardedValue.of(key, part, start, shape, stride, control=comm.control)
    with lasting_tensors(), torch.no_grad():
        parts = comm.parts_of_ranks(part.detach())
        # Every ``cut.size``-th rank has a range of the same part, in order.
        shapes = [cut.part_shape(slot.shape, rank) for rank in range(cut.size)]
        order = memory_order(slot.shape, slot.stride)
        held = [
            torch.cat(parts[rank :: cut.size]).as_strided(size, dense_stride(size, order))
            for rank, size in enumerate(shapes)
        ]
        whole = cut.whole_of(held).flatten()
        number, count, numel = comm.control.rank, comm.control.world_size, prod(shape)
        start, stop = (numel * n // count for n in (number, number + 1))
        part = whole[start:stop].clone()
        return ShardedValue.of(key, part, start, shape, stride, control=comm.control)


def local_value(value: Any, parameter: nn.Parameter, shape: Sequence[int]) -> Any:
    """Return this rank's part of a whole value of a cut parameter, here of ``shape``."""
    cut = cut_of(parameter)
    if cut is None or not isinstance(value, Tensor):
        return value
    return cut.part_of(value) if tuple(value.shape) == cut.whole_shape(shape) else value


# -- loading ---------------------------------------------------------------------------------------


@uncollected()
@runs_outside
def load_module_state(
    module: nn.Module,
    engine: Engine | None,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
) -> Any:
    """Call ``module.load_state_dict`` once; each rank copies its own part of each value.

    All ranks that share the module call it together. If names or shapes do not fit, all raise and
    nothing has changed.

    Args:
        module: The module, or a submodule.
        engine: The engine that shards it, if any.
        state: Whole values, by name.
        strict: As for ``load_state_dict``.
    """
    load = _ModuleLoad(module, engine)
    with load, loading_whole(), warnings.catch_warnings():
        # torch's copies to a meta module would be no-ops; ours are only noted.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        result = module.load_state_dict(state, strict=strict)
    load.make()
    return result


class _ModuleLoad(TorchFunctionMode):
    """A mode in which copies to a module's tensors are only noted until :meth:`make`.

    Code that reads one of the module's tensors, as a user's ``load_state_dict`` may, sees what was
    copied to it so far.
    """

    def __init__(self, module: nn.Module, engine: Engine | None) -> None:
        super().__init__()
        self._module, self._engine = module, engine
        # By the id, whatever Python object a hook asks for; the names are for errors.
        tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._noted: list[tuple[Tensor, Any, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and id(args[0]) in self._names and not self._has_own(args[1:]):
            self._noted.append((args[0], args[1], _version_of(args[1])))
            return args[0]
        if self._noted and func not in _HARMLESS and self._has_own([args, kwargs]):
            self.make()
        return func(*args, **kwargs)

    def _has_own(self, values: Any) -> bool:
        return any(id(tensor) in self._names for tensor in tensors_in(values, within_objects=False))

    def make(self) -> None:
        """Make the noted copies; all ranks call it together."""
        noted, self._noted = self._noted, []
        for target, value, version in noted:
            if version != _version_of(value):
                raise RuntimeError(
                    f"The tensor that load_state_dict copied to {self._names[id(target)]!r} was"
                    " changed after the copy. Copy a clone of it."
                )
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(torch.no_grad())
            if (engine := self._engine) is not None:
                wanted = {id(parameter) for parameter in engine.module.parameters()}
                is_all = wanted <= {id(target) for target, _, _ in noted}
                contexts.enter_context(engine.sharded.writing())
                contexts.enter_context(engine.loading("Loading weights", heals=is_all))
            for target, value, _ in noted:
                target.copy_(value)


def _version_of(value: Any) -> int:
    has_one = type(value) is Tensor and not value.is_inference()
    return internals.version_of(value) if has_one else 0


_HARMLESS = properties.METADATA | properties.FACTS
