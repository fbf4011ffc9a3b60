"""Batches: the parts of an optimizer's pieces that are stepped together from files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lightning_zero.comm import PAGE

_BATCH_BYTES = 8 * 2**20
"""The most bytes of pieces in a batch: smaller requests are slower, and larger batches leave the
disk idle one way for longer, when a step begins and ends."""

_LARGEST_ELEMENT = 16


class HasBytes(Protocol):
    """A piece, or what stands for one."""

    @property
    def nbytes(self) -> int:
        """Its size."""


Sized = TypeVar("Sized", bound=HasBytes)


@dataclass(frozen=True)
class Part(Generic[Sized]):
    """Bytes ``[start, stop)`` of a piece: all of a small one."""

    piece: Sized
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Return whether the piece ends with it."""
        return self.stop == self.piece.nbytes

    @property
    def is_cut(self) -> bool:
        """Return whether there are others of the piece."""
        return self.nbytes < self.piece.nbytes


def batches_of(units: Iterable[Sequence[Sized]]) -> list[list[Part[Sized]]]:
    """Return the pieces of units in batches, large pieces in several.

    Of a piece that is cut all parts but the last are batches by themselves, and have whole pages of
    elements, of whatever size: in a file they follow each other.
    """
    pages = _LARGEST_ELEMENT * PAGE
    at_once = -(-_BATCH_BYTES // pages) * pages
    batches: list[list[Part[Sized]]] = []
    for unit in units:
        room = -1
        for piece in unit:
            for start in range(0, max(1, piece.nbytes), at_once):
                part = Part(piece, start, min(start + at_once, piece.nbytes))
                if part.nbytes > room or part.is_cut:
                    batches.append([])
                    room = _BATCH_BYTES
                batches[-1].append(part)
                room -= part.nbytes
    return batches
