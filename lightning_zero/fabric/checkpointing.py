"""Checkpoints of sharded modules and optimizers, for the strategies of Fabric and the Trainer.

They are saved without gathering: by all ranks at once with Lightning's own ``TorchCheckpointIO``;
any other writer gets whole tensors on rank 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from torch.optim import Optimizer

from lightning_zero.checkpoint import (
    DirectorySave,
    FileSave,
    Provenance,
    Saver,
    collected,
    load,
    load_optimizer_state,
    loadable,
    optimizer_state,
)
from lightning_zero.comm import Control, agreed
from lightning_zero.engine import Engine
from lightning_zero.fabric.precision import stepped_by
from lightning_zero.optimizer import parameter_of
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

    def optimizer_state(self, optimizer: Optimizer, label: str) -> dict[str, Any]:
        """Return the whole state of an optimizer, with sharded values; a collective."""
        engines = stepped_by(optimizer) or self._engines()
        for engine in engines:
            engine.require_whole()
        return optimizer_state(optimizer, engines[0], label)

    def save(
        self,
        checkpoint: Any,
        path: str | Path,
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

    def load(self, path: str | Path, plugin: CheckpointIO, weights_only: bool | None) -> Any:
        """Return a checkpoint, whose tensors are mapped to memory; a collective.

        The user's ``plugin`` loads by itself.
        """
        self.saver.wait()
        if writes_files(plugin):
            return load(str(path), self.control, weights_only=weights_only in (None, True))
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
            load_optimizer_state(optimizer, state, *(stepped_by(optimizer) or self._engines()))

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
