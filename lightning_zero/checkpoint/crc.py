"""CRC-32 of concatenated byte strings, computed without the bytes."""

from __future__ import annotations

import functools


def joined_checksum(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two concatenated byte strings, given their CRCs and the second's length.

    Appending ``n`` zero bytes multiplies a CRC by ``x**(8 n)`` modulo the CRC polynomial (M. Adler,
    ``crc32_combine`` of zlib).
    """
    if not first:
        return second
    return _times(_power_of_x(8 * second_nbytes), first) ^ second


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
