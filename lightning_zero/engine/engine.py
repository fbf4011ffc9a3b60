"""The training of a sharded model.

The engine does not depend on Lightning. In a plain loop::

    engine = Engine(module, Settings(stage=3))
    engine.adopt(optimizer)
    for batch in data:
        optimizer.zero_grad()
        loss = module(batch).sum()
        loss.backward()
        optimizer.step()
    engine.close()
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.comm import (
    Communicator,
    SyncPoint,
    agreed,
    default_world_size,
    parameter_behind,
)
from lightning_zero.engine import rank_check
from lightning_zero.engine.activations import (
    ActivationOffload,
    checkpoint_activations,
)
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.engine.step import Step
from lightning_zero.engine.unit import Residency, Unit
from lightning_zero.optimizer import (
    FileStep,
    OptimizerHooks,
    RoundedStep,
    UnitStep,
    stepper_of,
)
from lightning_zero.parameters import FullGrad, Piece
from lightning_zero.plan import Settings
from lightning_zero.tensors import uncollected, unwrapped


class Engine:
    """The training of a sharded model: the steps that its units go through together.

    Args:
        module: The model. Its parameters become views of flat buffers, sharded according to the
            stage; the ``Parameter`` objects stay.
        settings: The user's settings.
        comm: The ranks; the default process group if omitted.
        facts: Other facts that must be equal on all ranks, compared before anything is built.

    Attributes:
        module: The model.
        comm: The ranks.
        sharded: The model in units: its parameters, pieces and bytes.
        steps: One line on each adopted optimizer: how it is stepped.
        is_restored: Whether the run has ended and the module is an ordinary one again.

    Raises:
        ValueError: The module cannot be sharded as it is; the message says why.
        RuntimeError: The ranks differ; the message says how.
    """

    @uncollected()
    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        comm: Communicator | None = None,
        *,
        facts: rank_check.Facts = MappingProxyType({}),
    ) -> None:
        self.module = module
        self.comm = comm = comm or Communicator(
            settings.device, **settings.division(default_world_size())
        )
        rank_check.require_equal(
            comm.control, lambda: rank_check.model_lines(module, settings, facts)
        )
        if settings.activation_offload:
            ActivationOffload.require(comm.device)
        self.sharded = sharded = ShardedModel(module, settings, comm)
        self.steps: list[str] = []
        self.is_restored, self._broadcasts_next = False, True
        self._step = Step(sharded)
        # The units whose weights were refreshed during the optimizer's step that is under way.
        self._refreshed: set[int] = set()
        choice, modules = settings.activation_checkpointing, [u.module for u in sharded.units[:-1]]
        self._wrapped = [checkpoint_activations(choice, module, modules)]
        if settings.activation_offload:
            self._wrapped.append(ActivationOffload(sharded.units, comm.host_copies))
        _engines.append(weakref.ref(self, _engines.remove))

    @property
    def is_closed(self) -> bool:
        """Return whether the run has ended and the hooks are gone."""
        return self._step.is_closed

    # -- the step --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, *, awaits_backward: bool = True) -> Iterator[Callable[[Any], None]]:
        """Enter code that all ranks run together: the root is whole, other units gather on touch.

        Yields a function to call with the step's outputs, so that a backward pass from them finds
        its weights after the context has ended. ``awaits_backward=False`` closes the step at once.

        It stands for DDP's forward, before which buffers are broadcast: not after a forward whose
        gradients were not to be sent (within `no_sync`, without gradients, or under manual
        optimization, where Lightning tells DDP to expect no backward).
        """
        begins = self._step.enter() and not self._step.prefetcher.is_joined
        if begins and self._broadcasts_next and self.sharded.settings.broadcast_buffers:
            broadcast_buffers(self.module, self.comm)
        outputs: list[Any] = []
        try:
            yield outputs.append
        except BaseException as error:
            self.reset()
            self.comm.control.watchdog.explain(error)
            raise
        if not awaits_backward:
            self._step.keeps_graph = False
        if begins:
            self._broadcasts_next = awaits_backward and self._step.sends
        self._step.leave(outputs if awaits_backward else None)

    def broadcast_next(self) -> None:
        """Broadcast buffers before the next forward, if one that runs now would send gradients."""
        self._broadcasts_next = self._step.sends

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enter a context in which gradients of microbatches may stay local, if the plan allows."""
        backward = self._step.backward
        before, backward.syncs = backward.syncs, False
        try:
            yield
        finally:
            backward.syncs = before

    # -- the optimizer ---------------------------------------------------------------------------

    @uncollected()
    def adopt(self, optimizer: Optimizer, *others: Engine) -> None:
        """Point ``optimizer`` at this rank's pieces, and refresh weights whenever it has stepped.

        Args:
            optimizer: The user's optimizer.
            others: The engines of other modules that it steps too.

        Raises:
            ValueError: There is no way to step it, or a parameter is in two of its groups.
        """
        engines = (self, *others)

        def before() -> None:
            for engine in engines:
                engine._before_step()

        def after(pieces: list[Piece]) -> None:
            for engine in engines:
                engine._after_step(pieces)

        self._compare_optimizers(optimizer)
        hooks = OptimizerHooks(
            optimizer,
            piece_among(engines),
            self.comm,
            changed=self._compare_optimizers,
            before=before,
            after=after,
            by_unit=self._by_unit(optimizer, engines),
            choices=self.sharded.settings.optimizer_step,
        )
        for engine in engines:
            engine.sharded.optimizers.append(optimizer)
        self._step.handles += hooks.handles
        self.steps.append(hooks.notice)

    def _by_unit(self, optimizer: Optimizer, engines: Sequence[Engine]) -> UnitStep | None:
        """Return what steps an optimizer where masters and states rest, if that is elsewhere."""
        settings, scratch = self.sharded.settings, self.sharded.scratch
        if (offload := settings.offload) is None:
            return RoundedStep(optimizer) if settings.stochastic_rounding else None
        if offload.optimizer != "nvme" or scratch is None:
            own = [weakref.proxy(engine) for engine in engines]  # as the optimizer may live on
            ledger = self.comm.transport.ledger
            return UnitStep(
                optimizer, ledger, partial(_by_units, own), partial(_refresh_units, own)
            )
        return FileStep(optimizer, scratch, self.comm)

    def _compare_optimizers(self, *new: Optimizer) -> None:
        """Raise on all ranks if the optimizers differ; all call it when groups have changed."""
        optimizers = [*self.sharded.optimizers, *new]
        rank_check.require_equal(
            self.comm.control, lambda: rank_check.optimizer_lines(optimizers, self.module)
        )

    def _before_step(self) -> None:
        """Wait until no rank reads this one's masters or reduce buffers any more."""
        self._refreshed.clear()
        for unit in self.sharded.units:
            # The last step may have been another optimizer's. A backend may write this rank's part
            # as well when its gather ends, over what is stepped meanwhile.
            weights = unit.weights
            if weights.residency is Residency.IN_FLIGHT and not weights.reshards:
                weights.wait()
        self.sharded.keep_edits()
        self.comm.change_masters(SyncPoint.STEP)
        for transport in self.comm.transports.values():
            transport.drop_outgrown()

    def _after_step(self, pieces: Sequence[Piece]) -> None:
        """Refresh weights from the stepped masters, where this was not done during the step."""
        self.comm.fence(SyncPoint.STEPPED)
        self._step.keeps_graph = False
        units = self.sharded.units_of([piece.parameter for piece in pieces])
        of_optimizer = set(map(id, pieces))
        for unit in units:
            for flat in unit.flat_parameters:
                flat.note_step(of_optimizer)
        self._refresh([unit for unit in units if unit.index not in self._refreshed])
        for transport in self.comm.transports.values():
            transport.ledger.end_step()
        self.comm.control.watchdog.step += 1

    def _refresh(self, units: Sequence[Unit]) -> None:
        """Refresh weights of units from masters that have been stepped, on all ranks."""
        if not self._step.is_inside:
            self._step.close()
        for unit in units:
            for flat in unit.flat_parameters:
                if flat.may_be_stepped:
                    flat.store.cast(unit.label)
        self.sharded.refresh(units, only_stepped=True)
        self._refreshed |= {unit.index for unit in units}

    # -- loading ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self, doing: str, *, heals: bool = False) -> Iterator[None]:
        """Enter a context that changes values; if it fails on any rank, all ranks raise.

        The values are then partly old and partly new: until a context that ``heals``, as it loads
        all of them, has succeeded, the module neither trains nor predicts, and is not saved.
        """
        was_torn, self._step.is_torn = self._step.is_torn, True
        with agreed(self.comm.control, doing):
            yield
        self._step.is_torn = was_torn and not heals

    def require_whole(self) -> None:
        """Raise a ``RuntimeError`` if a load or an optimizer's step has ended half-way."""
        self._step.require_whole()
        for stepper in map(stepper_of, self.sharded.optimizers):
            if stepper.is_torn:
                stepper.check()

    @property
    def is_torn(self) -> bool:
        """Return whether a load or an optimizer's step has ended half-way, on this rank."""
        steppers = map(stepper_of, self.sharded.optimizers)
        return self._step.is_torn or any(stepper.is_torn for stepper in steppers)

    # -- the end ---------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop a step that an exception ended, so that the next one starts clean."""
        self._step.reset()

    def close(self, *, restore: bool = True) -> None:
        """Remove the hooks and, with ``restore``, make the module an ordinary one again.

        Restoring gathers unit by unit and needs host memory for the whole model on every rank.
        Without it, or if a load has ended half-way, the parameters stay at rest. All ranks must
        close together, unless an exception has just ended a step.
        """
        was_interrupted = self._step.is_interrupted
        restore = restore and not self._step.is_torn
        if not was_interrupted:
            self._step.order_check.wait()
            self.comm.control.call(SyncPoint.CLOSE).wait()
        for unit in self.sharded.units:
            unit.weights.wait()
        if restore and not was_interrupted:
            self.sharded.keep_edits()
        self._step.close()
        for unit in self.sharded.units:
            if not unit.weights.is_cast:  # else they have less precision than an ordinary module
                unit.weights.show()
        for each in (*self._step.handles, *reversed(self._wrapped)):
            each.remove()
        for optimizer in self.sharded.optimizers:
            stepper_of(optimizer).comm = None  # what needs the engine raises from now on
        self._step.is_closed = True
        for flat in self.sharded.flats:
            flat.let_go()
        try:
            if restore:
                self.sharded.restore()
                self.is_restored = True
        finally:
            self.comm.host_copies.close()
            for transport in self.comm.transports.values():
                transport.release()
            self.comm.control.watchdog.leave()


