"""Activation checkpointing, and offload of activations to host memory.

**Checkpointing** drops activations after forward and recomputes them in backward (Chen et al.,
*Training Deep Nets with Sublinear Memory Cost*, 2016). The recomputation uses the tensors that the
module held in its forward, including those that `torch.func.functional_call` swapped in for that
call only.

**Offload** copies whatever autograd saves in the forward of a unit to the host, except weights,
which the engine gathers and releases itself, and small tensors. When backward first needs a tensor
of a call, all tensors of that call are fetched, and those of the preceding call, which backward
needs next. Rajbhandari et al., *ZeRO-Infinity*, 2021, section 5.1.2, do this with checkpointed
inputs; under checkpointing these are all that is saved.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.comm import Pending
from lightning_zero.engine.unit import Unit
from lightning_zero.optimizer import Announced
from lightning_zero.tensors import HostCopies, Work, internals


class Replacements:
    """Methods that replace those of other objects until :meth:`remove`."""

    def __init__(self) -> None:
        self._put: list[Announced] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any], *args: Any) -> None:
        """Replace ``owner.name`` by ``around(owner.name, *args, ...)``."""
        self._put.append(Announced.put(owner, name, around, getattr(owner, name), *args))

    def remove(self) -> None:
        """Restore the methods of all objects."""
        while self._put:
            self._put.pop().remove()


# -- checkpointing ---------------------------------------------------------------------------------


def checkpoint_activations(
    choice: bool | Iterable[type[nn.Module]], module: nn.Module, units: Iterable[nn.Module]
) -> Replacements:
    """Checkpoint ``units`` if ``choice`` is ``True``, or all modules of the chosen classes.

    Only ``forward`` is wrapped, so module hooks run once per call and not again in the
    recomputation, which preserves the state of random numbers.

    Raises:
        ValueError: ``module`` contains no module of these classes.
    """
    found = units if choice is True else ()
    if not isinstance(choice, bool):
        classes = tuple(choice)
        found = [child for child in module.modules() if isinstance(child, classes)]
        if not found:
            names = ", ".join(wanted.__name__ for wanted in classes)
            raise ValueError(f"activation_checkpointing={names}: the model has no such module.")
    wrapped = Replacements()
    for child in found:
        wrapped.wrap(child, "forward", _checkpointed, child)
    return wrapped


def _checkpointed(forward: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    held = [named for child in module.modules() for named in (child._parameters, child._buffers)]
    then: list[dict[str, Any]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        now = [{**named} for named in held]
        if not then:  # the forward itself, which may replace buffers
            then.extend(now)
            return forward(*args, **kwargs)
        _hold(held, then)
        try:
            return forward(*args, **kwargs)
        finally:
            _hold(held, now)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _hold(held: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    for named, tensors in zip(held, others, strict=True):
        named.clear()
        named.update(tensors)


# -- offload ---------------------------------------------------------------------------------------

LEAST_BYTES = 2**16
"""Smaller storages stay on the device: a copy would cost more than the memory is worth."""


class ActivationOffload(Replacements):
    """Units whose activations are offloaded to host memory until their backward.

    Args:
        units: All units; the root's own activations stay on the device.
        copies: Copies between the device and its host.
        least_bytes: Smaller storages stay, as do tensors that are more than a view of a storage.
    """

    def __init__(
        self, units: Sequence[Unit], copies: HostCopies, least_bytes: int = LEAST_BYTES
    ) -> None:
        super().__init__()
        self._copies, self._least_bytes = copies, least_bytes
        weights = [flat.weight.tensor for unit in units for flat in unit.flat_parameters]
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        # A storage is copied once, however many views of it autograd saves.
        self._by_storage: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        self._last_call: weakref.ref[_Call] | None = None
        for unit in units:
            if unit.name:
                self.wrap(unit.module, "forward", self._run)

    @staticmethod
    def require(device: torch.device) -> None:
        """Raise a ``ValueError`` if ``device`` is the host itself."""
        if device.type == "cpu":
            raise ValueError(
                "activation_offload=True needs a device other than the host, but accelerator='cpu'"
                " has none. Remove it; activation_checkpointing=True saves memory on the CPU too."
            )

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _Call(self._last_call)
        self._last_call = weakref.ref(call)
        pack = functools.partial(self._pack, call)
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return forward(*args, **kwargs)

    def _pack(self, call: _Call, tensor: Tensor) -> Tensor | functools.partial[Tensor]:
        if not self._can_move(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._least_bytes or storage._cdata in self._weights:
            return tensor
        saved = self._by_storage.get(storage._cdata)
        # Another storage may have taken its address, or this one may have been written to since.
        if saved is None or saved.source() is not storage or saved.version != tensor._version:
            saved = _Saved(call, tensor, self._copies)
            self._by_storage[storage._cdata] = saved
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return functools.partial(saved.view, tensor.dtype, *place)

    def _can_move(self, tensor: Tensor) -> bool:
        """Return whether a storage on the device, shape and strides fully describe a tensor."""
        is_there = type(tensor) is Tensor and tensor.device.type == self._copies.device.type
        if not (is_there and internals.has_storage(tensor)):
            return False
        return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


class _Call:
    """One call of a unit: the storages saved in it, and the call before."""

    def __init__(self, before: weakref.ref[_Call] | None) -> None:
        self.before = before
        self.saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def fetch(self) -> None:
        """Start to copy all of its storages to the device."""
        for saved in tuple(self.saved):
            saved.fetch()


class _Saved:
    """A storage whose content is offloaded to the host.

    Attributes:
        source: A weak reference to the storage.
        version: The version of the tensor when it was saved, equal to that of the same content.
        call: The call in which it was first saved.
    """

    def __init__(self, call: _Call, tensor: Tensor, copies: HostCopies) -> None:
        self.source, self.version = weakref.ref(tensor.untyped_storage()), tensor._version
        self.call = call
        self._copies, self._device = copies, tensor.device
        content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        content.set_(tensor.untyped_storage())
        self._on_host = copies.passing_memory(content.numel(), torch.uint8)
        self._end = copies.down(self._on_host, content, group=call)
        self._fetched: tuple[Tensor, Work] | None = None
        self._is_awaited = False
        call.saved.add(self)

    def fetch(self) -> None:
        """Start to copy the content to the device, unless that was done."""
        if self._fetched is None:
            content = torch.empty(len(self._on_host), dtype=torch.uint8, device=self._device)
            work = self._copies.up(content, self._on_host, Pending, self._end)
            self._fetched = content, work

    def view(self, dtype: torch.dtype, *place: Any) -> Tensor:
        """Return a view of the content on the device, and prefetch what backward needs next."""
        self._copies.release_sources(self.call)  # its forward is over
        self.call.fetch()
        before = self.call.before() if self.call.before is not None else None
        if before is not None:
            before.fetch()
        assert self._fetched is not None
        content, work = self._fetched
        work.wait()
        self._is_awaited = True
        whole = content[: len(content) // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(*place)

    def __del__(self) -> None:
        # Fetched and never used: computation may reuse its memory only once it has been written.
        if self._fetched is not None and not self._is_awaited:
            self._fetched[1].wait()


def _unpack(saved: Tensor | functools.partial[Tensor]) -> Tensor:
    return saved() if isinstance(saved, functools.partial) else saved
