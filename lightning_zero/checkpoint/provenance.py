"""Who wrote a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

FORMAT = 1
"""Number of the format, to tell checkpoints of later versions by."""

PROVENANCE = "lightning_zero.json"
"""The record, or in a directory the file, that tells who wrote it."""


@dataclass(frozen=True)
class Provenance:
    """Who wrote a checkpoint; stage 0 stands for a conversion."""

    stage: int
    world_size: int
    precision: str
    format: int = FORMAT

    def encoded(self) -> bytes:
        """The content of the record."""
        return json.dumps(asdict(self)).encode()
