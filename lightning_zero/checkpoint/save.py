"""Writing one checkpoint from all ranks at once.

1. **Agree**: every rank takes its checkpoint apart; rank 0 decides what is written, and every rank
   must have its parts of it.
2. **Write**: rank 0 creates a file or folder under a temporary name; if all ranks see it, each
   writes its parts to their places and syncs them to the disk. If some rank does not, or the target
   is a URL, the others send their parts of a file to rank 0, which writes it.
3. **Rename**: rank 0 gives the file or folder its final name, or uploads the file.

If a process dies in between, an earlier checkpoint of the same name stays whole (``atomic.py``).
Nothing is gathered, and a rank copies no more than a buffer at a time.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from torch import Tensor
from typing_extensions import override

from lightning_zero.checkpoint.archive import Archive, joined_checksum
from lightning_zero.checkpoint.atomic import Temporary, local_path
from lightning_zero.checkpoint.provenance import Provenance
from lightning_zero.checkpoint.skeleton import Content, Skeleton, size_of
from lightning_zero.checkpoint.values import ShardedValue
from lightning_zero.checkpoint.writer import Writer
from lightning_zero.comm import Control, Outcome, agreed

log = logging.getLogger(__name__)


class Save(ABC):
    """One save of one checkpoint; all ranks construct and :meth:`run` it together.

    Sharded values are taken from every rank, the rest of ``checkpoint`` from rank 0. ``on_written``
    is called with the number of bytes that this rank has written since the last call.
    """

    def __init__(
        self,
        checkpoint: Any,
        path: str,
        control: Control,
        provenance: Provenance,
        on_written: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.path = path
        self.control = control
        self.provenance = provenance
        self.on_written = on_written
        with self.together():
            self._take(checkpoint)

    def together(self) -> Any:
        """Return a context that all ranks leave with an error if any does."""
        return agreed(self.control, f"Saving {self.path!r}")

    def detach(self, control: Control) -> None:
        """Copy this rank's values to host memory, so that :meth:`run` may run in another thread."""
        self._copy_to_host()
        self.control = control

    def run(self) -> None:
        """Write the checkpoint; if any rank fails, all raise, and an earlier one is unchanged."""
        layout = self._agreed_layout()
        target, temporary = local_path(self.path), None
        try:
            with self.together():
                if self.control.rank == 0:
                    temporary = self._create(target, layout)
            place: Path = self.control.broadcast_object(temporary and temporary.path)
            sees = self.control.gather_objects(target is not None and place.exists())
            blind = [rank for rank, it_sees in enumerate(sees) if not it_sees]
            self._write(layout, place, blind)
            with self.together():
                if temporary is None:
                    return
                if target is not None:
                    temporary.keep()
                else:
                    _upload(temporary.path, self.path)
        finally:
            if temporary is not None:
                temporary.close()

    def _agreed_layout(self) -> Any:
        """Return rank 0's layout; raise on all ranks unless each has its parts of it."""
        mine: dict[str, Any] = {}
        known: dict[Any, Any] = {}
        for name, value in self.values.items():
            shape, _, dtype = value.facts
            # Of equal ones the same object, which an exchange carries once.
            mine[name] = known.setdefault((shape, dtype), (shape, dtype))
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

    @property
    @abstractmethod
    def values(self) -> Mapping[str, ShardedValue]:
        """The sharded values of this rank's checkpoint, by name."""

    @abstractmethod
    def _take(self, checkpoint: Any) -> None:
        """Take a checkpoint apart; its tensors stay where they are."""

    @abstractmethod
    def _copy_to_host(self) -> None:
        """Replace this rank's values by host copies that nothing else changes."""

    @abstractmethod
    def _layout(self) -> Any:
        """Return what every rank needs to know to write its parts; called on rank 0."""

    @abstractmethod
    def _create(self, target: Path | None, layout: Any) -> Temporary:
        """Create the temporary file or folder, on rank 0; ``target`` is ``None`` for a URL."""

    @abstractmethod
    def _write(self, layout: Any, place: Path, blind: list[int]) -> None:
        """Write and sync everything; ``blind`` are the ranks that do not see ``place``."""


