"""The building of units: parameters become views of flat buffers, and masters are cut.

Models on the ``meta`` device are allocated and initialized one unit at a time. Values come from a
module's ``reset_parameters()``, then from the ``_init_weights(module)`` of the nearest enclosing
module that has one (the convention of Transformers). Children come before their parents, as in
``Module.apply``: a parent's ``_init_weights`` may overwrite its children's weights (GPT-2 does so
for the projections of its residual stream, T5 for all of its matrices).

A parameter that tensor parallelism has cut is initialized whole, on each rank the same, and each
keeps its part: so its values are those of a model that is not cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import Parameter

from lightning_zero.comm import Communicator, SyncPoint
from lightning_zero.engine.unit import Unit
from lightning_zero.parameters import (
    FlatParameters,
    Guarded,
    Owner,
    ownership_of,
    put_values,
    restore_class,
    stores_for,
    uncut,
)
from lightning_zero.plan import Settings, cut_of, specify_units, whole_shape
from lightning_zero.tensors import Scratch


def build_units(
    module: nn.Module,
    settings: Settings,
    comm: Communicator,
    scratch: Scratch | None,
    owner: Owner,
    initializer: MetaInitializer,
) -> Iterator[Unit]:
    """Yield each unit, whose parameters belong to ``owner``, before the next one is built.

    So at most one unit is in memory both whole and sharded.
    """
    specs = specify_units(module, settings)
    # The first module that holds each parameter.
    holders = {
        id(parameter): child
        for child in reversed(list(module.modules()))
        for parameter in child._parameters.values()
    }
    groups = [group for spec in specs for group in spec.flat_parameters]
    stores = stores_for(groups, comm, scratch)
    # An exception's traceback keeps this frame, which must not keep memory for later units.
    with contextlib.closing(stores):
        for index, spec in enumerate(specs):
            own = [group.named for group in spec.flat_parameters]
            initializer.fill(holders[id(p)] for named in own for _, p in named)
            made = [FlatParameters(named, next(stores), owner) for named in own]
            yield Unit(spec.name, spec.module, made, index)
            # Initializers of later units may read these weights, at stage 3 from peers.
            comm.fence(SyncPoint.SETUP)


# -- models on the meta device ---------------------------------------------------------------------

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class MetaInitializer:
    """Moves a model's tensors from the meta device to ``device`` and initializes them."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._device = device
        self._initializers = dict(_initializers(root))
        # Children before their parents. A model that stays on the meta device has nothing to fill.
        modules: list[nn.Module] = []
        if device.type != "meta":
            nn.Module.apply(root, modules.append)
        self._modules = [
            module for module in dict.fromkeys(modules) if any(map(_owns_meta, module.modules()))
        ]
        # For each initializing module that holds no parameters itself: its children's, if all meta.
        self._parents = {
            id(module): {id(p) for p in module.parameters()}
            for module in self._modules
            if id(module) in self._initializers
            and not isinstance(module, _CONTAINERS)
            and not _owns_meta(module)
            and all(p.is_meta for p in module.parameters())
        }

    def fill(self, owners: Iterable[nn.Module]) -> None:
        """Allocate and initialize the tensors that ``owners`` hold directly.

        Raises:
            ValueError: One of them holds meta tensors and nothing initializes them.
        """
        wanted = {id(module) for module in owners}
        fresh = [m for m in self._modules if id(m) in wanted and _owns_meta(m)]
        with uncut(fresh):
            for module in fresh:
                self._allocate(module)
            have = {id(p) for module in fresh for p in module._parameters.values()}
            complete = {key for key, parts in self._parents.items() if parts <= have}
            for module in self._modules:
                if id(module) in complete or module in fresh:
                    self._initialize(module)
                    self._parents.pop(id(module), None)

    def finish(self, gathered: Callable[[list[Parameter]], AbstractContextManager[None]]) -> None:
        """Initialize what is left: buffers, and modules whose children lie in several units.

        ``gathered`` makes parameters whole, and keeps edits of them.
        """
        for module in self._modules:
            if _owns_meta(module):
                self._allocate(module)
            elif id(module) not in self._parents:
                continue
            children = [p for child in module.children() for p in child._parameters.values()]
            found = [p for p in children if p is not None]
            if any(map(cut_of, found)):
                raise ValueError(
                    f"{type(module).__name__} initializes parameters of several units, which tensor"
                    " parallelism has cut. Build the model on the CPU, or let `units` have classes"
                    " that initialize no more than themselves."
                )
            with gathered(found):
                self._initialize(module)

    def _allocate(self, module: nn.Module) -> None:
        """Allocate the module's own meta tensors; parameters stay the same objects."""
        if _reset_of(module) is None and id(module) not in self._initializers:
            raise ValueError(
                f"A module of class {type(module).__name__} was built on the meta device, but has"
                " no `reset_parameters()` to initialize its tensors. Add one, or build the model on"
                " the CPU."
            )
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty_like(parameter, device=self._device)
                if cut_of(parameter) is not None:
                    empty = empty.new_empty(whole_shape(parameter, parameter.shape))
                put_values(parameter, empty)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=self._device)

    @torch.no_grad()
    def _initialize(self, module: nn.Module) -> None:
        reset = _reset_of(module)
        if reset is not None and id(module) not in self._parents:
            reset()
        initializer = self._initializers.get(id(module))
        if initializer is not None:
            initializer._init_weights(module)  # type: ignore[operator]


def forget_values(module: nn.Module) -> bool:
    """Move parameters that an engine left at rest to the meta device; return if any is there.

    They regain the dtype and strides from before that engine: at rest they have the dtype that it
    computed in, and no memory order.
    """
    for parameter in module.parameters():
        if isinstance(parameter, Guarded):
            before = ownership_of(parameter)
            restore_class(parameter)
            layout = {"dtype": before.dtype, "device": "meta"}
            put_values(parameter, torch.empty_strided(parameter.shape, before.stride, **layout))
    return any(parameter.is_meta for parameter in module.parameters())


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    # `MultiheadAttention` has only the private name.
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    return None


def _owns_meta(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def _initializers(
    module: nn.Module, inherited: nn.Module | None = None
) -> Iterator[tuple[int, nn.Module]]:
    """Yield each module's id with the nearest enclosing module that has ``_init_weights``."""
    if callable(getattr(module, "_init_weights", None)):
        inherited = module
    if inherited is not None:
        yield id(module), inherited
    for child in module.children():
        yield from _initializers(child, inherited)
