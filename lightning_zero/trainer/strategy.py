"""ZeRO as a Lightning strategy: the adapter between the Trainer and the engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_zero.checkpoint import Saver
from lightning_zero.comm import Communicator
from lightning_zero.deepspeed import Config
from lightning_zero.engine import Engine, broadcast_buffers, forget_values
from lightning_zero.parameters import Source
from lightning_zero.plan import MIN_NUMEL, Settings, UnitPolicy, as_dtype
from lightning_zero.trainer import internals
from lightning_zero.trainer.callbacks import AdaptedCallbacks
from lightning_zero.trainer.checkpointing import SavingStrategy
from lightning_zero.trainer.deepspeed_config import Demands
from lightning_zero.trainer.graph_logging import log_whole_graphs
from lightning_zero.trainer.options import START_METHODS, STRATEGIES, Options
from lightning_zero.trainer.precision import ZeROPrecision
from lightning_zero.trainer.run import Run, callbacks_of, facts_of
from lightning_zero.trainer.signals import Signals
from lightning_zero.trainer.writing_bar import WritingBar

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ZeROStrategy(SavingStrategy):
    """Trains with optimizer states, gradients and weights partitioned over the ranks.

    Everything else is as under ``strategy="ddp"``: the same numbers, hooks, callbacks and launchers
    (Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
    2020).

    Args:
        stage: 1, 2 or 3.
        units: What is gathered and released together: ``"auto"``, a set of module classes, or a
            callable that says of a module whether it is a unit.
        min_num_params: The least parameters of an automatic unit; smaller modules share the unit
            around them, or the root. Units chosen otherwise are as they are said.
        prefetch: How many units ahead weights are gathered; 0 gathers each when it is needed.
        reshard_after_forward: Give weights back after a unit's forward and gather them again for
            its backward. ``False`` keeps them in between: less traffic, more memory. Stage 3 only.
        reduce_dtype: The dtype in which gradients are summed over the ranks; by default fp32 under
            mixed precision, else the parameters' own, in which those of complex ones always are.
        cast_weights: The weights that arrive in half precision under mixed precision: by default
            those that ``"autocast"`` would cast, and no others (embeddings, norms, what is not
            known), for DDP's numbers; ``"all"`` but norms, for less traffic and memory; ``"none"``.
        accumulate: With ``accumulate_grad_batches``: ``"reduce"`` keeps only gradient shards
            between microbatches, ``"local"`` sends nothing until the last one and holds whole
            gradients. By default ``"local"`` at stage 1 and ``"reduce"`` at stages 2 and 3.
        activation_checkpointing: ``True`` to recompute every unit's activations in backward, or the
            module classes to do so for.
        activation_offload: Keep what backward needs of every unit's forward in the memory of an
            accelerator's host until then; with checkpointing, its inputs.
        broadcast_buffers: Overwrite buffers with rank 0's before each forward, as DDP does.
        shard: The ranks that share one copy of states, gradients and weights: ``"all"``,
            ``"node"`` for those of each node, or a number, each so many that follow each other
            (Zhang et al., *MiCS*, 2022). What is reduced in a copy is then reduced between them.
        backward_shard: Keep a second copy of weights from forward to backward, sharded over the
            ranks of each ``"node"`` or so many that follow each other, from which the backward pass
            gathers (hpZ of *ZeRO++*, 2023). Stage 3 only.
        gather_bits: ``8`` sends weights in 8 bits (qwZ of *ZeRO++*); masters keep all theirs.
        reduce_bits: ``8`` or ``4`` sends gradients so, rounded by chance, and sums in fp32 (qgZ).
        error_feedback: Round to the nearest with ``reduce_bits``, and add what gradients have lost
            to those of the next step; takes as much memory as whole gradients.
        stochastic_rounding: Step in fp32, one unit at a time, the weights and states that rest in
            bf16 under ``bf16-true``, and round them by chance: small changes are not lost.
        offload_optimizer: ``"cpu"`` keeps masters and optimizer states in the memory of an
            accelerator's host and steps there, ``"nvme"`` in files, also where there is none;
            ``None`` on the device. At stage 3 beside an accelerator together with
            ``offload_weights``; on CPUs each may be alone, and masters are with the weights.
        offload_weights: The same for sharded weights. Stage 3 only.
        offload_ratio: The share that is offloaded, above 0; an accelerator keeps the others of a
            unit's parameters and steps them while its host steps these.
        offload_path: The folder of those files, which have no names and vanish with the process; by
            default the Trainer's ``default_root_dir``.
        step_in_backward: Step an offloaded unit once its gradients are reduced, by a thread, while
            others go backward. An exception there then leaves what cannot be saved.
        restore_weights: Make the module whole again after ``fit``, if one host can hold it.
        checkpoint: What checkpoints are: ``"file"``, one plain ``.ckpt``, or ``"dcp"``, a directory
            of torch.distributed.checkpoint. Both are read whatever is said here.
        verify_checkpoint: Read all of a checkpoint that is loaded and compare its checksums, each
            tensor on one rank. Without it a rank checks what it reads, as far as it can.
        async_checkpoint: Write checkpoints behind the training, from a copy in host memory.
        launcher: ``"subprocess"``, ``"spawn"``, ``"fork"`` or ``"notebook"``, as ``ddp``,
            ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook`` are launched.
        config: A DeepSpeed configuration, a dictionary or a JSON file, to take arguments from.
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
        min_num_params: int = MIN_NUMEL,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        reduce_dtype: torch.dtype | str | None = None,
        cast_weights: Literal["autocast", "all", "none"] = "autocast",
        accumulate: Literal["reduce", "local"] | None = None,
        activation_checkpointing: bool | Iterable[type[nn.Module]] = False,
        activation_offload: bool = False,
        broadcast_buffers: bool = True,
        shard: int | Literal["all", "node"] = "all",
        backward_shard: int | Literal["node"] | None = None,
        gather_bits: Literal[8] | None = None,
        reduce_bits: Literal[4, 8] | None = None,
        error_feedback: bool = False,
        stochastic_rounding: bool = False,
        offload_optimizer: Literal["cpu", "nvme"] | None = None,
        offload_weights: Literal["cpu", "nvme"] | None = None,
        offload_ratio: float = 1.0,
        offload_path: str | Path | None = None,
        step_in_backward: bool = False,
        restore_weights: bool = True,
        checkpoint: Literal["file", "dcp"] = "file",
        async_checkpoint: bool = False,
        verify_checkpoint: bool = False,
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
        options = Options(
            activation_checkpointing=activation_checkpointing,
            activation_offload=activation_offload,
            restore_weights=restore_weights,
            checkpoint=checkpoint,
            async_checkpoint=async_checkpoint,
            verify_checkpoint=verify_checkpoint,
            launcher=launcher,
        )
        self.config = Config.read(config)
        offload = options.offload(
            optimizer := self.config.argument("offload_optimizer", offload_optimizer),
            self.config.argument("offload_weights", offload_weights),
            path := self.config.argument("offload_path", offload_path),
            self.config.ratio(offload_ratio, optimizer),
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=START_METHODS[launcher],
        )
        self.precision_plugin = precision_plugin
        self.settings = Settings(
            stage=self.config.stage(stage),
            units=units,
            min_num_params=min_num_params,
            prefetch=self.config.argument("prefetch", prefetch),
            reshard_after_forward=reshard_after_forward,
            reduce_dtype=self.config.argument("reduce_dtype", as_dtype(reduce_dtype)),
            cast_weights=cast_weights,
            accumulate=accumulate,
            broadcast_buffers=broadcast_buffers,
            shard=self.config.argument("shard", shard),
            backward_shard=self.config.argument("backward_shard", backward_shard),
            gather_bits=self.config.argument("gather_bits", gather_bits),
            reduce_bits=self.config.argument("reduce_bits", reduce_bits),
            error_feedback=error_feedback,
            stochastic_rounding=stochastic_rounding,
            offload=offload,
            offload_path="" if path is None else str(path),
            step_in_backward=step_in_backward,
        )
        self.options = options
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
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # Never on the accelerator: a whole model need not fit there.
        device: AbstractContextManager[Any] = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        division = self.settings.division(self.world_size, self.num_processes)
        comm = Communicator(self.root_device, **division)
        self._run = Run(comm, Saver(comm.control))
        trainer = internals.trainer_of(self._module)
        if trainer is not None:
            is_fitting = trainer.state.fn == TrainerFn.FITTING
            self._run.callbacks = AdaptedCallbacks(callbacks_of(trainer), is_fitting=is_fitting)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self._agree_to_load(None)
        self.accelerator.setup(trainer)
        run, module = self._current, self._module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.config.check_precision(str(self.precision_plugin.precision))
        if is_fitting:
            Demands(self.config, trainer, module).act(self.precision_plugin.scaler)
        if run.callbacks is not None:
            run.callbacks.prepare(module)
        if is_fitting and self._layer_sync:
            self._layer_sync.apply(module)
        if is_fitting and next(module.parameters(), None) is None:
            raise ValueError(
                f"{type(module).__name__} has no parameters, so there is nothing to shard."
                " Build its layers in `__init__` or `configure_model`, or use another strategy."
            )
        # Another run may have left it at rest, and its values come again.
        is_blank = self._may_stream and forget_values(module)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        shard = functools.partial(self._shard, module, is_fitting=is_fitting)
        sources = self._note_load(shard)
        shard(sources=sources)
        assert self.engine is not None
        # What never was in memory need not fit there.
        run.restores = self.options.restore_weights and not (is_blank and sources)
        if run.callbacks is not None:
            run.callbacks.attach(self.engine)
        run.stand_ins.callback(log_whole_graphs(trainer.loggers, self.engine).remove)
        if is_fitting:
            run.signals = Signals(trainer, self.engine.comm.control)
            run.stand_ins.callback(run.signals.remove)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._load_pending(trainer)

    def _shard(
        self,
        module: pl.LightningModule,
        *,
        is_fitting: bool,
        sources: Mapping[int, Source] = MappingProxyType({}),
    ) -> Engine:
        """Return the run's engine, which is made when it is first asked for."""
        if self._open_engine is not None:
            return self._open_engine
        settings = dataclasses.replace(
            self.settings,
            recipe=self.precision_plugin.recipe,
            device=self.root_device,
            broadcast_buffers=self.settings.broadcast_buffers and is_fitting,
            broadcast_in_calls=False,
            offload_path=self.settings.offload_path or module.trainer.default_root_dir,
        )
        run = self._current
        facts = facts_of(module.trainer, self.precision_plugin, self.options)
        bar = WritingBar(module.trainer)
        self.engine = Engine(
            module, settings, run.comm, facts=facts, sources=sources, on_written=bar
        )
        broadcast_buffers(module, run.comm)
        self.precision_plugin.attach(self.engine)
        self.model = module
        self.options.wrap_units(self.engine, run.stand_ins)
        if (units := self.engine.sharded.describe()) != self._announced:
            self._announced = units
            rank_zero_info(units)
        return self.engine

    @override
    def model_to_device(self) -> None:
        """Move everything but the parameters, which the engine moves unit by unit."""
        internals.to_device_but_parameters(self._module, self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        demands = Demands(self.config, trainer, self._module)
        if optimizers := demands.optimizers():
            self.optimizers, self.lr_scheduler_configs = optimizers, []
        else:
            super().setup_optimizers(trainer)
        self.lr_scheduler_configs = demands.schedulers(self.optimizers, self.lr_scheduler_configs)
        assert self.engine is not None
        for optimizer in self.optimizers:
            if (notice := self.engine.adopt(optimizer)) is not None:
                rank_zero_info(notice)
            self._require_savable(optimizer)

    # -- the end ---------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._run is not None:
            self._run.has_failed = True
            self._run.comm.control.watchdog.end(exception)
        if self._open_engine is not None:
            self._open_engine.reset()

    @override
    def teardown(self) -> None:
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        run = self._run
        # One may raise, of a full disk or of ranks that have died: all others are ended still.
        with ExitStack() as endings:
            for end in reversed(
                [
                    *((run.stand_ins.close, run.saver.close) if run else ()),
                    self._end_engine,
                    *((run.remove_callbacks,) if run else ()),
                    self._move_to_host,
                    self.precision_plugin.teardown,
                    self.accelerator.teardown,
                    self.checkpoint_io.teardown,
                    self.cluster_environment.teardown,
                    self._leave_ranks,
                ]
            ):
                endings.callback(end)

    def _end_engine(self) -> None:
        if (engine := self._open_engine) is None:
            return
        run = self._current
        restores = run.restores and run.may_gather(engine)
        try:
            if restores and run.callbacks is not None:
                run.callbacks.gather()
        finally:
            engine.close(restore=restores)

    def _move_to_host(self) -> None:
        """Leave the optimizers, and the module if it is whole, as DDP leaves them."""
        internals.optimizers_to_device(self.optimizers, torch.device("cpu"))
        module = self.lightning_module
        # Without an engine a failed run may have ended amid the sharding.
        has_failed = self._run is not None and self._run.has_failed
        is_whole = self.engine.is_restored if self.engine is not None else not has_failed
        if module is None or not is_whole:
            return
        if self._layer_sync and internals.trainer_of(module) is not None:
            self._layer_sync.revert(module)
        module.cpu()

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
