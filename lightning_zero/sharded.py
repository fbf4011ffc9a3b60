"""A module whose parameters live in units: where each lies, its whole value, and its bytes.

Everything here may be asked between steps; the life of a step is the engine's.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero import meta
from lightning_zero.bundle import Bundle
from lightning_zero.comm import Comm
from lightning_zero.draft import draft_units
from lightning_zero.meeting import Subject
from lightning_zero.piece import Piece
from lightning_zero.settings import Settings
from lightning_zero.unit import State, Unit


class ShardedModule(ABC):
    """The units of a module.

    Attributes:
        module: The model. Its parameters are views of flat buffers, or at rest.
        settings: What the user chose.
        comm: The ranks.
        units: All units; the root last.
        optimizers: Those that step the pieces.
    """

    def __init__(self, module: nn.Module, settings: Settings, comm: Comm) -> None:
        self.module = module
        self.settings = settings
        self.comm = comm
        self.units: list[Unit] = []
        self.optimizers: list[Optimizer] = []
        self._places: dict[int, tuple[str, Unit, Bundle, int]] = {}
        self._is_writing = False
        self._build_units()

    def _build_units(self) -> None:
        owners = _owners(self.module)
        blank = meta.Blank(self.module, self.settings.device)
        for draft in draft_units(self.module, self.settings):
            blank.fill(owners[id(p)] for bundle in draft.bundles for _, p in bundle.named)
            bundles = [
                Bundle(bundle.named, bundle.plan, self.comm, self) for bundle in draft.bundles
            ]
            unit = Unit(draft.name, draft.module, bundles, len(self.units))
            self.units.append(unit)
            for bundle in unit.bundles:
                places = zip(bundle.layout.slots, bundle.parameters, strict=True)
                for place, (slot, parameter) in enumerate(places):
                    self._places[id(parameter)] = (slot.name, unit, bundle, place)
            if draft.name:
                unit.reshard()
        blank.finish(functools.partial(self.gathered, modify=True))

    @property
    def root(self) -> Unit:
        """The unit of everything that no inner unit took."""
        return self.units[-1]

    def owns(self, parameter: Parameter) -> bool:
        """Whether the parameter lies in one of the engine's buffers."""
        return id(parameter) in self._places

    def piece(self, parameter: Parameter) -> Piece | None:
        """This rank's piece of a parameter; ``None`` if the parameter is not the engine's."""
        place = self._places.get(id(parameter))
        return place[2].pieces[place[3]] if place else None

    @abstractmethod
    def touch(self, parameter: Parameter) -> None:
        """Make a parameter readable, or raise and say why it cannot be."""

    def expose(self, parameter: Parameter) -> None:
        """Notice that the ``data`` of a readable parameter is handed out."""
        _, _, bundle, index = self._places[id(parameter)]
        bundle.expose(index)

    def gives_back(self, parameter: Parameter) -> bool:
        """Whether views of a readable parameter will lose their memory."""
        return self._places[id(parameter)][2].gives_back

    def replace(self, parameter: Parameter, data: Tensor) -> None:
        """Keep what was assigned to the ``data`` of a readable parameter.

        Raises:
            RuntimeError: It is of another shape, dtype or device.
        """
        _, _, bundle, index = self._places[id(parameter)]
        bundle.replace(index, data)

    @torch.no_grad()
    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Keep a new whole value of ``parameter``, which is not in memory now; on all ranks.

        Outside :meth:`writing` every call waits for all ranks.
        """
        _, unit, bundle, index = self._places[id(parameter)]
        piece = bundle.pieces[index]
        if value.shape != parameter.shape:
            value = value.expand(parameter.shape)
        if self._is_writing:
            piece.data.copy_(piece.part_of(value))
            return
        unit.wait_if_in_flight()
        self.comm.fence(Subject.EDIT)
        piece.data.copy_(piece.part_of(value))
        self.comm.fence(Subject.EDIT)
        self.refresh([unit])

    def keep_edits(self) -> None:
        """Let the masters follow what users changed in whole weights; all ranks call it."""
        for unit in self.units:
            unit.keep_edits()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which whole values copied to parameters go to the masters, as in loading."""
        for unit in self.units:
            unit.wait_if_in_flight()
            unit.keep_edits()
            unit.guard()
        self.comm.fence(Subject.EDIT)
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
            self.comm.fence(Subject.EDIT)
            self.refresh(self.units)

    def refresh(self, units: Iterable[Unit], *, only_stepped: bool = False) -> None:
        """Bring whole weights up to date with masters that have changed, on all ranks."""
        for unit in units:
            if unit.state is not State.RESTING:
                unit.refresh(only_stepped=only_stepped)
        # A replicated weight is what peers read: nobody may edit his own before all have read it.
        self.comm.fence(Subject.REFRESH)

    @torch.no_grad()
    def broadcast_buffers(self) -> None:
        """Overwrite the module's buffers with rank 0's, one message per dtype, as DDP does."""
        if self.comm.world_size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in _buffers(self.module):
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self.comm.broadcast(flat)
            for buffer, part in zip(
                buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True
            ):
                buffer.copy_(part.view_as(buffer))

    # -- whole parameters ------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(
        self, parameters: Iterable[Parameter] | None = None, *, modify: bool = False
    ) -> Iterator[None]:
        """Make parameters whole, in the master's precision, for reading or for editing.

        Args:
            parameters: Which; all if omitted. Whole units are gathered. Every rank names the same.
            modify: Keep what rank 0 made of them, on all ranks.

        Raises:
            RuntimeError: They were changed without ``modify``.
        """
        wanted = self._units_of(parameters)
        units = [unit for unit in wanted if not unit.is_lent]
        if modify and len(units) < len(wanted):
            raise RuntimeError(
                "gathered(modify=True) was entered within another `gathered` of the same weights."
                " Give `modify=True` to the outer one."
            )
        for unit in units:
            unit.wait_if_in_flight()
            unit.keep_edits()
            unit.lend()
        if modify:
            self.comm.fence(Subject.EDIT)
        try:
            yield
        finally:
            try:
                if modify:
                    for unit in units:
                        unit.store_lent()
                    self.comm.fence(Subject.EDIT)
                changed = [name for unit in units for name in unit.changed]
            finally:
                for unit in units:
                    unit.take_back()
            if modify:
                self.refresh(units)
        if not modify:
            self._refuse(changed)

    def _refuse(self, changed: list[str]) -> None:
        """Raise on all ranks if any changed weights that it had gathered for reading."""
        flag = torch.tensor([bool(changed)], dtype=torch.uint8, device="cpu")
        self.comm.meetings.call(Subject.EDIT, flag).wait()
        if flag.item():
            what = f"Parameter {changed[0]!r}" if changed else "On another rank a parameter"
            raise RuntimeError(
                f"{what} was changed within `gathered(...)`, which was entered for reading. Enter"
                " `gathered(..., modify=True)`: it keeps what rank 0 does, on all ranks."
            )

    def _units_of(self, parameters: Iterable[Parameter] | None) -> list[Unit]:
        if parameters is None:
            return self.units
        wanted = {id(self._places[id(p)][1]) for p in parameters if id(p) in self._places}
        return [unit for unit in self.units if id(unit) in wanted]

    def full_parameters(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Every parameter with its whole value in the master's precision.

        One bundle is in memory at a time. All ranks must go through it together. The tensor is a
        view of memory that is freed when the next bundle comes.
        """
        for unit in self.units:
            for bundle in unit.bundles:
                yield from zip(bundle.parameters, bundle.full().views, strict=True)

    def full_from(self, part_of: Callable[[Piece], Tensor]) -> Iterator[tuple[Parameter, Tensor]]:
        """Every parameter with the whole tensor of which ``part_of(piece)`` is each rank's part.

        As :meth:`full_parameters`; the parts of a bundle have one dtype.
        """
        for unit in self.units:
            for bundle in unit.bundles:
                whole = bundle.full_from(dict(enumerate(map(part_of, bundle.pieces))))
                yield from zip(bundle.parameters, whole.views, strict=True)

    def full_of(self, piece: Piece, part: Tensor) -> Tensor:
        """The whole tensor of which every rank's ``part`` covers its ``piece``."""
        _, _, bundle, index = self._places[id(piece.parameter)]
        return bundle.full_of(index, part)

    def full_grad(self, parameter: Parameter) -> Tensor | None:
        """The whole reduced gradient of a parameter, ``None`` without one; a collective."""
        piece = self.piece(parameter)
        if piece is None:
            raise ValueError(
                "full_grad: the parameter belongs to no module that this engine shards."
            )
        has_grad = torch.tensor([piece.reduced is not None], dtype=torch.uint8, device="cpu")
        self.comm.meetings.call(Subject.GRADIENT, has_grad).wait()
        if not has_grad.item():
            return None
        return self.full_of(
            piece, piece.reduced if piece.reduced is not None else torch.zeros_like(piece)
        )

    @property
    def pieces(self) -> list[Piece]:
        """This rank's pieces of every parameter."""
        return [piece for unit in self.units for bundle in unit.bundles for piece in bundle.pieces]

    def describe(self) -> str:
        """The units with their sizes, equal ones that follow each other in one line."""
        runs: list[list[Unit]] = []
        for unit in self.units:
            if runs and unit is not self.root and runs[-1][0].numel == unit.numel:
                runs[-1].append(unit)
            else:
                runs.append([unit])
        lines = [
            f"  {run[0].label}"
            + (f" to {run[-1].label}: {len(run)} x" if len(run) > 1 else ":")
            + f" {run[0].numel:,} parameters"
            for run in runs
        ]
        header = f"ZeRO stage {self.settings.stage} over {self.comm.world_size} ranks, by unit:"
        return "\n".join([header, *lines])

    # -- memory ----------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds now, by kind, each storage counted once.

        ``gathered`` is whole weights of units that rest sharded; ``unreduced`` is gradients before
        and during their reduction; ``states`` is the tensors of the adopted optimizers.
        """
        kinds = dict.fromkeys(
            ("weights", "gathered", "gradients", "unreduced", "master", "states", "buffers"), 0
        )
        for unit in self.units:
            for bundle in unit.bundles:
                for kind, count in bundle.memory().items():
                    kinds[kind] += count
        kinds["unreduced"] += self.comm.scratch_bytes
        kinds["states"] = sum(
            value.nbytes
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        kinds["buffers"] = sum(buffer.nbytes for buffer in self.module.buffers())
        return kinds


def _buffers(module: nn.Module) -> list[Tensor]:
    """The module's buffers now, in an order that is the same on all ranks.

    Torch's own way through a tree of modules is several generators deep for every module.
    """
    buffers: dict[int, Tensor | None] = {}
    seen: set[nn.Module | None] = {None}
    left: list[nn.Module | None] = [module]
    while left:
        one = left.pop()
        if one is not None and one not in seen:
            seen.add(one)
            left.extend(one._modules.values())
            for buffer in one._buffers.values():
                buffers[id(buffer)] = buffer
    return [buffer for buffer in buffers.values() if buffer is not None]


def _owners(module: nn.Module) -> dict[int, nn.Module]:
    """The first module that holds each parameter, by the parameter's id."""
    owners: dict[int, nn.Module] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), owner)
    return owners
