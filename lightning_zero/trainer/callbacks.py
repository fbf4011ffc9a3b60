"""Lightning's callbacks and loggers that need more than to read and write weights.

They are used unmodified, so their methods are wrapped during a run:

- an averaging callback that loads a checkpoint waits until the module is sharded
- TensorBoard's ``log_graph`` draws nothing, as one rank cannot run a sharded module
- a batch size search is refused, as under DDP

A finetuning callback that looks for its parameters in an optimizer finds them in place of their
pieces. Averages are whole and rest where the callback keeps them, in host memory by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, Callback, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zero.engine import Engine, Replacements
from lightning_zero.trainer import internals

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before Lightning 2.6
    _AVERAGING: tuple[type[Callback], ...] = (StochasticWeightAveraging,)
else:
    _AVERAGING = (StochasticWeightAveraging, WeightAveraging)


def refuse_averages(callbacks: Iterable[Callback]) -> None:
    """Raise a ``ValueError`` if a callback averages whole weights, which no rank has."""
    for callback in callbacks:
        if isinstance(callback, _AVERAGING):
            raise ValueError(
                f"{type(callback).__name__} averages whole weights, which no rank has with"
                " tensor_parallel_size > 1. Average the parameters in a hook of your own."
            )


class AdaptedCallbacks:
    """The Trainer's callbacks, adapted to a sharded module until :meth:`remove`.

    Args:
        callbacks: The Trainer's callbacks.
        loggers: The Trainer's loggers.

    Raises:
        MisconfigurationException: One of them is a ``BatchSizeFinder``.
    """

    def __init__(self, callbacks: Iterable[Callback], loggers: Iterable[Any]) -> None:
        self._replaced = Replacements()
        self._engine: Engine | None = None
        self._awaiting: list[Callable[[], None]] = []
        for callback in callbacks:
            if isinstance(callback, BatchSizeFinder):
                raise MisconfigurationException(
                    "BatchSizeFinder does not work under ZeRO, as under DDP: a rank that runs out"
                    " of memory would leave the others waiting for it. Remove the callback;"
                    " lightning_zero.estimate(model, batch=...) predicts the memory of a batch of"
                    " any size without running it."
                )
            # An average also loads weights into the module, which the strategy would overwrite.
            if isinstance(callback, _AVERAGING[1:]):
                self._replaced.wrap(callback, "on_load_checkpoint", self._load_later)
        for logger in loggers:
            if isinstance(logger, TensorBoardLogger) and internals.draws_graphs(logger):
                self._replaced.wrap(logger, "log_graph", _draw_nothing)

    def attach(self, engine: Engine) -> None:
        """Take note that ``engine`` has sharded the module."""
        self._engine = engine

    def load(self) -> None:
        """Load the averages of a checkpoint, after the module's weights."""
        assert self._engine is not None
        awaiting, self._awaiting = self._awaiting, []
        if awaiting:
            with self._engine.sharded.writing():
                for function in awaiting:
                    function()

    def _load_later(self, inner: Callable[..., Any], *args: Any) -> None:
        """Load an average now if the module is sharded, else when :meth:`load` is called."""
        self._awaiting.append(functools.partial(inner, *args))
        if self._engine is not None:
            self.load()

    def remove(self) -> None:
        """Restore the methods of the callbacks and loggers."""
        self._replaced.remove()


def _draw_nothing(*_: Any, **__: Any) -> None:
    rank_zero_warn(
        "TensorBoardLogger(log_graph=True) draws nothing under ZeRO, because it runs the module on"
        " one rank. Call logger.log_graph(module) before the Trainer runs."
    )
