"""Saves of one run, one after another, in this thread or behind the training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from lightning_zero.checkpoint.agreement import Outcome
from lightning_zero.checkpoint.provenance import Provenance
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.skeleton import Skeleton, bytes_of
from lightning_zero.checkpoint.spread import Spread
from lightning_zero.checkpoint.target import remove
from lightning_zero.comm import Comm


class Job(Protocol):
    """One save of one checkpoint."""

    def detach(self, comm: Comm) -> None:
        """Copy what is needed, so that :meth:`run` may run in another thread."""

    def run(self) -> None:
        """Write it."""


class Saver:
    """Writes and removes checkpoints; all ranks call every method together.

    In the background a save ends its part in training when this rank's values are copied to host
    memory. The next save waits for it. Removals queue up behind it and are left out when it failed,
    so that a checkpoint goes only when its successor is there.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._apart: Comm | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._removals: list[Future[None]] = []
        self._agreed: dict[str, str] = {}

    def save(
        self,
        checkpoint: Any,
        path: str,
        provenance: Provenance,
        *,
        in_background: bool = False,
        kind: Callable[..., Job] = Save,
    ) -> None:
        """Write ``checkpoint`` to ``path``; in the background, return when it is copied.

        ``kind`` makes the job, of the checkpoint, path, ranks and provenance: a file by default.
        """
        self.wait()
        path = self._agree(path)
        save = kind(checkpoint, path, self.comm, provenance)
        if not in_background:
            save.run()
            return
        self._apart = self._apart or self.comm.apart()
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        save.detach(self._apart)
        self._running = self._executor.submit(save.run)

    def _agree(self, path: str) -> str:
        agreed: str = self.comm.broadcast_object(path)
        if agreed != path:
            self._agreed[path] = agreed
        return agreed

    def path_of(self, path: str) -> str:
        """Where the file is that this rank saved as ``path``: rank 0 may have chosen."""
        return self._agreed.get(path, path)

    def remove(self, path: str) -> None:
        """Remove a checkpoint, when the saves before have ended well."""
        if self.comm.rank:
            return
        if self._executor is None or self._running is None:
            remove(path)
            return
        running = self._running
        self._removals.append(
            self._executor.submit(lambda: None if running.exception() else remove(path))
        )

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            Exception: A save in the background failed; on all ranks.
        """
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


def collected(checkpoint: Any, comm: Comm) -> Any:
    """``checkpoint`` with whole tensors on rank 0; unchanged on the others. A collective.

    For writers that know nothing of spread tensors. Rank 0 needs host memory for all of them.
    """
    outcome, mine = Outcome(), Skeleton(b"", ())
    with outcome.attempt():
        mine = Skeleton.of(checkpoint)
    outcome.agree(comm, "Saving")
    spreads = mine.spreads()
    whole: dict[str, torch.Tensor] = {}
    for key in comm.broadcast_object(list(spreads)):
        spread = spreads[key]
        part = spread.part_bytes
        target = torch.empty(0, dtype=torch.uint8)
        if comm.rank == 0:
            whole[key] = torch.empty_strided(spread.shape, spread.stride(), dtype=spread.dtype)
            target = bytes_of(whole[key].untyped_storage())
        position = 0
        for _, message in comm.collect(part, comm.gather_objects(len(part))):
            target[position : position + len(message)] = message
            position += len(message)
    return _with(checkpoint, whole) if comm.rank == 0 else checkpoint


def _with(value: Any, whole: dict[str, torch.Tensor]) -> Any:
    """A copy of nested containers with whole tensors in place of spread ones."""
    if isinstance(value, Spread):
        return whole[value.key]
    if isinstance(value, dict):
        twin = copy.copy(value)
        twin.update({key: _with(item, whole) for key, item in value.items()})
        return twin
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_with(item, whole) for item in value)
    return value
