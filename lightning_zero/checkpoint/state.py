"""The state dict of a sharded module, as a single process would have it.

Saving: the dictionary that DDP would give, with a :class:`ShardedValue` in the place of every
tensor of which each rank has a part. Nothing is gathered.

Loading: whole values come in, usually mapped from a file, and each rank copies its own ranges.
``load_state_dict`` is called once, as users may have their own: what it copies is noted, and copied
when all names and shapes are known to fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.checksums import CheckedRange, check
from lightning_zero.checkpoint.load import ranges_of
from lightning_zero.checkpoint.read_ahead import read_ahead
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Control, Outcome
from lightning_zero.engine import Engine
from lightning_zero.optimizer import require_whole_steps
from lightning_zero.parameters import Piece
from lightning_zero.tensors import internals, properties, tensors_in

# -- saving ----------------------------------------------------------------------------------------


def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """Return ``module.state_dict()`` with sharded values in the master's precision.

    All ranks call it together.
    """
    require_whole_steps(engine.sharded.optimizers)
    engine.sharded.keep_edits()
    state = module.state_dict(keep_vars=True)
    values: dict[int, ShardedValue] = {}
    for key, value in state.items():
        if isinstance(value, nn.Parameter):
            piece = engine.sharded.piece(value)
            if piece is not None:
                # Tied names share one tensor in the file, as they do in the module.
                part = piece if engine.comm.is_in_first_copy else piece[:0]
                state[key] = values.setdefault(id(value), sharded(key, piece, part))
                continue
        if isinstance(value, Tensor):
            state[key] = value.detach()
    return state


def sharded(key: str, piece: Piece, part: Tensor) -> ShardedValue:
    """Return the whole tensor, of the shape of the piece's parameter, of which ``part`` is here."""
    slot = piece.range.slot
    return ShardedValue.of(key, part, piece.range.start, slot.shape, slot.stride)


# -- loading ---------------------------------------------------------------------------------------


def load_module_state(
    module: nn.Module,
    engine: Engine | None,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    before: Callable[[], None] = lambda: None,
) -> Any:
    """Call ``module.load_state_dict`` once; each rank keeps its own part of what it copies.

    All ranks that share the module call it together. Where names or shapes do not fit, or what a
    rank would read is damaged, all raise, and nothing has changed.

    Args:
        module: The module, or a part of one.
        engine: What shards it, if anything does.
        state: Whole values, by name.
        strict: As for ``load_state_dict``.
        before: Called when names and shapes fit, before anything is copied.
    """
    copies = _Copies(module, engine, before)
    with copies:
        result = module.load_state_dict(state, strict=strict)
    copies.make()
    return result


class _Copies(TorchFunctionMode):
    """A mode that notes what is copied to the tensors of a module, until :meth:`make`.

    Whoever reads one of them within the mode, in a ``load_state_dict`` of the user's, finds what
    was copied to it so far.
    """

    def __init__(
        self, module: nn.Module, engine: Engine | None, before: Callable[[], None]
    ) -> None:
        super().__init__()
        named = [*module.named_parameters(), *module.named_buffers()]
        self._names = {id(tensor): name for name, tensor in named}
        self._engine = engine
        self._before: Callable[[], None] | None = before
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
        """Copy what is noted; all ranks together."""
        noted, self._noted = self._noted, []
        before, self._before = self._before, None
        if before is not None:
            before()
        copies = [self._copy(*one) for one in noted]
        read = (
            one
            for target, piece, value in copies
            for one in ranges(self._names[id(target)], value, piece)
        )
        engine = self._engine
        control = Control(alone=True) if engine is None else engine.comm.control
        check_ranges(read, control, "Loading weights")
        writing = contextlib.nullcontext() if engine is None else engine.sharded.writing()
        with writing, torch.no_grad():
            for target, _, value in copies:
                target.copy_(value)

    def _copy(self, target: Tensor, value: Any, version: int) -> tuple[Tensor, Piece | None, Any]:
        """Return where and what to copy, with this rank's piece of it if it is sharded."""
        if version != _version_of(value):
            raise RuntimeError(
                f"What load_state_dict copied to {self._names[id(target)]!r} was changed behind it."
                " Copy a clone."
            )
        piece = None
        if self._engine is not None and isinstance(target, nn.Parameter):
            piece = self._engine.sharded.piece(target)
        return target, piece, value if piece is None else like(value, piece)


def _version_of(value: Any) -> int:
    has_one = type(value) is Tensor and not value.is_inference()
    return internals.version_of(value) if has_one else 0


_HARMLESS = properties.METADATA | properties.FACTS


def ranges(name: str, value: Any, piece: Any) -> Iterator[CheckedRange]:
    """Yield what this rank reads of a stored tensor: its piece, or the whole."""
    if not isinstance(value, Tensor):
        return
    if isinstance(piece, Piece) and value.shape == piece.parameter.shape:
        own = piece.range
        if own.start == own.stop:
            return
        if isinstance(value, LazyTensor):
            value = value.laid_out(own.slot.stride)
        if value.stride() == own.slot.stride:
            yield from ranges_of(name, value, own.start, own.stop)
            return
    yield from ranges_of(name, value)


def check_ranges(ranges: Iterable[CheckedRange], control: Control, doing: str) -> None:
    """Raise a ``ValueError`` on all ranks if what one of them will read is damaged."""
    outcome = Outcome()
    with outcome.attempt():
        check(ranges)
    outcome.agree(control, doing)


def like(value: Any, piece: Piece) -> Any:
    """Return a stored tensor in the order of its parameter, and start to read a mapped one."""
    if not isinstance(value, Tensor) or value.shape != torch.Size(piece.range.slot.shape):
        return value
    if isinstance(value, LazyTensor):
        return value.laid_out(piece.range.slot.stride)
    if type(value) is Tensor and value.stride() == piece.range.slot.stride:
        read_ahead(piece.range.part_of(value))
    return value
