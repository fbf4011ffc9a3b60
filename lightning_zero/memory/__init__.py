"""Bytes per rank before a run (``estimate``) and after it (``write_report``).

A model becomes an estimate in three steps: the user's own step runs once on tensors without data,
which yields events (a unit's forward begins, a gradient arrives) with the bytes of activations at
each; the engine is driven through these events on ``meta``, and what it holds in between makes the
segments of a step; what rests, by the plan's arithmetic, completes them to snapshots.

model          a model on meta with its optimizer, its batch and the settings of its run
dry_run        step 1: the events of the user's step
trace          the events
live_bytes     bytes of all live tensors, and of what kernels keep besides
replay         step 2: the engine itself, driven through the events
steps          step 3: snapshots under the engine, under DDP, of a bare number of parameters
snapshots      what a rank holds in each part of a step
terms          what rests
states         optimizers on meta, and the bytes of their states
prediction     ``estimate`` and its result; comparisons of stages and numbers of ranks
advice         which stage fits a device, and what to change if none does
cluster        the time of a step on a cluster, from what the replay does and waits for
summary        what a strategy prints when training begins
report, plot   text, the page and its picture; size: bytes as people write them
"""

from lightning_zero.memory.advice import Limits, advise
from lightning_zero.memory.cluster import TERMS, Cluster, Played, Timeline, play
from lightning_zero.memory.live_bytes import LiveBytes
from lightning_zero.memory.model import OF_STAGE_3, ModelPlan
from lightning_zero.memory.prediction import (
    Estimate,
    compare,
    estimate,
    estimate_of,
    named_offloads,
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
from lightning_zero.memory.terms import AWAY_ROWS, KINDS
from lightning_zero.plan import Offload
