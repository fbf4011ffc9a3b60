"""ZeRO as a Lightning strategy: the adapter between the Trainer and the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_zero.deepspeed import Config
from lightning_zero.engine import forget_values
from lightning_zero.fabric import Checkpoints, count_once, init_device, to_device_but_parameters
from lightning_zero.memory import explain, summary
from lightning_zero.optimizer import stepper_of
from lightning_zero.parameters import make_distributed
from lightning_zero.plan import (
    ARGUMENTS,
    START_METHODS,
    Settings,
    UnitPolicy,
    refuses_others,
)
from lightning_zero.trainer import deepspeed_config, internals
from lightning_zero.trainer.callbacks import AdaptedCallbacks, refuse_averages
from lightning_zero.trainer.checkpointing import SavingStrategy
from lightning_zero.trainer.precision import ZeROPrecision
from lightning_zero.trainer.run import Run, Signals, callbacks_of, facts_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ZeROStrategy(SavingStrategy):
    """Strategy that shards optimizer states, gradients and weights over the ranks (ZeRO).

    Everything else works as under ``strategy="ddp"``, with the same numbers, hooks, callbacks and
    launchers (Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models*, 2020).

    Args:
        stage: ``1`` shards optimizer states, ``2`` gradients as well, ``3`` weights as well.
        units: Modules whose weights are gathered and released together: ``"auto"``, a set of module
            classes, or a callable that takes a module and returns whether it is a unit.
        min_num_params: Fewest parameters of an automatic unit. Smaller modules belong to the unit
            that encloses them, or to the root. Does not apply to units chosen explicitly.
        prefetch: Number of units to gather ahead of use; 0 gathers each when it is needed.
        reshard_after_forward: Reshard each unit after its forward and gather it again for its
            backward. ``False`` keeps it whole: less traffic, more memory. Stage 3 only.
        reduce_dtype: Dtype in which gradients are summed over the ranks: by default fp32 under
            mixed precision, else the parameter's own. Does not apply to complex parameters.
        cast_weights: Weights to gather in half precision under mixed precision: ``"autocast"``,
            those known to be cast by autocast, for DDP's numbers (not embeddings or norms);
            ``"all"`` except norms, for less traffic and memory; or ``"none"``.
        accumulate: With ``accumulate_grad_batches``, ``"reduce"`` reduces every microbatch and
            keeps only gradient shards in between; ``"local"`` keeps whole gradients and reduces in
            the last microbatch. Default: ``"local"`` at stage 1, ``"reduce"`` at stages 2 and 3.
        activation_checkpointing: ``True`` to recompute the activations of every unit in backward,
            or the module classes to do so for.
        activation_offload: Keep what each unit's forward saves for backward in the memory of the
            accelerator's host; with activation checkpointing, the unit's inputs.
        broadcast_buffers: Overwrite buffers with rank 0's before each forward, as DDP does.
        shard: Ranks that share one copy of states, gradients and weights: ``"all"``, ``"node"`` for
            the ranks of each node, or a number of consecutive ranks. Gradients are reduced within
            each copy, then between the copies (Zhang et al., *MiCS*, 2022).
        tensor_parallel_size: Ranks over which ``configure_model`` cuts the model by torch's
            ``parallelize_module`` and ``self.device_mesh["tensor_parallel"]``: a number of
            consecutive ranks, or ``"node"``. Everything is sharded over the data-parallel ranks.
        gather_bits: Send weights in ``8`` bits (qwZ of *ZeRO++*); masters keep full precision.
        reduce_bits: Send gradients in ``8`` bits (qgZ): stochastic rounding, fp32 sums.
        optimizer_step: How optimizers step, by the name of their class: ``"element"`` if any part
            of a parameter may be stepped alone, ``"parameter"`` if whole parameters may, or
            ``"model"``, all at once. Nothing checks it. By default known classes step as in a
            table, and others by element if a trial shows that they may, else all at once.
        stochastic_rounding: Under ``bf16-true``, step bf16 weights and states in fp32, one unit at
            a time, and round the results stochastically, so that small updates are not lost.
        offload_optimizer: Keep masters and optimizer states in the memory of the accelerator's host
            (``"cpu"``) or in files (``"nvme"``, also without an accelerator), and step them on the
            host. Alone at stage 3, weights stay sharded on the accelerators; on CPUs masters then
            rest with the weights.
        offload_weights: The same for sharded weights. Stage 3 only.
        offload_path: Folder for the files, which have no names and vanish with the process; by
            default the Trainer's ``default_root_dir``.
        restore_weights: Make the module whole again after a run, in host memory on every rank.
        checkpoint: Format to save: ``"file"``, one plain ``.ckpt``, or ``"dcp"``, a directory of
            torch.distributed.checkpoint. Both can be loaded either way.
        async_checkpoint: Write checkpoints in the background, from a copy in host memory.
        launcher: ``"subprocess"``, ``"spawn"``, ``"fork"`` or ``"notebook"``, as in ``ddp``,
            ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``.
        config: A DeepSpeed configuration to take arguments from: a dictionary or a JSON file.
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

    @refuses_others
    def __init__(
        self,
        stage: int = 3,
        *,
        units: UnitPolicy = "auto",
        min_num_params: int = 65_536,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        reduce_dtype: torch.dtype | str | None = None,
        cast_weights: Literal["autocast", "all", "none"] = "autocast",
        accumulate: Literal["reduce", "local"] | None = None,
        activation_checkpointing: bool | Iterable[type[nn.Module]] = False,
        activation_offload: bool = False,
        broadcast_buffers: bool = True,
        shard: int | Literal["all", "node"] = "all",
        tensor_parallel_size: int | Literal["node"] = 1,
        gather_bits: Literal[8] | None = None,
        reduce_bits: Literal[8] | None = None,
        optimizer_step: Mapping[str, str] | None = None,
        stochastic_rounding: bool = False,
        offload_optimizer: Literal["cpu", "nvme"] | None = None,
        offload_weights: Literal["cpu", "nvme"] | None = None,
        offload_path: str | Path | None = None,
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
        given = {name: value for name, value in locals().items() if name in ARGUMENTS}
        self.config = Config.read(config)
        self.settings = Settings.of(**self.config.merged(given))
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
        self._announced: tuple[str, list[str]] = ("", [])

    # -- precision -------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> ZeROPrecision:
        return self._zero_precision

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning's connector reads `_precision_plugin` to see whether the user passed one, and
        # otherwise assigns its own.
        self._zero_precision = ZeROPrecision.of(precision_plugin or Precision())
        self._precision_plugin = None if precision_plugin is None else self._zero_precision

    # -- setup -----------------------------------------------------------------------------------

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with init_device(is_empty=empty_init), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        comm = self._connect()
        checkpoints = Checkpoints(
            comm.control, self.settings, lambda: [self.engine] if self.engine else []
        )
        self._run = Run(comm, checkpoints)
        if (mesh := self.device_mesh) is not None:
            internals.set_device_mesh(self._module, mesh)
        trainer = internals.trainer_of(self._module)
        if trainer is not None:
            self._run.callbacks = AdaptedCallbacks(callbacks_of(trainer), trainer.loggers)
            self._run.stand_ins.callback(self._run.callbacks.remove)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self._agree_to_load(None)
        self.accelerator.setup(trainer)
        run, module = self._current, self._module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.config.check_precision(str(self.precision_plugin.precision))
        if is_fitting:
            scaler = self.precision_plugin.scaler
            deepspeed_config.apply(self.config, trainer, module, scaler)
        if run.comm.mesh.tensor is not None:
            refuse_averages(callbacks_of(trainer))
            self._make_local(module)
            run.stand_ins.callback(count_once, module, 1)
        if is_fitting and self._layer_sync:
            self._layer_sync.apply(module)
        if is_fitting and next(module.parameters(), None) is None:
            raise ValueError(
                f"{type(module).__name__} has no parameters, so there is nothing to shard."
                " Build its layers in `__init__` or `configure_model`, or use another strategy."
            )
        # An earlier run, or a load that failed, may have left the module at rest; its values are
        # loaded again.
        is_blank = run.pending is not None and forget_values(module)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._shard(module, is_fitting=is_fitting)
        assert self.engine is not None
        # A model that was never in memory may not fit there.
        offload = self.settings.offload
        reads_files = not is_fitting and offload is not None and offload.weights == "nvme"
        run.restores = self.settings.restore_weights and not (is_blank and reads_files)
        if run.callbacks is not None:
            run.callbacks.attach(self.engine)
        if is_fitting:
            run.signals = Signals(trainer, self.engine.comm.control)
            run.stand_ins.callback(run.signals.remove)
        self._load_pending()
        if is_fitting:
            self.setup_optimizers(trainer)
        self._announce()
        self.setup_precision_plugin()

    def _shard(self, module: pl.LightningModule, *, is_fitting: bool) -> None:
        """Make the run's engine."""
        self.engine = self._sharded(
            module,
            self._current.comm,
            self.precision_plugin.recipe,
            module.trainer.default_root_dir,
            syncs_buffers=is_fitting,
            facts=facts_of(module.trainer, self.precision_plugin),
        )
        self.precision_plugin.attach(self.engine)
        self.model = module
        for name in self._act_as_wrapper(module):
            self._current.stand_ins.callback(vars(module).pop, name, None)

    @override
    def model_to_device(self) -> None:
        """Move all but the parameters, which the engine moves unit by unit."""
        to_device_but_parameters(self._module, self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if optimizers := deepspeed_config.optimizers_of(self.config, self._module):
            self.optimizers, self.lr_scheduler_configs = optimizers, []
        else:
            super().setup_optimizers(trainer)
        self.lr_scheduler_configs = deepspeed_config.schedulers_of(
            self.config, trainer, self.optimizers, self.lr_scheduler_configs
        )
        assert self.engine is not None
        for optimizer in self.optimizers:
            self.engine.adopt(internals.unwrapped(optimizer))
            self._require_savable(optimizer)

    def _announce(self) -> None:
        """Print the startup summary of a run, unless an earlier run has printed the same."""
        assert self.engine is not None
        units, steps = self.engine.sharded.describe(), self.engine.steps
        known, known_steps = self._announced
        if units != known:
            form = "one plain file" if self.settings.checkpoint == "file" else "a DCP directory"
            when = " in the background" if self.settings.async_checkpoint else ""
            rank_zero_info(
                summary(self.engine, f"{form}, written by all ranks{when}", self.num_processes)
            )
            rank_zero_debug(units)
        elif steps and steps != known_steps:
            rank_zero_info("\n".join(steps))
        self._announced = units, steps or known_steps

    # -- the end ---------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        is_signal = isinstance(exception, SIGTERMException)  # which all ranks answer together
        if self._run is not None and not (is_signal and self._run.signals is not None):
            self._run.has_failed = True
            self._run.comm.control.watchdog.end(exception)
        if self._open_engine is not None:
            explain(exception, self._open_engine)
            self._open_engine.reset()

    @override
    def teardown(self) -> None:
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        run = self._run
        # One may raise, for a full disk or dead ranks; the others must still run.
        with ExitStack() as endings:
            for end in reversed(
                [
                    *((run.stand_ins.close, run.checkpoints.saver.close) if run else ()),
                    self._end_engine,
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
        engine.close(restore=run.restores and run.may_gather(engine))

    def _move_to_host(self) -> None:
        """Move the optimizers, and the module if it is whole, to the CPU, as DDP does."""
        for optimizer in self.optimizers:
            with stepper_of(optimizer).holding_parts():
                internals.optimizer_to_device(optimizer, torch.device("cpu"))
        module = self.lightning_module
        # Without an engine, a run may have failed in the middle of sharding.
        has_failed = self._run is not None and self._run.has_failed
        is_whole = self.engine.is_restored if self.engine is not None else not has_failed
        if module is None or not is_whole:
            return
        if self._layer_sync and internals.trainer_of(module) is not None:
            self._layer_sync.revert(module)
        module.cpu()
        if self._run is not None and self._run.comm.mesh.tensor is not None:
            make_distributed(module)
