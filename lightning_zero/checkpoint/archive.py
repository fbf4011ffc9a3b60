"""A plain checkpoint file: one pickle and the storages it refers to, in the zip of ``torch.save``.

A checkpoint is a zip of stored (uncompressed) records: the pickle, and one record per storage. All
sizes are known before the first byte is written, so the place of every record is arithmetic, and
many processes can write one file::

    header | data.pkl | header | data/0 | header | data/1 | ... | directory
           ^ aligned           ^ aligned

Headers and the directory hold the records' checksums, so they are written last. The checksums are
those of the zip format: ``unzip -t`` and :mod:`zipfile` verify them.

The alternative, ``torch.save`` within ``torch.serialization.skip_data``, leaves space in the
same way, but loses tensors inside opaque objects, gives offsets only to readers that unpickle the
file, and leaves wrong checksums.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo, is_zipfile

import torch
from torch import Tensor

from lightning_zero.checkpoint.files import provenance
from lightning_zero.checkpoint.values import ShardedValue
from lightning_zero.tensors import internals, mapped_storage

ROOT = "archive/"
"""The folder in the zip that holds every record; torch takes it from the first record."""

_ALIGNMENT = 64  # of records, as in torch.save
_SECTOR = 512  # of disks, to which large records are aligned
_LARGE_BYTES = 2**20
_LEGACY = torch.serialization.MAGIC_NUMBER.to_bytes(10, "little")


class _Storage:
    """A stand-in for the storage of a sharded value while it is pickled."""

    def __init__(self, value: ShardedValue) -> None:
        self.value = value


class Skeleton(pickle.Pickler):
    """A pickle like that of ``torch.save``, and the content of the records ``data/0``, ....

    Args:
        value: The object to take apart; the tensors in it stay where they are.

    Attributes:
        names: The name of each sharded storage, the same on every rank, by its number.
        values: The sharded values, by name.
        others: The bytes ``[n]`` of the other storages, by number.
        pickled: The bytes that ``torch.load`` unpickles.
    """

    def __init__(self, value: Any) -> None:
        file = io.BytesIO()
        super().__init__(file, protocol=2)
        self.names: dict[int, str] = {}
        self.values: dict[str, ShardedValue] = {}
        self.others: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._counts: Counter[str] = Counter()
        self.dump(value)
        self.pickled = file.getvalue()

    def persistent_id(self, obj: Any) -> tuple[str, Any, str, str, int] | None:
        """Return the reference to a storage that the pickle has in its place."""
        if type(obj) in _PLAIN:  # most of what a pickle has
            return None
        if isinstance(obj, _Storage):
            value = obj.value
            if (number := self._number(id(value))) not in self.names:
                # Modules of one checkpoint, or copies of earlier values, may have equal keys.
                count = self._counts[value.key]
                self._counts[value.key] += 1
                self.names[number] = f"{value.key} ({count + 1})" if count else value.key
                self.values[self.names[number]] = value
            shape, _, dtype = value.facts
            kind = _storage_type(dtype) or torch.UntypedStorage
            size = prod(shape) * (dtype.itemsize if kind is torch.UntypedStorage else 1)
        elif isinstance(obj, torch.storage.TypedStorage):
            number = self._number_of(obj._untyped_storage)
            kind, size = _storage_type(obj.dtype), obj._size()  # type: ignore[no-untyped-call]
        elif isinstance(obj, torch.UntypedStorage):
            number, kind, size = self._number_of(obj), torch.UntypedStorage, obj.nbytes()
        else:
            return None
        # A reader need not have the writers' devices.
        return ("storage", kind, str(number), "cpu", size)

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild a sharded value."""
        if not isinstance(obj, ShardedValue):
            return NotImplemented
        if (value := obj.settled()) is not obj:
            return value.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        shape, stride, dtype = obj.facts
        args: Any = (_Storage(obj), 0, shape, stride, False, OrderedDict())
        if _storage_type(dtype) is None:
            return torch._utils._rebuild_tensor_v3, (*args, dtype)
        return torch._utils._rebuild_tensor_v2, args

    def _number(self, identity: int) -> int:
        return self._numbers.setdefault(identity, len(self._numbers))

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        number = self._number(storage._cdata)
        if number not in self.others:
            self.others[number] = bytes_of(storage)
        return number


def bytes_of(value: torch.UntypedStorage) -> Tensor:
    """Return the bytes ``[n]`` of a storage, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)


_PLAIN = {str, int, tuple, dict, float, bool, type(None), OrderedDict, torch.dtype, ShardedValue}


@functools.cache
def _storage_type(dtype: torch.dtype) -> Any:
    """Return the storage class that files name for a dtype; ``None`` for newer dtypes."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return getattr(torch, name) if name else None


# -- where the bytes lie ---------------------------------------------------------------------------


