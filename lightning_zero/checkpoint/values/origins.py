"""From the tensors of a loaded checkpoint to the bytes of files, and their checksums.

Tensors of a mapped file are ordinary ones. Which record their memory shows is kept beside them, by
storage, for as long as the storage lives.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import CheckedBytes, CheckedRange
from lightning_zero.checkpoint.file.records import stored_records
from lightning_zero.checkpoint.values.lazy_tensor import LazyTensor
from lightning_zero.tensors import tensors_in

_records: WeakKeyDictionary[torch.UntypedStorage, CheckedBytes] = WeakKeyDictionary()


def note_records(
    path: Path, archive: zipfile.ZipFile, storages: Iterable[torch.UntypedStorage]
) -> None:
    """Keep which record each of the ``storages`` shows that a mapped file was loaded to."""
    records = stored_records(path, archive)
    by_place = {record.offset: record for record in records if record.nbytes}
    shown = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
    # Where the file is mapped torch does not say. All storages fit at one address only.
    for offset in sorted(by_place):
        base = min(shown, default=0) - offset
        if shown and all(place - base in by_place for place in shown):
            for place, storage in shown.items():
                _records[storage] = by_place[place - base]
            return


def ranges_of(
    name: str, value: Tensor, start: int = 0, stop: int | None = None
) -> Iterator[CheckedRange]:
    """Yield the bytes of files that elements ``[start, stop)`` of a tensor are read from.

    Elements are counted in the tensor's memory order. ``name`` is for errors.
    """
    if isinstance(value, LazyTensor):
        yield from value.ranges(name, start, value.numel() if stop is None else stop)
    elif value.layout == torch.strided and not value.is_meta and value.numel():
        record = _records.get(value.untyped_storage())
        if record is not None:
            span = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            last = span + 1 if stop is None else stop
            begin = int(value.storage_offset())
            size = value.element_size()
            yield CheckedRange(name, record, (begin + start) * size, (begin + last) * size)


def forget_records(value: Any) -> None:
    """Drop what is known of the files of the tensors in ``value``."""
    for tensor in tensors_in(value):
        _records.pop(tensor.untyped_storage(), None)
