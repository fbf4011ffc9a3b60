"""The building of units: parameters become views of flat buffers, and masters are cut."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from lightning_zero.comm import Communicator, SyncPoint, require_room
from lightning_zero.engine.materialize import MetaInitializer
from lightning_zero.engine.unit import Unit
from lightning_zero.parameters import (
    FlatParameters,
    Owner,
    Reader,
    Store,
    memory_for_masters,
    store_for,
    stream_for,
)
from lightning_zero.plan import FlatSpec, Settings, UnitSpec, specify_units
from lightning_zero.tensors import PartlyRead, Scratch

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and their total."""


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
        reader: Reader,
        sources: Mapping[int, PartlyRead],
    ) -> None:
        self._comm, self._scratch, self._reader, self._sources = comm, scratch, reader, sources
        self.initializer = MetaInitializer(module, settings.device, needs_values=not sources)
        # Weights read from a checkpoint are not sent, and so not coded.
        settings = replace(settings, gather_bits=None) if sources else settings
        self._specs = specify_units(module, settings)
        # The first module that holds each parameter.
        self._holders = {
            id(parameter): child
            for child in reversed(list(module.modules()))
            for parameter in child._parameters.values()
        }

    def build(self, owner: Owner, on_written: Progress) -> Iterator[Unit]:
        """Yield each unit, whose parameters belong to ``owner``, before the next one is built."""
        streams, mesh = bool(self._sources), self._comm.mesh
        divided = {"num_shards": mesh.shard.size, "num_copies": mesh.replicate.size}
        written, nbytes, sizes = 0, 0, [0] * len(self._specs)
        if self._scratch is not None and not streams:
            sizes = [spec.bytes_in_files(**divided) for spec in self._specs]
            nbytes = sum(sizes)
            require_room(self._scratch, nbytes, self._comm.control, "masters")
        on_written(0, nbytes)
        flats = [] if streams else [flat for spec in self._specs for flat in spec.flat_parameters]
        layouts = ((flat.layout(**divided), flat.plan) for flat in flats)
        masters = memory_for_masters(layouts, self._comm, self._scratch)
        # An exception's traceback keeps this frame, which must not keep memory for later units.
        with contextlib.closing(masters):
            for index, (spec, size) in enumerate(zip(self._specs, sizes, strict=True)):
                stores = [
                    self._stream(flat) if streams else functools.partial(store_for, memory=masters)
                    for flat in spec.flat_parameters
                ]
                unit = self._unit(spec, owner, stores, index)
                yield unit
                if spec.name or streams:
                    unit.weights.reshard()
                written += size
                on_written(written, nbytes)
                if not streams:
                    # Initializers of later units may read these weights, at stage 3 from peers.
                    self._comm.fence(SyncPoint.SETUP)

    def _unit(
        self, spec: UnitSpec, owner: Owner, stores: list[Callable[..., Store]], index: int
    ) -> Unit:
        flats = spec.flat_parameters
        self.initializer.fill(self._holders[id(p)] for flat in flats for _, p in flat.named)
        groups = [
            FlatParameters(flat.named, flat.plan, self._comm, owner, self._scratch, make_store)
            for flat, make_store in zip(flats, stores, strict=True)
        ]
        return Unit(spec.name, spec.module, groups, index)

    def _stream(self, flat: FlatSpec) -> Callable[..., Store]:
        sources = [self._sources[id(p)] for _, p in flat.named]
        return functools.partial(stream_for(flat.plan), sources=sources, reader=self._reader)
