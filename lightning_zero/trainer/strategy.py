"""ZeRO as a Lightning strategy: the adapter between the Trainer and the engine."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import (
    are_safetensors,
    existing,
    load_module_state,
    module_state,
    require_checkpoint,
)
from lightning_zero.comm import Control, StepTimes, Traffic, whole
from lightning_zero.deepspeed import Config
from lightning_zero.engine import Engine, forget_values
from lightning_zero.fabric import (
    Checkpoints,
    ShardedModule,
    Sharding,
    count_once,
    init_device,
    writes_files,
)
from lightning_zero.memory import explain, summary
from lightning_zero.optimizer import follow, stepper_of, wraps_states
from lightning_zero.parameters import make_distributed
from lightning_zero.plan import (
    ARGUMENTS,
    START_METHODS,
    Settings,
    UnitPolicy,
    refuses_others,
)
from lightning_zero.trainer import deepspeed_config, internals
from lightning_zero.trainer.internals import SubprocessLauncher, unwrapped
from lightning_zero.trainer.precision import ZeROPrecision
from lightning_zero.trainer.run import Run, SameLength, Signals, adapt_callbacks, facts_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

_T = TypeVar("_T")


class Launcher(SubprocessLauncher):
    """Starts the other ranks, unless there is no checkpoint to load: each would then fail."""

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        path = inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
        is_file = path is not None and not re.search("^(best|last|hpc|registry|.*:.*)$", str(path))
        if is_file and not self.cluster_environment.creates_processes_externally:
            require_checkpoint(existing(Path(str(path))), str(path))
        return super().launch(function, *args, trainer=trainer, **kwargs)


def run_in_step(
    model: ShardedModule, module: pl.LightningModule, name: str, *args: Any, **kwargs: Any
) -> Any:
    """Run a step method of a module, such as ``training_step``, within a step of its engine."""
    awaits_backward = torch.is_grad_enabled() and module.automatic_optimization
    return model.run(getattr(module, name), awaits_backward, *args, **kwargs)


class ZeROStrategy(Sharding, DDPStrategy):
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

    Attributes:
        engine: The engine that shards the module, kept after it is closed; ``None`` before setup.

    Raises:
        ValueError: An argument is out of range or contradicts another.
    """

    @refuses_others
    def __init__(
        self,
        stage: Literal[1, 2, 3] = 3,
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
            start_method=START_METHODS[launcher],  # type: ignore[arg-type]
        )
        self._forward_redirection = run_in_step  # type: ignore[assignment]
        self._run: Run | None = None
        self.engine: Engine | None = None
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
            is_cut = comm.mesh.tensor is not None
            adapted = adapt_callbacks(trainer, self._load_average, is_cut=is_cut)
            self._run.stand_ins.callback(adapted.remove)

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
        is_blank = bool(run.pending) and forget_values(module)
        self.precision_plugin.convert_module(module)
        self.engine = self._sharded(
            module,
            run.comm,
            self.precision_plugin,
            trainer.default_root_dir,
            syncs_buffers=is_fitting,
            facts=facts_of(trainer, self.precision_plugin),
        )
        self.model = ShardedModule(module, self.engine)
        # A model that was never in memory may not fit there.
        offload = self.settings.offload
        reads_files = not is_fitting and offload is not None and offload.weights == "nvme"
        run.restores = self.settings.restore_weights and not (is_blank and reads_files)
        if is_fitting:
            run.signals = Signals(trainer, self.engine.comm.control)
            run.stand_ins.callback(run.signals.remove)
        run.load_pending()  # code that makes optimizers sees loaded weights
        if is_fitting:
            self.setup_optimizers(trainer)
        self._announce()
        self.setup_precision_plugin()

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
            self.engine.adopt(unwrapped(optimizer))
            self._require_savable(optimizer)

    def _announce(self) -> None:
        """Print the startup summary of a run, unless an earlier run has printed the same."""
        assert self.engine is not None
        units = self.engine.sharded.describe()
        now = units, self.engine.steps or self._announced[1]
        if now != self._announced:
            form = "one plain file" if self.settings.checkpoint == "file" else "a DCP directory"
            when = " in the background" if self.settings.async_checkpoint else ""
            rank_zero_info(
                summary(self.engine, f"{form}, written by all ranks{when}", self.num_processes)
            )
            rank_zero_debug(units)
        self._announced = now

    # -- the steps -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # For copies of a module that holds its Trainer: the copy belongs to no run.
        none: dict[str, Any] = {"engine": None, "_model": None, "_run": None}
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
        super(ZeROStrategy, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        for wrapper in self._lightning_optimizers:
            follow(wrapper, unwrapped(wrapper))

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

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        assert self.engine is not None
        if not self._module.automatic_optimization:
            self.engine.broadcast_next()

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        assert self.engine is not None
        return self.engine.no_sync()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return SameLength.of(dataloader, self._control, lambda: self._module.trainer.training)

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
        engine = self.engine
        return StepTimes() if engine is None else engine.comm.transport.ledger.last_times

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
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduced(super().reduce, tensor, group, reduce_op)

    @property
    @override
    def _control(self) -> Control | None:
        return None if self._run is None else self._run.comm.control

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # What names a checkpoint of a user's `CheckpointIO` need not be a path.
        if isinstance(self._launcher, SubprocessLauncher) and self._writes_files:
            assert self.cluster_environment is not None
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.engine is None or self.engine.is_restored:
            state = self._module.state_dict()
            for key, value in state.items():
                state[key] = whole(value)  # a cut module has DTensors after its run
            return state
        return module_state(self._module, self.engine)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.engine is None:
            return super().optimizer_state(optimizer)
        inner = unwrapped(optimizer)
        known = [unwrapped(other) for other in self.optimizers]
        number = next((n for n, other in enumerate(known) if other is inner), len(known))
        return self._current.checkpoints.optimizer_state(inner, f"optimizer {number}")

    def _require_savable(self, optimizer: Optimizer) -> None:
        """Raise at setup, not at the first save, if a directory has no place for the state."""
        if self.settings.checkpoint != "dcp":
            return
        name, what = type(optimizer).__name__, ""
        if stepper_of(optimizer).has_own_format:
            what = f"{name}.state_dict() has its own format"
        elif wraps_states(type(optimizer)):
            what = f"{name} keeps states in tensors that wrap others"
        if what:
            raise ValueError(f"{what}, which checkpoint='dcp' cannot store. Use checkpoint='file'.")

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._run is None:  # an ordinary module, before the ranks are connected
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._open_engine is not None:
            self._open_engine.sharded.keep_edits()  # by hooks that were given the checkpoint
        is_ours = storage_options is None and self._writes_files
        if not is_ours and self.settings.checkpoint == "dcp":
            plugin = type(self._plugins[-1]).__name__
            what = plugin if storage_options is None else "storage_options"
            raise ValueError(
                f"checkpoint='dcp' writes directories itself and cannot be combined with {what}."
                " Remove one of them."
            )
        is_async = self.settings.async_checkpoint or len(self._plugins) > 1
        self._current.checkpoints.save(
            checkpoint,
            filepath,
            str(self.precision_plugin.precision),
            None if is_ours else self.checkpoint_io,
            storage_options,
            # After fit there is no training to overlap with, and nothing waits for the thread.
            in_background=is_async and self._open_engine is not None,
            optimizers=map(unwrapped, self.optimizers),
        )

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self._writes_files and self._run is not None:
            self._run.checkpoints.saver.remove(str(filepath))
        elif self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    @property
    def _plugins(self) -> list[Any]:
        """The checkpoint plugin, and those within it that only save in a thread."""
        plugins = [self.checkpoint_io]
        while type(plugins[-1]) is AsyncCheckpointIO and plugins[-1].checkpoint_io is not None:
            plugins.append(plugins[-1].checkpoint_io)
        return plugins

    @property
    def _writes_files(self) -> bool:
        """Return whether this package writes checkpoints, not a ``CheckpointIO`` of the user's."""
        return writes_files(self._plugins[-1])

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if self._run is None:
            # Lightning 2.5 neither has nor passes this argument.
            given = {} if weights_only is None else {"weights_only": weights_only}
            return super().load_checkpoint(checkpoint_path, **given)
        self._agree_to_load(str(checkpoint_path))
        path = self._run.path = str(checkpoint_path)
        loaded: Any = self._run.checkpoints.load(checkpoint_path, self._plugins[-1], weights_only)
        held: dict[str, Any] = loaded if isinstance(loaded, dict) or not self._writes_files else {}
        if not self._writes_files:
            return held
        is_fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        if are_safetensors(Path(path)) and not is_fitting:
            held["pytorch-lightning_version"] = internals.VERSION
        for key in ("state_dict", "pytorch-lightning_version"):
            if key not in held:
                raise ValueError(
                    f"{path!r} is not a Trainer checkpoint: it has no {key!r}."
                    " Load bare weights with lightning_zero.load_weights(module, path)."
                )
        if not isinstance(held["state_dict"], Mapping):
            raise ValueError(
                f"{path!r} is not a Trainer checkpoint: its 'state_dict' is a"
                f" {type(held['state_dict']).__name__}, not a dictionary."
            )
        return held

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._run is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        weights = checkpoint["state_dict"]
        if self._run.pending is not None:  # what callbacks do to them until then comes too late
            weights = dict(weights) if isinstance(weights, MappingProxyType) else copy.copy(weights)
        self._run.load(functools.partial(self._load_weights, weights, strict))

    def _load_average(self, load: Callable[..., Any], *args: Any) -> None:
        """Let a callback load weights of its own into the module, after the module's."""

        def load_it() -> None:
            assert self.engine is not None
            with self.engine.sharded.writing():
                load(*args)

        self._current.load(load_it)

    def _agree_to_load(self, path: str | None) -> None:
        """Raise on all ranks unless all of them load a checkpoint in this setup, or none does."""
        if self._current.has_agreed_to_load:
            return
        self._current.has_agreed_to_load = True
        paths = self._current.checkpoints.control.gather_objects(path)
        without = [str(rank) for rank, its in enumerate(paths) if its is None]
        if without and len(without) < len(paths):
            given = next(its for its in paths if its is not None)
            raise ValueError(
                f"Only some ranks load the checkpoint {given!r}: on rank {', '.join(without)},"
                " ckpt_path is None or leads to no checkpoint on its disk. Pass the same ckpt_path"
                " on every rank, on a disk that all ranks share."
            )

    def _load_weights(self, weights: Mapping[str, Any], strict: bool) -> None:
        try:
            load_module_state(self._module, self._open_engine, weights, strict=strict)
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):
                raise  # of a user's hook, or of other ranks
            raise RuntimeError(
                f"The checkpoint {self._current.path!r} does not fit the module. {error}"
            ) from error

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._run is None:  # in the process that has launched the ranks, which has no optimizers
            super().load_optimizer_state_dict(checkpoint)
            return
        optimizers, states = [*map(unwrapped, self.optimizers)], checkpoint["optimizer_states"]
        try:
            prepared = self._current.checkpoints.prepared(optimizers, states)
        except ValueError as error:
            raise ValueError(f"Cannot resume from {self._current.path!r}. {error}") from error
        self._current.checkpoints.load_optimizers(zip(optimizers, prepared, strict=False))
        here, there = len(optimizers), len(states)
        if here != there:
            fresh = [type(optimizer).__name__ for optimizer in optimizers[there:]]
            what = ", ".join(f"{n} ({kind})" for n, kind in enumerate(fresh, there))
            rest = ", ".join(map(str, range(here, there)))
            rank_zero_warn(
                f"{self._current.path!r} has the states of {there} optimizers, but"
                f" configure_optimizers returned {here}. They are paired in order. "
                + (f"Optimizers that begin fresh: {what}." if fresh else f"Unused states: {rest}.")
            )

    # -- the end ---------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        is_signal = isinstance(exception, SIGTERMException)  # which all ranks answer together
        if self._run is not None and not (is_signal and self._run.signals is not None):
            self._run.has_failed = True
            self._run.comm.control.watchdog.end(exception)
        if self._open_engine is not None:
            explain(exception)
            self._open_engine.reset()

    @override
    def teardown(self) -> None:
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        run, self.model = self._run, self.lightning_module
        # One may raise, for a full disk or dead ranks; the others must still run.
        with ExitStack() as endings:  # which calls the last one first
            if run is not None:
                endings.callback(run.comm.control.watchdog.leave)
            endings.callback(self.cluster_environment.teardown)
            endings.callback(self.checkpoint_io.teardown)
            endings.callback(self.accelerator.teardown)
            endings.callback(self.precision_plugin.teardown)
            endings.callback(self._move_to_host)
            endings.callback(self._end_engine)
            if run is not None:
                endings.callback(run.checkpoints.saver.close)
                endings.callback(run.stand_ins.close)

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
