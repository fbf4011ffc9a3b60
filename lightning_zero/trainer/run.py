"""The state that a strategy keeps for one call of the Trainer, and what lasts as long.

Those are adapted callbacks, answers to signals, and ends of training data.
"""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zero.comm import Communicator, Control, SyncPoint
from lightning_zero.engine import Engine, Replacements
from lightning_zero.fabric import Checkpoints
from lightning_zero.trainer import internals
from lightning_zero.trainer.precision import ZeROPrecision

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


@dataclass
class Run:
    """The state of a strategy for one call of ``fit``, ``validate``, ``test`` or ``predict``.

    Kept beyond teardown until the next call, because checkpoints can still be saved in between.

    Attributes:
        comm: Connects the ranks.
        checkpoints: Saves and loads.
        signals: Answers signals on all ranks together, in ``fit``.
        stand_ins: Undoes replacements at teardown, last one first.
        pending: Loads of weights that wait for the module to be sharded; ``None`` once it is.
        path: The checkpoint read last.
        has_agreed_to_load: Whether the ranks agreed that all load a checkpoint, or none does.
        has_failed: Whether an exception ends the run.
        restores: Whether to make the module whole at the end.
    """

    comm: Communicator
    checkpoints: Checkpoints
    signals: Signals | None = None
    stand_ins: ExitStack = field(default_factory=ExitStack)
    pending: list[Callable[[], None]] | None = field(default_factory=list)
    path: str = ""
    has_agreed_to_load: bool = False
    has_failed: bool = False
    restores: bool = True

    def load(self, load: Callable[[], None]) -> None:
        """Load weights, at :meth:`load_pending` if each rank does not know its part yet.

        As under DDP, a checkpoint is read and its hooks run before setup.
        """
        if self.pending is None:
            load()
        else:
            self.pending.append(load)

    def load_pending(self) -> None:
        """Make the loads that setup has postponed."""
        pending, self.pending = self.pending or [], None
        for load in pending:
            load()

    def may_gather(self, engine: Engine) -> bool:
        """Return whether weights can be made whole; warn if an exception prevents that."""
        if not self.has_failed:
            return True
        if self.comm.control.world_size > 1:
            log.warning(
                "An exception ended the run. The parameters stay sharded, as whole weights need all"
                " ranks. Resume from a checkpoint."
            )
            return False
        if engine.is_torn:
            log.warning(
                "An optimizer step or a load was interrupted halfway, so whole weights would mix"
                " new and old values. The parameters stay sharded. Resume from a checkpoint."
            )
        return not engine.is_torn


def facts_of(trainer: pl.Trainer, precision: ZeROPrecision) -> dict[str, dict[str, Any]]:
    """Return what must be equal on all ranks besides the model and the settings."""
    names = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
    facts = {
        "The Trainer": {
            "function": trainer.state.fn,
            "precision": str(precision.precision),
            **{name: getattr(trainer, name) for name in names},
            "accumulation schedules": [
                callback.scheduling
                for callback in trainer.callbacks  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler)
            ],
        },
    }
    if precision.scaler is not None:
        facts["The loss scaler"] = precision.scaler.state_dict()
    return facts


# -- callbacks and loggers that need more than to read and write weights ---------------------------

# They are used unmodified, so their methods are wrapped during a run. A finetuning callback that
# looks for its parameters in an optimizer finds them in place of their pieces. Averages are whole
# and rest where the callback keeps them, in host memory by default.

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before Lightning 2.6
    _AVERAGING: tuple[type[Callback], ...] = (StochasticWeightAveraging,)
else:
    _AVERAGING = (StochasticWeightAveraging, WeightAveraging)


def adapt_callbacks(trainer: pl.Trainer, load_average: Callable[..., Any], *, is_cut: bool) -> Any:
    """Adapt the Trainer's callbacks and loggers to a sharded module; return what undoes it.

    ``load_average`` is called in place of an averaging callback's ``on_load_checkpoint``, with that
    and its arguments. ``is_cut`` says whether tensor parallelism cuts the module.

    Raises:
        ValueError: One averages weights that are cut.
    """
    replaced = Replacements()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _AVERAGING) and is_cut:
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, which no rank has with"
                " tensor_parallel_size > 1. Average the parameters in a hook of your own."
            )
        # An average also loads weights into the module, which the strategy would overwrite.
        if isinstance(callback, _AVERAGING[1:]):
            replaced.wrap(callback, "on_load_checkpoint", load_average)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and internals.draws_graphs(logger):
            replaced.wrap(logger, "log_graph", _draw_nothing)
    return replaced


def _draw_nothing(*_: Any, **__: Any) -> None:
    rank_zero_warn(
        "TensorBoardLogger(log_graph=True) draws nothing under ZeRO, because it runs the module on"
        " one rank. Call logger.log_graph(module) before the Trainer runs."
    )


