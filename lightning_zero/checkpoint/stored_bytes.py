"""Bytes of a file that are checked while they are read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import PartChecksums, Run, runs
from lightning_zero.checkpoint.open_file import OpenFile, memory_of

_AT_ONCE = 2**21
_AHEAD_BYTES = 2**25
"""How far the system reads ahead: asking for more at once would block until most of it is read."""


class DamageError(ValueError):
    """Bytes of a file do not match their checksum."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of a file, and their checksums.

    Attributes:
        file: The file; each use opens it, unless it is ``kept`` open.
        offset: Where the bytes begin in it.
        nbytes: How many they are.
        whole: The CRC of all of them; ``None`` if the writer left it out.
        parts: The checksums of blocks, which only this package writes.
    """

    file: Path
    offset: int
    nbytes: int
    whole: int | None
    parts: Sequence[PartChecksums] = ()
    kept: OpenFile | None = field(default=None, compare=False, repr=False)

    def can_check(self, start: int, stop: int) -> bool:
        """Return whether bytes ``[start, stop)`` can be checked without reading others."""
        return bool(self.parts) or (self.whole is not None and stop - start == self.nbytes)

    def read(self, name: str, start: int, out: Tensor, *, checks: bool = True) -> None:
        """Fill ``out``, bytes ``[n]``, from ``start`` on, and check all blocks that they touch.

        Raises:
            DamageError: They are damaged; ``name`` is the tensor that they belong to.
            OSError: The file is too short, or the disk failed.
        """
        stop, file = start + out.numel(), self.opened()
        if start == stop:
            return
        if not checks:
            file.read(out, self.offset + start)
            return
        memory = memory_of(out)
        if not self.parts:
            file.read_once(memory, self.offset + start)
            if self.can_check(start, stop) and zlib.crc32(memory) != self.whole:
                raise self._damaged(name, start, stop)
            return
        for run in self._runs(file, start, stop):
            if start <= run.start and run.stop <= stop:
                self._read_run(file, name, run, memory[run.start - start : run.stop - start])
                continue
            # A block of which only a part is wanted.
            block = torch.empty(run.stop - run.start, dtype=torch.uint8, device="cpu")
            self._read_run(file, name, run, memory_of(block))
            first, last = max(start, run.start), min(stop, run.stop)
            out[first - start : last - start] = block[first - run.start : last - run.start]

    def check(self, name: str, start: int, stop: int) -> None:
        """Raise a ``DamageError`` if a block that bytes ``[start, stop)`` touch is damaged."""
        if start == stop or not self.can_check(start, stop):
            return
        file, checksum = self.opened(), 0
        buffer = torch.empty(min(self.nbytes, _AT_ONCE), dtype=torch.uint8, device="cpu")
        memory = memory_of(buffer)
        if self.parts:
            for run in self._runs(file, start, stop):
                self._read_run(file, name, run, memory[: run.stop - run.start])
            return
        for place in range(0, self.nbytes, _AT_ONCE):
            content = memory[: min(_AT_ONCE, self.nbytes - place)]
            file.read_once(content, self.offset + place)
            checksum = zlib.crc32(content, checksum)
        if checksum != self.whole:
            raise self._damaged(name, 0, self.nbytes)

    def _runs(self, file: OpenFile, start: int, stop: int) -> Iterator[Run]:
        """Yield the runs that bytes ``[start, stop)`` touch, while the system reads ahead."""
        asked = start
        for run in runs(self.parts, start, stop):
            if run.stop < stop and asked < min(run.stop + _AHEAD_BYTES // 2, stop):
                upto = min(run.stop + _AHEAD_BYTES, stop)
                file.will_read(self.offset + asked, upto - asked)
                asked = upto
            yield run

    def _read_run(self, file: OpenFile, name: str, run: Run, memory: memoryview) -> None:
        file.read_once(memory, self.offset + run.start)
        damage = run.damage_in(memory)
        if damage is not None:
            raise self._damaged(name, *damage)

    def opened(self) -> OpenFile:
        """Return the kept file, or open the file until the returned object is collected."""
        return self.kept or OpenFile(self.file)

    def _damaged(self, name: str, start: int, stop: int) -> DamageError:
        return DamageError(
            f"{str(self.file)!r} is damaged: bytes [{start}, {stop}) of {name!r}, which start at"
            f" byte {self.offset + start} of the file, do not match their checksum. Load another"
            " checkpoint or another copy of this one"
        )
