"""The base class of Fabric's strategy that saves and loads checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_zero.checkpoint import (
    Provenance,
    Saver,
    check_optimizer_states,
    collected,
    in_memory,
    load,
    load_module_state,
    load_optimizer_state,
    local_optimizer_states,
    module_state,
    optimizer_state,
)
from lightning_zero.comm import Control
from lightning_zero.engine import Engine
from lightning_zero.fabric import internals
from lightning_zero.fabric.module import ShardedModule
from lightning_zero.fabric.sharding import Sharding
from lightning_zero.optimizer import members, parameter_of


class SavingStrategy(Sharding, DDPStrategy):
    """Checkpoints of sharded modules and their optimizers, saved without gathering.

    Attributes:
        engines: The engines of all modules that were set up.
    """

    engines: list[Engine]

    def _engines_of(self, optimizer: Optimizer) -> list[Engine]:
        """Return the engines of an optimizer's parameters; empty if none shards them."""
        parameters = [parameter_of(member) for member in members(optimizer)]
        return [
            engine
            for engine in self.engines
            if any(engine.sharded.piece(parameter) is not None for parameter in parameters)
        ]

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
                converted, str(path), self._provenance, in_background=self.settings.async_checkpoint
            )
        else:
            # The user's own writer takes whole tensors.
            whole = collected(converted, self._saver.control)
            super().save_checkpoint(path, whole, storage_options)

    def _state_of(self, key: str, value: Any) -> Any:
        if isinstance(value, ShardedModule):
            return module_state(value.module, value.engine)
        if isinstance(value, Optimizer) and (engines := self._engines_of(value)):
            for engine in engines:
                engine.require_whole()
            return optimizer_state(value, engines[0], key)
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
                verify=self.settings.verify_checkpoint,
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
        optimizers: list[tuple[str, Optimizer, Any]] = [
            (key, value, local_optimizer_states([value], [saved])[0])
            for key, value, saved in found
            if isinstance(value, Optimizer) and self._engines_of(value)
        ]
        for key, optimizer, saved in optimizers:
            try:
                check_optimizer_states([optimizer], [saved], self._name_of)
            except ValueError as error:
                raise ValueError(f"Cannot load {key!r}. {error}") from error
        for _, value, saved in found:
            if isinstance(value, ShardedModule):
                load_module_state(value.module, value.engine, saved, strict=strict)
            elif isinstance(value, nn.Module):
                value.load_state_dict(whole(saved), strict=strict)
            elif any(value is optimizer for _, optimizer, _ in optimizers):
                continue
            elif isinstance(value, internals.Stateful):
                value.load_state_dict(whole(saved))
        for _, optimizer, saved in optimizers:
            first, *others = self._engines_of(optimizer)
            with contextlib.ExitStack() as loading:
                for engine in others:
                    loading.enter_context(engine.loading("Loading optimizer states"))
                load_optimizer_state(optimizer, saved, first)

    def _name_of(self, member: Any) -> str:
        for engine in self.engines:
            for name, parameter in engine.module.named_parameters():
                if parameter is parameter_of(member):
                    return name
        return "a parameter of no module"


def kept(state: Any, keeps: Callable[[str, Any], bool] | None) -> Any:
    """Return the entries of a state for which ``keeps(name, value)`` is true."""
    if keeps is None or not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if keeps(name, value)}


def whole(value: Any) -> Any:
    """Return a loaded value with all of its tensors in memory."""
    return tree_map_only(Tensor, in_memory, value)
