"""The base class of the strategy that runs the Trainer's steps within steps of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.comm import StepTimes, Traffic
from lightning_zero.engine import Engine
from lightning_zero.optimizer import follow
from lightning_zero.trainer import internals
from lightning_zero.trainer.dataloader import SameLength
from lightning_zero.trainer.ranks import RankStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


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


class SteppingStrategy(RankStrategy):
    """Steps over batches that all ranks take together, each within a step of the engine.

    Attributes:
        engine: The engine that shards the module, kept after it is closed; ``None`` before setup.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
        with self.engine.step(awaits_backward=self._module.automatic_optimization) as watch:
            with self.precision_plugin.train_step_context():
                output = self._module.training_step(*args, **kwargs)
            watch(output)
            return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        assert self.engine is not None
        is_manual = not self._module.automatic_optimization
        self.engine.prepare_backward(closure_loss, broadcasts=is_manual)

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
