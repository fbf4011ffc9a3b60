"""Work that makes very many objects at once, all of which live."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Enter a context in which Python does not look for reference cycles.

    It looks again and again while many objects are made, each time at all that the process has. So
    a model of many small tensors pays for it more than for their setup, save or load. Whatever no
    reference leads to is freed here as ever.
    """
    if not gc.isenabled():  # within another such context, or by the user's choice
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
