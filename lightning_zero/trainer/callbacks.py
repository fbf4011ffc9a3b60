"""Lightning's callbacks that do more between steps than read and write weights.

They are used unmodified, so their methods are wrapped during a fit. Averaging is element-wise:
averaging callbacks average, swap and save this rank's pieces (``weight_average.py``), unless a
subclass or the averaging function needs whole weights. A finetuning callback that looks for its
parameters in an optimizer finds them in place of their pieces. A batch size search is refused, as
under DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_zero.checkpoint import ReadingAssigned
from lightning_zero.engine import Engine, Replacements
from lightning_zero.trainer import internals
from lightning_zero.trainer.weight_average import Average, is_by_element

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before Lightning 2.6
    WeightAveraging = None  # type: ignore[assignment, misc]

_READ, _WRITE = False, True
_AVERAGING: dict[type[Callback], dict[str, bool]] = {
    StochasticWeightAveraging: {"update_parameters": _READ, "transfer_weights": _WRITE},
}
"""Averaging callbacks, and their methods that use only the parameters and buffers of their second
argument, a module."""
_LOADING: dict[type[Callback], str] = {StochasticWeightAveraging: internals.LOADS_AVERAGE}
if WeightAveraging is not None:
    _AVERAGING[WeightAveraging] = {
        "on_train_batch_end": _READ,
        "on_train_epoch_end": _READ,
        "on_validation_epoch_start": _WRITE,
        "on_validation_epoch_end": _WRITE,
        "on_train_end": _WRITE,
    }
    _LOADING[WeightAveraging] = "on_load_checkpoint"
_OTHER_WORK = (
    "setup",
    "on_save_checkpoint",
    "on_train_epoch_start",
    "on_train_end",
    *internals.OVERRIDABLE,
)
"""Other methods of an averaging callback that touch the average."""
_NO_BATCH_SIZES = (
    "BatchSizeFinder does not work under ZeRO, as under DDP: a rank that runs out of memory would"
    " leave the others waiting for it. Remove the callback; lightning_zero.estimate(model,"
    " batch=...) predicts the memory of a batch of any size without running it."
)


def refuse_whole_averages(callbacks: Iterable[Callback]) -> None:
    """Raise a ``ValueError`` if a callback's average needs whole weights, which no rank has."""
    for callback in callbacks:
        if isinstance(callback, tuple(_AVERAGING)) and not _is_by_element(callback):
            raise ValueError(
                f"{type(callback).__name__} needs whole weights, which is not supported with"
                " tensor_parallel_size > 1. Use Lightning's own methods and an element-wise"
                " averaging function."
            )


class AdaptedCallbacks:
    """The Trainer's callbacks, adapted to a sharded module until :meth:`remove`.

    1. Construct it before ``Callback.setup``, which would copy the whole module.
    2. Call :meth:`prepare` before the module is sharded, :meth:`attach` after.
    3. Call :meth:`load` when the weights of a checkpoint are loaded.
    4. Call :meth:`gather`, while all ranks are alive, to make the callbacks ordinary again.

    Args:
        callbacks: The Trainer's callbacks.
        is_fitting: Whether they will train. If not, averages are whole, from an earlier fit.

    Raises:
        MisconfigurationException: One of them is a ``BatchSizeFinder``.
    """

    def __init__(self, callbacks: Iterable[Callback], *, is_fitting: bool) -> None:
        self._callbacks = list(callbacks)
        if any(isinstance(callback, BatchSizeFinder) for callback in self._callbacks):
            raise MisconfigurationException(_NO_BATCH_SIZES)
        self._replaced = Replacements()
        self._engine: Engine | None = None
        self._awaiting: list[Callable[[], None]] = []
        self._averages: dict[int, Average] = {}
        self._wholes: dict[int, list[torch.Tensor]] = {}
        self._in_pieces = [
            callback for callback in self._callbacks if is_fitting and _is_by_element(callback)
        ]
        for callback in self._callbacks:
            for cls, name in _LOADING.items():
                if isinstance(callback, cls):
                    self._replaced.wrap(callback, name, self._load_later)
        for callback in self._in_pieces:
            self._replaced.wrap(callback, "setup", lambda *args, **kwargs: None)

    def prepare(self, module: nn.Module) -> None:
        """Copy what averages need from ``module``, before it is sharded."""
        for number, callback in enumerate(self._in_pieces):
            self._averages[id(callback)] = Average(module, f"average {number}")

    def attach(self, engine: Engine) -> None:
        """Adapt the hooks to the module, now that ``engine`` shards it."""
        self._engine = engine
        for callback in self._callbacks:
            if id(callback) in self._averages:
                self._average_pieces(callback, engine)

    def _average_pieces(self, callback: Any, engine: Engine) -> None:
        averaged = self._averages[id(callback)]
        device = internals.average_device(callback)
        averaged.fill(engine, None if device is None else torch.device(device))
        if isinstance(callback, StochasticWeightAveraging):
            average = averaged.copy
        else:
            # The average exists already; `AveragedModel(module)` would copy the whole module.
            average = AveragedModel(nn.Module(), **_options(callback))
            average.module = averaged.copy
        internals.set_average(callback, average)
        for cls, methods in _AVERAGING.items():
            for name, modify in methods.items() if isinstance(callback, cls) else ():
                self._replaced.wrap(callback, name, _on_pieces, averaged, modify)

    def load(self) -> None:
        """Load the averages of a checkpoint, after the module's weights."""
        assert self._engine is not None
        awaiting, self._awaiting = self._awaiting, []
        if awaiting:
            with self._engine.sharded.writing():
                for function in awaiting:
                    function()

    def _load_later(self, inner: Callable[..., Any], *args: Any) -> None:
        """Load averages now if the module is sharded, else when :meth:`load` is called."""
        self._awaiting.append(functools.partial(inner, *map(_without_copies, args)))
        if self._engine is not None:
            self.load()

    def gather(self) -> None:
        """Gather the averages into host memory; all ranks call it together."""
        self._wholes = {
            key: averaged.whole() for key, averaged in self._averages.items() if averaged.is_filled
        }

    def remove(self) -> None:
        """Restore the callbacks' own hooks, and their averages if they were gathered."""
        self._replaced.remove()
        for callback in self._in_pieces:
            whole = self._wholes.get(id(callback))
            if whole is not None:
                self._averages[id(callback)].restore(whole)
            else:
                internals.set_average(callback, None)


