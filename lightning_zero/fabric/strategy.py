"""ZeRO as a strategy of Fabric: the adapter between loops that users write and the engine."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_zero.checkpoint import (
    Provenance,
    Saver,
    check_optimizer_states,
    check_ranges,
    collected,
    in_memory,
    load,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    ranges_of_optimizers,
)
from lightning_zero.comm import Communicator, Control, process_groups
from lightning_zero.engine import Engine, broadcast_buffers
from lightning_zero.fabric import internals
from lightning_zero.fabric.options import START_METHODS, STRATEGIES, Options
from lightning_zero.fabric.precision import FabricPrecision
from lightning_zero.optimizer import clip, members, parameter_of, pieces_of
from lightning_zero.plan import Settings, as_dtype


class ShardedModule(nn.Module):
    """A module whose forward is a step of an engine; what ``fabric.setup`` wraps.

    Attributes:
        module: The user's module, whose parameters the engine shards.
        engine: The engine.
    """

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.module = module
        self.engine = engine

    @override
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; a backward from what it returns finds its weights."""
        with self.engine.step(awaits_backward=torch.is_grad_enabled()) as watch:
            output = self.module(*args, **kwargs)
            watch(output)
            return output


class ZeROStrategy(DDPStrategy):
    """Strategy of Fabric that shards optimizer states, gradients and weights over the ranks (ZeRO).

    Loops are written as for ``strategy="ddp"``, with the same numbers::

        fabric = Fabric(strategy="zero3", devices=2)
        fabric.launch()
        with fabric.init_module(empty_init=True):
            model = Model()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))

    Each module that is set up has ranks, steps and weights of its own, and each optimizer steps the
    parameters of one module.

    Args:
        stage: ``1`` shards optimizer states, ``2`` gradients as well, ``3`` weights as well.
        launcher: ``"subprocess"``, ``"spawn"``, ``"fork"`` or ``"notebook"``, as in ``ddp``,
            ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``.
        accelerator: As in ``ParallelStrategy``.
        parallel_devices: As in ``ParallelStrategy``.
        cluster_environment: As in ``ParallelStrategy``.
        checkpoint_io: As in ``ParallelStrategy``.
        precision: A ``FabricPrecision``; by default built from ``Fabric(precision=...)``.
        process_group_backend: As in ``DDPStrategy``.
        timeout: As in ``DDPStrategy``.
        **settings: Those of :class:`lightning_zero.ZeROStrategy` that are not about the Trainer.

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
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **settings: Any,
    ) -> None:
        self.settings, self.options = chosen(stage, launcher=launcher, **settings)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=START_METHODS[launcher],  # type: ignore[arg-type]
        )
        self.precision = precision
        self._backward_sync_control = _BackwardSync()
        self.engines: list[Engine] = []

    @property
    @override
    def precision(self) -> FabricPrecision:
        return self._zero_precision

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        # Lightning's connector reads `_precision` to see whether the user passed one, and
        # otherwise assigns its own.
        self._zero_precision = FabricPrecision.of(precision or Precision())
        self._precision = None if precision is None else self._zero_precision

    # -- setup -----------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        process_groups.end_at_exit()
        # When the strategy goes, at the latest when the process ends: Fabric has no teardown.
        weakref.finalize(self, _leave, self.engines)

    @override
    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Never on the accelerator: the whole model may not fit there.
        device: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision.module_init_context():
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move nothing: :meth:`setup_module` moves the module unit by unit."""

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
        comm = Communicator(
            self.root_device, **self.settings.division(self.world_size, self.num_processes)
        )
        settings = dataclasses.replace(
            self.settings,
            recipe=self.precision.recipe,
            device=self.root_device,
            broadcast_in_calls=False,
            offload_path=self.settings.offload_path or str(Path.cwd()),
        )
        internals.to_device_but_parameters(module, self.root_device)
        self.precision.device = self.root_device.type
        facts = {"The strategy": dict(vars(self.options))}
        engine = Engine(module, settings, comm, facts=facts)
        broadcast_buffers(module, comm)
        self.options.wrap_units(engine, ExitStack())
        self.engines.append(engine)
        rank_zero_info(engine.sharded.describe())
        return ShardedModule(module, engine)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Point an optimizer at this rank's pieces of the module's parameters.

        Raises:
            ValueError: Its parameters belong to several modules, or there is no way to step it.
        """
        engine = self._engine_of(optimizer)
        if engine is not None and (notice := engine.adopt(optimizer)) is not None:
            rank_zero_info(notice)
        return optimizer

    def _engine_of(self, optimizer: Optimizer) -> Engine | None:
        """Return the engine of an optimizer's parameters; ``None`` if none shards them."""
        parameters = [parameter_of(member) for member in members(optimizer)]
        found = [
            engine
            for engine in self.engines
            if any(engine.sharded.piece(parameter) is not None for parameter in parameters)
        ]
        if len(found) > 1:
            raise ValueError(
                f"{type(optimizer).__name__} has parameters of {len(found)} modules that were set"
                " up one by one. Use an optimizer for each, or set them up as one nn.ModuleDict."
            )
        return found[0] if found else None

    # -- the step --------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._unscale(optimizer)
        return super().optimizer_step(optimizer, **kwargs)

    def _unscale(self, optimizer: Optimizer) -> Engine | None:
        engine = self._engine_of(optimizer)
        if engine is not None:
            self.precision.unscale(optimizer, engine)
        return engine

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
        engine = self._unscale(optimizer)
        if engine is None:
            return super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
        return clip.clip_by_norm(
            pieces_of(optimizer, engine.sharded.piece),
            engine.comm,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        engine = self._unscale(optimizer)
        if engine is None:
            super().clip_gradients_value(module, optimizer, clip_val)
        else:
            clip.clip_by_value(pieces_of(optimizer, engine.sharded.piece), clip_val)

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        path: internals.StoredPath,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save from all ranks at once; nothing is gathered."""
        converted = {
            key: kept(self._state_of(key, value), (filter or {}).get(key))
            for key, value in state.items()
        }
        if storage_options is None and type(self.checkpoint_io) is TorchCheckpointIO:
            self._saver.save(
                converted, str(path), self._provenance, in_background=self.options.async_checkpoint
            )
        else:
            # The user's own writer takes whole tensors.
            whole = collected(converted, self._saver.control)
            super().save_checkpoint(path, whole, storage_options)

    def _state_of(self, key: str, value: Any) -> Any:
        if isinstance(value, ShardedModule):
            return module_state(value.module, value.engine)
        engine = self._engine_of(value) if isinstance(value, Optimizer) else None
        if engine is not None:
            return optimizer_state(value, engine, key)
        return value.state_dict() if isinstance(value, internals.Stateful) else value

    @property
    def _provenance(self) -> Provenance:
        return Provenance(
            stage=self.settings.stage,
            world_size=self.world_size,
            precision=str(self.precision.precision),
        )

    @functools.cached_property
    def _saver(self) -> Saver:
        return Saver(Control())

    @override
    def load_checkpoint(
        self,
        path: internals.StoredPath,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load; each rank reads its own parts of what is sharded.

        Raises:
            KeyError: ``state`` has a key that the checkpoint lacks, though ``strict``.
            RuntimeError: Names or shapes of a module do not fit; nothing has changed.
            ValueError: The file is damaged or does not fit an optimizer; nothing has changed.
        """
        self._saver.wait()
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            given = {} if weights_only is None else {"weights_only": weights_only}
            held = self.checkpoint_io.load_checkpoint(path, **given)
        else:
            held = load(
                self._saver.path_of(str(path)),
                self._saver.control,
                weights_only=weights_only in (None, True),
                verify=self.options.verify_checkpoint,
                maps=self.settings.offload is None,
            )
        if not state:
            return dict(whole(held))
        if isinstance(state, (nn.Module, Optimizer)):
            self._load([("the checkpoint", state, held)], strict=strict)
            return {}
        missing = [key for key in state if key not in held]
        if strict and missing:
            raise KeyError(
                f"The requested state contains a key {missing[0]!r} that does not exist in the"
                " loaded checkpoint. To disable strict loading, set `strict=False`."
            )
        found = [(key, value, held.pop(key)) for key, value in state.items() if key in held]
        self._load(found, strict=strict)
        for key, value, saved in found:
            if not isinstance(value, internals.Stateful):
                state[key] = whole(saved)
        return dict(whole(held))

    def _load(self, found: list[tuple[str, Any, Any]], *, strict: bool) -> None:
        """Load what has a ``load_state_dict``; check sharded optimizers before all of it."""
        optimizers = [
            (key, value, saved)
            for key, value, saved in found
            if isinstance(value, Optimizer) and self._engine_of(value) is not None
        ]
        for key, optimizer, saved in optimizers:
            try:
                check_optimizer_states([optimizer], [saved], self._name_of)
            except ValueError as error:
                raise ValueError(f"Cannot load {key!r}. {error}") from error
        ranges = ranges_of_optimizers(
            [one for _, one, _ in optimizers], [saved for _, _, saved in optimizers]
        )
        check_ranges(ranges, self._saver.control, "Loading optimizers")
        for _, value, saved in found:
            if isinstance(value, ShardedModule):
                load_module_state(value.module, value.engine, saved, strict=strict)
            elif isinstance(value, nn.Module):
                value.load_state_dict(whole(saved), strict=strict)
            elif isinstance(value, Optimizer) and self._engine_of(value) is not None:
                load_optimizer_state(value, saved)
            elif isinstance(value, internals.Stateful):
                value.load_state_dict(whole(saved))

    def _name_of(self, member: Any) -> str:
        for engine in self.engines:
            for name, parameter in engine.module.named_parameters():
                if parameter is parameter_of(member):
                    return name
        return "a parameter of no module"

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: internals.StrategyRegistry) -> None:
        for name, (what, arguments) in STRATEGIES.items():
            for launcher in START_METHODS:
                strategy_registry.register(
                    name if launcher == "subprocess" else f"{name}_{launcher}",
                    cls,
                    description=f"{what}, launcher '{launcher}'",
                    override=True,
                    launcher=launcher,
                    **arguments,
                )


