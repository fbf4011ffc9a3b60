"""The parameters of a unit that share a dtype and trainability, on flat buffers.

Such a group has one layout, one buffer of weights, one shard of the masters and one of gradients.
Its parameters are one of three things: placeholders (at rest), views of the weights (whole), or
views of whole masters that were gathered for reading or editing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.comm import Pending, Shards, SyncPoint
from lightning_zero.parameters.gradients import FlatGradients
from lightning_zero.parameters.guarded import (
    Guarded,
    Owner,
    Readable,
    class_of,
    ownership_of,
    restore_class,
    take,
)
from lightning_zero.parameters.local_form import put_values
from lightning_zero.parameters.piece import Piece
from lightning_zero.parameters.stores import Buffer, Store
from lightning_zero.plan import cut_of
from lightning_zero.tensors import (
    Work,
    internals,
    lasting_tensors,
    properties,
)

HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")
"""This version of torch allows a gradient of another dtype than its parameter's."""


class Shown:
    """Tensors that the parameters of a group point at.

    Attributes:
        values: The value of each parameter.
        versions: The parameters' versions without users' changes.
    """

    def __init__(self, parameters: list[Parameter], values: list[Tensor]) -> None:
        self._parameters, self.values = parameters, values
        self.versions = self.versions_now

    @property
    def versions_now(self) -> list[int]:
        """The parameters' versions."""
        with internals.as_plain_tensors():
            return list(map(internals.version_of, self._parameters))

    @property
    def moved(self) -> list[int]:
        """The indices of parameters that point at other memory."""
        with internals.as_plain_tensors():
            now = list(map(Tensor.data_ptr, self._parameters))
            then = list(map(Tensor.data_ptr, self.values))
        return [] if now == then else [i for i in range(len(now)) if now[i] != then[i]]

    @property
    def changed(self) -> list[int]:
        """The indices of parameters that point at other memory, or have other versions."""
        now, moved = self.versions_now, self.moved
        return [i for i in range(len(now)) if i in moved or now[i] != self.versions[i]]


class Edits(Shown):
    """Changes that users make to whole weights where they lie.

    Attributes:
        is_exposed: Whether they may have been changed without their version counters.
        in_step: Whether any code of a step has them, not just their module's forward.
        handed_out: Weak references to tensors over their memory that user code was given.
    """

    def __init__(self, parameters: list[Parameter], values: list[Tensor]) -> None:
        super().__init__(parameters, values)
        self.is_exposed = self.in_step = False
        self.handed_out: list[weakref.ref[Tensor]] = []

    def watch(self, values: list[Tensor]) -> None:
        """Watch for changes of ``values`` from now on."""
        self.values, self.is_exposed = values, False
        self.versions = self.versions_now

    def expose(self, tensor: Tensor, *, is_plain: bool = False) -> None:
        """Note that ``tensor`` lies in the memory of the weights, and may outlive them there.

        Through it they may be changed without their version counters: if it ``is_plain``, only by
        an array, which is looked for only where code of a step has weights, not in forwards, where
        torch itself takes plain views.
        """
        self.handed_out = [ref for ref in self.handed_out if ref() is not None]
        self.handed_out.append(weakref.ref(tensor))
        self.is_exposed |= self.in_step or not is_plain

    def forget(self) -> None:
        """Forget what was handed out: the memory is released, or left to it."""
        self.is_exposed, self.handed_out = False, []

    @property
    def is_held(self) -> bool:
        """Return whether user code still holds the data of a parameter."""
        return any(ref() is not None for ref in self.handed_out)

    def require_free(self, place: Tensor, name: str) -> None:
        """Raise a ``RuntimeError`` if user code holds data at ``place``, that of a parameter."""
        first, size = place.data_ptr(), place.nbytes
        for ref in self.handed_out:
            tensor = ref()
            if tensor is not None and first <= tensor.data_ptr() < first + size:
                raise RuntimeError(
                    f"The data of parameter {name!r} was replaced while its module ran, and its"
                    " former data is still in use. Keep a copy instead: `p.data.clone()`, or"
                    " replace data outside of the forward."
                )


