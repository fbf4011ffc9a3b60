"""Lightning's callbacks and loggers that need more than to read and write weights.

They are used unmodified, so their methods are wrapped during a run:

- an averaging callback that loads a checkpoint waits until the module is sharded
- TensorBoard's ``log_graph`` draws nothing, as one rank cannot run a sharded module
- a batch size search is refused, as under DDP

A finetuning callback that looks for its parameters in an optimizer finds them in place of their
pieces. Averages are whole and rest where the callback keeps them, in host memory by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, Callback, StochasticWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zero.engine import Replacements
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


def adapt_callbacks(
    callbacks: Iterable[Callback], loggers: Iterable[Any], load_average: Callable[..., Any]
) -> Replacements:
    """Adapt the Trainer's callbacks and loggers to a sharded module; return what undoes it.

    ``load_average`` is called in place of an averaging callback's ``on_load_checkpoint``, with that
    and its arguments.

    Raises:
        MisconfigurationException: One of them is a ``BatchSizeFinder``.
    """
    replaced = Replacements()
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
            replaced.wrap(callback, "on_load_checkpoint", load_average)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and internals.draws_graphs(logger):
            replaced.wrap(logger, "log_graph", _draw_nothing)
    return replaced


def _draw_nothing(*_: Any, **__: Any) -> None:
    rank_zero_warn(
        "TensorBoardLogger(log_graph=True) draws nothing under ZeRO, because it runs the module on"
        " one rank. Call logger.log_graph(module) before the Trainer runs."
    )
