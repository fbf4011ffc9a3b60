"""Memory before a run (``estimate``) and after it (``write_report``)."""

from lightning_zero.memory.estimate import Estimate, compare, estimate, estimate_of
from lightning_zero.memory.live import LiveBytes
from lightning_zero.memory.subject import Subject

__all__ = ["Estimate", "LiveBytes", "Subject", "compare", "estimate", "estimate_of"]
