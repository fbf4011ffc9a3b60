"""The parameters of a unit that share a dtype and whether they are trainable, on flat buffers.

A **bundle** is one layout, one buffer of weights, one shard of the master, one shard of gradients.
Its parameters show one of three things: placeholders (at rest), views of the weights (whole), or
views of whole masters that were gathered for reading or editing (lent).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero import resting
from lightning_zero.buffer import Buffer, lasting_tensors
from lightning_zero.comm import Comm, Shared, Work
from lightning_zero.edits import Edits
from lightning_zero.gradient import GradFace
from lightning_zero.layout import Layout
from lightning_zero.meeting import Subject
from lightning_zero.piece import Piece
from lightning_zero.plan import Plan
from lightning_zero.reducer import Reducer


class Bundle:
    """The parameters of a unit that share a dtype and trainability, on their buffers.

    Args:
        named: The parameters.
        plan: The homes of weights, gradients and masters.
        comm: The ranks.
        owner: Whoever is told of uses of the parameters.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        plan: Plan,
        comm: Comm,
        owner: resting.Owner,
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.plan = plan
        self.comm = comm
        self.dtype = self.parameters[0].dtype
        self.trainable = self.parameters[0].requires_grad
        self.layout = Layout.build(
            [(name, tuple(p.shape), _dense_stride(p)) for name, p in named], comm.world_size
        )
        self.weight, self.shared = self._place()
        self.master = self.shared.own
        self._load()
        self.pieces = self._cut_pieces()
        for index, piece in enumerate(self.pieces):
            assemble = functools.partial(self.full_of, index)
            piece.face = GradFace(piece, self.weight.tensor, comm, assemble)
        self._shown = self.weight
        self._is_lent = False
        # Whether whole weights lie in another storage than the masters.
        self._has_copies = plan.has_master or plan.gives_weights_back
        self.edits = Edits(self.parameters, self.layout, self.weight)
        self.reducer = Reducer(self.pieces, self.layout, plan, comm)
        base = resting.placeholder(plan.weight.dtype, plan.weight.device)
        self._placeholders = [base.expand(slot.shape) for slot in self.layout.slots]
        self._guises = resting.Guises(named, owner)
        self.show_whole()

    # -- weights ---------------------------------------------------------------------------------

    def _place(self) -> tuple[Buffer, Shared]:
        """The buffer of whole weights and the master; one storage if they rest in the same form."""
        plan, layout, comm = self.plan, self.layout, self.comm
        if plan.gives_weights_back or plan.has_master:
            weight = Buffer(layout, plan.weight.dtype, plan.weight.device)
            return weight, comm.share(layout.shard_numel, plan.master.dtype)
        whole = comm.share(layout.numel, plan.weight.dtype)
        weight = Buffer(layout, plan.weight.dtype, plan.weight.device, whole.own)
        return weight, whole.sharded(comm.world_size, comm.rank)

    def _load(self) -> None:
        """Fill weights and master from rank 0's parameters."""
        with lasting_tensors():
            source = self.weight
            if self.plan.has_master:
                source = Buffer(self.layout, self.plan.master.dtype, self.plan.master.device)
            for start, stop in self.layout.gaps:
                source.tensor[start:stop].zero_()
            for parameter, view in zip(self.parameters, source.views, strict=True):
                view.copy_(parameter)
            self.comm.broadcast(source.tensor)
            if source is not self.weight:
                self.weight.tensor.copy_(source.tensor)
            shard = source.shard(self.comm.rank, self.comm.world_size)
            if shard.data_ptr() != self.master.data_ptr():
                self.master.copy_(shard)
            self.comm.fence(Subject.SETUP)

    def _cut_pieces(self) -> list[Piece]:
        pieces = []
        for index, (parameter, slot) in enumerate(
            zip(self.parameters, self.layout.slots, strict=True)
        ):
            start, _ = self.layout.piece(index, self.comm.rank)
            first, stop = self.layout.piece_in_shard(index, self.comm.rank)
            pieces.append(Piece.cut(parameter, slot, self.master[first:stop], start))
        return pieces

    def gather(self, unit: str, tag: int) -> Work:
        """Start to make the weights whole from every rank's master."""
        self.weight.allocate()
        return self.comm.gather(self.weight.tensor, self.shared, unit=unit, tag=tag)

    def show_whole(self, *, is_new: bool = True) -> None:
        """Point the parameters at the weights; with ``is_new`` nothing in them is an edit yet."""
        self._shown, self._is_lent = self.weight, False
        self._guises.whole.put_on(self.weight.views)
        if is_new:
            self.edits.begin(self.weight)

    def show_resting(self) -> None:
        """Point the parameters at placeholders that send every use to the owner."""
        self._shown, self._is_lent = self.weight, False
        self.edits.forget(self.weight)
        self._guises.resting.put_on(self._placeholders)

    def guard(self) -> None:
        """Send every use to the owner, the data staying where it is."""
        self._guises.resting.put_on_alone()

    def full(self) -> Buffer:
        """A new buffer with the whole master, gathered now; in the parameters' own dtype."""
        with lasting_tensors():
            whole = Buffer(self.layout, self.plan.master.dtype, self.plan.master.device)
            self.comm.gather(whole.tensor, self.shared, unit="full", tag=0).wait()
            return whole

    def full_of(self, index: int, part: Tensor) -> Tensor:
        """The whole of parameter ``index`` of which every rank's ``part`` covers its piece."""
        return self.full_from({index: part}).views[index].clone()

    def full_from(self, parts: Mapping[int, Tensor]) -> Buffer:
        """A new buffer of which every rank's ``parts``, by index, cover its pieces; one dtype."""
        dtype = next(iter(parts.values())).dtype
        with lasting_tensors():
            whole = Buffer(self.layout, dtype, self.master.device)
            shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.master.device)
            for index, part in parts.items():
                first, stop = self.layout.piece_in_shard(index, self.comm.rank)
                shard[first:stop] = part
            self.comm.gather(whole.tensor, Shared(shard), unit="full", tag=0).wait()
            return whole

    def lend(self, *, is_whole: bool) -> Buffer:
        """Point the parameters at whole masters; returns what holds them."""
        lent = self.weight if is_whole and not self.plan.has_master else self.full()
        self._shown, self._is_lent = lent, True
        self._guises.whole.put_on(lent.views)
        self.edits.begin(lent)
        return lent

    @torch.no_grad()
    def store(self, whole: Buffer) -> None:
        """Take this rank's part of ``whole`` as the new master; between two fences."""
        self.master.copy_(whole.shard(self.comm.rank, self.comm.world_size))

    @property
    def may_be_stepped(self) -> bool:
        """Whether an optimizer may change the masters; the same on every rank."""
        return self.trainable or any(parameter.requires_grad for parameter in self.parameters)

    @property
    def edited(self) -> list[int]:
        """Whole parameters whose changes are not in the masters."""
        return self.edits.changed if self._has_copies else self.edits.moved

    def expose(self, index: int) -> None:
        """Keep what parameter ``index`` is now, since no version will tell of its changes."""
        if self._has_copies or self._is_lent:
            self.edits.expose(index)

    @property
    def gives_back(self) -> bool:
        """Whether the memory that the parameters view now is released while views may live."""
        return self.plan.gives_weights_back and self._shown is self.weight

    def replace(self, index: int, data: Tensor) -> None:
        """Copy the tensor that the user put in the place of parameter ``index``'s own.

        Values in the master's dtype are cast: the user may know of no other.
        """
        parameter, slot = self.parameters[index], self.layout.slots[index]
        dtypes = (parameter.dtype, self.plan.master.dtype)
        if (data.shape, data.device) != (parameter.shape, parameter.device) or (
            data.dtype not in dtypes
        ):
            raise RuntimeError(
                f"Parameter {slot.name!r} is a view of a flat buffer until training ends:"
                f" {_describe(parameter)} cannot be replaced by {_describe(data)}. Convert or move"
                " the module before the Trainer takes it or after it has ended, choose the"
                " precision by Trainer(precision=...), or convert a copy.deepcopy of it made in"
                " `with lightning_zero.gathered(module):`"
            )
        with lasting_tensors():
            value = data.to(parameter.dtype)
            # One rank alone may put back what was there, as `module.float()` does.
            if not torch.equal(parameter, value):
                parameter.copy_(value)

    @torch.no_grad()
    def keep_edits(self) -> None:
        """Take this rank's part of what was changed over to the masters."""
        edited = self.edited
        self.edits.bring_back()
        for index in edited:
            piece = self.pieces[index]
            part = piece.part_of(self.weight.views[index])
            # What did not change keeps the digits that only the master has.
            same = piece.to(part.dtype) == part
            piece.data.copy_(torch.where(same, piece.detach(), part.to(piece.dtype)))
        self.edits.begin(self._shown)

    def let_go(self) -> None:
        """End the parameters' time with their owner; gradients in pieces are not shown any more."""
        self.reducer.hide()
        self._guises.end()

    def retire(self) -> None:
        """Keep no more than this rank's pieces; nobody reads the weights any more."""
        with lasting_tensors():
            master = self.master.clone()
            for index, piece in enumerate(self.pieces):
                first, stop = self.layout.piece_in_shard(index, self.comm.rank)
                piece.data = master[first:stop]
            self.master, self.shared = master, Shared(master)
            self.weight = Buffer(self.layout, self.weight.tensor.dtype, self.master.device)
            self.weight.release()
            self._shown = self.weight
            self.edits.forget(self.weight)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind; see ``Engine.memory``."""
        kinds = self.reducer.memory()
        if self.plan.gives_weights_back:
            kinds["gathered"] = self.weight.nbytes
            kinds["master" if self.plan.has_master else "weights"] = self.master.nbytes
        else:
            kinds["weights"] = self.weight.nbytes
            kinds["master"] = self.master.nbytes if self.plan.has_master else 0
        return kinds


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's stride if it fills its memory densely, else a contiguous one."""
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return tuple(dense.stride())
