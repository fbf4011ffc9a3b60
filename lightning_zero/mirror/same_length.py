"""``lightning_zero.same_length`` on the classes of ``pytorch_lightning``."""

from __future__ import annotations

from lightning_zero.mirror.source import run_room

run_room("same_length", globals())
