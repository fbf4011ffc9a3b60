"""Lightning's callbacks that read or write weights between steps, when a sharded one is at rest.

They come unmodified, so for the time of a fit their methods are wrapped. Averaging is element-wise:
its callbacks average, swap and save this rank's pieces (``average.py``), unless a subclass or its
function asks for whole weights. Other hooks run with the whole weights in the master's precision,
and what they do to them stays; a finetuning callback that looks for its parameters in an optimizer
finds them instead of their pieces. A search for the largest batch comes to one size on all ranks,
because memory that is exhausted on one is exhausted on all (``trial.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero import average
from lightning_zero.average import Average
from lightning_zero.engine import Engine
from lightning_zero.piece import Piece
from lightning_zero.trial import Trials

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before Lightning 2.6
    WeightAveraging = None  # type: ignore[assignment, misc]

_READ, _WRITE = False, True
_HOOKS: dict[type[Callback], dict[str, bool]] = {
    BaseFinetuning: {"on_train_epoch_start": _READ},
    StochasticWeightAveraging: {"on_train_epoch_start": _WRITE, "on_train_end": _WRITE},
}
_AVERAGING: list[type[Callback]] = [StochasticWeightAveraging]
_LOADING: dict[type[Callback], str] = {StochasticWeightAveraging: "_load_average_model_state"}
_ON_MODULES: dict[type[Callback], dict[str, bool]] = {
    StochasticWeightAveraging: {"update_parameters": _READ, "transfer_weights": _WRITE},
}
"""What gets the module as its second argument, and only its parameters and buffers are used."""
if WeightAveraging is not None:
    _HOOKS[WeightAveraging] = _ON_MODULES[WeightAveraging] = {
        "on_train_batch_end": _READ,
        "on_train_epoch_end": _READ,
        "on_validation_epoch_start": _WRITE,
        "on_validation_epoch_end": _WRITE,
        "on_train_end": _WRITE,
    }
    _LOADING[WeightAveraging] = "on_load_checkpoint"
    _AVERAGING.append(WeightAveraging)
_OTHER_WORK = ("setup", "on_save_checkpoint", "_swap_models", "_copy_average_to_current")
"""What else of an averaging callback touches the average."""


class AdaptedCallbacks:
    """Callbacks whose hooks see weights, until :meth:`remove`.

    1. Construct it before ``Callback.setup``: copies of the whole module are not made then.
    2. :meth:`prepare` before the module is sharded, :meth:`attach` after.
    3. :meth:`load` when the weights of a checkpoint are in place.
    4. :meth:`gather`, while all ranks are there, if callbacks shall be ordinary again afterwards.

    Args:
        callbacks: The Trainer's.
        is_fitting: Whether they will train. Otherwise averages are whole, from a fit before.

    Raises:
        NotImplementedError: A callback replaces parameters while they are sharded.
    """

    def __init__(self, callbacks: Iterable[Callback], *, is_fitting: bool) -> None:
        self._callbacks = list(callbacks)
        self._wrapped: list[tuple[Callback, str]] = []
        self._engine: Engine | None = None
        self._awaiting: list[Callable[[], None]] = []
        self._averages: dict[int, Average] = {}
        self._wholes: dict[int, list[torch.Tensor]] = {}
        for callback in self._callbacks:
            if is_fitting and isinstance(callback, ModelPruning):
                raise NotImplementedError(
                    f"{type(callback).__name__} replaces parameters during training, which cannot"
                    " be done to those that are sharded. Prune the module before or after `fit`, or"
                    " use strategy='ddp'."
                )
        self._in_pieces = [
            callback for callback in self._callbacks if is_fitting and _is_by_element(callback)
        ]
        for callback in self._callbacks:
            for cls, name in _LOADING.items():
                if isinstance(callback, cls):
                    self._wrap(callback, name, self._load_later)
            if isinstance(callback, BatchSizeFinder):
                self._wrap(callback, "setup", _alone)
        for callback in self._in_pieces:
            self._wrap(callback, "setup", lambda inner, *args, **kwargs: None)

    def prepare(self, module: nn.Module) -> None:
        """Copy what averages need of ``module``, which is not sharded yet."""
        for number, callback in enumerate(self._in_pieces):
            self._averages[id(callback)] = Average(module, f"average {number}")

    def attach(self, engine: Engine) -> None:
        """Let hooks find what they need on the module that ``engine`` shards."""
        self._engine = engine
        for callback in self._callbacks:
            if id(callback) in self._averages:
                self._average_pieces(callback, engine)
                continue
            for cls, hooks in _HOOKS.items():
                for name, modify in hooks.items() if isinstance(callback, cls) else ():
                    self._wrap(callback, name, _gathered, engine, modify)
            if isinstance(callback, BaseFinetuning):
                self._wrap(callback, "_apply_mapping_to_param_groups", _with_parameters)
            if isinstance(callback, BatchSizeFinder):
                self._wrap(callback, "scale_batch_size", _in_trials, engine)

    def _average_pieces(self, callback: Any, engine: Engine) -> None:
        averaged = self._averages[id(callback)]
        device = callback._device
        averaged.fill(engine, None if device is None else torch.device(device))
        if isinstance(callback, StochasticWeightAveraging):
            callback._average_model = averaged.copy  # type: ignore[assignment]
        else:
            callback._average_model = average.averaged_model(averaged, **_options(callback))
        for cls, methods in _ON_MODULES.items():
            for name, modify in methods.items() if isinstance(callback, cls) else ():
                self._wrap(callback, name, _on_pieces, averaged, modify)

    def load(self) -> None:
        """Let averages load what a checkpoint has for them; the module's weights are in place."""
        assert self._engine is not None
        awaiting, self._awaiting = self._awaiting, []
        if awaiting:
            with self._engine.writing():
                for function in awaiting:
                    function()

    def _load_later(self, inner: Callable[..., Any], *args: Any) -> None:
        """Load when each rank knows its pieces, and the module's weights have been loaded."""
        self._awaiting.append(functools.partial(inner, *map(_without_copies, args)))
        if self._engine is not None:
            self.load()

    def gather(self) -> None:
        """Make averages whole in host memory; all ranks call it together."""
        self._wholes = {
            key: averaged.whole() for key, averaged in self._averages.items() if averaged.is_filled
        }

    def remove(self) -> None:
        """Give the callbacks their own hooks back, and their averages if they were gathered."""
        for callback, name in self._wrapped:
            delattr(callback, name)
        self._wrapped = []
        for callback in self._in_pieces:
            whole = self._wholes.get(id(callback))
            if whole is not None:
                self._averages[id(callback)].restore(whole)
            else:
                callback._average_model = None  # type: ignore[attr-defined]

    def _wrap(self, callback: Callback, name: str, around: Callable[..., Any], *args: Any) -> None:
        inner = getattr(callback, name)
        setattr(callback, name, functools.partial(around, inner, *args))
        self._wrapped.append((callback, name))


