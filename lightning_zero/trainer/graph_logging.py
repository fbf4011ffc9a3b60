"""Loggers that run the model on one rank to draw its graph, as TensorBoard's ``log_graph`` does.

One rank alone cannot run a sharded module, and its hooks cannot be traced. So during a run the
loggers get an ordinary copy of it, made from weights that all ranks gather.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_zero.engine import Engine, Replacements
from lightning_zero.trainer import internals


def log_whole_graphs(loggers: Iterable[Any], engine: Engine) -> Replacements:
    """Make ``log_graph`` of the Trainer's ``loggers`` receive a whole module on rank 0.

    Meanwhile rank 0 holds two whole models, and every other rank one.
    """
    drawing = [logger for logger in loggers if _draws(logger)]
    # Gathering takes all ranks, so loggers that only some ranks have never get a whole module.
    is_everywhere = len(set(engine.comm.control.gather_objects(len(drawing)))) == 1
    replaced = Replacements()
    for logger in drawing if is_everywhere else ():
        replaced.wrap(logger, "log_graph", _log_whole, engine)
    return replaced


def _draws(logger: Any) -> bool:
    if type(logger).__name__ == "LitLogger":
        return False  # its log_graph warns that it draws nothing
    overrides = getattr(type(logger), "log_graph", Logger.log_graph) is not Logger.log_graph
    # Do not gather a model that is not drawn.
    return overrides and internals.draws_graphs(logger)


def _log_whole(
    log_graph: Callable[..., Any], engine: Engine, model: Any, *args: Any, **kwargs: Any
) -> None:
    control, error = engine.comm.control, None
    with engine.sharded.gathered():
        if control.rank == 0:
            try:
                whole = copy.deepcopy(model)
                whole.trainer = model.trainer
                log_graph(whole, *args, **kwargs)
            except Exception as raised:
                error = raised
    told = control.broadcast_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if told is not None:
        raise RuntimeError(f"Rank 0 could not log the model's graph. {told}")
