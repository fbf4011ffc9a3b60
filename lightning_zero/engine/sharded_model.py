"""A model in units, and what can be done with it between steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.comm import Communicator, SyncPoint, parameter_behind
from lightning_zero.engine.unit import Residency, Unit, store_edits
from lightning_zero.engine.unit_builder import MetaInitializer, build_units
from lightning_zero.optimizer import kept_states
from lightning_zero.parameters import (
    FlatParameters,
    Guarded,
    Piece,
    put_values,
    restore_class,
)
from lightning_zero.plan import Settings, stays_whole, whole_tensors
from lightning_zero.tensors import Scratch, bytes_held, internals, runs_outside

_MOST_TOUCHED = 2
"""Units whose masters code sees at a time; more only while one operation uses them all."""


class ShardedModel:
    """A model whose parameters live in units: where each lies, its whole value, and its bytes.

    The rest of the engine, and all code that saves, loads or measures, relies on it: hence its many
    attributes.

    Attributes:
        module: The model. Its parameters are views of flat buffers, or at rest.
        settings: The user's settings.
        comm: The ranks.
        units: All units; the root last.
        flats: The flat parameters of all units.
        reshards: Whether any weights are released after use.
        optimizers: The optimizers that step the pieces.
        scratch: The folder for what rests in files; ``None`` if nothing does.
        moves_nothing: Whether the requested offload is to the memory that holds everything anyway.
        replicated: Frozen parameters that wrap tensors, by name: every rank keeps all of them.
        compute: Makes units whole for a use in a step that computes with weights, or returns
            ``False``.
        is_within_step: Tells whether code that runs now is part of a step.
    """

    def __init__(self, module: nn.Module, settings: Settings, comm: Communicator) -> None:
        self.module = module
        self.settings, asked = settings.on_device(), settings
        self.moves_nothing = self.settings.offload is not asked.offload
        self.comm = comm
        self.replicated = {name: p for name, p in module.named_parameters() if stays_whole(p)}
        self.units: list[Unit] = []
        self.optimizers: list[Optimizer] = []
        offload = self.settings.offload
        is_in_files = offload is not None and "nvme" in (offload.optimizer, offload.weights)
        self.scratch = Scratch(self.settings.offload_path) if is_in_files else None
        self.compute: Callable[..., bool] = lambda units, computes: False
        self.is_within_step: Callable[[], bool] = lambda: False
        # Whose masters code sees that has touched them, the least recently touched one first.
        self._touched: list[Unit] = []
        self._places: dict[int, tuple[Unit, FlatParameters, int]] = {}
        self._is_writing = False
        initializer = MetaInitializer(module, self.settings.device)
        for unit in build_units(module, self.settings, comm, self.scratch, self, initializer):
            self.units.append(unit)
            for flat in unit.flat_parameters:
                for index, parameter in enumerate(flat.parameters):
                    self._places[id(parameter)] = (unit, flat, index)
        self.flats = [flat for unit in self.units for flat in unit.flat_parameters]
        self.reshards = any(flat.plan.reshards for flat in self.flats)
        # Peers read replicated weights if there are no other masters.
        self._peers_read_weights = any(not flat.plan.rests_apart for flat in self.flats)
        initializer.finish(functools.partial(self.gathered, modify=True))

    @property
    def root(self) -> Unit:
        """The unit of everything that no inner unit took."""
        return self.units[-1]

    def piece(self, parameter: Parameter) -> Piece | None:
        """Return this rank's piece of a parameter; ``None`` if the model does not hold it."""
        place = self._places.get(id(parameter))
        if place is None:
            place = self._places.get(id(parameter_behind(parameter)))
        return place[1].pieces[place[2]] if place else None

    @runs_outside
    def touch(self, parameters: Sequence[Parameter], *, computes: bool = False) -> None:
        """Give parameters that are used together values outside of their units' forwards.

        They are masters, unless the use ``computes`` with weights in a step, or is of a backward,
        and are shown until other units are touched. All ranks must touch the same units, in the
        same order, except where whole weights have their masters' values (stages 1 and 2 without
        mixed precision).

        Raises:
            RuntimeError: A gather needs every rank, and other ranks touch other units or none.
        """
        guarded = [parameter for parameter in parameters if isinstance(parameter, Guarded)]
        needed = self.units_of(guarded)
        if self.compute(needed, computes=computes):
            if torch.is_grad_enabled():
                for parameter in guarded:
                    self._places[id(parameter)][1].is_recorded = True
            return
        used = self.units_of(parameters)
        new = [unit for unit in needed if not unit.weights.has_masters]
        if new:
            others = [unit for unit in self._touched if unit not in used]
            most = max(_MOST_TOUCHED - len(new), 0)
            self.hide(others[: max(len(self._touched) - most, 0)], new, must=False)
            for unit in new:
                unit.weights.show_masters(in_step=self.is_within_step())
        touched = [unit for unit in used if unit in self._touched or unit in new]
        self._touched = [unit for unit in self._touched if unit not in touched] + touched

    @runs_outside
    def hide(
        self, units: Sequence[Unit] | None = None, new: Sequence[Unit] = (), *, must: bool = True
    ) -> None:
        """Hide the masters of ``units``, or of all touched ones, and keep changes; a collective.

        Unless they ``must`` be hidden, those of which views are alive on any rank are not. All
        ranks agree on that, on what was changed, and that ``new`` ones come.
        """
        units = [unit for unit in self._touched if units is None or unit in units]
        if not (units or new):
            return
        flags = {
            unit: [
                not must and any(m.are_held for f in unit.flat_parameters if (m := f.masters)),
                *(flat.are_masters_changed for flat in unit.flat_parameters),
            ]
            for unit in units
        }
        together = [unit for unit in units if unit.weights.needs_ranks]
        if together or any(unit.weights.needs_ranks for unit in new):
            own = bytes(flag for unit in together for flag in flags[unit])
            what = ", ".join(unit.label for unit in new or units)
            agreed = iter(self.comm.control.call(SyncPoint.TOUCH, own, about=what).wait())
            for unit in together:
                flags[unit] = [next(agreed) > 0 for _ in flags[unit]]
        hidden = [unit for unit in units if not flags[unit][0]]
        changed = [
            (unit, flat)
            for unit in hidden
            for flat, flag in zip(unit.flat_parameters, flags[unit][1:], strict=True)
            if flag
        ]
        if of_ranks := [flat for unit, flat in changed if unit in together]:
            with self.comm.write_access(SyncPoint.EDIT):
                for flat in of_ranks:
                    flat.store_masters()
        if alone := [flat for unit, flat in changed if unit not in together]:
            # No peer reads them between steps.
            self.comm.note_change()
            for flat in alone:
                flat.store_masters()
        for unit in hidden:
            unit.weights.hide_masters(of_ranks)
            self._touched.remove(unit)
            if not self.is_within_step():
                unit.weights.reshard()

    def abandon(self) -> None:
        """Drop changes of touched units, and what is under way, after an exception."""
        touched, self._touched = self._touched, []
        for unit in touched:
            unit.weights.hide_masters()
        for unit in self.units:
            unit.abandon()

    @runs_outside
    @torch.no_grad()
    def write(self, parameter: Parameter, value: Tensor) -> None:
        """Keep a new whole value of ``parameter``, which is not readable now."""
        _, flat, index = self._places[id(parameter)]
        if value.shape != parameter.shape:  # not always: it reads a value that is not loaded yet
            value = value.expand(parameter.shape)
        if self._is_writing:
            piece = flat.pieces[index]
            piece.data.copy_(piece.range.part_of(value))
            return
        self.touch([parameter])
        with internals.as_plain_tensors():  # masters that are shown in a step stay guarded
            parameter.copy_(value)

    @runs_outside
    def keep_edits(self) -> None:
        """Copy users' changes of whole weights to the masters, on all ranks; hide touched units."""
        whole = [unit for unit in self.units if unit.weights.residency >= Residency.WHOLE]
        store_edits([flat for unit in whole for flat in unit.flat_parameters])
        self.hide()
        self.store_pending()

    def store_pending(self) -> None:
        """Make changes those of the masters that a backward pass must not have seen."""
        flats = [flat for flat in self.flats if flat.pending is not None]
        if flats:
            with self.comm.write_access(SyncPoint.EDIT):
                for flat in flats:
                    flat.store_pending()
            self.refresh(self.units_of(flat.parameters[0] for flat in flats))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Enter a context in which whole values copied to parameters go to the masters."""
        self.keep_edits()
        for unit in self.units:
            unit.weights.wait()
            unit.weights.guard()
        try:
            with self.comm.write_access(SyncPoint.EDIT):
                self._is_writing = True
                yield
        finally:
            self._is_writing = False
            self.refresh(self.units)

    @runs_outside
    def refresh(self, units: Iterable[Unit], *, only_stepped: bool = False) -> None:
        """Bring whole weights up to date with masters that have changed, on all ranks."""
        for unit in units:
            if not unit.weights.rests:
                unit.weights.refresh(only_stepped=only_stepped)
        if self._peers_read_weights:
            # Weights must not be edited before all ranks have read them.
            self.comm.fence(SyncPoint.REFRESH)

    def units_of(self, parameters: Iterable[Parameter]) -> list[Unit]:
        """Return the units of ``parameters``, the root first; skip parameters of other models.

        The root is needed first, and a device gathers one unit after the other.
        """
        places = [self._places.get(id(parameter)) for parameter in parameters]
        wanted = {place[0].index for place in places if place}
        return [unit for unit in (self.root, *self.units[:-1]) if unit.index in wanted]

    # -- whole parameters ------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(
        self, parameters: Iterable[Parameter] | None = None, *, modify: bool = False
    ) -> Iterator[None]:
        """Enter a context in which parameters are whole, in the master's precision.

        Args:
            parameters: The same on every rank; all if omitted. Their whole units are gathered.
            modify: Keep rank 0's changes, on all ranks.

        Raises:
            RuntimeError: A parameter was changed without ``modify``, or ``modify`` was given within
                another ``gathered`` of the same weights.
        """
        units = self.units
        if parameters is not None:
            units = self.units_of(map(parameter_behind, parameters))
        self.hide()
        wanted = [unit.weights for unit in units if not unit.weights.has_masters]
        access: AbstractContextManager[None] = contextlib.nullcontext()
        if modify:
            if len(wanted) < len(units):
                raise RuntimeError(
                    "gathered(modify=True) was entered within another `gathered` of the same"
                    " weights. Pass `modify=True` to the outer one."
                )
            access = self.comm.write_access(SyncPoint.EDIT)
        for weights in wanted:
            weights.show_masters(as_gathered=True)
        try:
            with access:
                try:
                    yield
                finally:
                    for weights in wanted if modify else ():
                        weights.store_gathered()
            changed = [name for weights in wanted for name in weights.changed]
        finally:
            for weights in wanted:
                weights.hide_masters()
                if not self.is_within_step():
                    weights.reshard()
            if modify:
                self.refresh(units)
        if not modify:
            self._refuse_changes(changed)

    @runs_outside
    def _refuse_changes(self, changed: list[str]) -> None:
        """Raise on all ranks if any rank changed weights that were gathered for reading."""
        (any_changed,) = self.comm.control.call(SyncPoint.EDIT, bytes([bool(changed)])).wait()
        if any_changed:
            what = f"Parameter {changed[0]!r}" if changed else "A parameter on another rank"
            raise RuntimeError(
                f"{what} was changed within `gathered(...)`, which is for reading only. Use"
                " `gathered(..., modify=True)`, which keeps rank 0's changes on all ranks."
            )

    def whole_parameters(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield every parameter with its whole value in the master's precision.

        One buffer is in memory at a time. All ranks must iterate together. The tensors are views of
        a buffer that is freed when the next one comes.
        """
        # Edits of whole weights are stored without telling the other ranks.
        self.comm.fence(SyncPoint.EDIT)
        for flat in self.flats:
            yield from zip(flat.parameters, flat.whole_masters().views, strict=True)

    def restore(self) -> None:
        """Make the module an ordinary one, with whole parameters in host memory; a collective."""
        for parameter, whole in self.whole_parameters():
            restore_class(parameter)
            put_values(parameter, whole.to("cpu", copy=True))
        for unit in self.units:
            unit.weights.retire()

    @property
    def pieces(self) -> list[Piece]:
        """This rank's pieces of every parameter."""
        return [piece for flat in self.flats for piece in flat.pieces]

    @property
    def headline(self) -> str:
        """The stage and the ranks."""
        mesh, stage = self.comm.mesh, self.settings.stage
        copies = f", in {mesh.replicate.size} copies" if mesh.replicate.size > 1 else ""
        if mesh.tensor is not None:
            copies = f", each part of {mesh.tensor.size}"
        ranks = f"{mesh.shard.size} ranks" if mesh.shard.size > 1 else "1 rank"
        return f"ZeRO stage {stage} over {ranks}{copies}"

    def describe(self) -> str:
        """Return the units with their sizes, consecutive equal ones on one line."""
        lines = [f"{self.headline}, by unit:"]
        for (_, numel), equal in itertools.groupby(self.units, lambda u: (not u.name, u.numel)):
            first, *others = [unit.label for unit in equal]
            names = f"{first} to {others[-1]}: {len(others) + 1} x" if others else f"{first}:"
            lines.append(f"  {names} {numel:,} parameters")
        return "\n".join(lines)

    # -- memory ----------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds now, by kind, each storage counted once.

        ``gathered`` is whole weights of units that rest sharded; ``unreduced`` is gradients before
        and during their reduction; ``states`` is the tensors of the adopted optimizers. What is
        offloaded has kinds of its own: ``disk states``, ``host gradients`` and so on.
        """
        names = ("weights", "gathered", "gradients", "unreduced", "master", "states", "buffers")
        kinds = Counter(dict.fromkeys(names, 0))
        for flat in self.flats:
            kinds.update(flat.memory())
        for transport in self.comm.transports.values():
            kinds["unreduced"] += transport.scratch_bytes
            for kind, held in transport.passing.items():
                kinds[kind] += sum(storage.nbytes() for storage in held)
        rows: dict[Tensor, str] = {
            piece: row
            for flat, row in [(flat, flat.plan.row("states")) for flat in self.flats]
            for piece in flat.pieces
        }
        kinds.update(dict.fromkeys(rows.values(), 0))
        for member, state in kept_states(self.optimizers):
            if isinstance(member, Piece) and member not in rows:
                continue  # of another module, which the same optimizer steps
            kinds[rows.get(member, "states")] += sum(
                bytes_held(value) for value in tree_leaves(state) if isinstance(value, Tensor)
            )
        kinds["buffers"] = sum(map(bytes_held, whole_tensors(self.module)))
        return dict(kinds)
