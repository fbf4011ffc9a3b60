"""``lightning_zero.graph`` on the classes of ``pytorch_lightning``."""

from __future__ import annotations

from lightning_zero.mirror.source import run_room

run_room("graph", globals())
