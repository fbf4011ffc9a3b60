"""The state dict of a sharded module, as a single process would have it.

Saving returns the dictionary that DDP would, with a :class:`ShardedValue` in place of every sharded
tensor. Nothing is gathered.

Loading takes whole values, usually unread ones of a file, and each rank reads its own ranges.
``load_state_dict``, which users may override, is called once: its copies are only noted, and made
once all names and shapes are known to fit. What is damaged shows while it is read, which leaves the
module **torn**: it does not train, predict or save until it is loaded from somewhere else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.cut_values import joined
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine
from lightning_zero.parameters import Piece, loading_whole
from lightning_zero.plan import cut_of
from lightning_zero.tensors import (
    internals,
    properties,
    runs_outside,
    tensors_in,
    uncollected,
)

# -- saving ----------------------------------------------------------------------------------------


@uncollected()
@runs_outside
def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """Return ``module.state_dict()`` with sharded values in the master's precision.

    All ranks call it together.
    """
    engine.require_whole()
    engine.sharded.keep_edits()
    state = module.state_dict(keep_vars=True)
    values: dict[int, ShardedValue] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter):
            piece = engine.sharded.piece(value)
            if piece is not None:
                # Tied names share one tensor in the file, as they do in the module.
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
        return joined(key, piece, part, cut, comm)
    start = piece.range.start
    return ShardedValue.of(key, part, start, slot.shape, slot.stride, control=comm.control)


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
    nothing has changed. If a range that a rank reads is damaged, all raise and a sharded module is
    torn; nothing of an ordinary module has changed.

    Args:
        module: The module, or a submodule.
        engine: The engine that shards it, if any.
        state: Whole values, by name.
        strict: As for ``load_state_dict``.
    """
    load = ModuleLoad(module, lambda: engine)
    result = load.call(state, strict=strict)
    load.make()
    return result


class ModuleLoad(TorchFunctionMode):
    """A call of ``module.load_state_dict`` whose copies are only noted until :meth:`make`.

    Code within the call that reads one of the module's tensors, as a user's ``load_state_dict``
    may, sees what was copied to it so far.

    1. :meth:`call`.
    2. :meth:`make`.

    Args:
        module: The module, or a submodule.
        engine: Returns the engine that shards it, if any; called when there is something to copy.
    """

    def __init__(self, module: nn.Module, engine: Callable[[], Engine | None]) -> None:
        super().__init__()
        self._module = module
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._engine = engine
        self._noted: list[tuple[str, Any, int]] = []
        self._failure: Exception | None = None

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """The module's current tensors: an engine gives memory to those on the meta device."""
        return {**dict(self._module.named_buffers()), **dict(self._module.named_parameters())}

    def call(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Call ``load_state_dict`` and return what it returns."""
        with self, loading_whole(), warnings.catch_warnings():
            # torch's copies to a meta module would be no-ops; ours are only noted.
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
            try:
                return self._module.load_state_dict(state, strict=strict)
            finally:
                # torch would report it as the failure of whatever it was copying.
                if self._failure is not None:
                    raise self._failure

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and id(args[0]) in self._names and not self._has_own(args[1:]):
            self._noted.append((self._names[id(args[0])], args[1], _version_of(args[1])))
            return args[0]
        if self._noted and func not in _HARMLESS and self._has_own([args, kwargs]):
            try:
                self.make()
            except Exception as error:
                self._failure = error
                raise
        return func(*args, **kwargs)

    def _has_own(self, values: Any) -> bool:
        return any(id(tensor) in self._names for tensor in tensors_in(values, within_objects=False))

    def make(self) -> None:
        """Make the noted copies; all ranks call it together."""
        noted, self._noted = self._noted, []
        for name, value, version in noted:
            if version != _version_of(value):
                raise RuntimeError(
                    f"The tensor that load_state_dict copied to {name!r} was changed after the"
                    " copy. Copy a clone of it."
                )
        engine, tensors = self._engine(), self._tensors
        pairs = [(tensors[name], value) for name, value, _ in noted]
        if engine is None:
            for _, value in pairs:  # an ordinary module cannot refuse to be used
                if isinstance(value, LazyTensor):
                    value.check()
            _copy(pairs)
            return
        is_all = {*dict(engine.module.named_parameters())} <= {name for name, _, _ in noted}
        with engine.sharded.writing(), engine.loading("Loading weights", heals=is_all):
            _copy(pairs)


def _copy(pairs: Iterable[tuple[Tensor, Any]]) -> None:
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)


def _version_of(value: Any) -> int:
    if isinstance(value, LazyTensor):
        return value.version
    has_one = type(value) is Tensor and not value.is_inference()
    return internals.version_of(value) if has_one else 0


_HARMLESS = properties.METADATA | properties.FACTS
