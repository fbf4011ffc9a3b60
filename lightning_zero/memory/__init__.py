"""Memory before a run (``estimate``) and after it (``write_report``)."""

from lightning_zero.memory.estimate import Estimate, compare, estimate, estimate_of
from lightning_zero.memory.live import LiveBytes
from lightning_zero.memory.report import write_report
from lightning_zero.memory.size import format_bytes, parse_bytes, parse_numel
from lightning_zero.memory.subject import Subject
from lightning_zero.memory.table import estimate_table, table
from lightning_zero.memory.terms import KINDS, RESTING

__all__ = [
    "KINDS",
    "RESTING",
    "Estimate",
    "LiveBytes",
    "Subject",
    "compare",
    "estimate",
    "estimate_of",
    "estimate_table",
    "format_bytes",
    "parse_bytes",
    "parse_numel",
    "table",
    "write_report",
]
