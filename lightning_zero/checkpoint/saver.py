"""The saves of a run, one after another, in the calling thread or in the background."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from lightning_zero.checkpoint.atomic import remove
from lightning_zero.checkpoint.provenance import Provenance
from lightning_zero.checkpoint.save import FileSave, Save, brought
from lightning_zero.checkpoint.skeleton import Skeleton, bytes_of
from lightning_zero.checkpoint.values import ShardedValue
from lightning_zero.comm import Control, agreed
from lightning_zero.tensors import runs_outside, uncollected

log = logging.getLogger(__name__)


class Saver:
    """A writer and remover of checkpoints; all ranks call every method together.

    A background save returns once this rank's values are copied to host memory. The next save waits
    for it, and so does the end of the process. Removals queue behind it and are skipped if it
    failed, so that a checkpoint is removed only once its successor exists.
    """

    def __init__(self, control: Control) -> None:
        self.control = control
        self._background: Control | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []
        self._agreed: dict[str, str] = {}
        weakref.finalize(self, _end, self._running)

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
        self._running.append(self._executor.submit(save.run))

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
        if self._executor is None or not self._running:
            _remove(path)
            return
        running = self._running[0]
        self._running.append(
            self._executor.submit(lambda: None if running.exception() else _remove(path))
        )

    def wait(self) -> None:
        """Wait until everything is written; raise on all ranks if that failed."""
        running, self._running[:] = [*self._running], []
        for future in running:
            future.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None


def _end(running: list[Future[None]]) -> None:
    """Wait for a save for which nobody waits any more, and report its failure."""
    for future in running:
        if error := future.exception():
            log.error("The last checkpoint was not written.", exc_info=error)


def _remove(path: str) -> None:
    """Remove a checkpoint; a failure is no reason to end training, least of all on one rank."""
    try:
        remove(path)
    except Exception as error:
        log.warning("The old checkpoint %r could not be removed: %s", path, error)


def collected(checkpoint: Any, control: Control) -> Any:
    """Return ``checkpoint`` with whole tensors on rank 0, unchanged on the others. A collective.

    For writers that do not know sharded values. Rank 0 needs host memory for all of them.
    """
    with agreed(control, "Saving"):
        mine = Skeleton.of(checkpoint)
    values = mine.sharded_values()
    whole: dict[int, torch.Tensor] = {}
    is_first = control.rank == 0
    for name in control.broadcast_object(list(values)):
        value = values[name]
        made = (
            torch.empty_strided(*value.facts[:2], dtype=value.dtype) if not control.rank else None
        )
        for start, chunk in brought(value, control):
            assert made is not None
            bytes_of(made.untyped_storage())[start : start + len(chunk)] = chunk
        if made is not None:
            whole[id(value)] = made
    return _with(checkpoint, whole) if is_first else checkpoint


def _with(value: Any, whole: dict[int, torch.Tensor]) -> Any:
    """Copy nested containers with whole tensors in place of sharded values."""
    if isinstance(value, ShardedValue):
        settled = value.settled()
        return whole[id(value)] if settled is value else settled
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _with(item, whole) for key, item in value.items()})
        return copied
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_with(item, whole) for item in value)
    return value