def read_what_is_assigned(owners: Iterable[Any]) -> Replacements:
    """Let ``on_load_checkpoint`` assign loaded tensors to ``parameter.data``, until removed."""

    def within(method: Callable[..., Any], *args: Any) -> Any:
        with ReadingAssigned():
            return method(*args)

    replaced = Replacements()
    for owner in owners:
        replaced.wrap(owner, "on_load_checkpoint", within)
    return replaced


def _on_pieces(
    method: Callable[..., Any], averaged: Average, modify: bool, first: Any, _: Any, *args: Any
) -> Any:
    with averaged.shown(modify=modify) as pieces:
        return method(first, pieces, *args)


# -- averages in pieces ----------------------------------------------------------------------------


def _is_by_element(callback: Any) -> bool:
    """Return whether each rank may average its pieces alone; warn of averages that cannot."""
    cls = next((cls for cls in _AVERAGING if isinstance(callback, cls)), None)
    if cls is None:
        return False
    reasons = [f"{type(callback).__name__} overrides {name}" for name in _overridden(callback, cls)]
    if not reasons and not is_by_element(_options(callback)):
        reasons = ["its averaging function is not element-wise"]
    if reasons:
        rank_zero_warn(
            f"{type(callback).__name__} keeps a whole copy of the averaged weights on every rank,"
            f" because {' and '.join(reasons)}. A sharded average needs Lightning's own methods and"
            " an element-wise averaging function."
        )
    return not reasons


def _overridden(callback: Any, cls: type[Callback]) -> Iterator[str]:
    names = {*_AVERAGING[cls], _LOADING[cls], *_OTHER_WORK}
    for name in sorted(names):
        is_theirs = getattr(cls, name, None) is not getattr(Callback, name, None)
        if is_theirs and getattr(type(callback), name, None) is not getattr(cls, name, None):
            yield name


def _options(callback: Any) -> dict[str, Any]:
    """Return arguments for an ``AveragedModel`` that averages as ``callback`` does."""
    if isinstance(callback, StochasticWeightAveraging):
        return {"avg_fn": internals.average_function(callback)}
    return internals.average_options(callback)


class _Uncopied(dict[str, Any]):
    """A loaded state dict that ``deepcopy`` leaves alone: its values are copied when used."""

    def __deepcopy__(self, memo: Any) -> _Uncopied:
        return self


def _without_copies(argument: Any) -> Any:
    """Return ``argument``; if it is a checkpoint, ``deepcopy`` of it does not read its weights."""
    if isinstance(argument, dict) and "state_dict" in argument:
        return {**argument, "state_dict": _Uncopied(argument["state_dict"])}
    return argument
