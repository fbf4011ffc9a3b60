"""The base class of the strategy that saves and loads checkpoints."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import (
    DirectorySave,
    ElsewhereError,
    FileSave,
    Provenance,
    Saver,
    are_bare_weights,
    check_optimizer_states,
    collected,
    load,
    load_bare_weights,
    load_module_state,
    load_optimizer_state,
    local_optimizer_states,
    module_state,
    optimizer_state,
    without_gathering,
)
from lightning_zero.comm import Outcome, whole
from lightning_zero.optimizer import members, parameter_of, stepper_of, wraps_states
from lightning_zero.trainer.internals import StoredPath, unwrapped, wait_for_plugin
from lightning_zero.trainer.plugins import plugins_of, replaced
from lightning_zero.trainer.run import callbacks_of
from lightning_zero.trainer.steps import SteppingStrategy


class SavingStrategy(SteppingStrategy):
    """Checkpoints of a sharded module, saved without gathering and loaded once it is sharded.

    1. ``_run`` is set when the ranks are connected.
    2. The Trainer asks for states, saves and loads. Loads before setup are postponed.
    3. Setup ends with :meth:`_load_pending`, which runs them.
    """

    _plugin_reads = False

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
        return optimizer_state(inner, self.engine, f"optimizer {number}")

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
            plugin = type(plugins_of(self.checkpoint_io)[-1]).__name__
            what = plugin if storage_options is None else "storage_options"
            raise ValueError(
                f"checkpoint='dcp' writes directories itself and cannot be combined with {what}."
                " Remove one of them."
            )
        passed = self._passed_on(checkpoint, filepath, storage_options) if is_ours else None
        if passed is None:
            # The user's own writer takes whole tensors.
            everything = collected(checkpoint, self._saver.control)
            self._save_by_plugin(everything, filepath, storage_options)
            return
        is_async = self.settings.async_checkpoint or any(
            isinstance(plugin, AsyncCheckpointIO) for plugin in plugins_of(self.checkpoint_io)
        )
        # After fit there is no training to overlap with, and nothing waits for the thread.
        is_running = self._open_engine is not None
        for one, path in passed:
            self._saver.save(
                one,
                path,
                self._provenance,
                in_background=is_async and is_running,
                kind=self._checkpoint_kind,
            )

    def _save_by_plugin(
        self, checkpoint: dict[str, Any], filepath: StoredPath, storage_options: Any | None
    ) -> None:
        # As `Strategy.save_checkpoint`, which a user may have replaced by one that calls ours.
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(
                checkpoint, filepath, storage_options=storage_options
            )

    def _passed_on(
        self, checkpoint: dict[str, Any], filepath: StoredPath, storage_options: Any | None
    ) -> list[tuple[dict[str, Any], str]] | None:
        """Call the plugin on rank 0, as DDP does; return what it gives to the plugin beneath it.

        The other ranks return their own checkpoint as often. ``None`` if a plugin of the user reads
        tensors, and so needs whole ones; from then on it gets them at once.
        """
        passed: list[tuple[dict[str, Any], str]] = []
        outcome = Outcome()

        def note(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            passed.append((checkpoint, str(path)))

        with outcome.attempt():
            if self.is_global_zero and not self._plugin_reads:
                innermost = plugins_of(self.checkpoint_io)[-1]
                try:
                    with replaced(innermost, save_checkpoint=note), without_gathering():
                        self._save_by_plugin(checkpoint, filepath, storage_options)
                        for plugin in plugins_of(self.checkpoint_io):
                            wait_for_plugin(plugin)
                except ElsewhereError:
                    self._plugin_reads = True
        outcome.agree(self._saver.control, f"Saving {str(filepath)!r}")
        count, self._plugin_reads = self._saver.control.broadcast_object(
            (len(passed), self._plugin_reads)
        )
        if self._plugin_reads:
            return None
        return passed if self.is_global_zero else [(checkpoint, str(filepath))] * count

    @property
    def _checkpoint_kind(self) -> Callable[..., Any]:
        """Return the constructor of save jobs in the chosen format."""
        if self.settings.checkpoint == "file":
            return FileSave
        names = self._parameter_names
        parameters = [
            [
                names.get(id(parameter_of(parameter)), f"outside of the module {number}")
                for number, parameter in enumerate(members(unwrapped(optimizer)))
            ]
            for optimizer in self.optimizers
        ]
        return functools.partial(DirectorySave, parameters=parameters)

    @override
    def remove_checkpoint(self, filepath: StoredPath) -> None:
        is_ours = self._writes_files and self._run is not None
        remove = {"remove_checkpoint": self._saver.remove} if is_ours else {}
        with replaced(plugins_of(self.checkpoint_io)[-1], **remove):
            if self.is_global_zero:
                self.checkpoint_io.remove_checkpoint(filepath)

    @property
    def _saver(self) -> Saver:
        return self._current.saver

    @property
    def _writes_files(self) -> bool:
        """Return whether we write checkpoints, not a ``CheckpointIO`` of the user."""
        innermost = plugins_of(self.checkpoint_io)[-1]
        return type(innermost) is TorchCheckpointIO and "save_checkpoint" not in vars(innermost)

    @property
    def _provenance(self) -> Provenance:
        return Provenance(
            stage=self.settings.stage,
            world_size=self._saver.control.world_size,
            precision=str(self.precision_plugin.precision),
        )

    @override
    def load_checkpoint(
        self, checkpoint_path: StoredPath, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if self._run is not None:
            self._saver.wait()
            self._agree_to_load(str(checkpoint_path))
        # Lightning 2.5 neither has nor passes this argument.
        known = inspect.signature(TorchCheckpointIO.load_checkpoint).parameters
        given = {"weights_only": weights_only} if "weights_only" in known else {}
        is_ours = self._writes_files and self._run is not None
        load = {"load_checkpoint": self._load} if is_ours else {}
        with replaced(plugins_of(self.checkpoint_io)[-1], **load):
            return self.checkpoint_io.load_checkpoint(checkpoint_path, **given)

    def _load(
        self, checkpoint_path: StoredPath, *_: Any, weights_only: bool | None = None, **__: Any
    ) -> dict[str, Any]:
        """Load a checkpoint, of which each rank reads its own parts."""
        path = self._current.path = self._saver.path_of(str(checkpoint_path))
        control = self._saver.control
        if are_bare_weights(path) and not self._is_fitting:
            weights = load_bare_weights(path, control)
            return {"state_dict": weights, "pytorch-lightning_version": pl.__version__}
        safe, verify = weights_only in (None, True), self.settings.verify_checkpoint
        checkpoint = load(path, control, weights_only=safe, verify=verify)
        held = checkpoint if isinstance(checkpoint, dict) else {}
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
            self._run.pending = (checkpoint, _copied(checkpoint["state_dict"]), strict)
        else:
            self._load_weights(checkpoint["state_dict"], strict)

    def _agree_to_load(self, path: str | None) -> None:
        """Raise on all ranks unless all of them load a checkpoint in this setup, or none does."""
        if self._current.has_agreed_to_load:
            return
        self._current.has_agreed_to_load = True
        paths = self._saver.control.gather_objects(path)
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

    def _load_pending(self) -> Mapping[str, Any] | None:
        """Finish the loads that setup postponed, and return the checkpoint, if there is one.

        As under DDP, the code that makes optimizers sees loaded weights.
        """
        run = self._current
        pending, run.pending = run.pending, None
        run.is_set_up = True
        if pending is None:
            return None
        checkpoint, weights, strict = pending
        self._load_weights(weights, strict)
        if run.callbacks is not None:
            run.callbacks.load()
        return checkpoint

    def _check_resumable(self, trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` if an optimizer cannot load its state, which it does later."""
        # Finetuning callbacks restore the checkpoint's param groups later, in on_fit_start.
        finetunes = any(isinstance(each, BaseFinetuning) for each in callbacks_of(trainer))
        if "optimizer_states" in checkpoint and not finetunes:
            self._check_optimizer_states(checkpoint)

    def _load_weights(self, weights: Mapping[str, Any], strict: bool) -> None:
        with self._naming_the_file():
            load_module_state(self._module, self._open_engine, weights, strict=strict)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):
                raise  # of a user's hook, or of other ranks
            raise RuntimeError(
                f"The checkpoint {self._current.path!r} does not fit the module. {error}"
            ) from error

    def _check_optimizer_states(self, checkpoint: Mapping[str, Any]) -> None:
        optimizers = [unwrapped(optimizer) for optimizer in self.optimizers]
        names = self._parameter_names

        def name_of(parameter: Any) -> str:
            return names.get(id(parameter_of(parameter)), "a parameter outside the module")

        try:
            check_optimizer_states(optimizers, self._local_states(checkpoint), name_of)
        except ValueError as error:
            raise ValueError(f"Cannot resume from {self._current.path!r}. {error}") from error

    def _local_states(self, checkpoint: Mapping[str, Any]) -> Any:
        """Return the checkpoint's optimizer states, of which tensor parallelism may need parts."""
        states = checkpoint["optimizer_states"]
        if self._current.comm.mesh.tensor is None or not isinstance(states, Sequence):
            return states
        return local_optimizer_states(map(unwrapped, self.optimizers), states)

    @property
    def _parameter_names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._module.named_parameters()}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._check_optimizer_states(checkpoint)
        states = self._local_states(checkpoint)
        for optimizer, state in zip(self.optimizers, states, strict=False):
            assert self._open_engine is not None
            load_optimizer_state(unwrapped(optimizer), state, self._open_engine)
        here, there = len(self.optimizers), len(states)
        if here != there:
            fresh = [type(unwrapped(optimizer)).__name__ for optimizer in self.optimizers[there:]]
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