def _by_units(engines: Sequence[Engine], pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces of each unit, the root's first, as it is needed first."""
    wanted, parameters = set(pieces), [piece.parameter for piece in pieces]
    return [
        [piece for flat in unit.flat_parameters for piece in flat.pieces if piece in wanted]
        for engine in engines
        for unit in engine.sharded.units_of(parameters)
    ]


def _refresh_units(engines: Sequence[Engine], pieces: Sequence[Piece]) -> None:
    """Refresh the weights of a unit whose pieces have been stepped, while others are not yet."""
    for engine in engines:
        engine._refresh(engine.sharded.units_of([piece.parameter for piece in pieces]))


@torch.no_grad()
def broadcast_buffers(module: nn.Module, comm: Communicator, others: Iterable[Tensor] = ()) -> None:
    """Overwrite the module's buffers, and others, with rank 0's: one message per dtype, like DDP.

    Of other tensors that wrap tensors, those are sent.
    """
    if comm.mesh.size == 1 and comm.mesh.tensor is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    more = [tensor for other in others for tensor in unwrapped(other)]
    for buffer in (*module.buffers(), *more):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        comm.control.broadcast(flat)
        parts = torch.split(flat, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def piece_among(engines: Sequence[Engine]) -> Callable[[Parameter], Piece | None]:
    """Return a function that finds this rank's piece of a parameter of any of several modules."""

    def find(parameter: Parameter) -> Piece | None:
        found = (engine.sharded.piece(parameter) for engine in engines)
        return next((piece for piece in found if piece is not None), None)

    return find


_engines: list[weakref.ref[Engine]] = []
"""The engines of this process in the order in which they were made, which is that of all ranks."""


def open_engines() -> list[Engine]:
    """Return the engines of this process that are not closed."""
    engines = [engine for ref in _engines if (engine := ref()) is not None]
    return [engine for engine in engines if not engine.is_closed]


def engines_of(parameters: Iterable[Parameter]) -> list[tuple[Engine, list[Parameter]]]:
    """Return the open engines that shard any of ``parameters``, each with those that it shards."""
    wanted, found = list(parameters), []
    for engine in open_engines():
        if own := [p for p in wanted if engine.sharded.piece(p) is not None]:
            found.append((engine, own))
    return found


# -- public functions ------------------------------------------------------------------------------


@contextmanager
def gathered(
    module_or_params: nn.Module | Parameter | Iterable[Parameter], *, modify: bool = False
) -> Iterator[None]:
    """Enter a context in which parameters are whole, in the precision of the optimizer's steps.

    Args:
        module_or_params: A module, a parameter or several; the units they are in are gathered.
        modify: Keep rank 0's changes, on all ranks. Without it, parameters must not be changed.

    Raises:
        RuntimeError: A parameter was changed without ``modify``. Raised on all ranks.
    """
    with ExitStack() as contexts:
        for engine, parameters in engines_of(_parameters(module_or_params)):
            contexts.enter_context(engine.sharded.gathered(parameters, modify=modify))
        yield


@contextmanager
def join(module: nn.Module) -> Iterator[None]:
    """Enter a context in which ranks may run different parts of ``module`` any number of times.

    For forwards without gradients whose length depends on the data, such as ``generate``. All ranks
    must enter it; a rank that reaches the end helps the others until all have, as in
    ``torch.distributed.algorithms.Join``.

    Args:
        module: Any module whose parameters are sharded by the same engines as those that are run.

    Raises:
        RuntimeError: A backward pass begins within.
    """
    with ExitStack() as contexts:
        for engine, _ in engines_of(module.parameters()):
            contexts.enter_context(engine._step.prefetcher.joined())
        yield


def full_grad(parameter: Parameter) -> Tensor | None:
    """Return ``parameter.grad`` as an ordinary tensor: whole, and averaged over the ranks.

    ``None`` without a gradient; this rank's own after a backward pass within `no_sync`.
    """
    grad = parameter_behind(parameter).grad
    return grad.whole(is_lent=False) if isinstance(grad, FullGrad) else grad


def grad_norm(
    module_or_params: nn.Module | Parameter | Iterable[Parameter], norm_type: float = 2.0
) -> Tensor:
    """Return the total norm of the averaged gradients, a 0-d tensor."""
    grads = [p.grad for p in map(parameter_behind, _parameters(module_or_params))]
    return torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None], norm_type)


def _parameters(value: nn.Module | Parameter | Iterable[Parameter]) -> list[Parameter]:
    if isinstance(value, nn.Module):
        return list(value.parameters())
    behind = parameter_behind(value)
    return [behind] if isinstance(behind, Parameter) else list(behind)
