"""Memory before a run (``estimate``) and after it (``write_report``)."""

from lightning_zero.memory import plot
from lightning_zero.memory.advice import Limits, advise
from lightning_zero.memory.command import add_estimate_command
from lightning_zero.memory.difference import explain
from lightning_zero.memory.kernel import kept_beyond
from lightning_zero.memory.live import LiveBytes
from lightning_zero.memory.prediction import (
    NO_OFFLOAD_YET,
    Estimate,
    compare,
    estimate,
    estimate_of,
    named_offloads,
)
from lightning_zero.memory.report import write_report
from lightning_zero.memory.size import format_bytes, parse_bytes, parse_numel
from lightning_zero.memory.subject import Subject
from lightning_zero.memory.tables import estimate_table, table
from lightning_zero.memory.terms import KINDS, RESTING
from lightning_zero.plan import Offload

__all__ = [
    "KINDS",
    "NO_OFFLOAD_YET",
    "RESTING",
    "Estimate",
    "Limits",
    "LiveBytes",
    "Offload",
    "Subject",
    "add_estimate_command",
    "advise",
    "compare",
    "estimate",
    "estimate_of",
    "estimate_table",
    "explain",
    "format_bytes",
    "kept_beyond",
    "named_offloads",
    "parse_bytes",
    "parse_numel",
    "plot",
    "table",
    "write_report",
]
