"""ZeRO as a Lightning strategy: the adapter between the Trainer and the engine."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_zero.activation import ActivationCheckpointing
from lightning_zero.callbacks import AdaptedCallbacks
from lightning_zero.checkpoint import (
    DirectorySave,
    Provenance,
    Save,
    Saver,
    check_optimizer_states,
    collected,
    load,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    rehearse,
)
from lightning_zero.comm import Comm
from lightning_zero.config import Config
from lightning_zero.engine import Engine
from lightning_zero.ledger import Traffic
from lightning_zero.optimizer_block import SchedulerBlock
from lightning_zero.piece import Piece
from lightning_zero.precision import ZeROPrecision
from lightning_zero.same_length import SameLength
from lightning_zero.settings import Settings
from lightning_zero.store import store_of_life
from lightning_zero.trial import Trials
from lightning_zero.wrap import UnitPolicy

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_PEERS_TIMEOUT = timedelta(seconds=5)


class ZeROStrategy(DDPStrategy):
    """Trains with optimizer states, gradients and weights partitioned over the ranks.

    Everything else is as under ``strategy="ddp"``: the same numbers, hooks, callbacks and launchers
    (Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
    2020).

    Args:
        stage: 1, 2 or 3.
        units: What is gathered and released together: ``"auto"``, a set of module classes, or a
            callable that says of a module whether it is a unit.
        prefetch: How many units ahead weights are gathered; 0 gathers each when it is needed.
        reshard_after_forward: Give weights back after a unit's forward and gather them again for
            its backward. ``False`` keeps them in between: less traffic, more memory. Stage 3 only.
        reduce_dtype: The dtype in which gradients are summed over the ranks; by default fp32 under
            mixed precision, else the parameters' own.
        accumulate: With ``accumulate_grad_batches``: ``"reduce"`` keeps only gradient shards
            between microbatches, ``"local"`` sends nothing until the last one and holds whole
            gradients. By default ``"local"`` at stage 1 and ``"reduce"`` at stages 2 and 3.
        activation_checkpointing: ``True`` to recompute every unit's activations in backward, or the
            module classes to do so for.
        broadcast_buffers: Overwrite buffers with rank 0's before each forward, as DDP does.
        restore_weights: Make the module whole and ordinary again after ``fit``. ``False`` for
            models that one host cannot hold.
        checkpoint: What checkpoints are: ``"file"``, one plain ``.ckpt``, or ``"dcp"``, a directory
            of torch.distributed.checkpoint. Both are read whatever is said here.
        async_checkpoint: Write checkpoints behind the training, from a copy of this rank's values
            in host memory.
        launcher: ``"subprocess"``, ``"spawn"``, ``"fork"`` or ``"notebook"``, as ``ddp``,
            ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook`` are launched.
        config: A DeepSpeed configuration to take arguments from: a dictionary or a JSON file. Each
            of its keys acts, warns or raises.
        accelerator: As in ``ParallelStrategy``.
        parallel_devices: As in ``ParallelStrategy``.
        cluster_environment: As in ``ParallelStrategy``.
        checkpoint_io: As in ``ParallelStrategy``.
        precision_plugin: A ``ZeROPrecision``; by default built from ``Trainer(precision=...)``.
        process_group_backend: As in ``DDPStrategy``.
        timeout: As in ``DDPStrategy``.

    Raises:
        ValueError: An argument is out of range or contradicts another.
    """

    def __init__(
        self,
        stage: int = 3,
        *,
        units: UnitPolicy = "auto",
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        reduce_dtype: torch.dtype | str | None = None,
        accumulate: Literal["reduce", "local"] | None = None,
        activation_checkpointing: bool | Iterable[type[nn.Module]] = False,
        broadcast_buffers: bool = True,
        restore_weights: bool = True,
        checkpoint: Literal["file", "dcp"] = "file",
        async_checkpoint: bool = False,
        launcher: Literal["subprocess", "spawn", "fork", "notebook"] = "subprocess",
        config: str | Path | dict[str, Any] | None = None,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if launcher not in _START_METHODS:
            raise ValueError(
                f"Expected launcher among {', '.join(_START_METHODS)}, got {launcher!r}."
            )
        if checkpoint not in ("file", "dcp"):
            raise ValueError(f"Expected checkpoint among 'file', 'dcp', got {checkpoint!r}.")
        if not restore_weights and launcher != "subprocess":
            raise ValueError(
                f"launcher={launcher!r} brings the trained weights back to this process, which"
                " restore_weights=False contradicts. Leave one of them out."
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=_START_METHODS[launcher],  # type: ignore[arg-type]
        )
        self.precision_plugin = precision_plugin
        self.config = Config.read(config)
        self.settings = Settings(
            stage=self.config.stage(stage),
            units=units,
            prefetch=self.config.argument("prefetch", prefetch),
            reshard_after_forward=reshard_after_forward,
            reduce_dtype=self.config.argument("reduce_dtype", _as_dtype(reduce_dtype)),
            accumulate=accumulate,
            broadcast_buffers=broadcast_buffers,
        )
        self.activation_checkpointing = activation_checkpointing
        self.restore_weights = restore_weights
        self.checkpoint = checkpoint
        self.async_checkpoint = async_checkpoint
        self.engine: Engine | None = None
        self._recompute: ActivationCheckpointing | None = None
        self._adapted: AdaptedCallbacks | None = None
        self._has_failed = False
        self._comm: Comm | None = None
        self.trials: Trials | None = None
        self._current_saver: Saver | None = None
        self._awaits_setup = False
        self._pending: tuple[Mapping[str, Any], bool] | None = None
        self._loaded_path = ""
        self._announced = ""

    # -- precision -------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> ZeROPrecision:
        return self._zero_precision

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning's connector knows nothing of us: it reads `_precision_plugin` to learn whether
        # the user chose one here, and otherwise assigns one of its own.
        self._zero_precision = ZeROPrecision.of(precision_plugin or Precision())
        self._precision_plugin = None if precision_plugin is None else self._zero_precision

    # -- setup -----------------------------------------------------------------------------------

    @override
    def setup_distributed(self) -> None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._join_group_of_life()
        super().setup_distributed()
        # Lightning leaves only NCCL's group at exit; gloo's threads, if alive then, now and then
        # abort the process.
        atexit.unregister(_leave_group)
        atexit.register(_leave_group)

    def _join_group_of_life(self) -> None:
        """Make the group before Lightning does, in a store without the ranks' former lives."""
        if torch.distributed.is_initialized() or not isinstance(
            self.cluster_environment, TorchElasticEnvironment
        ):
            return
        self.set_world_ranks()
        timeout = self._timeout or default_pg_timeout
        host, port = self.cluster_environment.main_address, self.cluster_environment.main_port
        agents = torch.distributed.TCPStore(
            host, port, self.world_size, timeout=timeout, wait_for_workers=False
        )
        on_cpu = self.root_device.type == "cpu"
        torch.distributed.init_process_group(
            self._get_process_group_backend(),
            store=store_of_life(agents, self.global_rank, self.world_size, timeout),
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=timeout,
            device_id=None if on_cpu else self.root_device,
        )

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Never on the accelerator: a whole model need not fit there.
        device: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._comm = Comm(self.root_device)
        self._current_saver = Saver(self._comm)
        self._awaits_setup = True
        trainer = self._module._trainer
        if trainer is not None:
            is_fitting = trainer.state.fn == TrainerFn.FITTING
            self._adapted = AdaptedCallbacks(_callbacks(trainer), is_fitting=is_fitting)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._obey_config(trainer, is_fitting=is_fitting)
        if self._adapted is not None:
            self._adapted.prepare(module)
        if is_fitting and self._layer_sync:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._shard(module, is_fitting=is_fitting)
        assert self.engine is not None
        if self._adapted is not None:
            self._adapted.attach(self.engine)
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._load_pending(trainer)

    def _obey_config(self, trainer: pl.Trainer, *, is_fitting: bool) -> None:
        """Let the DeepSpeed configuration act on the Trainer, or say where the two contradict."""
        config, precision = self.config, self.precision_plugin
        config.check_precision(str(precision.precision))
        if not is_fitting:
            return
        for name, default in (("gradient_clip_val", None), ("accumulate_grad_batches", 1)):
            given = getattr(trainer, name)
            wanted = config.trainer_value(name, given, default)
            if wanted != given and not self._module.automatic_optimization:
                raise ValueError(
                    f"The DeepSpeed configuration asks for {name}={wanted}, but the module"
                    " optimizes manually. Do it in `training_step`, and take the key out."
                )
            setattr(trainer, name, wanted)
        if precision.scaler is not None:
            for name, value in config.scaler.items():
                setattr(precision.scaler, name, value)
            config.scaler.clear()
        if config.warnings:
            rank_zero_warn("\n".join(config.warnings))
            config.warnings.clear()

    def _shard(self, module: pl.LightningModule, *, is_fitting: bool) -> None:
        settings = dataclasses.replace(
            self.settings,
            recipe=self.precision_plugin.recipe,
            device=self.root_device,
            broadcast_buffers=self.settings.broadcast_buffers and is_fitting,
        )
        self._has_failed = False
        self.engine = Engine(module, settings, self._comm)
        self.engine.broadcast_buffers()
        self.precision_plugin.comm = self.engine.comm
        self.model = module
        self._recompute = ActivationCheckpointing(self._checkpointed_modules(module))
        self._announce(self.engine.describe())

    def _announce(self, units: str) -> None:
        """Log the units, once for as long as they stay the same."""
        if units != self._announced:
            self._announced = units
            rank_zero_info(units)

    def _checkpointed_modules(self, module: nn.Module) -> list[nn.Module]:
        assert self.engine is not None
        choice = self.activation_checkpointing
        if isinstance(choice, bool):
            return [unit.module for unit in self.engine.units[:-1]] if choice else []
        classes = tuple(choice)
        found = [child for child in module.modules() if isinstance(child, classes)]
        if not found:
            names = ", ".join(cls.__name__ for cls in classes)
            raise ValueError(f"activation_checkpointing={names}: the model has no such module.")
        return found

    @override
    def model_to_device(self) -> None:
        """Move everything but the parameters, which the engine moves unit by unit."""
        module = self._module
        for child in module.modules():
            if isinstance(child, Metric):
                child.to(self.root_device)
            for name, buffer in child._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    child._buffers[name] = buffer.to(self.root_device)
        _update_properties(module, device=self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if self.config.optimizer is None:
            super().setup_optimizers(trainer)
        else:
            if self._module.configure_optimizers() is not None:
                raise ValueError(
                    "The DeepSpeed configuration has an optimizer block, and configure_optimizers"
                    " returns an optimizer too. Return None from it, or take the block out."
                )
            self.optimizers = [self.config.optimizer.build(self._module.parameters())]
            self.lr_scheduler_configs = []
        if self.config.scheduler is not None:
            self._build_scheduler(trainer, self.config.scheduler)
        assert self.engine is not None
        for optimizer in self.optimizers:
            self.engine.adopt(optimizer)

    def _build_scheduler(self, trainer: pl.Trainer, block: SchedulerBlock) -> None:
        if len(self.optimizers) != 1 or self.lr_scheduler_configs:
            raise ValueError(
                "The DeepSpeed configuration has a scheduler block, which is for one optimizer"
                " without a scheduler, but configure_optimizers returns"
                f" {len(self.optimizers)} optimizers and {len(self.lr_scheduler_configs)}"
                " schedulers. Return no scheduler from it, or take the block out."
            )
        scheduler = block.build(
            _unwrapped(self.optimizers[0]), lambda: trainer.estimated_stepping_batches
        )
        self.lr_scheduler_configs = [LRSchedulerConfig(scheduler, interval="step")]

    # -- steps -----------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.engine is not None
        with self.engine.step(awaits_backward=self._module.automatic_optimization) as watch:
            output = super().training_step(*args, **kwargs)
            watch(output)
            return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation():
            return super().predict_step(*args, **kwargs)

    def _evaluation(self) -> AbstractContextManager[Any]:
        assert self.engine is not None
        return self.engine.step(awaits_backward=False)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.engine is not None
        with self.engine.no_sync():
            yield

    # -- what all ranks must come to -------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return SameLength.of(dataloader, self._comm, lambda: self._module.trainer.training)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._meeting("a barrier"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        with self._meeting("a broadcast"):
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        with self._meeting("a reduction of values"):
            return super().reduce(tensor, *args, **kwargs)

    @override
    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._meeting("an all-gather of values"):
            return super().all_gather(tensor, *args, **kwargs)

    def _meeting(self, place: str) -> AbstractContextManager[Any]:
        if self.trials is not None:
            self.trials.ask()
        return nullcontext() if self._comm is None else self._comm.watch.at(place)

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.engine is None or self.engine.is_restored:
            return super().lightning_module_state_dict()
        return module_state(self._module, self.engine)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.engine is not None
        inner = _unwrapped(optimizer)
        known = [_unwrapped(other) for other in self.optimizers]
        number = next((n for n, other in enumerate(known) if other is inner), len(known))
        return optimizer_state(inner, self.engine, f"optimizer {number}")

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        saver = self._saver
        if self.checkpoint == "dcp" and (storage_options is not None or not self._writes_files):
            what = type(self.checkpoint_io).__name__ if storage_options is None else "options"
            raise ValueError(
                f"checkpoint='dcp' writes directories itself, which the {what} given for storage"
                " contradicts. Take one of them out."
            )
        if storage_options is None and self._writes_files:
            is_async = self.async_checkpoint or isinstance(self.checkpoint_io, AsyncCheckpointIO)
            # After fit there is nothing to go on with, and nobody who would wait for the thread.
            is_running = self.engine is not None and not self.engine.is_closed
            saver.save(
                checkpoint,
                str(filepath),
                self._provenance,
                in_background=is_async and is_running,
                kind=self._checkpoint_kind,
            )
            return
        # A writer of the user's own takes whole tensors.
        super().save_checkpoint(collected(checkpoint, saver.comm), filepath, storage_options)

    @property
    def _checkpoint_kind(self) -> Callable[..., Any]:
        """What makes the job of a save."""
        if self.checkpoint == "file":
            return Save
        names = self._parameter_names
        parameters = [
            [
                names.get(id(_whole(parameter)), f"outside of the module {number}")
                for number, parameter in enumerate(_parameters(optimizer))
            ]
            for optimizer in self.optimizers
        ]
        return functools.partial(DirectorySave, parameters=parameters)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._writes_files:
            self._saver.remove(str(filepath))
        else:
            super().remove_checkpoint(filepath)

    @property
    def _saver(self) -> Saver:
        assert self._current_saver is not None, "the environment is set up before anything is saved"
        return self._current_saver

    @property
    def _writes_files(self) -> bool:
        """Whether checkpoints are plain files, and not what a plugin of the user makes of them."""
        plugin: CheckpointIO | None = self.checkpoint_io
        if type(plugin) is AsyncCheckpointIO:
            plugin = plugin.checkpoint_io
        return type(plugin) is TorchCheckpointIO

    @property
    def _provenance(self) -> Provenance:
        return Provenance(
            stage=self.settings.stage,
            world_size=self._saver.comm.world_size,
            precision=str(self.precision_plugin.precision),
        )

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._saver.wait()
        if not self._writes_files:
            # Lightning 2.5 has no such argument, and never gives one.
            given = {} if weights_only is None else {"weights_only": weights_only}
            return super().load_checkpoint(checkpoint_path, **given)
        self._loaded_path = self._saver.path_of(str(checkpoint_path))
        safe = True if weights_only is None else weights_only
        checkpoint = load(self._loaded_path, self._saver.comm, weights_only=safe)
        held = checkpoint if isinstance(checkpoint, dict) else {}
        for key in ("state_dict", "pytorch-lightning_version"):
            if key not in held:
                raise ValueError(
                    f"{self._loaded_path!r} is not a checkpoint of a Trainer: it has no {key!r}."
                    " Load bare weights with lightning_zero.load_weights(module, path)."
                )
        return held

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._awaits_setup:
            # As under DDP the checkpoint is read and its hooks run before setup; the values are
            # copied when each rank knows its part, and the optimizers are there to be checked.
            self._pending = (checkpoint, strict)
        else:
            self._load_weights(checkpoint, strict)

    def _load_pending(self, trainer: pl.Trainer) -> None:
        """Load what was read before setup, unless the Trainer will refuse it in a moment."""
        pending, self._pending = self._pending, None
        self._awaits_setup = False
        if pending is None:
            return
        checkpoint, strict = pending
        if trainer.state.fn == TrainerFn.FITTING:
            if "optimizer_states" not in checkpoint:
                return
            with self._naming_the_file():
                rehearse(self._module, checkpoint["state_dict"], strict=strict)
            # Finetuning callbacks bring the param groups of the checkpoint later, in on_fit_start.
            if not any(isinstance(callback, BaseFinetuning) for callback in _callbacks(trainer)):
                self._check_optimizer_states(checkpoint)
        self._load_weights(checkpoint, strict)
        if self._adapted is not None:
            self._adapted.load()

    def _load_weights(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        is_open = self.engine is not None and not self.engine.is_closed
        with self._naming_the_file():
            load_module_state(
                self._module,
                self.engine if is_open else None,
                checkpoint["state_dict"],
                strict=strict,
            )

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"The checkpoint {self._loaded_path!r} does not fit the module. {error}"
            ) from error

    def _check_optimizer_states(self, checkpoint: Mapping[str, Any]) -> None:
        optimizers = [_unwrapped(optimizer) for optimizer in self.optimizers]
        names = self._parameter_names

        def name_of(parameter: Any) -> str:
            return names.get(id(_whole(parameter)), "a parameter outside of the module")

        try:
            check_optimizer_states(optimizers, checkpoint["optimizer_states"], name_of)
        except ValueError as error:
            raise ValueError(f"{self._loaded_path!r} cannot be resumed from. {error}") from error

    @property
    def _parameter_names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._module.named_parameters()}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._check_optimizer_states(checkpoint)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(_unwrapped(optimizer), state)

    # -- memory and traffic ----------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds now, by kind; see ``Engine.memory``."""
        return self.engine.memory() if self.engine is not None else {}

    @property
    def traffic(self) -> Traffic:
        """What this rank sent in the last optimizer step, by unit and verb."""
        return self.engine.comm.ledger.last_step if self.engine is not None else {}

    # -- the end ---------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        if self.engine is not None:
            self.engine.reset()

    @override
    def teardown(self) -> None:
        if self._current_saver is not None:
            self._current_saver.close()
        if self._recompute is not None:
            self._recompute.remove()
            self._recompute = None
        if self.engine is not None and not self.engine.is_closed:
            restores = self._may_restore(self.engine)
            if restores and self._adapted is not None:
                self._adapted.gather()
            self.engine.close(restore=restores)
        if self._adapted is not None:
            self._adapted.remove()
            self._adapted = None
        is_whole = self.engine is None or self.engine.is_restored
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        module = self.lightning_module
        if module is not None:
            if self._layer_sync and module._trainer is not None and is_whole:
                self._layer_sync.revert(module)
            if is_whole:
                module.cpu()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        if self._comm is not None:
            self._comm.watch.leave()

    def _may_restore(self, engine: Engine) -> bool:
        if not self.restore_weights:
            return False
        if self._has_failed and not engine.comm.is_whole(_PEERS_TIMEOUT):
            # Any rank may be the one that survived, so each says it.
            log.warning(
                "Other ranks did not survive the exception, so the weights they held are lost and"
                " the parameters stay at rest. Continue from a checkpoint."
            )
            return False
        return True

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for stage in (1, 2, 3):
            for launcher in _START_METHODS:
                suffix = "" if launcher == "subprocess" else f"_{launcher}"
                strategy_registry.register(
                    f"zero{stage}{suffix}",
                    cls,
                    description=f"ZeRO stage {stage}, launcher '{launcher}'",
                    override=True,
                    stage=stage,
                    launcher=launcher,
                )


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


_START_METHODS = {"subprocess": "popen", "spawn": "spawn", "fork": "fork", "notebook": "fork"}


def _as_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, also by the name that a YAML file can hold (``bfloat16``, ``torch.bfloat16``)."""
    if not isinstance(value, str):
        return value
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"Expected reduce_dtype as a torch dtype such as 'bfloat16', got {value!r}."
        )
    return dtype


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    for group in _unwrapped(optimizer).param_groups:
        yield from group["params"]


def _whole(parameter: Any) -> Any:
    return parameter.parameter if isinstance(parameter, Piece) else parameter


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    inner: Callable[..., Any] | Optimizer = optimizer
    if isinstance(optimizer, LightningOptimizer):
        inner = optimizer._optimizer
    assert isinstance(inner, Optimizer)
    return inner
