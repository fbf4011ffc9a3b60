"""The base class of the strategy that saves and loads checkpoints."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import (
    are_safetensors,
    existing,
    load_module_state,
    module_state,
)
from lightning_zero.comm import whole
from lightning_zero.fabric import Checkpoints, writes_files
from lightning_zero.optimizer import stepper_of, wraps_states
from lightning_zero.trainer.internals import StoredPath, SubprocessLauncher, unwrapped
from lightning_zero.trainer.steps import SteppingStrategy


class Launcher(SubprocessLauncher):
    """Starts the other ranks, unless the checkpoint to load is missing: each would then fail."""

    @override
    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        path = inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")
        is_file = path is not None and not re.search("^(best|last|hpc|registry|.*:.*)$", str(path))
        starts_ranks = not self.cluster_environment.creates_processes_externally
        if is_file and starts_ranks and not existing(Path(str(path))).exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        return super().launch(function, *args, trainer=trainer, **kwargs)


class SavingStrategy(SteppingStrategy):
    """Checkpoints of a sharded module, saved without gathering and loaded once it is sharded.

    1. ``_run`` is set when the ranks are connected.
    2. The Trainer asks for states, saves and loads. Loads before setup are postponed.
    3. Setup ends with :meth:`_load_pending`, which runs them.
    """

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
        return self._checkpoints.optimizer_state(inner, f"optimizer {number}")

    def _require_savable(self, optimizer: Optimizer) -> None:
        """Raise at setup, not at the first save, if a directory has no place for the state."""
        if self.settings.checkpoint != "dcp":
            return
        name, what = type(optimizer).__name__, ""
        if stepper_of(optimizer).has_own_format:
            what = f"{name}.state_dict() has its own format"
        elif wraps_states(optimizer):
            what = f"{name} keeps states in tensors that wrap others"
        if what:
            raise ValueError(f"{what}, which checkpoint='dcp' cannot store. Use checkpoint='file'.")

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: StoredPath, storage_options: Any | None = None
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
        self._checkpoints.save(
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
    def remove_checkpoint(self, filepath: StoredPath) -> None:
        if self._writes_files and self._run is not None:
            self._checkpoints.saver.remove(str(filepath))
        elif self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    @property
    def _checkpoints(self) -> Checkpoints:
        return self._current.checkpoints

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
        self, checkpoint_path: StoredPath, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if self._run is None:
            # Lightning 2.5 neither has nor passes this argument.
            given = {} if weights_only is None else {"weights_only": weights_only}
            return super().load_checkpoint(checkpoint_path, **given)
        self._agree_to_load(str(checkpoint_path))
        path = self._run.path = self._checkpoints.saver.path_of(str(checkpoint_path))
        checkpoint = self._checkpoints.load(path, self._plugins[-1], weights_only)
        held = checkpoint if isinstance(checkpoint, dict) else {}
        if not self._writes_files:
            return held
        if are_safetensors(Path(path)) and not self._is_fitting:
            held["pytorch-lightning_version"] = pl.__version__
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
        elif not self._run.is_set_up:
            # As under DDP, the checkpoint is read and its hooks run before setup. Values are copied
            # once each rank knows its part.
            # What callbacks do to its weights later, when they are loaded, comes too late.
            self._run.pending = (_copied(checkpoint["state_dict"]), strict)
        else:
            self._load_weights(checkpoint["state_dict"], strict)

    def _agree_to_load(self, path: str | None) -> None:
        """Raise on all ranks unless all of them load a checkpoint in this setup, or none does."""
        if self._current.has_agreed_to_load:
            return
        self._current.has_agreed_to_load = True
        paths = self._checkpoints.control.gather_objects(path)
        without = [str(rank) for rank, its in enumerate(paths) if its is None]
        if without and len(without) < len(paths):
            given = next(its for its in paths if its is not None)
            raise ValueError(
                f"Only some ranks load the checkpoint {given!r}: on rank {', '.join(without)},"
                " ckpt_path is None or leads to no checkpoint on its disk. Pass the same ckpt_path"
                " on every rank, on a disk that all ranks share."
            )

    @property
    def _is_fitting(self) -> bool:
        return self._module.trainer.state.fn == TrainerFn.FITTING

    def _load_pending(self) -> None:
        """Finish the load that setup postponed: code that makes optimizers sees loaded weights."""
        run = self._current
        pending, run.pending = run.pending, None
        run.is_set_up = True
        if pending is not None:
            self._load_weights(*pending)
            if run.callbacks is not None:
                run.callbacks.load()

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
            prepared = self._checkpoints.prepared(optimizers, states)
        except ValueError as error:
            raise ValueError(f"Cannot resume from {self._current.path!r}. {error}") from error
        self._checkpoints.load_optimizers(zip(optimizers, prepared, strict=False))
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


def _copied(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy, of the same class if such an object can be copied."""
    return dict(weights) if isinstance(weights, MappingProxyType) else copy.copy(weights)
