"""The saves of a run: one after another, each from all ranks at once.

1. **Agree**: every rank takes its checkpoint apart; rank 0 decides what is written, and every rank
   must have its parts of it.
2. **Write**: rank 0 creates a file or folder under a temporary name; if all ranks see it, each
   writes its parts to their places and syncs them to the disk. If some rank does not, or the target
   is a URL, the others send their parts of a file to rank 0, which writes it.
3. **Rename**: rank 0 gives the file or folder its final name, or uploads the file.

If a process dies in between, an earlier checkpoint of the same name stays whole (``files.py``).
Nothing is gathered, and a rank copies no more than a buffer at a time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import os
import shutil
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import torch
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.archive import Archive, Skeleton, bytes_of, joined_checksum
from lightning_zero.checkpoint.files import (
    PROVENANCE,
    Provenance,
    Writer,
    local_path,
    put_in_place,
    remove,
    temporary,
)
from lightning_zero.checkpoint.values import ShardedValue
from lightning_zero.comm import Control, Outcome, agreed
from lightning_zero.tensors import runs_outside, uncollected

log = logging.getLogger(__name__)


class Save(ABC):
    """One save of one checkpoint; all ranks construct and :meth:`run` it together.

    Sharded values are taken from every rank, the rest of ``checkpoint`` from rank 0.

    Attributes:
        values: The sharded values of this rank's checkpoint, by name.
        others: On rank 0, the unsharded tensors and other objects that the format stores.
    """

    is_folder: ClassVar[bool]
    values: dict[str, ShardedValue]
    others: dict[Any, Any]

    def __init__(
        self, checkpoint: Any, path: str, control: Control, provenance: Provenance
    ) -> None:
        self.path = path
        self.control = control
        self.provenance = provenance
        with self.together():
            self._take(checkpoint)

    def together(self) -> Any:
        """Return a context that all ranks leave with an error if any does."""
        return agreed(self.control, f"Saving {self.path!r}")

    def detach(self, control: Control) -> None:
        """Copy what this rank saves to host memory, so that another thread may :meth:`run`."""
        for name, value in self.values.items():
            self.values[name] = value.with_part(value.part.to("cpu", copy=True))
        for key, other in self.others.items():
            is_tensor = isinstance(other, Tensor)
            copied = other.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(other)
            self.others[key] = copied
        self.control = control

    def run(self) -> None:
        """Write the checkpoint; if any rank fails, all raise, and an earlier one is unchanged."""
        layout, target = self._agreed_layout(), local_path(self.path)
        with contextlib.ExitStack() as stack:
            path: Path | None = None
            with self.together():
                if self.control.rank == 0:
                    here = target or Path(tempfile.gettempdir(), "lightning_zero-upload")
                    path = stack.enter_context(temporary(here, is_folder=self.is_folder))
            place: Path = self.control.broadcast_object(path)
            all_see = all(self.control.gather_objects(target is not None and place.exists()))
            self._write(layout, place, all_see=all_see)
            with self.together():
                if path is not None and target is not None:
                    put_in_place(path, target)
                elif path is not None:
                    _upload(path, self.path)

    def _agreed_layout(self) -> Any:
        """Return rank 0's layout; raise on all ranks unless each has its parts of it."""
        mine = {name: (value.facts[0], value.facts[2]) for name, value in self.values.items()}
        needed, layout = self.control.broadcast_object(
            (mine, self._layout()) if self.control.rank == 0 else None
        )
        with self.together():
            for name, (shape, dtype) in needed.items():
                if mine.get(name) != (shape, dtype):
                    found = "no" if name not in mine else "a different"
                    raise ValueError(
                        f"this rank's checkpoint has {found} {name!r}, but rank 0's has one of"
                        f" shape {shape}, {dtype}. A hook that edits the checkpoint must make the"
                        " same edits on every rank."
                    )
        return layout

    # -- what a format does ------------------------------------------------------------------------

    @abstractmethod
    def _take(self, checkpoint: Any) -> None:
        """Take a checkpoint apart: set ``values`` and ``others``, which stay where they are."""

    def _layout(self) -> Any:
        """Return what every rank needs to know to write its parts; called on rank 0."""
        return None

    @abstractmethod
    def _write(self, layout: Any, place: Path, *, all_see: bool) -> None:
        """Write and sync everything; ``all_see`` whether all ranks see ``place``."""


