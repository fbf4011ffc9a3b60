"""The saves of a run, one after another, in the calling thread or in the background."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from lightning_zero.checkpoint.file.atomic import remove
from lightning_zero.checkpoint.file.file_save import FileSave
from lightning_zero.checkpoint.file.format import Provenance
from lightning_zero.checkpoint.file.skeleton import Skeleton, bytes_of
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Control, agreed
from lightning_zero.tensors import runs_outside, uncollected


class Saver:
    """A writer and remover of checkpoints; all ranks call every method together.

    A background save returns once this rank's values are copied to host memory. The next save waits
    for it. Removals queue behind it and are skipped if it failed, so that a checkpoint is removed
    only once its successor exists.
    """

    def __init__(self, control: Control) -> None:
        self.control = control
        self._background: Control | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._removals: list[Future[None]] = []
        self._agreed: dict[str, str] = {}

    @runs_outside
    @uncollected()
    def save(
        self,
        checkpoint: Any,
        path: str,
        provenance: Provenance,
        *,
        in_background: bool = False,
        kind: Callable[..., Save] = FileSave,
    ) -> None:
        """Write ``checkpoint`` to ``path``; in the background, return once it is copied.

        ``kind`` is the format, a file by default.
        """
        self.wait()
        path = self._agree(path)
        save = kind(checkpoint, path, self.control, provenance)
        if not in_background:
            save.run()
            return
        self._background = self._background or self.control.separate()
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        save.detach(self._background)
        self._running = self._executor.submit(save.run)

    def _agree(self, path: str) -> str:
        agreed: str = self.control.broadcast_object(path)
        if agreed != path:
            self._agreed[path] = agreed
        return agreed

    def path_of(self, path: str) -> str:
        """Return the path to which this rank's ``path`` was saved, which is that of rank 0."""
        return self._agreed.get(path, path)

    def remove(self, path: str) -> None:
        """Remove a checkpoint once the running save, if any, has succeeded."""
        if self.control.rank:
            return
        if self._executor is None or self._running is None:
            remove(path)
            return
        running = self._running
        self._removals.append(
            self._executor.submit(lambda: None if running.exception() else remove(path))
        )

    def wait(self) -> None:
        """Wait until everything is written; raise on all ranks if that failed."""
        running, self._running = self._running, None
        removals, self._removals = self._removals, []
        for removal in removals:
            removal.result()
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None


def collected(checkpoint: Any, control: Control) -> Any:
    """Return ``checkpoint`` with whole tensors on rank 0, unchanged on the others. A collective.

    For writers that do not know sharded values. Rank 0 needs host memory for all of them.
    """
    with agreed(control, "Saving"):
        mine = Skeleton.of(checkpoint)
    values = mine.sharded_values()
    whole: dict[str, torch.Tensor] = {}
    for key in control.broadcast_object(list(values)):
        value = values[key]
        part = value.part_bytes
        target = torch.empty(0, dtype=torch.uint8)
        if control.rank == 0:
            whole[key] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            target = bytes_of(whole[key].untyped_storage())
        # Of cut parameters, the ranks' parts are not in the order of the ranks.
        starts, sizes = zip(*control.gather_objects((value.start_byte, len(part))), strict=True)
        places = [*starts]
        for peer, message in control.collect(part, sizes):
            target[places[peer] : places[peer] + len(message)] = message
            places[peer] += len(message)
    return _with(checkpoint, whole) if control.rank == 0 else checkpoint


def _with(value: Any, whole: dict[str, torch.Tensor]) -> Any:
    """Copy nested containers with whole tensors in place of sharded values."""
    if isinstance(value, ShardedValue):
        settled = value.settled()
        return whole[value.key] if settled is value else settled
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _with(item, whole) for key, item in value.items()})
        return copied
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_with(item, whole) for item in value)
    return value