@dataclass
class Archive:
    """The records of a file: their headers, where each begins, and where the last one ends."""

    headers: list[ZipInfo]
    places: list[int]
    end: int

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int]]) -> Archive:
        """Lay out records of ``(name, nbytes)`` one after another."""
        made = cls([], [], 0)
        for name, nbytes in sizes:
            header = ZipInfo(ROOT + name)
            header.CRC, header.file_size, header.compress_size = 0, nbytes, nbytes
            header.header_offset, header.extra = made.end, _padding(0)
            least = made.end + len(header.FileHeader())
            alignment = _SECTOR if nbytes >= _LARGE_BYTES else _ALIGNMENT
            place = -(-least // alignment) * alignment
            header.extra = _padding(place - least)
            made.headers.append(header)
            made.places.append(place)
            made.end = place + nbytes
        return made

    def seal(self, path: Path, checksums: Sequence[int]) -> None:
        """Write the headers and the directory to a file that has the records."""
        with path.open("r+b") as file:
            with ZipFile(file, "w") as archive:
                for header, checksum in zip(self.headers, checksums, strict=True):
                    header.CRC = checksum
                    file.seek(header.header_offset)
                    file.write(header.FileHeader())
                    header.extra = b""  # which the directory need not repeat
                archive.filelist, archive.start_dir = self.headers, self.end
            file.flush()
            os.fsync(file.fileno())


def _padding(nbytes: int) -> bytes:
    """Return a header's extra field of ``nbytes`` bytes besides its own four."""
    return struct.pack("<HH", 0x4246, nbytes) + b"Z" * nbytes


def joined_checksum(parts: Sequence[tuple[int, int, int]], nbytes: int) -> int:
    """Return the CRC-32 of a record of ``nbytes``, given start, size and CRC of its parts.

    Appending ``n`` zero bytes multiplies a CRC by ``x**(8 n)`` modulo the CRC polynomial (M. Adler,
    ``crc32_combine`` of zlib).

    Raises:
        ValueError: The parts do not form the record.
    """
    whole = position = 0
    for start, size, checksum in sorted(parts):
        if start != position:
            break
        whole = (_times(_power_of_x(8 * size), whole) if whole else 0) ^ checksum
        position += size
    if position != nbytes or sum(size for _, size, _ in parts) != nbytes:
        raise ValueError(f"the parts of a record of {nbytes} bytes do not join at byte {position}")
    return whole


_POLYNOMIAL = 0xEDB88320  # bit-reversed: the highest bit is x**0


def _times(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@functools.lru_cache(4096)
def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(square, result)
        square = _times(square, square)
        exponent >>= 1
    return result


# -- reading ---------------------------------------------------------------------------------------

Share = tuple[int, int] | None
"""The number of a rank, which verifies a share of a file's storages, and the number of ranks."""


def read_archive(place: Path, path: str, share: Share = (0, 1), *, weights_only: bool) -> Any:
    """Return the content of a file named ``path``, its tensors mapped to memory.

    A ``share`` of its storages and everything else are verified before.

    Raises:
        ValueError: A record does not match its checksum, or the file is of a later version, or not
            of ``torch.save``.
    """
    if is_zipfile(place):
        provenance(place)
        with ZipFile(place) as archive:
            # Before unpickling: a damaged pickle may ask for any class.
            for name, reason in damaged_records(archive, share):
                raise ValueError(
                    f"{path!r} is damaged: {name!r} does not match its checksum ({reason}). Load"
                    " another checkpoint or another copy of this one"
                )
            infos = archive.infolist()
            is_mapped = all(info.compress_type == ZIP_STORED for info in infos)
        with internals.mapping_files_by(mapped_storage):
            return torch.load(place, map_location="cpu", weights_only=weights_only, mmap=is_mapped)
    # Files by torch before 1.6 are not zip archives; they are read as a whole.
    with place.open("rb") as file:
        if _LEGACY not in file.read(64):
            raise ValueError(f"{path!r} is not a checkpoint, or it is truncated")
    return torch.load(place, map_location="cpu", weights_only=weights_only)


def damaged_records(archive: ZipFile, share: Share = (0, 1)) -> Iterator[tuple[str, str]]:
    """Yield name and reason of damaged records: of all but storages, and of a share of those."""
    if not has_checksums(archive):
        return
    infos = archive.infolist()
    storages = sorted(
        (info for info in infos if "/data/" in info.filename), key=lambda info: -info.file_size
    )
    others = [info for info in infos if "/data/" not in info.filename]
    mine = storages[share[0] :: share[1]] if share is not None else []
    for info in (*others, *mine):
        try:
            with archive.open(info) as record:
                while record.read(2**20):
                    pass
        except Exception as error:  # a damaged archive can fail in any way
            yield info.filename.partition("/")[2], str(error)


def has_checksums(archive: ZipFile) -> bool:
    """Return whether the writer stored checksums, which torch can be told to omit."""
    return any(info.CRC for info in archive.infolist())