def _leave(engines: list[Engine]) -> None:
    """Let these engines take part in nothing more."""
    for engine in engines:
        engine.comm.control.leave()


class _BackwardSync(internals.BackwardSyncControl):
    """What ``fabric.no_backward_sync`` enters: gradients of microbatches may stay local."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, ShardedModule):
            raise TypeError(
                "fabric.no_backward_sync needs a module that fabric.setup has returned, got"
                f" {type(module).__name__}."
            )
        return module.engine.no_sync()


_OPTIONS = (
    "activation_checkpointing",
    "activation_offload",
    "async_checkpoint",
    "verify_checkpoint",
)
"""Those of the Trainer's options that mean something in Fabric."""


def chosen(stage: int, *, launcher: str, **given: Any) -> tuple[Settings, Options]:
    """Return the engine's settings and the options that a user's arguments ask for.

    Raises:
        TypeError: An argument is unknown.
        ValueError: An argument is out of range or contradicts another.
    """
    if unknown := set(given) & {"recipe", "device", "broadcast_in_calls"}:
        raise TypeError(f"ZeROStrategy sets {', '.join(unknown)} itself. Remove it.")
    options = Options(
        launcher=launcher, **{name: given.pop(name) for name in _OPTIONS if name in given}
    )
    path = given.pop("offload_path", None)
    media = [given.pop(f"offload_{what}", None) for what in ("optimizer", "weights")]
    offload = options.offload(media[0], media[1], path, 1.0)
    reduce_dtype = as_dtype(given.pop("reduce_dtype", None))
    settings = Settings(
        stage=stage,
        offload=offload,
        offload_path=str(path or ""),
        reduce_dtype=reduce_dtype,
        **given,
    )
    return settings, options


def kept(state: Any, keeps: Callable[[str, Any], bool] | None) -> Any:
    """Return the entries of a state for which ``keeps(name, value)`` is true."""
    if keeps is None or not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if keeps(name, value)}


def whole(value: Any) -> Any:
    """Return a loaded value with all of its tensors in memory."""
    return tree_map_only(Tensor, in_memory, value)
