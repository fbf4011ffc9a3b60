"""A module's parameters that are gathered, released and reduced together.

A **bundle** is the part of a unit whose parameters share a dtype and whether they are trainable:
one layout, one buffer of weights, one shard of the master, one shard of gradients. A **unit** is a
module's bundles and the state they are in::

    state       weight buffer            parameters
    RESTING     released (stage 3)       placeholders that send a read to the engine
    IN_FLIGHT   allocated, being filled  the same; at stages 1 and 2 also between a step and its use
    WHOLE       filled                   views of the buffer that notice uses of their `data`

The life of a stage-3 unit in one microbatch::

    unshard -> wait -> forward -> reshard ... unshard -> wait -> backward -> take_grad... -> reduce
    -> reshard -> finish_reduce                                  (stages 1 and 2: no reshard)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.profiler import record_function

from lightning_zero import resting
from lightning_zero.buffer import Buffer, lasting_tensors
from lightning_zero.comm import Comm, ReduceBuffer, Shared, Work
from lightning_zero.gradient import GradFace, LocalGrad
from lightning_zero.layout import Layout
from lightning_zero.meeting import Subject
from lightning_zero.piece import Piece
from lightning_zero.plan import Plan


class State(Enum):
    """Where a unit's whole weights are."""

    RESTING = "resting"
    """Given back."""
    IN_FLIGHT = "in flight"
    """On their way."""
    WHOLE = "whole"
    """Readable."""


