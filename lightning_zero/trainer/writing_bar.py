"""A progress bar for writing a large model's weights to files at setup."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

if TYPE_CHECKING:
    import lightning.pytorch as pl

LEAST_BYTES = 10**9
"""Bytes per rank below which writing is too fast for a bar."""


class WritingBar:
    """A bar on rank 0 with the written share and the bytes per second, if progress bars are shown.

    Args:
        trainer: Its ``enable_progress_bar`` decides whether they are.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        callback = trainer.progress_bar_callback
        is_shown = callback is not None and not getattr(callback, "is_disabled", False)
        self._is_shown = is_shown and trainer.is_global_zero
        self._bar: Tqdm | None = None

    def __call__(self, written: int, nbytes: int) -> None:
        """Show that ``written`` of ``nbytes`` bytes are written."""
        if not self._is_shown or nbytes < LEAST_BYTES:
            return
        if self._bar is None:
            self._bar = Tqdm(
                desc="Writing weights to files",
                total=nbytes,
                unit="B",
                unit_scale=True,
                file=sys.stdout,
            )
        self._bar.update(written - self._bar.n)
        if written == nbytes:
            self._bar.close()
