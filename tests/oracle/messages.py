"""What Lightning and this package tell users, as the log has it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from lightning_utilities.core import rank_zero


@contextlib.contextmanager
def messages(logger: str = "") -> Iterator[list[str]]:
    """Record the messages of a logger, at level INFO and above; by default those of Lightning.

    That one belongs to Lightning or to its mirror, whichever this process has imported last, and
    examples silence it.
    """
    log = logging.getLogger(logger) if logger else rank_zero.log
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
