"""A checksum of blocks that is computed as fast as memory is read.

A block is 8192 words of 64 bits, viewed as nine rows of 920 words that start 909 words apart, so
that the rows overlap slightly and cover the block. The column sums, modulo 2**64, are mixed so that
their upper halves affect lower digits too, and added up with odd weights.

Every change within one word is found. So is every other change, unless the differences cancel out
in each column, or by a coincidence less likely than one in 2**32. To cancel out, words must be
swapped, or changed in opposite directions (in the highest bit: in any), at a distance that is a
multiple of 7272 bytes; no sectors or pages of a block are that far apart. So words, sectors and
pages that are zeroed, repeated, moved or swapped are found, as are flips of several bits and, since
nine is odd, a bit stuck in all words. It is no cryptographic hash: collisions can be constructed.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

BLOCK_BYTES = 2**16
"""Bytes that share a sum."""

_WORDS = BLOCK_BYTES // 8
_AT_ONCE = 32  # blocks: their sums stay in the cache
_ROWS, _STEP = 9, 909
_COLUMNS = _WORDS - (_ROWS - 1) * _STEP


def word_sums(content: memoryview) -> Tensor:
    """Return the sums ``[n]`` of consecutive blocks: writable bytes ``[n * BLOCK_BYTES]``."""
    with torch.no_grad():
        words = torch.frombuffer(content, dtype=torch.int64).view(-1, _WORDS)
        # Reused, since fresh memory each time would cost as much as the sums.
        columns, upper = torch.empty(2, min(len(words), _AT_ONCE), _COLUMNS, dtype=torch.int64)
        sums = []
        for some in torch.split(words, _AT_ONCE):
            count = len(some)
            rows = some.as_strided((count, _ROWS, _COLUMNS), (_WORDS, _STEP, 1))
            torch.sum(rows, 1, out=columns[:count])
            torch.bitwise_right_shift(columns[:count], 31, out=upper[:count])
            sums.append(columns[:count].bitwise_xor_(upper[:count]).mv(_weights()))
        return torch.cat(sums)


@functools.cache
def _weights() -> Tensor:
    content = bytearray(hashlib.shake_128(b"lightning-zero").digest(8 * _COLUMNS))
    return torch.frombuffer(content, dtype=torch.int64) | 1
