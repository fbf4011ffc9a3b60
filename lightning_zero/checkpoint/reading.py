"""What the readers of all formats share: errors that name the file, on all ranks alike."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_zero.checkpoint.provenance import LaterFormat
from lightning_zero.comm import Control, agreed


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
