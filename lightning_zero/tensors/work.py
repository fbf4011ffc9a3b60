"""Work that is in flight, and may be waited for."""

from __future__ import annotations

from typing import Any, Protocol


class Work(Protocol):
    """A transfer in flight; ``wait`` may be called once or never."""

    def wait(self) -> Any:
        """Return when the result may be used on the current stream."""