class _Layout(NamedTuple):
    """The records of a file, and the names of the sharded ones; rank 0 has the others."""

    archive: Archive
    names: dict[int, str]


class FileSave(Save):
    """A save to one plain file, which ``torch.save`` would have written.

    Rank 0 works out where every record lies and creates the file at its full size. At last it
    writes the checksums of the records, which lie in the seams between them.
    """

    _skeleton: Skeleton

    @override
    def _take(self, checkpoint: Any) -> None:
        self._skeleton = Skeleton.of(checkpoint)

    @override
    def _copy_to_host(self) -> None:
        self._skeleton = self._skeleton.copied_to_host()

    @property
    @override
    def values(self) -> dict[str, ShardedValue]:
        return self._skeleton.sharded_values()

    def _records(self) -> list[tuple[str, Content]]:
        return self._skeleton.records(self.provenance.encoded())

    @override
    def _layout(self) -> _Layout:
        records = self._records()
        archive = Archive.build((name, size_of(content)) for name, content in records)
        first = len(records) - len(self._skeleton.storages)
        names = {first + number: name for number, name in self._skeleton.names.items()}
        return _Layout(archive, names)

    @override
    def _create(self, target: Path | None, layout: _Layout) -> Temporary:
        here = target or Path(tempfile.gettempdir(), "lightning_zero-upload")
        return Temporary(here, layout.archive.nbytes)

    @override
    def _write(self, layout: _Layout, place: Path, blind: list[int]) -> None:
        if blind:
            _log_once(self.path)
        archive, shares = layout.archive, array("q")
        parts = self._parts(layout, brings=bool(blind))
        outcome = Outcome()
        if self.control.rank == 0 or not blind:
            with outcome.attempt(), Writer(place, self.on_written) as writer:
                for index, start, content in parts:
                    offset = archive.records[index].offset + start
                    checksum = writer.write(offset, content)
                    shares.extend((index, start, len(content), checksum))
                writer.sync()
        for _ in parts:  # receive the rest even after an error, since the others are sending it
            pass
        outcome.agree(self.control, f"Saving {self.path!r}")
        every = self.control.gather_objects(shares.tobytes())
        with self.together():
            if self.control.rank == 0:
                self._seal(archive, place, every)

    def _parts(self, layout: _Layout, *, brings: bool) -> Iterator[tuple[int, int, bytes | Tensor]]:
        """Yield a record, where this rank's part of it begins, and the part.

        With ``brings``, rank 0 yields those of all ranks and the others, which send theirs, none.
        """
        values, records = self.values, self._records() if self.control.rank == 0 else []
        for index in range(len(layout.archive.records)):
            if index not in layout.names:
                if records:
                    content: Any = records[index][1]
                    yield index, 0, content
                continue
            value = values[layout.names[index]]
            if brings:
                for start, chunk in brought(value, self.control):
                    yield index, start, chunk
            elif value.part.numel():
                yield index, value.start_byte, value.part_bytes

    def _seal(self, archive: Archive, place: Path, shares: list[bytes]) -> None:
        parts: list[list[tuple[int, int, int]]] = [[] for _ in archive.records]
        for numbers in (array("q", of_rank) for of_rank in shares):
            for position in range(0, len(numbers), 4):
                index, start, nbytes, checksum = numbers[position : position + 4]
                parts[index].append((start, nbytes, checksum))
        wholes = [
            joined_checksum(of_record, record.nbytes)
            for record, of_record in zip(archive.records, parts, strict=True)
        ]
        with Writer(place) as writer:
            for index in range(len(wholes) + 1):
                writer.write(*archive.seam(index, wholes))
            writer.sync()


def brought(value: ShardedValue, control: Control) -> Iterator[tuple[int, Tensor]]:
    """Yield byte offsets and bytes of all ranks' parts on rank 0, and send this rank's part.

    A collective; the other ranks yield nothing.
    """
    part = value.part_bytes
    # Of cut parameters, the ranks' parts are not in the order of the ranks.
    starts, sizes = zip(*control.gather_objects((value.start_byte, len(part))), strict=True)
    places = [*starts]
    for peer, message in control.collect(part, sizes):
        yield places[peer], message
        places[peer] += len(message)


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
