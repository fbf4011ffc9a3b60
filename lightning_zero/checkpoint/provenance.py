"""The record of a checkpoint's origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Number of the format; it grows when older readers would not understand a new one."""

PROVENANCE = "lightning_zero.json"
"""The record, or in a directory the file, that says who wrote a checkpoint."""


@dataclass(frozen=True)
class Provenance:
    """The origin of a checkpoint; stage 0 stands for a conversion."""

    stage: int
    world_size: int
    precision: str
    format: int = FORMAT

    def encoded(self) -> bytes:
        """Return the content of the record."""
        return json.dumps(asdict(self)).encode()


class LaterFormat(ValueError):
    """A checkpoint has a format that only later versions of this package can read."""


def check_version(path: Path, origin: Mapping[str, Any] | None) -> None:
    """Raise if the record ``origin`` of the checkpoint at ``path`` is of a later format."""
    if origin is not None and int(origin.get("format", 0)) > FORMAT:
        raise LaterFormat(
            f"{str(path)!r} has format {origin['format']} of a later lightning-zero, but this"
            f" version reads only formats up to {FORMAT}. Update the package"
        )