# -- signals to requeue the job (SLURM) and to end it ----------------------------------------------

# A signal arrives in the middle of a step, and at a different place on each rank. Lightning answers
# it right there: it saves a checkpoint and requeues the job, or tells the other ranks that training
# ends. Both need all ranks, so here a rank only notes the signal. Its next message at a sync point,
# such as that of each backward pass, tells the others, and all answer it together at the start of
# the next batch.

_KINDS = (internals.ANSWERS_REQUEUE, signal.SIGUSR1), (internals.ANSWERS_END, signal.SIGTERM)
"""Lightning's methods that answer a signal, and the signals that they usually answer."""


class Signals:
    """Answers to signals that replace the Trainer's own until :meth:`remove`.

    Args:
        trainer: A Trainer that has not registered its signal handlers yet.
        control: Exchanges decisions between the ranks.
    """

    def __init__(self, trainer: Any, control: Control) -> None:
        self._trainer, self._control = trainer, control
        self._received, self._answered = [0, 0], [0, 0]
        self._replaced = Replacements()
        connector = internals.signal_connector(trainer)
        self._answers = [getattr(connector, name) for name, _ in _KINDS]
        for kind, (name, _) in enumerate(_KINDS):
            self._replaced.wrap(connector, name, functools.partial(self._note, kind))
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, internals.ASKS_FOR_END):
            self._replaced.wrap(loop, internals.ASKS_FOR_END, lambda _: self._end_if_answered())

    def _note(self, kind: int, _: Any, number: int, frame: Any) -> None:
        """Note the signal, wherever it interrupts this rank."""
        self._received[kind] += 1
        # Not one that comes after the others' has been answered.
        if self._received[kind] == self._answered[kind] + 1:
            self._control.notices[kind] = min(self._received[kind], 255)
            launcher = self._trainer.strategy.launcher
            if _KINDS[kind][0] == internals.ANSWERS_END and launcher is not None:
                launcher.kill(number)  # to ranks that only this process may know of

    def _end_if_answered(self) -> None:
        # All ranks have answered at the same batch, so none needs to ask another, and a device is
        # not drained at each batch to read its answer.
        if self._trainer.received_sigterm:
            raise SIGTERMException

    def answer(self) -> None:
        """Answer, at the start of a batch, the signals that any rank has received."""
        for kind, number in enumerate(self._control.noticed):
            if number > self._answered[kind]:
                self._answered[kind] = number
                self._answers[kind](_KINDS[kind][1], None)

    def remove(self) -> None:
        """Give the Trainer its own handlers back."""
        self._replaced.remove()
        for kind, (_, usual) in enumerate(_KINDS):
            if self._received[kind] > self._answered[kind]:
                log.warning(
                    "Rank %d received %s, but training ended before the next sync point of all"
                    " ranks. It was ignored.",
                    self._control.rank,
                    usual.name,
                )


# -- data that ends at the same batch on all ranks -------------------------------------------------

# The length of an iterable dataset is unknown until it ends, which may be at a different batch on
# each rank. A rank without a batch cannot take part in a training step, so the epoch ends for all
# ranks when it ends for one; DDP would hang. Where the length is unknown, the ranks therefore
# exchange one small message before each batch.

_OWN = ("_loader", "_control", "_is_training")
_END = object()


class SameLength:
    """A wrapper of a data loader that, in training, ends at the same batch on all ranks.

    In everything else it behaves as the loader does.

    Args:
        loader: Any iterable of batches, of unknown length.
        control: Exchanges decisions between the ranks.
        is_training: Returns whether the training loop is the one that iterates.
    """

    def __init__(self, loader: Any, control: Control, is_training: Callable[[], bool]) -> None:
        self._loader = loader
        self._control = control
        self._is_training = is_training

    @classmethod
    def of(cls, loader: Any, control: Control | None, is_training: Callable[[], bool]) -> Any:
        """Wrap ``loader``, or return it unchanged if it has a length or there is one rank."""
        if control is None or control.world_size == 1 or sized_len(loader) is not None:
            return loader
        return cls(loader, control, is_training)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        if not self._is_training():
            yield from batches
            return
        while True:
            batch = next(batches, _END)
            (has_ended,) = self._control.call(SyncPoint.BATCH, bytes([batch is _END])).wait()
            if has_ended:
                self._warn(has_more=batch is not _END)
                return
            yield batch

    def _warn(self, *, has_more: bool) -> None:
        have_more = self._control.gather_objects(has_more)
        ended = [rank for rank, more in enumerate(have_more) if not more]
        if len(ended) < len(have_more):
            rank_zero_warn(
                f"The training data of ranks {ended} ended before that of the other ranks, so the"
                " epoch ends here for all ranks and the remaining batches are skipped. Give every"
                " rank the same number of batches, or set limit_train_batches."
            )

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)