class Bundle:
    """The parameters of a unit that share a dtype and trainability, on their buffers."""

    def __init__(self, named: Sequence[tuple[str, Parameter]], plan: Plan, comm: Comm) -> None:
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
        self.partial: ReduceBuffer | None = None
        self.grad: Tensor | None = None
        self._in_flight: list[Tensor] = []
        self._grad_pieces: list[Tensor] = []
        self._partial_views: list[Tensor] = []
        self._is_unscaled = False
        self._shown = self.weight
        self._is_lent = False
        self._versions: list[int] = []
        self._exposed: dict[int, Tensor] = {}
        self.filled = [False] * len(self.parameters)
        self.arrived = [False] * len(self.parameters)
        self.used = [False] * len(self.parameters)
        self.is_settled = False
        base = resting.placeholder(plan.weight.dtype, plan.weight.device)
        self._placeholders = [base.expand(slot.shape) for slot in self.layout.slots]

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

    def gather(self, unit: str, tag: int) -> Work:
        """Start to make the weights whole from every rank's master."""
        self.weight.allocate()
        return self.comm.gather(self.weight.tensor, self.shared, unit=unit, tag=tag)

    def show_whole(self, owner: resting.Owner) -> None:
        """Point the parameters at the weights."""
        self._show(self.weight, owner)

    def _show(self, whole: Buffer, owner: resting.Owner, *, is_lent: bool = False) -> None:
        self._shown, self._is_lent = whole, is_lent
        for parameter, view in zip(self.parameters, whole.views, strict=True):
            resting.unguard(parameter)
            parameter.data = view
            resting.watch(parameter, owner)

    def show_resting(self, owner: resting.Owner) -> None:
        """Point the parameters at placeholders that send every use to ``owner``."""
        self._shown, self._is_lent = self.weight, False
        self._exposed = {}
        for parameter, stand_in in zip(self.parameters, self._placeholders, strict=True):
            resting.unguard(parameter)
            parameter.data = stand_in
            resting.guard(parameter, owner)

    def guard(self, owner: resting.Owner) -> None:
        """Send every use to ``owner``, the data staying where it is."""
        for parameter in self.parameters:
            resting.guard(parameter, owner)

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
                first = self.pieces[index].storage_offset() - self.master.storage_offset()
                shard[first : first + part.numel()] = part
            self.comm.gather(whole.tensor, Shared(shard), unit="full", tag=0).wait()
            return whole

    def lend(self, owner: resting.Owner, *, is_whole: bool) -> Buffer:
        """Point the parameters at whole masters; returns what holds them."""
        lent = self.weight if is_whole and not self.plan.has_master else self.full()
        self._show(lent, owner, is_lent=True)
        self.note_versions()
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
    def changed(self) -> list[int]:
        """Whole parameters that are not what they were when :meth:`note_versions` was called."""
        moved = self._moved
        return [
            index
            for index, parameter in enumerate(self.parameters)
            if parameter._version != self._versions[index]
            or index in moved
            or (index in self._exposed and self._differs(index))
        ]

    @property
    def edited(self) -> list[int]:
        """Whole parameters whose changes are not in the masters."""
        return self.changed if self._has_copies else self._moved

    @property
    def _has_copies(self) -> bool:
        """Whether whole weights lie in another storage than the masters."""
        return self.plan.has_master or self.plan.gives_weights_back

    @property
    def _moved(self) -> list[int]:
        """Parameters that something put into storages of their own, as cuDNN's RNNs do."""
        pairs = zip(self.parameters, self._shown.views, strict=True)
        with torch._C.DisableTorchFunctionSubclass():
            return [i for i, (p, view) in enumerate(pairs) if p.data_ptr() != view.data_ptr()]

    @torch.no_grad()
    def bring_back(self) -> None:
        """Copy parameters that have moved to where they belong."""
        for index in self._moved:
            view = self._shown.views[index]
            view.copy_(self.parameters[index])
            resting.point(self.parameters[index], view)

    def _differs(self, index: int) -> bool:
        return not torch.equal(self._exposed[index], self._bytes(index))

    def _bytes(self, index: int) -> Tensor:
        slot = self.layout.slots[index]
        flat = self._shown.tensor.detach()[slot.offset : slot.offset + slot.numel]
        return flat.view(torch.uint8)

    def expose(self, index: int) -> None:
        """Keep what parameter ``index`` is now, since no version will tell of its changes."""
        if index not in self._exposed and (self._has_copies or self._is_lent):
            with lasting_tensors():
                self._exposed[index] = self._bytes(index).clone()

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
        self.bring_back()
        for index in edited:
            piece = self.pieces[index]
            part = piece.part_of(self.weight.views[index])
            # What did not change keeps the digits that only the master has.
            same = piece.to(part.dtype) == part
            piece.data.copy_(torch.where(same, piece.detach(), part.to(piece.dtype)))
        self.note_versions()

    def note_versions(self) -> None:
        """Begin to watch for changes in place."""
        self._versions = [parameter._version for parameter in self.parameters]
        self._exposed = {}

    # -- gradients -------------------------------------------------------------------------------

    def _cut_pieces(self) -> list[Piece]:
        pieces = []
        base = self.comm.rank * self.layout.shard_numel
        for index, (parameter, slot) in enumerate(
            zip(self.parameters, self.layout.slots, strict=True)
        ):
            start, stop = self.layout.piece(index, self.comm.rank)
            first = slot.offset + start - base if stop else 0
            pieces.append(
                Piece.cut(parameter, slot, self.master[first : first + stop - start], start)
            )
        return pieces

    @torch.no_grad()
    def take_grad(self, index: int, grad: Tensor) -> None:
        """Move parameter ``index``'s new gradient into the reduce buffer, cast on the way."""
        if self.partial is None:
            self._allocate_partial()
        view = self._partial_views[index]
        if grad.is_sparse:
            grad = grad.to_dense()
        scale = self._early_scale
        if self.filled[index]:
            view.add_(grad, alpha=scale)
        elif scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, scale, out=view)
        self.filled[index] = self.arrived[index] = self.used[index] = True

    @property
    def _early_scale(self) -> float:
        """What gradients are multiplied by on their way into the reduce buffer.

        The average is taken there, as DDP does, when that costs nothing: in the pass that copies. A
        pass that casts cannot multiply as well, so then the reduced shard is scaled, which is N
        times smaller; as it is where a rank's own gradient is shown before the reduction.
        """
        casts = self.plan.grad.dtype != self.plan.weight.dtype
        return 1.0 if casts or self._is_unscaled else 1 / self.comm.world_size

    def _allocate_partial(self) -> None:
        dtype, device = self.plan.grad.dtype, self.plan.grad.device
        self.partial = self.comm.reduce_buffer(self.layout.numel, dtype)
        partial = Buffer(self.layout, dtype, device, self.partial.tensor)
        self._partial_views = partial.views
        for start, stop in self.layout.gaps:
            partial.tensor[start:stop].zero_()

    @torch.no_grad()
    def reduce(self, unit: str, tag: int) -> Callable[[], None]:
        """Start to average the gradients over the ranks; the returned call ends it."""
        if self.partial is None:
            self._allocate_partial()
        assert self.partial is not None
        for view, is_filled in zip(self._partial_views, self.filled, strict=True):
            if not is_filled:
                view.zero_()
        partial = self.partial
        self.partial, self._partial_views = None, []
        self.filled = [False] * len(self.parameters)
        shard = self._grad_shard()
        adds = self.is_settled or self.holds_grads
        target = torch.empty_like(shard) if adds else shard
        self._in_flight = [partial.tensor, target] if adds else [partial.tensor]
        work = self.comm.reduce(partial, target, unit=unit, tag=tag)
        late_scale = 1 / self.comm.world_size if self._early_scale == 1.0 else 1.0
        self._is_unscaled = False
        return functools.partial(self._finish_reduce, work, target, late_scale)

    @torch.no_grad()
    def _finish_reduce(self, work: Work, target: Tensor, late_scale: float) -> None:
        """Wait for a reduction; what it reads and writes had to live until then."""
        work.wait()
        self._in_flight = []
        shard = self._grad_shard()
        if late_scale != 1.0:
            target.mul_(late_scale)
        if target is not shard:
            if not self.is_settled:
                self._settle_grads()
            shard.add_(target)
        self.is_settled = True

    @property
    def holds_grads(self) -> bool:
        """Whether reduced gradients of earlier backward passes are kept."""
        return any(piece.reduced is not None for piece in self.pieces)

    def _grad_shard(self) -> Tensor:
        if self.grad is None:
            with lasting_tensors():
                self.grad = torch.zeros_like(self.master)
            base = self.master.storage_offset()
            for piece in self.pieces:
                first = piece.storage_offset() - base
                self._grad_pieces.append(self.grad[first : first + piece.numel()])
        return self.grad

    def _settle_grads(self) -> None:
        """Make the shard hold what the pieces hold: the user may have dropped or replaced some."""
        for piece, view in zip(self.pieces, self._grad_pieces, strict=True):
            if piece.reduced is None:
                view.zero_()
            elif piece.reduced is not view:
                view.copy_(piece.reduced)

    @property
    def has_grads(self) -> list[bool]:
        """For each parameter, whether it got a gradient or its piece keeps an earlier one."""
        return [
            is_used or piece.reduced is not None
            for is_used, piece in zip(self.used, self.pieces, strict=True)
        ]

    def install_grads(self, has_grads: Sequence[bool]) -> None:
        """End a backward pass: show the gradients that any rank has to optimizer and user."""
        self.arrived = [False] * len(self.parameters)
        if self.is_settled:
            self.is_settled = False
            self.used = [False] * len(self.parameters)
            for piece, view, has_grad in zip(
                self.pieces, self._grad_pieces, has_grads, strict=True
            ):
                if piece.numel() and has_grad:
                    piece.reduced = view
        for piece, has_grad in zip(self.pieces, has_grads, strict=True):
            if has_grad:
                piece.show_grad()

    def expect(self, *, is_local: bool) -> None:
        """Begin a backward pass; with ``is_local`` one whose gradients stay on this rank."""
        self.hide_grads()
        self._is_unscaled |= is_local
        self.arrived = [False] * len(self.parameters)

    def hide_grads(self) -> None:
        """Make room for autograd's gradients on the parameters; forget those that were dropped."""
        for index, piece in enumerate(self.pieces):
            piece.hide_grad()
            if piece.is_dropped:
                piece.is_dropped = False
                self.filled[index] = self.used[index] = False

    def show_local_grads(self) -> None:
        """End a backward pass whose gradients stay on this rank: show them, as DDP does."""
        for index, piece in enumerate(self.pieces):
            if self.filled[index]:
                held = self._partial_views[index]
                piece.show_local(LocalGrad(piece, self.parameters[index], held))
            elif piece.was_shown:
                piece.show_grad()

    def retire(self) -> None:
        """Keep no more than this rank's pieces; nobody reads the weights any more."""
        with lasting_tensors():
            master = self.master.clone()
            for piece in self.pieces:
                first = piece.storage_offset() - self.master.storage_offset()
                piece.data = master[first : first + piece.numel()]
            self.master, self.shared = master, Shared(master)
            self.weight = Buffer(self.layout, self.weight.tensor.dtype, self.master.device)
            self.weight.release()
            self._shown, self._exposed = self.weight, {}

    def memory(self) -> dict[str, int]:
        """Bytes held now, by kind; see ``Engine.memory``."""
        kinds = {
            "gradients": self.grad.nbytes if self.grad is not None else 0,
            "unreduced": sum(tensor.nbytes for tensor in self._in_flight)
            + (self.partial.tensor.nbytes if self.partial is not None else 0),
        }
        if self.plan.gives_weights_back:
            kinds["gathered"] = self.weight.nbytes
            kinds["master" if self.plan.has_master else "weights"] = self.master.nbytes
        else:
            kinds["weights"] = self.weight.nbytes
            kinds["master"] = self.master.nbytes if self.plan.has_master else 0
        return kinds

    def drop_grads(self) -> None:
        """Forget what arrived or was reduced and is not shown to the optimizer yet."""
        self.partial, self._partial_views, self._in_flight = None, [], []
        self.is_settled = self._is_unscaled = False
        for piece in self.pieces:
            if piece.local is not None:
                piece.hide_grad()
        for flags in (self.filled, self.arrived, self.used):
            flags[:] = [False] * len(flags)


