"""Checkpoints of sharded modules and optimizers, for the strategies of Fabric and the Trainer.

They are saved without gathering: by all ranks at once with Lightning's own ``TorchCheckpointIO``;
any other writer gets whole tensors on rank 0.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import (
    DirectorySave,
    FileSave,
    Provenance,
    Saver,
    collected,
    load,
    load_module_state,
    load_optimizer_state,
    loadable,
    module_state,
    optimizer_state,
)
from lightning_zero.comm import Control, agreed
from lightning_zero.engine import Engine
from lightning_zero.fabric import internals
from lightning_zero.fabric.sharding import ShardedModule, Sharding
from lightning_zero.optimizer import members, parameter_of
from lightning_zero.plan import Settings


class Checkpoints:
    """The checkpoints of a strategy.

    Args:
        control: All ranks.
        settings: The user's settings.
        engines: Returns the engines that shard the modules now.
    """

    def __init__(
        self, control: Control, settings: Settings, engines: Callable[[], Sequence[Engine]]
    ) -> None:
        self.control = control
        self.saver = Saver(control)
        self._settings = settings
        self._engines = engines

    # -- saving ----------------------------------------------------------------------------------

    def engines_of(self, optimizer: Optimizer) -> list[Engine]:
        """Return the engines of an optimizer's parameters; empty if none shards them."""
        parameters = [parameter_of(member) for member in members(optimizer)]
        return [
            engine
            for engine in self._engines()
            if any(engine.sharded.piece(parameter) is not None for parameter in parameters)
        ]

    def optimizer_state(self, optimizer: Optimizer, label: str) -> dict[str, Any]:
        """Return the whole state of an optimizer, with sharded values; a collective."""
        engines = self.engines_of(optimizer) or self._engines()
        for engine in engines:
            engine.require_whole()
        return optimizer_state(optimizer, engines[0], label)

    def save(
        self,
        checkpoint: Any,
        path: internals.StoredPath,
        precision: str,
        plugin: CheckpointIO | None = None,
        storage_options: Any = None,
        *,
        in_background: bool = False,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        """Write a checkpoint from all ranks, or by the user's ``plugin`` on rank 0.

        ``optimizers`` are those whose states it has.
        """
        if plugin is not None:
            everything = collected(checkpoint, self.control)
            with agreed(self.control, f"Saving {str(path)!r}"):
                if self.control.rank == 0:
                    plugin.save_checkpoint(everything, path, storage_options=storage_options)
            return
        kind: Callable[..., Any] = FileSave
        if self._settings.checkpoint == "dcp":
            groups = [itertools.chain(*self.names_of(optimizer)) for optimizer in optimizers]
            names = [[known[0] for known in of_one] for of_one in groups]
            kind = functools.partial(DirectorySave, parameters=names)
        origin = Provenance(self._settings.stage, self.control.world_size, precision)
        self.saver.save(checkpoint, str(path), origin, in_background=in_background, kind=kind)

    # -- loading ---------------------------------------------------------------------------------

    def load(
        self, path: internals.StoredPath, plugin: CheckpointIO, weights_only: bool | None
    ) -> Any:
        """Return a checkpoint, whose tensors are mapped to memory; a collective.

        The user's ``plugin`` loads by itself.
        """
        self.saver.wait()
        if writes_files(plugin):
            own = self.saver.path_of(str(path))
            return load(own, self.control, weights_only=weights_only in (None, True))
        return plugin.load_checkpoint(
            path, **({} if weights_only is None else {"weights_only": weights_only})
        )

    def prepared(
        self, optimizers: Sequence[Optimizer], states: Any, names: Sequence[str] = ()
    ) -> list[Any]:
        """Return states that the optimizers can load, paired in order; ``names`` are for errors.

        Raises:
            ValueError: A state does not fit its optimizer.
        """
        if not isinstance(states, Sequence):
            raise ValueError(f"The checkpoint's optimizer states are a {type(states).__name__}.")
        found = []
        for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
            try:
                found.append(loadable(optimizer, state, self.names_of(optimizer)))
            except ValueError as error:
                name = names[number] if names else f"optimizer {number}"
                raise ValueError(
                    f"Cannot load {name} ({type(optimizer).__name__}): {error}."
                ) from error
        return found

    def load_optimizers(self, pairs: Iterable[tuple[Optimizer, Any]]) -> None:
        """Load states that :meth:`prepared` has returned; a collective."""
        for optimizer, state in pairs:
            load_optimizer_state(optimizer, state, *(self.engines_of(optimizer) or self._engines()))

    def names_of(self, optimizer: Optimizer) -> list[list[list[str]]]:
        """Return all names of each parameter, by the optimizer's groups."""
        known: dict[int, list[str]] = {}
        for engine in self._engines():
            for name, parameter in engine.module.named_parameters(remove_duplicate=False):
                known.setdefault(id(parameter), []).append(name)
        count = itertools.count()
        names = []
        for group in optimizer.param_groups:
            given = group.get("param_names") or [None] * len(group["params"])
            names.append(
                [
                    [*known.get(id(parameter_of(member)), ()), *filter(None, [own])]
                    or [f"outside of the module {number}"]
                    for member, own, number in zip(group["params"], given, count, strict=False)
                ]
            )
        return names


def writes_files(plugin: CheckpointIO) -> bool:
    """Return whether a plugin is Lightning's own, in place of which all ranks write."""
    return type(plugin) is TorchCheckpointIO and "save_checkpoint" not in vars(plugin)


class SavingStrategy(Sharding, DDPStrategy):
    """The base class of Fabric's strategy that saves and loads checkpoints.

    Attributes:
        engines: The engines of all modules that were set up.
    """

    engines: list[Engine]

    @functools.cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(Control(), self.settings, lambda: self.engines)

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
        if isinstance(value, Optimizer) and self._checkpoints.engines_of(value):
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
        path: internals.StoredPath,
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
        missing = [key for key in state if key not in held]
        if strict and missing:
            raise KeyError(
                f"The requested state contains a key {missing[0]!r} that does not exist in the"
                " loaded checkpoint. To disable strict loading, set `strict=False`."
            )
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
            if isinstance(objects[key], Optimizer) and self._checkpoints.engines_of(objects[key])
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


def kept(state: Any, keeps: Callable[[str, Any], bool] | None) -> Any:
    """Return the entries of a state for which ``keeps(name, value)`` is true."""
    if keeps is None or not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if keeps(name, value)}
