"""A sharded average of a module's weights: each rank keeps the part that it owns.

Averaging is element-wise, so a rank can average its pieces of the masters alone. The average stays
what Lightning's callbacks expect, a copy of the module with its structure, buffers and hooks, but
each parameter of the copy is 1-D, as long as this rank's piece::

    module.weight     [6, 4]   piece on rank 1  [12]   in the engine's master
    copy.weight                piece on rank 1  [12]   the average, in separate memory

``copy.state_dict()`` returns tensors of whole shape that are sharded over the ranks, and
``copy.load_state_dict()`` takes whole tensors, so checkpoints are the same as under DDP.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from lightning_zero.checkpoint import ShardedValue, holds, sharded
from lightning_zero.engine import Engine
from lightning_zero.parameters import Piece, make_distributed, put_values


class Average:
    """A copy of ``module``, made before it is sharded, that holds an average of its weights.

    Life cycle: construct, :meth:`fill`, any number of updates and checkpoints, :meth:`restore`.

    Args:
        module: The module, not sharded yet.
        key: Prefix that tells the average's tensors from others in a checkpoint.

    Attributes:
        copy: The copy. Its parameters are empty until :meth:`fill`, then pieces.
    """

    def __init__(self, module: nn.Module, key: str) -> None:
        self.key = key
        self._module = module
        stand_ins = {
            id(p): Parameter(torch.empty(0, dtype=p.dtype), p.requires_grad)
            for p in module.parameters()
        }
        self.copy = copy.deepcopy(module, dict(stand_ins))
        self._pieces: dict[int, Piece] = {}
        self._handles: list[RemovableHandle] = []
        self._copying: dict[str, Any] = {}

    def fill(self, engine: Engine, device: torch.device | None) -> None:
        """Start from the module's weights, now that ``engine`` shards it.

        Args:
            engine: The engine whose pieces are averaged.
            device: Where to keep the average; by default where the pieces are.
        """
        self._engine = engine
        for own, parameter in zip(self.copy.parameters(), self._module.parameters(), strict=True):
            piece = engine.sharded.piece(parameter)
            assert piece is not None, "an engine has a piece of each of its module's parameters"
            self._pieces[id(own)] = piece
            put_values(own, piece.data.to(device or piece.device, own.dtype, copy=True))
        # torch sets an attribute on the hook, which fails for a bound method.
        cut, show = functools.partial(self._cut), functools.partial(self._show_sharded)
        for child, original in zip(self.copy.modules(), self._module.modules(), strict=True):
            self._fill_buffers(child, original, device or engine.sharded.settings.device)
            handle = child.register_load_state_dict_pre_hook(cut)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        handle = self.copy.register_state_dict_post_hook(show)  # type: ignore[no-untyped-call]
        self._handles.append(handle)
        copies = functools.partial(self._copied, [cut, show])
        self._copying = {
            "__deepcopy__": copies,
            "__reduce_ex__": lambda protocol: (_same, (copies({}),)),
        }
        vars(self.copy).update(self._copying)

    def _copied(self, hooks: Sequence[Any], memo: dict[int, Any]) -> nn.Module:
        """Return a deep copy of the average, an ordinary module; a collective."""
        for own, value in zip(self.copy.parameters(), self.whole(), strict=True):
            memo[id(own)] = Parameter(value.to(own.device), own.requires_grad)
        memo.update({id(hook): _no_hook for hook in hooks})
        for name in self._copying:
            del vars(self.copy)[name]
        try:
            return copy.deepcopy(self.copy, memo)
        finally:
            vars(self.copy).update(self._copying)

    @staticmethod
    def _fill_buffers(child: nn.Module, original: nn.Module, device: torch.device) -> None:
        for name, buffer in child._buffers.items():
            if buffer is not None:
                values = original._buffers[name] if buffer.is_meta else buffer
                assert values is not None
                child._buffers[name] = values.detach().to(device, copy=buffer.is_meta)

    @property
    def is_filled(self) -> bool:
        """Return whether there is an average yet."""
        return bool(self._handles)

    # -- updates ---------------------------------------------------------------------------------

    @contextmanager
    def shown(self, *, modify: bool) -> Iterator[Any]:
        """Enter a context with a stand-in for the module, whose parameters are up-to-date pieces.

        With ``modify``, changes to them are kept.
        """
        stand_in = SimpleNamespace(parameters=self._masters, buffers=self._module.buffers)
        if modify:
            with self._engine.sharded.writing():
                yield stand_in
            return
        self._engine.sharded.keep_edits()
        yield stand_in

    def _masters(self) -> Iterator[Tensor]:
        """Yield this rank's part ``[n]`` of every master, in the order of the parameters."""
        for piece in self._pieces.values():
            yield piece.data

    # -- in a checkpoint -------------------------------------------------------------------------

    def _show_sharded(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace the parts in ``state`` by sharded tensors of whole shape."""
        own = {p.untyped_storage()._cdata: (n, p) for n, p in self.copy.named_parameters()}
        values: dict[str, ShardedValue] = {}
        for key, value in state.items():
            found = isinstance(value, Tensor) and own.get(value.untyped_storage()._cdata)
            if found:
                # Tied names share one tensor in the file, as they do in the module.
                state[key] = values.setdefault(found[0], self._sharded_value_of(*found))

    def _sharded_value_of(self, name: str, part: Parameter) -> ShardedValue:
        piece, comm = self._pieces[id(part)], self._engine.comm
        values = part.data if holds(piece, comm) else part.data[:0]
        return sharded(f"{self.key} {name}", piece, values, comm)

    def _cut(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Replace whole tensors in ``state`` by this rank's part."""
        for name, own in module._parameters.items():
            value = state.get(prefix + name)
            if own is None or value is None:
                continue
            piece = self._pieces[id(own)]
            if value.shape == piece.parameter.shape:
                state[prefix + name] = piece.range.part_of(value)
                continue
            errors.append(
                f"size mismatch for the average of {prefix + name}: its shape is"
                f" {tuple(value.shape)} in the checkpoint and {tuple(piece.parameter.shape)} here."
            )
            state[prefix + name] = own.data

    # -- the end ---------------------------------------------------------------------------------

    def whole(self) -> list[Tensor]:
        """Return the whole averages, in host memory; all ranks call it together."""
        parts = {id(self._pieces[id(own)]): own.data for own in self.copy.parameters()}
        wholes = {
            id(parameter): value.to("cpu", copy=True)
            for parameter, value in self._engine.sharded.whole_parameters(
                lambda piece: parts[id(piece)]
            )
        }
        return [
            wholes[id(self._pieces[id(own)].parameter)].to(own.dtype)
            for own in self.copy.parameters()
        ]

    def restore(self, whole: Sequence[Tensor]) -> None:
        """Make the copy an ordinary module on the CPU, with ``whole`` as its parameters."""
        for handle in self._handles:
            handle.remove()
        for name in self._copying:
            del vars(self.copy)[name]
        for own, value in zip(self.copy.parameters(), whole, strict=True):
            put_values(own, value)
        self.copy.cpu()
        make_distributed(self.copy)


def _same(module: nn.Module) -> nn.Module:
    """Return what a pickle holds in place of an average."""
    return module


def _no_hook(*_: Any) -> None:
    """Do nothing, in a copy of the average."""


def is_by_element(options: Mapping[str, Any]) -> bool:
    """Return whether ``AveragedModel(**options)`` averages parts of a tensor as it does the whole.

    If so, each rank may average its pieces alone.
    """
    values = [torch.linspace(-1, 1, 24).mul(step + 1).cos().view(6, 4) for step in range(3)]
    try:
        expected = _average(options, values).flatten()
        halves = [
            _average(options, [value.flatten()[part] for value in values])
            for part in (slice(0, 9), slice(9, 24))
        ]
    except Exception:
        return False
    return torch.allclose(torch.cat(halves), expected, rtol=1e-5, atol=1e-7)


def _average(options: Mapping[str, Any], values: Sequence[Tensor]) -> Tensor:
    # A copy, because a user's function may count its calls.
    average = AveragedModel(_module_of(values[0]), **copy.deepcopy(dict(options)))
    for value in values:
        average.update_parameters(_module_of(value))
    (result,) = average.parameters()
    return result.detach()


def _module_of(value: Tensor) -> nn.Module:
    return nn.ParameterList([value.clone()])
