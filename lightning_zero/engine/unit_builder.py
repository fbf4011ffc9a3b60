"""The building of units: parameters become views of flat buffers, and masters are cut."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch import nn

from lightning_zero.comm import Communicator, SyncPoint, require_room
from lightning_zero.engine.materialize import MetaInitializer
from lightning_zero.engine.unit import Unit
from lightning_zero.parameters import (
    FlatParameters,
    Owner,
    Store,
    memory_for_masters,
    store_for,
)
from lightning_zero.plan import Settings, UnitSpec, specify_units
from lightning_zero.tensors import Scratch


class UnitBuilder:
    """Shards a module unit by unit, so that no two units need memory for both forms.

    Attributes:
        initializer: Initializes modules that are on the meta device.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        comm: Communicator,
        scratch: Scratch | None,
    ) -> None:
        self._comm, self._scratch = comm, scratch
        self.initializer = MetaInitializer(module, settings.device)
        self._specs = specify_units(module, settings)
        # The first module that holds each parameter.
        self._holders = {
            id(parameter): child
            for child in reversed(list(module.modules()))
            for parameter in child._parameters.values()
        }

    def build(self, owner: Owner) -> Iterator[Unit]:
        """Yield each unit, whose parameters belong to ``owner``, before the next one is built."""
        mesh = self._comm.mesh
        divided = {"num_shards": mesh.shard.size, "num_copies": mesh.replicate.size}
        if self._scratch is not None:
            nbytes = sum(spec.bytes_in_files(**divided) for spec in self._specs)
            require_room(self._scratch, nbytes, self._comm.control, "masters")
        flats = (flat for spec in self._specs for flat in spec.flat_parameters)
        layouts = ((flat.layout(**divided), flat.plan) for flat in flats)
        masters = memory_for_masters(layouts, self._comm, self._scratch)
        # An exception's traceback keeps this frame, which must not keep memory for later units.
        with contextlib.closing(masters):
            for index, spec in enumerate(self._specs):
                unit = self._unit(spec, owner, functools.partial(store_for, memory=masters), index)
                yield unit
                if spec.name:
                    unit.weights.reshard()
                # Initializers of later units may read these weights, at stage 3 from peers.
                self._comm.fence(SyncPoint.SETUP)

    def _unit(
        self, spec: UnitSpec, owner: Owner, make_store: Callable[..., Store], index: int
    ) -> Unit:
        flats = spec.flat_parameters
        self.initializer.fill(self._holders[id(p)] for flat in flats for _, p in flat.named)
        groups = [
            FlatParameters(flat.named, flat.plan, self._comm, owner, self._scratch, make_store)
            for flat in flats
        ]
        return Unit(spec.name, spec.module, groups, index)
