"""A checksum of blocks that is added up as fast as memory is read.

A block is 8192 words of 64 bits. It is seen as nine rows that begin 909 words apart, each 920 long,
so that the rows overlap a little and cover all. The sums of the columns, modulo 2**64, are mixed,
so that their upper halves count in lower digits too, and added up with odd weights.

Every change within one word is found, and so is every other but those whose differences cancel
out in each column, or by a coincidence of less than one in 2**32. To cancel out, words must be
swapped, or changed in opposite directions (in their highest bit: in any), at a distance that is a
multiple of 7272 bytes, which is none of sectors or pages. So words, sectors and pages that are
zeroed, repeated, moved or swapped are found, as are flips of several bits and, as nine is odd, a
bit that is stuck in all words. It is no cryptographic hash: content of the same sum can be made.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

BLOCK_BYTES = 2**16
"""Bytes that share a sum."""

_WORDS = BLOCK_BYTES // 8
_ROWS, _STEP = 9, 909
_COLUMNS = _WORDS - (_ROWS - 1) * _STEP


def word_sums(content: memoryview) -> Tensor:
    """Return the sums of blocks in a row: of bytes ``[n * BLOCK_BYTES]``, writable, ``[n]``."""
    with torch.no_grad():
        words = torch.frombuffer(content, dtype=torch.int64)
        rows = words.as_strided((len(words) // _WORDS, _ROWS, _COLUMNS), (_WORDS, _STEP, 1))
        columns = rows.sum(1)
        return columns.bitwise_xor_(columns >> 31).mv(_weights())


@functools.cache
def _weights() -> Tensor:
    content = bytearray(hashlib.shake_128(b"lightning-zero").digest(8 * _COLUMNS))
    return torch.frombuffer(content, dtype=torch.int64) | 1
