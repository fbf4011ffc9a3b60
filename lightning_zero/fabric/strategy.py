"""ZeRO as a strategy of Fabric: the adapter between loops that users write and the engine."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_debug, rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import load_module_state, module_state
from lightning_zero.comm import Control
from lightning_zero.engine import Engine, piece_among
from lightning_zero.fabric import internals
from lightning_zero.fabric.checkpointing import Checkpoints, writes_files
from lightning_zero.fabric.precision import FabricPrecision, grads_of, stepped_by
from lightning_zero.fabric.sharding import ShardedModule, Sharding, init_device
from lightning_zero.memory import explained_memory, summary
from lightning_zero.optimizer import clip, members, parameter_of
from lightning_zero.parameters import local_of
from lightning_zero.plan import START_METHODS, Settings


class ZeROStrategy(Sharding, DDPStrategy):
    """Strategy of Fabric that shards optimizer states, gradients and weights over the ranks (ZeRO).

    Loops are written as for ``strategy="ddp"``, with the same numbers::

        fabric = Fabric(strategy="zero3", devices=2)
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = Model()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))

    Each module that is set up has ranks, steps and weights of its own; an optimizer may step the
    parameters of several.

    Args:
        stage: ``1`` shards optimizer states, ``2`` gradients as well, ``3`` weights as well.
        launcher: ``"subprocess"``, ``"spawn"``, ``"fork"`` or ``"notebook"``, as in ``ddp``,
            ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``.
        accelerator: As in ``ParallelStrategy``.
        parallel_devices: As in ``ParallelStrategy``.
        cluster_environment: As in ``ParallelStrategy``.
        checkpoint_io: As in ``ParallelStrategy``.
        precision: A ``FabricPrecision``; by default built from ``Fabric(precision=...)``.
        parallelize_fn: As in ``ModelParallelStrategy``: cuts a module that is set up over
            ``device_mesh["tensor_parallel"]``, and returns it. By default modules are cut already.
        process_group_backend: As in ``DDPStrategy``.
        timeout: As in ``DDPStrategy``.
        **settings: Those of :class:`lightning_zero.ZeROStrategy` that are not about the Trainer.

    Attributes:
        engines: The engines of all modules that were set up.

    Raises:
        ValueError: An argument is out of range or contradicts another.
    """

    def __init__(
        self,
        stage: int = 3,
        *,
        launcher: str = "subprocess",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        parallelize_fn: Callable[[Any, Any], nn.Module] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **settings: Any,
    ) -> None:
        of_trainer = {"checkpoint", "restore_weights"}
        if unknown := settings.keys() & of_trainer:
            raise TypeError(f"{', '.join(unknown)} belongs to the Trainer's strategy. Remove it.")
        self.settings = Settings.of(stage=stage, launcher=launcher, **settings)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=START_METHODS[launcher],  # type: ignore[arg-type]
        )
        if parallelize_fn is not None and self.settings.tensor_parallel_size == 1:
            raise ValueError("parallelize_fn needs tensor_parallel_size > 1. Set both or neither.")
        self._parallelize_fn = parallelize_fn
        self.precision = precision
        self._backward_sync_control = _BackwardSync()
        self.engines: list[Engine] = []
        self._awaits_optimizers = False

    @property
    @override
    def precision(self) -> FabricPrecision:
        return self._zero_precision

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        # Lightning's connector reads `_precision` to see whether the user passed one, and
        # otherwise assigns its own.
        self._zero_precision: FabricPrecision = FabricPrecision.of(precision or Precision())
        self._precision = None if precision is None else self._zero_precision

    def __getstate__(self) -> dict[str, Any]:
        # For copies of a module that was set up: they belong to no ranks.
        kept = {name: value for name, value in vars(self).items() if name != "_checkpoints"}
        return {**kept, "engines": []}

    # -- setup -----------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        with self._joining():
            super().setup_environment()
        # Fabric has no teardown: when the strategy is freed, or at exit after an exception.
        weakref.finalize(self, _leave, self.engines).atexit = False

    @override
    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with init_device(is_empty=empty_init), self.precision.module_init_context():
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move nothing: :meth:`setup_module` moves the module unit by unit."""

    @override
    def setup_module_and_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        self._awaits_optimizers = True
        try:
            found = super().setup_module_and_optimizers(*args, **kwargs)
        finally:
            self._awaits_optimizers = False
        assert isinstance(found[0], ShardedModule)
        assert found[0].engine is not None
        self._announce(found[0].engine)
        return found

    def _announce(self, engine: Engine) -> None:
        """Print the startup summary of a module."""
        rank_zero_info(summary(engine, "a plain file, written by all ranks", self.num_processes))
        rank_zero_debug(engine.sharded.describe())

    @override
    def setup_module(self, module: nn.Module) -> ShardedModule:  # type: ignore[override]
        """Shard a module; parameters stay the same objects, so that optimizers may exist already.

        Raises:
            ValueError: The module cannot be sharded as it is; the message says why.
        """
        if next(module.parameters(), None) is None:
            raise ValueError(
                f"{type(module).__name__} has no parameters, so there is nothing to shard. Use the"
                " module without `fabric.setup`."
            )
        for engine in self.engines:
            if engine.module is module:  # set up before, as for an optimizer that came later
                return ShardedModule(module, engine)
        comm = self._connect()
        if self._parallelize_fn is not None:
            module = self._parallelize_fn(module, self.device_mesh)
        self._make_local(module)
        engine = self._sharded(module, comm, self.precision, str(Path.cwd()))
        self.engines.append(engine)
        if not self._awaits_optimizers:
            self._announce(engine)
        return ShardedModule(module, engine)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Point an optimizer at this rank's pieces of the module's parameters.

        Raises:
            ValueError: There is no way to step it, or tensor parallelism has replaced its
                parameters.
        """
        for group in optimizer.param_groups:
            group["params"] = [local_of(parameter) for parameter in group["params"]]
        engines = stepped_by(optimizer)
        held = [piece_among(engines)(parameter_of(member)) for member in members(optimizer)]
        if self.device_mesh is not None and None in held:
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of no module that was set up. Create"
                " it after the module has been cut over tensor-parallel ranks: set up the module"
                " first, then the optimizer."
            )
        if engines and optimizer not in engines[0].sharded.optimizers:
            engines[0].adopt(optimizer, *engines[1:])
            if not self._awaits_optimizers:
                rank_zero_info(engines[0].steps[-1])
        return optimizer

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduced(super().all_reduce, tensor, group, reduce_op)

    @property
    @override
    def _control(self) -> Control | None:
        return self.engines[0].comm.control if self.engines else None

    # -- the step --------------------------------------------------------------------------------

    @override
    @functools.wraps(DDPStrategy.backward)  # which Fabric looks at: it allows `loss.backward()`
    def backward(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        with explained_memory():
            super().backward(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with explained_memory():
            return super().optimizer_step(optimizer, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale the gradients to a total norm of at most ``max_norm``; return the norm before.

        Raises:
            RuntimeError: The norm is not finite, on all ranks, if ``error_if_nonfinite``.
        """
        pieces, others, comm = grads_of(optimizer)
        if comm is None:
            return super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
        self.precision.unscale_gradients(optimizer)
        return clip.clip_by_norm(
            pieces,
            comm,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
            others=others,
        )

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        pieces, others, comm = grads_of(optimizer)
        if comm is None:
            super().clip_gradients_value(module, optimizer, clip_val)
        else:
            self.precision.unscale_gradients(optimizer)
            clip.clip_by_value(pieces, clip_val, others)

    # -- checkpoints -----------------------------------------------------------------------------

    @functools.cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(Control(), self.settings, lambda: self.engines)

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save from all ranks at once; nothing is gathered."""
        converted: dict[str, Any] = {}
        for key, value in state.items():
            internals.apply_filter(key, filter or {}, self._state_of(key, value), converted)
        is_ours = storage_options is None and writes_files(self.checkpoint_io)
        self._checkpoints.save(
            converted,
            path,
            str(self.precision.precision),
            None if is_ours else self.checkpoint_io,
            storage_options,
            in_background=self.settings.async_checkpoint,
        )

    def _state_of(self, key: str, value: Any) -> Any:
        if isinstance(value, ShardedModule):
            return module_state(value.module, value.engine)
        if isinstance(value, Optimizer) and stepped_by(value):
            return self._checkpoints.optimizer_state(value, key)
        return value.state_dict() if isinstance(value, internals.Stateful) else value

    @override
    def teardown(self) -> None:
        """Wait for the last save in the background; raise if it failed. Fabric does not call it."""
        if "_checkpoints" in vars(self):
            self._checkpoints.saver.close()
        super().teardown()

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load; each rank copies its own parts of what is sharded.

        Raises:
            KeyError: ``state`` has a key that the checkpoint lacks, though ``strict``.
            RuntimeError: Names or shapes of a module do not fit; nothing of it has changed.
            ValueError: The file is damaged or does not fit an optimizer; nothing has changed.
        """
        held = self._checkpoints.load(path, self.checkpoint_io, weights_only)
        if not state:
            return dict(copy.deepcopy(held))
        if isinstance(state, (nn.Module, Optimizer)):
            self._load({"optimizer": state}, {"optimizer": held}, strict=strict)
            return {}
        internals.require_keys(state.keys(), held.keys(), strict=strict)
        found = {key: held.pop(key) for key in state if key in held}
        self._load(state, found, strict=strict)
        for key, saved in found.items():
            if not isinstance(state[key], internals.Stateful):
                state[key] = copy.deepcopy(saved)
        # Copies: a program may write over the file to which the tensors are mapped.
        return dict(copy.deepcopy(held))

    def _load(self, objects: dict[str, Any], saved: dict[str, Any], *, strict: bool) -> None:
        """Load what has a ``load_state_dict``; check sharded optimizers before all of it."""
        optimizers = {
            key: objects[key]
            for key in saved
            if isinstance(objects[key], Optimizer) and stepped_by(objects[key])
        }
        states, names = [saved[key] for key in optimizers], [*map(repr, optimizers)]
        prepared = self._checkpoints.prepared([*optimizers.values()], states, names)
        for key, state in saved.items():
            value = objects[key]
            if isinstance(value, ShardedModule):
                load_module_state(value.module, value.engine, state, strict=strict)
            elif isinstance(value, nn.Module):
                value.load_state_dict(state, strict=strict)
            elif isinstance(value, internals.Stateful) and key not in optimizers:
                value.load_state_dict(copy.deepcopy(state))
        self._checkpoints.load_optimizers(zip(optimizers.values(), prepared, strict=True))


def _leave(engines: list[Engine]) -> None:
    """Let these engines stop taking part in collectives."""
    for engine in engines:
        engine.comm.control.watchdog.leave()


class _BackwardSync(internals.BackwardSyncControl):
    """The context of ``fabric.no_backward_sync``: gradients of microbatches may stay local."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        assert isinstance(module, ShardedModule), "Fabric asks for a module that was set up"
        return module.no_sync() if enabled else nullcontext()
