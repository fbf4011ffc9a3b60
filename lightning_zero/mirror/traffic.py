"""``lightning_zero.traffic`` on the classes of ``pytorch_lightning``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_zero.mirror.source import run_room

if TYPE_CHECKING:
    from lightning_zero.traffic import TrafficMonitor as TrafficMonitor

run_room("traffic", globals())