class Unit:
    """The bundles of one module and the state of its whole weights.

    Attributes:
        name: The module's qualified name; the root's is ``""``.
        module: The module whose forward the unit serves.
        bundles: Its parameters, by dtype and trainability.
        state: Where its whole weights are.
        is_pinned: Whether they stay whole to the end of the step.
        has_run: Whether this rank used the weights in this step.
        calling: The calls of its forward that run now, the innermost last.
        awaited: The calls whose inputs' gradients will tell when their backward has ended.
        in_backward: The calls whose backward has begun and not ended.
        is_trainable: Whether every parameter wants a gradient in this backward pass.
        wants_grads: Whether any does.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        bundles: Sequence[Bundle],
        index: int,
        owner: resting.Owner,
    ) -> None:
        self.name = name
        self.module = module
        self.bundles = list(bundles)
        self.index = index
        self.state = State.WHOLE
        self.is_pinned = False
        self.has_run = False
        self.calling: list[object] = []
        self.awaited: set[object] = set()
        self.in_backward: set[object] = set()
        self._has_ended = False
        self._is_idle = False
        self._lent: list[Buffer] = []
        self._owner = owner
        self._works: list[Work] = []
        self._finishes: list[Callable[[], None]] = []
        self._num_missing = 0
        self.is_trainable = self.wants_grads = False
        self._label = name or "root"
        for bundle in self.bundles:
            bundle.show_whole(owner)
            bundle.note_versions()

    @property
    def numel(self) -> int:
        """Elements of all slots, without padding."""
        return sum(slot.numel for bundle in self.bundles for slot in bundle.layout.slots)

    @property
    def gives_weights_back(self) -> bool:
        """Whether whole weights are released after use."""
        return any(bundle.plan.gives_weights_back for bundle in self.bundles)

    @property
    def is_whole(self) -> bool:
        """Whether the weights are all here."""
        return self.state is State.WHOLE

    @property
    def will_be_given_back(self) -> bool:
        """Whether the weights are whole and the end of the unit's backward will release them."""
        is_told = bool(self.awaited)
        is_held = self.state is State.RESTING or self.is_pinned or not is_told
        return self.gives_weights_back and not is_held

    @property
    def label(self) -> str:
        """The name to show."""
        return self._label

    def tags(self) -> Iterable[tuple[int, Bundle]]:
        """Each bundle with a number that no bundle of another unit has (a unit has under 16)."""
        return (
            (16 * self.index + number + 1, bundle) for number, bundle in enumerate(self.bundles)
        )

    def unshard(self) -> None:
        """Start to make the weights whole."""
        if self.state is State.RESTING:
            self._gather()

    def refresh(self, *, only_stepped: bool = False) -> None:
        """Start to bring whole weights up to date with masters that have changed.

        Args:
            only_stepped: Leave out bundles that no optimizer steps.
        """
        self.wait()
        self.guard()
        self._gather(only_stepped=only_stepped)

    def idle(self) -> None:
        """Keep whole weights for a later need, but notice whoever else uses them."""
        if self.gives_weights_back and not self.is_pinned:
            self.guard()
            self._is_idle = True

    def keep(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of weights that will be given back; it knows from now on."""
        if not (self.gives_weights_back and torch._C._has_storage(tensor)):
            return False
        storage = tensor.untyped_storage()._cdata
        for bundle in self.bundles:
            if bundle.weight.tensor.untyped_storage()._cdata == storage:
                resting.keep(tensor, bundle.parameters)
                return True
        return False

    def guard(self) -> None:
        """Send every use of the parameters to their owner."""
        for bundle in self.bundles:
            bundle.guard(self._owner)

    @torch.no_grad()
    def _gather(self, *, only_stepped: bool = False) -> None:
        with record_function(f"zero.unshard {self._label}"):
            self._works = [
                bundle.gather(self._label, tag)
                for tag, bundle in self.tags()
                if not only_stepped or bundle.may_be_stepped
            ]
            self.state = State.IN_FLIGHT

    def wait(self) -> None:
        """Make the weights readable; they must be whole or on their way."""
        if self.state is State.WHOLE:
            if self._is_idle:
                self._is_idle = False
                for bundle in self.bundles:
                    bundle.show_whole(self._owner)
            return
        assert self.state is State.IN_FLIGHT, f"{self._label} is waited for but was not unsharded"
        with record_function(f"zero.wait {self._label}"):
            for work in self._works:
                work.wait()
        self._works = []
        for bundle in self.bundles:
            bundle.show_whole(self._owner)
            bundle.note_versions()
        self.state = State.WHOLE

    def gather_again(self) -> None:
        """Gather for ranks that ask for it, whether the weights are whole here or not."""
        was_idle = self._is_idle
        self.keep_edits()
        self._gather()
        self.wait()
        if was_idle:
            self.guard()

    def keep_edits(self) -> None:
        """Let the masters follow what users changed in whole weights, on all ranks."""
        if self.state is not State.WHOLE or not any(bundle.edited for bundle in self.bundles):
            return
        comm = self.bundles[0].comm
        comm.fence(Subject.EDIT)
        for bundle in self.bundles:
            bundle.keep_edits()
        comm.fence(Subject.EDIT)

    @property
    def changed(self) -> list[str]:
        """The names of whole or lent parameters that were changed since they were shown."""
        return [bundle.layout.slots[i].name for bundle in self.bundles for i in bundle.changed]

    def reshard(self) -> None:
        """Give whole weights back, if their home is sharded and nothing pins them."""
        if self.state is State.RESTING or self.is_pinned or not self.gives_weights_back:
            return
        self._is_idle = False
        self.wait()
        self.keep_edits()
        with record_function(f"zero.reshard {self._label}"):
            for bundle in self.bundles:
                bundle.show_resting(self._owner)
                bundle.weight.release()
        self.state = State.RESTING

    def wait_if_in_flight(self) -> None:
        """Let a gather that was started arrive."""
        if self.state is State.IN_FLIGHT:
            self.wait()

    @property
    def is_lent(self) -> bool:
        """Whether whole masters are shown now."""
        return bool(self._lent)

    def lend(self) -> None:
        """Show whole parameters in the master's precision until :meth:`take_back`."""
        self._lent = [
            bundle.lend(self._owner, is_whole=self.state is State.WHOLE) for bundle in self.bundles
        ]

    def store_lent(self) -> None:
        """Take rank 0's lent values as everybody's masters; between two fences."""
        for bundle, lent in zip(self.bundles, self._lent, strict=True):
            bundle.bring_back()
            bundle.comm.broadcast(lent.tensor)
            bundle.store(lent)

    def take_back(self) -> None:
        """End :meth:`lend`."""
        self._lent = []
        for bundle in self.bundles:
            if self.state is State.RESTING:
                bundle.show_resting(self._owner)
            else:
                bundle.show_whole(self._owner)
                bundle.note_versions()

    def abandon(self) -> None:
        """Give up whatever is under way; weights and gradients in flight are dropped."""
        self.is_pinned = False
        self.calling = []
        self.forget_calls()
        try:
            self.wait_if_in_flight()
            self.finish_reduce()
        except RuntimeError:
            # The ranks we waited for are gone; what they would have sent is lost with them.
            self._works, self._finishes = [], []
            self.state = State.WHOLE
        for bundle in self.bundles:
            bundle.drop_grads()

    def retire(self) -> None:
        """Free the weights after the parameters were pointed elsewhere."""
        for bundle in self.bundles:
            bundle.hide_grads()
            bundle.retire()
        self.state = State.RESTING

    @property
    def has_arrivals(self) -> bool:
        """Whether a gradient arrived that is not reduced yet."""
        return any(any(bundle.filled) for bundle in self.bundles)

    def expect(self, *, is_local: bool) -> None:
        """Begin a backward pass: make room for gradients, and note how many are wanted."""
        for bundle in self.bundles:
            bundle.expect(is_local=is_local)
        wants = [p.requires_grad for bundle in self.bundles for p in bundle.parameters]
        self._num_missing = sum(wants)
        self.is_trainable, self.wants_grads = all(wants), any(wants)

    def show_local_grads(self) -> None:
        """Show the gradients of a backward pass that are not sent."""
        for bundle in self.bundles:
            bundle.show_local_grads()

    def forget_calls(self) -> None:
        """End a backward pass: nothing that came before it is waited for."""
        self._has_ended = False
        self.awaited, self.in_backward = set(), set()

    def end_call(self, call: object) -> None:
        """Note that the backward of a call has ended."""
        self.awaited.discard(call)
        self.in_backward.discard(call)
        self._has_ended = True

    @property
    def is_passed(self) -> bool:
        """Whether the backward of every call has ended, so that no gradient is expected."""
        return self._has_ended and not self.awaited

    def take_grad(self, bundle: Bundle, index: int, grad: Tensor) -> None:
        """Take in a gradient that autograd just finished."""
        self._num_missing -= not bundle.arrived[index]
        bundle.take_grad(index, grad)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter that wants a gradient got one in this backward pass."""
        return self._num_missing == 0

    def reduce(self) -> None:
        """Start to average the gradients that arrived over the ranks."""
        self.finish_reduce()
        with record_function(f"zero.reduce {self._label}"):
            self._finishes = [
                bundle.reduce(self._label, tag)
                for tag, bundle in self.tags()
                if any(parameter.requires_grad for parameter in bundle.parameters)
            ]

    def finish_reduce(self) -> None:
        """End the reductions that were started."""
        with record_function(f"zero.finish_reduce {self._label}"):
            finishes, self._finishes = self._finishes, []
            for finish in finishes:
                finish()


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's stride if it fills its memory densely, else a contiguous one."""
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return tuple(dense.stride())
