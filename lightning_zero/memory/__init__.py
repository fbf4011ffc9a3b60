"""Bytes per rank before a run (``estimate``) and after it (``write_report``).

prediction     ``estimate`` and its result; comparisons of stages and numbers of ranks
model          a model on meta with its optimizer and batch
dry_run        one step of the user's module on tensors without data: its events
trace          the events of a step
live_bytes     bytes of all live tensors, and of what kernels keep besides
replay         the engine itself, driven through the events on meta
snapshots      what a rank holds in each part of a step
cluster        the time of a step on a cluster, from what the replay does and waits for
steps          a step under the engine, under DDP, of a bare number of parameters, with offload
states         optimizers on meta, and the bytes of their states
terms          what rests, by the plan's arithmetic
advice         which stage fits a device, and what to change if none does
summary        what a strategy prints when training begins
report, plot   text, the page and its picture; size: bytes as people write them
"""

from lightning_zero.memory.advice import Limits, advise
from lightning_zero.memory.cluster import TERMS, Cluster, Played, Timeline, play
from lightning_zero.memory.live_bytes import LiveBytes
from lightning_zero.memory.model import ModelPlan
from lightning_zero.memory.prediction import (
    OF_STAGE_3,
    Estimate,
    compare,
    estimate,
    estimate_of,
    named_offloads,
    step_settings,
)
from lightning_zero.memory.report import (
    EQUAL_STAGES,
    are_equal_stages,
    estimate_table,
    rest_table,
    table,
    write_report,
)
from lightning_zero.memory.size import format_bytes, format_ranks, parse_bytes, parse_numel
from lightning_zero.memory.summary import summary
from lightning_zero.memory.terms import AWAY_ROWS, KINDS, RESTING
from lightning_zero.plan import Offload

__all__ = [
    "AWAY_ROWS",
    "EQUAL_STAGES",
    "KINDS",
    "OF_STAGE_3",
    "RESTING",
    "TERMS",
    "Cluster",
    "Estimate",
    "Limits",
    "LiveBytes",
    "ModelPlan",
    "Offload",
    "Played",
    "Timeline",
    "advise",
    "are_equal_stages",
    "compare",
    "estimate",
    "estimate_of",
    "estimate_table",
    "format_bytes",
    "format_ranks",
    "named_offloads",
    "parse_bytes",
    "parse_numel",
    "play",
    "rest_table",
    "step_settings",
    "summary",
    "table",
    "write_report",
]