def _gathered(
    hook: Callable[..., Any], engine: Engine, modify: bool, *args: Any, **kwargs: Any
) -> Any:
    with engine.gathered(modify=modify):
        return hook(*args, **kwargs)


def _on_pieces(
    method: Callable[..., Any], averaged: Average, modify: bool, first: Any, _: Any, *args: Any
) -> Any:
    with averaged.source.shown(modify=modify) as pieces:
        return method(first, pieces, *args)


def _with_parameters(
    inner: Callable[..., Any], groups: list[dict[str, Any]], mapping: dict[Any, Any]
) -> Any:
    whole = [
        {**group, "params": [p.parameter if isinstance(p, Piece) else p for p in group["params"]]}
        for group in groups
    ]
    return inner(whole, mapping)


# -- batch sizes -----------------------------------------------------------------------------------


class _Alone:
    """A Trainer that says it has one rank to a callback that asks for no other reason than this."""

    _accelerator_connector = SimpleNamespace(is_distributed=False)

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def _alone(setup: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return setup(_Alone(trainer), *args, **kwargs)


def _in_trials(search: Callable[..., Any], engine: Engine, trainer: Any, module: Any) -> Any:
    trials = Trials(engine, is_oom_error)
    loop = trainer._active_loop
    loop.run = functools.partial(_undone, functools.partial(trials.run, loop.run), trainer)
    try:
        return search(trainer, module)
    finally:
        del loop.run


def _undone(run: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """A run that, if it fails in its validation, does not leave the Trainer validating."""
    stage = trainer.state.stage
    modes = [(module, module.training) for module in trainer.lightning_module.modules()]
    try:
        return run(*args, **kwargs)
    except Exception:
        trainer.state.stage = stage
        for module, is_training in modes:
            module.training = is_training
        raise


# -- averages in pieces ----------------------------------------------------------------------------


def _is_by_element(callback: Any) -> bool:
    """Whether each rank may average its pieces; warns if an averaging callback needs more."""
    cls = next((cls for cls in _AVERAGING if isinstance(callback, cls)), None)
    if cls is None:
        return False
    reasons = [f"{type(callback).__name__} overrides {name}" for name in _overridden(callback, cls)]
    if not reasons and not average.is_by_element(_course(callback)):
        reasons = ["its averaging function does not treat each element by itself"]
    if reasons:
        rank_zero_warn(
            f"The average of {type(callback).__name__} is a whole copy of the weights on every"
            f" rank, because {' and '.join(reasons)}. An average in shards needs Lightning's own"
            " methods and an element-wise function."
        )
    return not reasons


def _overridden(callback: Any, cls: type[Callback]) -> Iterator[str]:
    names = {*_HOOKS[cls], *_ON_MODULES[cls], _LOADING[cls], *_OTHER_WORK}
    for name in sorted(names):
        if getattr(type(callback), name, None) is not getattr(cls, name, None):
            yield name


def _course(callback: Any) -> Any:
    if isinstance(callback, StochasticWeightAveraging):
        return average.counted_average(callback.update_parameters, callback._avg_fn)
    return average.torch_average(_options(callback))


def _options(callback: Any) -> dict[str, Any]:
    return {"use_buffers": callback._use_buffers, **callback._kwargs}


class _Uncopied(dict[str, Any]):
    """The values of a file, which are copied where they go and need no copy before."""

    def __deepcopy__(self, memo: Any) -> _Uncopied:
        return self


def _without_copies(argument: Any) -> Any:
    """A checkpoint whose weights a callback may ``deepcopy`` without reading them."""
    if isinstance(argument, dict) and "state_dict" in argument:
        return {**argument, "state_dict": _Uncopied(argument["state_dict"])}
    return argument