class FileSave(Save):
    """A save to one plain file, which ``torch.save`` would have written.

    Rank 0 works out where every record lies. Finally, it writes the headers of the records, which
    have the checksums.
    """

    is_folder = False

    @override
    def _take(self, checkpoint: Any) -> None:
        skeleton = Skeleton(checkpoint)
        self._pickled, self._names = skeleton.pickled, skeleton.names
        self.values, self.others = skeleton.values, {} if self.control.rank else skeleton.others

    @override
    def _layout(self) -> dict[str, tuple[int, int]]:
        """Return the number of each value's record, and where it begins."""
        texts = {
            "data.pkl": self._pickled,
            "byteorder": sys.byteorder.encode(),
            "version": b"3\n",
            PROVENANCE: self.provenance.encoded(),
        }
        tensors = {n: torch.frombuffer(bytearray(t), dtype=torch.uint8) for n, t in texts.items()}
        storages = {**self.others, **{n: self.values[name] for n, name in self._names.items()}}
        self._records = [*tensors.values(), *(storages[n] for n in range(len(storages)))]
        names = [*texts, *(f"data/{n}" for n in range(len(storages)))]
        sizes = [
            r.whole_nbytes if isinstance(r, ShardedValue) else r.numel() for r in self._records
        ]
        self._archive = Archive.of(zip(names, sizes, strict=True))
        first, places = len(texts), self._archive.places
        return {name: (first + n, places[first + n]) for n, name in self._names.items()}

    @override
    def _write(self, layout: Mapping[str, tuple[int, int]], place: Path, *, all_see: bool) -> None:
        if not all_see:
            _log_once(self.path)
        parts, written = self._parts(layout, brings=not all_see), []
        outcome = Outcome()
        if self.control.rank == 0 or all_see:
            with outcome.attempt(), Writer(place) as writer:
                if self.control.rank == 0:
                    os.truncate(place, self._archive.end)
                for number, offset, start, content in parts:
                    checksum = writer.write(offset + start, content)
                    written.append((number, start, content.numel(), checksum))
                writer.sync()
        for _ in parts:  # receive the rest even after an error, since the others are sending it
            pass
        outcome.agree(self.control, f"Saving {self.path!r}")
        every = itertools.chain(*self.control.gather_objects(written))
        with self.together():
            if self.control.rank == 0:
                joined: list[list[tuple[int, int, int]]] = [[] for _ in self._records]
                for number, *part in every:
                    joined[number].append((*part,))
                sizes = (header.file_size for header in self._archive.headers)
                self._archive.seal(place, [*map(joined_checksum, joined, sizes)])

    def _parts(
        self, layout: Mapping[str, tuple[int, int]], *, brings: bool
    ) -> Iterator[tuple[int, int, int, Tensor]]:
        """Yield a record's number and place, where in it this rank's part begins, and the part.

        With ``brings``, rank 0 yields those of all ranks and the others, which send theirs, none.
        """
        if self.control.rank == 0:
            for number, content in enumerate(self._records):
                if not isinstance(content, ShardedValue):
                    yield number, self._archive.places[number], 0, content
        for name, place in layout.items():
            value = self.values[name]
            if brings:
                for start, chunk in self.control.collect(value.part_bytes, value.start_byte):
                    yield *place, start, chunk
            elif value.part.numel():
                yield *place, value.start_byte, value.part_bytes


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
        save = kind(checkpoint, self.control.broadcast_object(path), self.control, provenance)
        if not in_background:
            save.run()
            return
        self._background = self._background or self.control.separate()
        self._executor = self._executor or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        save.detach(self._background)
        self._running.append(self._executor.submit(save.run))

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
        values = Skeleton(checkpoint).values
    for name in control.broadcast_object(list(values)):
        value = values[name]
        device = "meta" if control.rank else "cpu"
        whole = torch.empty_strided(*value.facts[:2], dtype=value.dtype, device=device)
        for start, chunk in control.collect(value.part_bytes, value.start_byte):
            bytes_of(whole.untyped_storage())[start : start + len(chunk)] = chunk
        if control.rank == 0:
            value.value = whole
    return checkpoint if control.rank else _settled(checkpoint)


def _settled(value: Any) -> Any:
    """Copy nested containers with whole tensors in place of sharded values."""
    if isinstance(value, ShardedValue):
        return value.settled()
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _settled(item) for key, item in value.items()})
        return copied
    return type(value)(map(_settled, value)) if type(value) in (list, tuple) else value


def _upload(file: Path, url: str) -> None:
    """Upload a file, which gets its name only once it is complete."""
    file_system, place = fsspec.core.url_to_fs(url)
    file_system.makedirs(os.path.dirname(place), exist_ok=True)
    with (
        file.open("rb") as source,
        file_system.transaction,
        file_system.open(place, "wb") as copy,
    ):
        shutil.copyfileobj(source, copy, 2**24)


@functools.cache
def _log_once(path: str) -> None:
    log.info("%r is not on a disk that all ranks share, so rank 0 writes it for all.", path)
