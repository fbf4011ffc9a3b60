"""The parameters of a unit that share a dtype and trainability, on flat buffers.

Such a group has one layout, one buffer of weights, one shard of the masters and one of gradients.
Its parameters are one of three things: placeholders (at rest), views of the weights (whole), or
views of whole masters that were gathered for reading or editing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.comm import Communicator, Pending, Shards
from lightning_zero.parameters.buffer import Buffer
from lightning_zero.parameters.classes import ParameterClasses
from lightning_zero.parameters.edits import Edits
from lightning_zero.parameters.gradients import FlatGradients
from lightning_zero.parameters.ownership import Owner, ownership_of
from lightning_zero.parameters.piece import Piece, PieceRange
from lightning_zero.parameters.stores import Store
from lightning_zero.plan import Layout, Plan, cut_of
from lightning_zero.tensors import (
    Scratch,
    Work,
    internals,
    lasting_tensors,
    runs_outside,
)

HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")
"""Whether this version of torch allows a gradient of another dtype than its parameter's."""


class FlatParameters:
    """The parameters of a unit that share a dtype and trainability, on their buffers.

    Args:
        named: The parameters.
        plan: The homes of weights, gradients and masters.
        comm: The ranks.
        owner: Called when a use of the parameters needs it.
        scratch: The folder for what rests in files.
        make_store: Makes the store from layout, plan, ranks and scratch.

    Attributes:
        parameters: The parameters on the module.
        trainable: Whether they required gradients when the group was made.
        layout: Where they lie in their buffers.
        plan: The homes of weights, gradients and masters.
        store: Where they rest.
        weight: The buffer of whole weights.
        pieces: This rank's pieces of them.
        edits: Changes that users make to them.
        gradients: Their gradients.
        classes: Switches their classes, so that every use finds readable memory.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        plan: Plan,
        comm: Communicator,
        owner: Owner,
        scratch: Scratch | None,
        make_store: Callable[..., Store],
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.trainable = self.parameters[0].requires_grad
        self.layout = Layout.build(
            [(name, tuple(p.shape), _dense_stride(p)) for name, p in named],
            comm.mesh.shard.size,
            comm.mesh.replicate.size,
        )
        self.plan = plan
        self.store = make_store(self.layout, plan, comm, scratch)
        self.weight = self.store.weights()
        # The buffers that are refilled, so that old views of them show later values.
        self._lasting = [self.weight]
        self._load()
        with lasting_tensors():
            self.pieces = self._cut()
        self.edits = Edits(self.parameters, self.weight, has_copies=plan.rests_apart)
        self.gradients = FlatGradients(self.pieces, self.store, self.whole_of)
        self.classes = ParameterClasses(named, owner, self, plan.weight, plan.master.dtype)
        if HAS_GRAD_DTYPE and plan.weight.dtype is not plan.master.dtype:
            for parameter in self.parameters:
                parameter.grad_dtype = None  # any: autograd's gradients have the weight's dtype
        # This rank's part of coded weights, if they were edited since they were gathered.
        self._edited: Tensor | None = None
        self.show_whole()

    @property
    def master(self) -> Tensor:
        """This rank's shard of the masters."""
        return self.store.master

    # -- weights ---------------------------------------------------------------------------------

    def _load(self) -> None:
        """Fill weights and master from rank 0's parameters; peers may read only after a fence."""
        comm, plan = self.store.comm, self.plan
        with lasting_tensors():
            source = self.weight
            if plan.has_master:
                source = self.store.whole_masters()
            for start, stop in self.layout.gaps:
                source.tensor[start:stop].zero_()
            internals.copy_each(source.views, [*self.parameters])
            comm.broadcast(source.tensor)
            comm.broadcast_copies(
                source.tensor[slot.offset : slot.stop]
                for parameter, slot in zip(self.parameters, self.layout.slots, strict=True)
                if cut_of(parameter) is None
            )
            self.take_over(source)
            if source is not self.weight or plan.are_copies:
                self.weight.tensor.copy_(self.store.as_weights(source.tensor))

    def _cut(self) -> list[Piece]:
        """Return this rank's pieces of the parameters."""
        layout, comm, weight, pieces = self.layout, self.store.comm, self.weight.tensor, []
        master, stays, tensor_axis = self.master, self.plan.stays, comm.mesh.tensor
        places = zip(layout.slots, layout.pieces(comm.mesh.shard.rank), strict=True)
        for parameter, (slot, place) in zip(self.parameters, places, strict=True):
            range_ = PieceRange(slot, *place)
            piece = Piece.cut(parameter, range_, master, weight.dtype, stays=stays)
            if tensor_axis is not None and cut_of(parameter) is None:
                piece.is_copy = tensor_axis.rank > 0
            pieces.append(piece)
        return pieces

    def gather(self, unit: str, tag: int) -> Work:
        """Start to make the weights whole from every rank's master."""
        self.weight.allocate()
        self._edited = None
        return self.store.gather_weights(self.weight.tensor, unit=unit, tag=tag)

    def show_whole(self, *, is_new: bool = True) -> None:
        """Point the parameters at the weights; with ``is_new`` they hold no edits yet."""
        self.classes.show(self.weight.views)
        if is_new:
            self.edits.begin(self.weight)

    def show_resting(self) -> None:
        """Point the parameters at placeholders that send every use to the owner."""
        self.edits.end(self.weight)
        self.classes.rest()

    def whole_masters(self) -> Buffer:
        """Gather the whole masters to a new buffer, in the parameters' dtype, and return it."""
        whole, work = self.gather_masters("full", 0, as_gathered=True)
        work.wait()
        return whole

    def whole_of(self, index: int, part: Tensor) -> Tensor:
        """Return a whole tensor like parameter ``index``, assembled from each rank's ``part``."""
        return self.whole_from({index: part}).views[index].clone()

    def whole_from(self, parts: Mapping[int, Tensor]) -> Buffer:
        """Return a new buffer, assembled from each rank's ``parts`` by parameter index.

        Its dtype can hold the values of all of them.
        """
        dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts.values()])
        with lasting_tensors():
            device = self.plan.weight.device
            whole = Buffer(self.layout, dtype, device)
            shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
            for index, part in parts.items():
                shard[self.pieces[index].range.in_shard] = part
            self.store.gather(whole.tensor, Shards(shard), unit="full", tag=0).wait()
            return whole

    def _kept_masters(self) -> Buffer:
        """Return the buffer for whole masters between steps, kept because views of it may live."""
        if self.plan.are_copies and len(self._lasting) == 1:
            self._lasting.append(self.store.whole_masters())
        return self._lasting[-1]

    def gather_masters(
        self, unit: str, tag: int, *, are_whole: bool = False, as_gathered: bool = False
    ) -> tuple[Buffer, Work]:
        """Start to make the masters whole; return the buffer, and the work that fills it.

        With ``are_whole`` the weights are, and serve if they are no copies. With ``as_gathered``
        the buffer is a new one, whose views outlive it.
        """
        if are_whole and not self.plan.are_copies:
            return self.weight, Pending()
        whole = self.store.whole_masters() if as_gathered else self._kept_masters()
        whole.allocate()
        return whole, self.store.gather_masters(whole.tensor, unit=unit, tag=tag)

    def show_masters(self, whole: Buffer, *, as_gathered: bool) -> None:
        """Point the parameters at whole masters, which :meth:`gather_masters` has returned."""
        self.classes.show(whole.views)
        self.edits.begin(whole, are_gathered=as_gathered)

    def hide_masters(self, *, are_whole: bool) -> None:
        """Point the parameters at guarded weights or, unless these ``are_whole``, placeholders."""
        shown, is_kept = self.edits.buffer, not self.edits.are_gathered
        if are_whole:
            self.show_whole()
            self.classes.guard()
        else:
            self.show_resting()
        if is_kept and not (are_whole and shown is self.weight):
            # A graph that saved them would read memory that is gone; torch refuses changed ones.
            torch.autograd.graph.increment_version(self.parameters)
            shown.release()

    @torch.no_grad()
    def take_over(self, whole: Buffer) -> None:
        """Take this rank's part of ``whole`` as the new master; within write access."""
        axis = self.store.comm.mesh.shard
        shard = whole.shard(axis.rank, axis.size)
        if shard.data_ptr() != self.master.data_ptr():
            self.master.copy_(shard)

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
            self.edits.note_step(stepped)

    @property
    def gives_back(self) -> bool:
        """Return whether the memory that the parameters show is released while views may live."""
        if self.edits.buffer is self.weight:
            return self.plan.gives_weights_back
        return not self.edits.are_gathered

    def expose(self, index: int, *, is_plain: bool = False) -> None:
        """Note that the ``data`` of parameter ``index``, or a plain view of it, is handed out."""
        self.edits.expose(index, is_plain=is_plain)

    @property
    def are_in_graph(self) -> bool:
        """Return whether an autograd graph holds a parameter, or a view of one."""
        return any(
            internals.num_uses(one) > 1
            for parameter in self.parameters
            for one in (parameter, *ownership_of(parameter).views)
        )

    @property
    def shows_copies(self) -> bool:
        """Return whether what the parameters show lies apart from the masters."""
        return self.plan.rests_apart or self.edits.buffer is not self.weight

    @runs_outside
    def replace(self, index: int, data: Tensor) -> None:
        """Copy in the tensor that the user assigned to the ``data`` of parameter ``index``.

        Values in the master's dtype are cast: the user need not know of any other.
        """
        parameter, slot = self.parameters[index], self.layout.slots[index]
        dtypes = (parameter.dtype, self.plan.master.dtype)
        if (data.shape, data.device) != (parameter.shape, parameter.device) or (
            data.dtype not in dtypes
        ):
            raise RuntimeError(
                f"Parameter {slot.name!r} is a view of a flat buffer until training ends:"
                f" {_describe(parameter)} cannot be replaced with {_describe(data)}. Convert or"
                " move the module before or after training, set the `precision` of the Trainer"
                " or of Fabric, or convert a copy.deepcopy of the module made within"
                " `with lightning_zero.gathered(module):`"
            )
        self.edits.bring_back()
        with lasting_tensors(), internals.as_plain_tensors():
            value, shown = data.to(parameter.dtype), self.edits.buffer
            in_same = internals.storage_key(value) == internals.storage_key(parameter)
            if in_same and _place(value) == _place(parameter):
                return  # its own memory, assigned again as `module.float()` does
            value = value.clone() if in_same else value
            places = [buffer.views[index] for buffer in self._lasting if buffer is not shown]
            ownership_of(parameter).views.part(parameter, places, slot.name)
            # Equal values are no edit: one rank alone may restore what was there.
            if not torch.equal(parameter, value):
                parameter.copy_(value)

    @torch.no_grad()
    def store_edits(self) -> None:
        """Copy this rank's part of changed parameters to the masters; within write access."""
        edited, whole = self.edits.unsaved, self.edits.buffer
        self.edits.bring_back()
        if edited:
            self._store(edited, whole)
        self.edits.begin(whole)

    def _store(self, edited: Sequence[int], whole: Buffer) -> None:
        # What the parameters showed of this rank's masters before the edits.
        shown = self.master
        if whole is self.weight and self.plan.gather_bits is not None:
            shown = self.store.as_weights(shown) if self._edited is None else self._edited
        for index in edited:
            piece = self.pieces[index]
            part = piece.range.part_of(whole.views[index]).to(piece.device)
            # Unchanged elements keep the digits that only the master has.
            same = shown[piece.range.in_shard].to(part.dtype) == part
            piece.data.copy_(torch.where(same, piece.detach(), part.to(piece.dtype)))
        if whole is self.weight and self.plan.gather_bits is not None:
            axis = self.store.comm.mesh.shard
            self._edited = self.weight.shard(axis.rank, axis.size).clone()
        elif whole is not self.weight and not self.plan.gives_weights_back:
            show = self.store.as_weights(whole.tensor)
            for slot, view in ((self.layout.slots[i], self.weight.views[i]) for i in edited):
                view.copy_(show.as_strided(slot.shape, slot.stride, slot.offset))

    def let_go(self) -> None:
        """Release the parameters from their owner; they show no gradients any more."""
        self.gradients.let_go()
        self.classes.end()

    def retire(self) -> None:
        """Keep only this rank's pieces; the weights are not read any more."""
        with lasting_tensors():
            self.store.retire()
            for piece in self.pieces:
                piece.data = self.master[piece.range.in_shard]
            self.weight = self.store.weights()
            self.weight.release()
            self._lasting = [self.weight]
            self.edits.end(self.weight)

    def memory(self) -> dict[str, int]:
        """Return the bytes held now, by kind; see ``ShardedModel.memory``."""
        rows, shown = self.gradients.memory(), self.edits.buffer
        rows["gathered"] += 0 if shown is self.weight else shown.nbytes
        rows["gathered" if self.plan.gives_weights_back else "weights"] += self.weight.nbytes
        if self.plan.rests_apart:
            kind = "master" if self.plan.has_master else "weights"
            rows.update(self.plan.rows({kind: self.master.nbytes}))
        if self.store.cast_bytes:
            rows.update(self.plan.rows({"weights": self.store.cast_bytes}))
        return rows


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.stride()


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's stride if it is dense, else a contiguous one."""
    if parameter.is_contiguous():
        return tuple(parameter.stride())
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return tuple(dense.stride())
