"""The user's options of a run beside the engine's settings, checked at the door."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

START_METHODS = {"subprocess": "popen", "spawn": "spawn", "fork": "fork", "notebook": "fork"}
"""Lightning's names of the ways to start the ranks, by launcher."""


@dataclass(frozen=True)
class Options:
    """The user's options of a run; ``ZeROStrategy`` says what each means."""

    activation_checkpointing: bool | Iterable[type[nn.Module]] = False
    restore_weights: bool = True
    checkpoint: str = "file"
    async_checkpoint: bool = False
    verify_checkpoint: bool = False
    launcher: str = "subprocess"

    def __post_init__(self) -> None:
        if self.launcher not in START_METHODS:
            raise ValueError(
                f"Expected launcher among {', '.join(START_METHODS)}, got {self.launcher!r}."
            )
        if self.checkpoint not in ("file", "dcp"):
            raise ValueError(f"Expected checkpoint among 'file', 'dcp', got {self.checkpoint!r}.")
        if not self.restore_weights and self.launcher != "subprocess":
            raise ValueError(
                f"launcher={self.launcher!r} brings the trained weights back to this process, which"
                " restore_weights=False contradicts. Leave one of them out."
            )
