"""The base class of the strategy: the ranks of a run, and its steps within steps of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import (
    Control,
    StepTimes,
    SyncPoint,
    Traffic,
)
from lightning_zero.engine import Engine
from lightning_zero.fabric import Sharding
from lightning_zero.memory import explained_memory
from lightning_zero.optimizer import follow
from lightning_zero.trainer import internals
from lightning_zero.trainer.run import Run

if TYPE_CHECKING:
    import lightning.pytorch as pl

_T = TypeVar("_T")


class NoSync:
    """``trainer.model.no_sync``: backward passes within its context send no gradients."""

    def __init__(self, strategy: SteppingStrategy) -> None:
        self._strategy = weakref.ref(strategy)

    def __call__(self) -> AbstractContextManager[None]:
        """Return the context; outside of a run it does nothing."""
        strategy = self._strategy()
        engine = None if strategy is None else strategy.engine
        return nullcontext() if engine is None else engine.no_sync()

    def __deepcopy__(self, memo: Any) -> NoSync:
        return self

    def __reduce__(self) -> Any:
        return nullcontext, ()  # a copy in another process belongs to no run


class SteppingStrategy(Sharding, DDPStrategy):
    """The ranks of a run, and steps that they take together, each within a step of the engine.

    The watchdog tells a rank that waits which collectives the others are in, so each of Lightning's
    has a name in the log.

    Attributes:
        engine: The engine that shards the module, kept after it is closed; ``None`` before setup.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._run: Run | None = None
        self.engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        # For copies of a module that holds its Trainer: the copy belongs to no run.
        none: dict[str, Any] = {"engine": None, "_run": None}
        if self._open_engine is None and self.engine is not None:
            # Each rank has its parts of the states only, and there may be no others to ask.
            none.update(_optimizers=[], lr_scheduler_configs=[])
        return {**super().__getstate__(), **none}

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    @override
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        super(SteppingStrategy, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        for wrapper in self._lightning_optimizers:
            follow(wrapper, internals.unwrapped(wrapper))

    def _act_as_wrapper(self, module: pl.LightningModule) -> Iterator[str]:
        """Give the module what DDP's wrapper, ``trainer.model``, has; yield the names."""
        for name, value in (("module", module), ("no_sync", NoSync(self))):
            if not hasattr(module, name):
                vars(module)[name] = value
                yield name

    @property
    def _open_engine(self) -> Engine | None:
        """The engine, unless it is closed."""
        return None if self.engine is None or self.engine.is_closed else self.engine

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._run is not None and self._run.signals is not None:
            self._run.signals.answer()

    # Where Lightning has a hook within a method of `Strategy`, the hook is overridden, not the
    # method, which users patch by one that calls the instance's. `ZeROPrecision` has those of
    # evaluation.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.engine is not None
        step = self.engine.step(awaits_backward=self._module.automatic_optimization)
        with step as watch, explained_memory(self.engine):
            with self.precision_plugin.train_step_context():
                output = self._module.training_step(*args, **kwargs)
            watch(output)
            return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        assert self.engine is not None
        if not self._module.automatic_optimization:
            self.engine.broadcast_next()

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.engine is not None
        with self.engine.no_sync():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        control = self._run.comm.control if self._run is not None else None
        return SameLength.of(dataloader, control, lambda: self._module.trainer.training)

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds now, by kind; see ``ShardedModel.memory``."""
        return self.engine.sharded.memory() if self.engine is not None else {}

    @property
    def traffic(self) -> Traffic:
        """Traffic that this rank sent in the last optimizer step, by unit and verb."""
        return self.engine.comm.traffic if self.engine is not None else {}

    @property
    def step_times(self) -> StepTimes:
        """Times of the last optimizer step with offload, and the speed of its files."""
        return self.engine.comm.step_times if self.engine is not None else StepTimes()

    # -- the ranks -------------------------------------------------------------------------------

    @property
    def _current(self) -> Run:
        assert self._run is not None, "the environment is set up before anything else"
        return self._run

    @override
    def setup_distributed(self) -> None:
        with self._joining():
            super().setup_distributed()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._collective("a barrier"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        with self._collective("a broadcast"):
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        with self._collective("a reduction of values"):
            return self._counted_once(super().reduce, tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        with self._collective("a decision"):
            return super().reduce_boolean_decision(decision, all)

    @override
    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._collective("an all-gather of values"):
            return super().all_gather(tensor, *args, **kwargs)

    def _collective(self, place: str) -> AbstractContextManager[Any]:
        return nullcontext() if self._run is None else self._run.comm.control.log.at(place)

    def _leave_ranks(self) -> None:
        if self._run is not None:
            self._run.comm.control.leave()


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