class Masters(Shown):
    """Whole masters that parameters show, each in a storage of its own over their buffer.

    Attributes:
        whole: Their buffer.
        are_whole: Whether the weights were whole then.
    """

    def __init__(self, parameters: list[Parameter], whole: Buffer, *, are_whole: bool) -> None:
        with lasting_tensors():
            super().__init__(parameters, [own_storage(view) for view in whole.views])
        self.whole, self.are_whole = whole, are_whole
        # How often each value's memory, and each parameter, was referred to at first.
        self._references: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Note what refers to the values, as the parameters have just begun to show them."""
        self._references = list(map(_references, self._parameters, self.values))

    @property
    def are_held(self) -> bool:
        """Return whether code or a graph has a view of a value, or a parameter in a graph."""
        now = map(_references, self._parameters, self.values)
        pairs = zip(now, self._references, strict=True)
        return any(a > c or b > d for (a, b), (c, d) in pairs)

    @property
    def in_graphs(self) -> list[Parameter]:
        """The parameters that a graph has saved as masters."""
        uses = zip(self._parameters, self._references, strict=True)
        return [parameter for parameter, (_, then) in uses if internals.num_uses(parameter) > then]


class FlatParameters:
    """The parameters of a unit that share a dtype and trainability, on their buffers.

    Args:
        named: The parameters.
        store: Where they will rest.
        owner: Called when a use of the parameters needs it.

    Attributes:
        parameters: The parameters on the module.
        trainable: Whether they required gradients when the group was made.
        layout: Where they lie in their buffers.
        plan: The homes of weights, gradients and masters.
        store: As given.
        weight: The buffer of whole weights.
        pieces: This rank's pieces of them.
        gradients: Their gradients.
        owner: As given.
        classes: The guarded and the readable class of each.
        is_guarded: Whether they have the guarded one.
        edits: What users change of whole weights.
        masters: Whole masters, while they are shown.
        pending: This rank's shard of masters with changes that a backward pass must not see.
        is_recorded: Whether a graph has saved the weights, and its backward has not ended.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], store: Store, owner: Owner) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.trainable = self.parameters[0].requires_grad
        self.store, self.layout, self.plan = store, store.layout, store.plan
        self.weight = self.store.weights()
        with lasting_tensors():
            self._load()
            self.pieces = self._cut()
        self.gradients = FlatGradients(self.pieces, self.store)
        self.owner = owner
        take(named, self, self.plan.master.dtype)
        self.classes = [
            (class_of(Guarded, type(parameter)), class_of(Readable, type(parameter)))
            for parameter in self.parameters
        ]
        self._placeholders = self._made_placeholders()
        if HAS_GRAD_DTYPE and self.plan.weight.dtype is not self.plan.master.dtype:
            for parameter in self.parameters:
                parameter.grad_dtype = None  # any: autograd's gradients have the weight's dtype
        self.edits = Edits(self.parameters, self.weight.views)
        self.masters: Masters | None = None
        self.pending: Tensor | None = None
        self.is_recorded = False
        if self.plan.reshards:
            self.rest()
        else:
            self.point_at_weights()

    def _made_placeholders(self) -> list[Tensor]:
        """Return tensors of the parameters' shapes that show one element."""
        dtype, device = self.plan.weight.dtype, self.plan.weight.device
        # NaN where the dtype has it.
        has_nan = dtype.is_floating_point or dtype.is_complex
        with lasting_tensors():
            one = torch.full((), float("nan") if has_nan else 0, dtype=dtype, device=device)
            placeholders = [one.expand(parameter.shape) for parameter in self.parameters]
            for parameter, placeholder in zip(self.parameters, placeholders, strict=True):
                if not internals.may_hold(parameter, placeholder):
                    put_values(parameter, placeholder)
        return placeholders

    @property
    def master(self) -> Tensor:
        """This rank's shard of the masters."""
        return self.store.master

    # -- weights ---------------------------------------------------------------------------------

    def _load(self) -> None:
        """Fill masters, and weights that stay whole, with the first rank's parameters.

        Each element is copied once where this rank holds all masters. Peers may read them only
        after a fence.
        """
        comm, plan = self.store.comm, self.plan
        if plan.reshards:
            self.weight.release()
        whole = self.store.whole_masters(at_rest=True)
        if comm.mesh.data.rank == 0:
            for start, stop in self.layout.gaps:
                whole.tensor[start:stop].zero_()
            for view, parameter in zip(whole.views, self.parameters, strict=True):
                view.copy_(parameter)
        comm.broadcast(whole.tensor)
        comm.broadcast_copies(
            whole.tensor[slot.offset : slot.stop]
            for parameter, slot in zip(self.parameters, self.layout.slots, strict=True)
            if cut_of(parameter) is None
        )
        self.take_over(whole)
        if plan.has_master and not plan.reshards:
            self.weight.tensor.copy_(self.store.as_weights(whole.tensor))

    def _cut(self) -> list[Piece]:
        """Return this rank's pieces of the parameters."""
        mesh, pieces = self.store.comm.mesh, []
        ranges = self.layout.pieces(mesh.shard.rank)
        for parameter, range_ in zip(self.parameters, ranges, strict=True):
            piece = Piece(self.master[range_.in_shard], requires_grad=False)
            piece.parameter, piece.range = parameter, range_
            if mesh.tensor is not None and cut_of(parameter) is None:
                piece.is_copy = mesh.tensor.rank > 0
            pieces.append(piece)
        return pieces

    def point_at_weights(self) -> None:
        """Point the parameters, guarded, at whole weights that hold no edits."""
        self._point(self.weight.views)
        self.edits.watch(self.weight.views)

    def rest(self) -> None:
        """Point the parameters, guarded, at placeholders."""
        self.edits.forget()
        self._point(self._placeholders)

    def _point(self, values: Sequence[Tensor], *, guarded: bool = True) -> None:
        with internals.as_plain_tensors():
            for parameter, classes, data in zip(self.parameters, self.classes, values, strict=True):
                properties.SET_DATA(parameter, data)
                parameter.__class__ = classes[not guarded]  # as in `guard`, without another call
        self.is_guarded = guarded

    def guard(self, *, guarded: bool = True) -> None:
        """Guard the parameters, or make them readable, but leave their data in place."""
        for parameter, classes in zip(self.parameters, self.classes, strict=True):
            parameter.__class__ = classes[not guarded]
        self.is_guarded = guarded

    def release(self, *, may_be_shared: bool) -> None:
        """Release whole weights; if they ``may_be_shared``, leave the memory to whoever has it.

        A graph may have it as well, which keeps the memory then.
        """
        self.rest()
        if may_be_shared and self.weight.is_shared:
            self.weight.leave()
            self.edits.values = self.weight.views  # which otherwise keep what is left
        else:
            self.weight.release()

    def whole_masters(self) -> Buffer:
        """Return a buffer of the whole masters, gathered unless this rank holds all of them."""
        if self.store.comm.control.world_size == 1 and self.pending is None:
            return self.store.whole_masters(at_rest=True)
        whole, work = self.gather_masters("full", 0)
        work.wait()
        return whole

    # -- changes to whole weights ----------------------------------------------------------------

    @property
    def may_be_edited(self) -> bool:
        """Return whether users may have changed whole weights; the same on every rank."""
        edits = self.edits
        if self.plan.rests_apart and (edits.is_exposed or edits.versions != edits.versions_now):
            return True
        return bool(edits.moved)

    @torch.no_grad()
    def store_edits(self) -> None:
        """Copy this rank's part of changed weights to the masters; within write access.

        Raises:
            RuntimeError: The weights are in less precision than the masters, or the former data of
                a parameter whose data was replaced is still in use.
        """
        if self.plan.is_cast:
            self._refuse_edits()
            return
        views = self.weight.views
        for index in self.edits.moved:
            value = _data_of(self.parameters[index])
            self.edits.require_free(views[index], self.layout.slots[index].name)
            views[index].copy_(value)
            properties.set_data(self.parameters[index], views[index])
        if self.plan.rests_apart:
            self._copy_to(self.master)
        self.edits.watch(views)

    def _copy_to(self, shard: Tensor) -> None:
        """Copy this rank's part of what the parameters show to ``shard``."""
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            shard[piece.range.in_shard].copy_(piece.range.part_of(_data_of(parameter)))

    def _refuse_edits(self) -> None:
        """Raise if weights that are cast from masters were changed: small changes would be lost."""
        found, master = self.edits.changed, self.master
        own = self.store.own(self.weight.tensor).to(master.device)
        is_changed = bool(found) or not _same_bits(self.store.as_weights(master).to(own.dtype), own)
        (any_changed,) = self.store.comm.control.call(SyncPoint.EDIT, bytes([is_changed])).wait()
        if any_changed:
            what = f"Parameter {self.layout.slots[found[0]].name!r}" if found else "A parameter"
            raise RuntimeError(
                f"{what} was changed in {self.plan.weight.dtype} while its module ran, where small"
                f" changes would be lost: its {self.plan.master.dtype} values are not there. Change"
                " it outside of the module's forward, or gather weights in full precision with"
                " ZeROStrategy(cast_weights='none')."
            )
        self.edits.watch(self.weight.views)

    # -- whole masters ---------------------------------------------------------------------------

    def gather_masters(
        self, unit: str, tag: int, *, are_whole: bool = False
    ) -> tuple[Buffer, Work]:
        """Start to make the masters whole in a new buffer, and return it and the work.

        With ``are_whole`` the weights are, and serve if they have the masters' values.
        """
        whole = self.store.whole_masters()
        if are_whole and not self.plan.is_cast:
            with lasting_tensors():
                whole.tensor.copy_(self.weight.tensor)
            return whole, Pending()
        if self.pending is not None:
            source = Shards(self.pending)
            return whole, self.store.gather(whole.tensor, source, unit=unit, tag=tag)
        return whole, self.store.gather_masters(whole.tensor, unit=unit, tag=tag)

    def show_masters(self, whole: Buffer, *, stay_guarded: bool, are_whole: bool) -> None:
        """Point the parameters at whole masters, each in a storage of its own.

        Args:
            whole: The masters, which :meth:`gather_masters` has returned.
            stay_guarded: Whether the parameters stay guarded, as other uses need the weights.
            are_whole: Whether the weights are whole as well, so that changes need no other rank.
        """
        masters = Masters(self.parameters, whole, are_whole=are_whole)
        self._point(masters.values, guarded=stay_guarded)
        masters.begin()
        self.masters = masters

    @property
    def are_masters_changed(self) -> bool:
        """Return whether this rank's part of shown masters was changed, or they were replaced."""
        masters = self.masters
        if masters is None:
            return False
        if masters.moved:
            return True
        whole = masters.whole
        if masters.are_whole and not self.plan.is_cast:
            return not _same_bits(whole.tensor, self.weight.tensor)
        before = self.master if self.pending is None else self.pending
        return not _same_bits(self.store.own(whole.tensor).to(before.device), before)

    @torch.no_grad()
    def store_masters(self) -> None:
        """Take this rank's part of shown masters as the new ones; within write access."""
        assert self.masters is not None
        self._copy_to(self.changed_master())
        if self.masters.are_whole and not self.plan.is_cast:
            internals.copy_each(self.weight.views, [*map(_data_of, self.parameters)])

    def changed_master(self) -> Tensor:
        """Return the shard that takes changes: the master, or what it will be.

        Weights that are cast keep the values that a graph has saved until :meth:`store_pending`.
        """
        if self.pending is None and self.is_recorded and self.plan.is_cast:
            with lasting_tensors():
                self.pending = self.master.clone()
        return self.master if self.pending is None else self.pending

    @torch.no_grad()
    def store_pending(self) -> None:
        """Make deferred changes those of the masters; within write access."""
        assert self.pending is not None
        self.master.copy_(self.pending)
        self.pending = None
        # For graphs that have saved the weights and are not done.
        self._note_change(range(len(self.parameters)))

    def hide_masters(self, *, are_whole: bool) -> None:
        """Guard the parameters, at whole weights or at placeholders."""
        masters, self.masters = self.masters, None
        assert masters is not None
        if self.plan.is_cast:
            # A graph has saved the weights, which changes to the masters do not reach.
            internals.set_versions(self.parameters, masters.versions)
        if self.plan.is_cast or not are_whole:
            # A graph that has saved parameters as masters would find others.
            torch.autograd.graph.increment_version(masters.in_graphs)
        if are_whole:
            self.point_at_weights()
        else:
            self.rest()

    @torch.no_grad()
    def gathered_values(self) -> Buffer:
        """Return a buffer that holds the masters as they are shown now."""
        assert self.masters is not None
        whole = self.masters.whole
        moved = {i: _data_of(self.parameters[i]).clone() for i in self.masters.moved}
        for index, value in moved.items():
            whole.views[index].copy_(value)
        return whole

    @torch.no_grad()
    def take_over(self, whole: Buffer) -> None:
        """Take this rank's part of ``whole`` as the new master; within write access."""
        own = self.store.own(whole.tensor)
        if own.data_ptr() != self.master.data_ptr():  # not where they rest
            self.master.copy_(own)

    @property
    def may_be_stepped(self) -> bool:
        """Return whether an optimizer may change the masters; the same on every rank."""
        return self.trainable or any(parameter.requires_grad for parameter in self.parameters)

    def note_step(self, of_optimizer: Set[int]) -> None:
        """Note that an optimizer has stepped what has gradients, of pieces with these ids."""
        stepped = [
            index
            for index, piece in enumerate(self.pieces)
            if self.gradients.averaged[index] and id(piece) in of_optimizer
        ]
        if stepped:
            self._note_change(stepped)

    def _note_change(self, indices: Sequence[int]) -> None:
        """Let autograd refuse graphs that have saved parameters which were changed since.

        Under DDP the parameters themselves are changed, which autograd sees.
        """
        torch.autograd.graph.increment_version([self.parameters[index] for index in indices])
        for index in indices:
            self.edits.versions[index] += 1
            if self.masters is not None:
                self.masters.versions[index] += 1

    def require_like(self, index: int, data: Tensor) -> None:
        """Raise a ``RuntimeError`` unless ``data`` may become the data of parameter ``index``."""
        view, slot = self.weight.views[index], self.layout.slots[index]
        dtypes = (view.dtype, self.plan.master.dtype)
        if (data.shape, data.device) != (view.shape, view.device) or data.dtype not in dtypes:
            raise RuntimeError(
                f"Parameter {slot.name!r} is a view of a flat buffer until training ends:"
                f" {_describe(view)} cannot be replaced with {_describe(data)}. Convert or move the"
                " module before or after training, set the `precision` of the Trainer or of Fabric,"
                " or convert a copy.deepcopy of the module made within"
                " `with lightning_zero.gathered(module):`"
            )

    def let_go(self) -> None:
        """Release the parameters from their owner; they show no gradients any more."""
        for parameter, (_, readable) in zip(self.parameters, self.classes, strict=True):
            ownership_of(parameter).end(self)
            if type(parameter) is readable:
                restore_class(parameter)

    def retire(self) -> None:
        """Keep only this rank's pieces; the weights are not read any more."""
        with lasting_tensors():
            self.store.retire()
            for piece in self.pieces:
                piece.data = self.master[piece.range.in_shard]
            self.weight = self.store.weights()
            self.weight.release()

    def memory(self) -> dict[str, int]:
        """Return the bytes held now, by kind; see ``ShardedModel.memory``."""
        rows = self.gradients.memory()
        rows["gathered"] += 0 if self.masters is None else self.masters.whole.nbytes
        rows["gathered" if self.plan.reshards else "weights"] += self.weight.nbytes
        if self.plan.rests_apart:
            kind = "master" if self.plan.has_master else "weights"
            rows.update(self.plan.rows({kind: self.master.nbytes}))
        if self.store.cast_bytes:
            rows.update(self.plan.rows({"weights": self.store.cast_bytes}))
        return rows


def _data_of(parameter: Parameter) -> Tensor:
    """Return the data of a parameter, wherever it is."""
    with internals.as_plain_tensors():
        found: Tensor = properties.GET_DATA(parameter)
        return found


def own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of ``view`` whose storage holds nothing else.

    It keeps the memory of ``view`` alive.
    """
    if view.is_meta or not view.numel():
        return view.clone()
    made: Tensor = torch.from_dlpack(view)
    return made


def _references(parameter: Parameter, value: Tensor) -> tuple[int, int]:
    storage = value.untyped_storage()
    return internals.num_references(storage), internals.num_uses(parameter)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors ``[n]`` of one dtype hold the same bits."""
    return one.view(torch.uint8).equal(other.view(torch.uint8))


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
