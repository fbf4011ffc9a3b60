"""Which stages a case is run at, where each at all of them would prove the same over and over.

Other things that many cases could each be run with take turns too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

STAGES = (1, 2, 3)
T = TypeVar("T")
EVERY_STAGE = "LIGHTNING_ZERO_EVERY_STAGE"
"""The variable by which stages take no turns."""


def in_turns(*case: Any) -> Sequence[int]:
    """Stage 3 and, in turns from case to case, 1 or 2, whose weights are whole alike.

    A case is known by the names in it; those with a slash are folders. All three stages where every
    test runs.
    """
    names = [getattr(part, "__name__", part) for part in case]
    text = " ".join(name for name in names if isinstance(name, str) and "/" not in name)
    return STAGES if EVERY_STAGE in os.environ else (1 + zlib.crc32(text.encode()) % 2, 3)


def turn_of(number: int, choices: Sequence[T]) -> Sequence[T]:
    """One of the choices, the next one for the next number; all of them where every test runs."""
    return choices if EVERY_STAGE in os.environ else [choices[number % len(choices)]]
