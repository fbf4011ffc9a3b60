"""Code of all formats: the record of a checkpoint's origin, and errors that name the file."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_zero.comm import Control, agreed

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


# -- errors ----------------------------------------------------------------------------------------


class DamageError(ValueError):
    """A record of a file does not match its checksum."""


@dataclass(frozen=True)
class Reading:
    """A checkpoint that all ranks read together."""

    path: str
    control: Control
    weights_only: bool

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Enter a context that all ranks leave with an error, which names the file, if any does."""
        with agreed(self.control, f"Loading {self.path!r}"), naming(self.path):
            yield

    def compare(self, mine: str) -> None:
        """Raise a ``ValueError`` on all ranks unless all describe what they read alike."""
        found: dict[str, list[str]] = {}
        for rank, (its_path, its) in enumerate(self.control.gather_objects((self.path, mine))):
            found.setdefault(its, []).append(f"rank {rank} ({its_path!r})")
        if len(found) > 1:
            several = "; ".join(f"{', '.join(ranks)}: {its}" for its, ranks in found.items())
            raise ValueError(
                f"Loading {self.path!r} failed: the ranks see different checkpoints. {several}."
                " Copy one of them to every host, or load from a disk that all ranks share."
            )


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Enter a context in which any error that damage can cause becomes one that names the file."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path, error)) from error
    except (FileNotFoundError, PermissionError, MemoryError, LaterFormat, DamageError):
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if repr(path) in reason:
            raise
        raise ValueError(f"{path!r} is damaged or not a checkpoint: {reason}") from error


def _refusal(path: str, error: Exception) -> str:
    reason = str(error)
    if "GLOBAL" in reason or "weights_only" in reason.lower():
        kind = reason.split("Unsupported global: ")[-1] if "Unsupported global" in reason else ""
        what = kind.split(" was not")[0].strip() if kind else "objects of other classes"
        return (
            f"{path!r} holds more than tensors and plain values: {what}. If you trust its"
            " source, pass weights_only=False (--trust to `lightning-zero convert`), or allow the"
            " class with torch.serialization.add_safe_globals"
        )
    return f"{path!r} is damaged or not a checkpoint: {reason.splitlines()[0]}"
