"""Bytes per rank before a run (``estimate``), and tables of bytes.

A model becomes an estimate in three steps: the user's own step runs once on tensors without data,
which yields events (a unit's forward begins, a gradient arrives) with the bytes of activations at
each; one walk over these events counts the whole weights and unreduced gradients that a rank holds
in between; what rests, by the plan's arithmetic, completes them.

=========== =======================================================================================
model       a model on meta with its optimizer, its batch and the settings of its run
dry_run     the events of the user's step
live_bytes  bytes of all live tensors, and of what kernels keep besides
walk        the parts of a step, and what a rank holds in each
terms       what rests, by the plan's arithmetic
states      optimizers on meta, and the bytes of their states
prediction  ``estimate`` and its result; comparisons of stages and numbers of ranks
summary     what a strategy prints when training begins
report      tables, ``memory.json`` and the picture; ``size``: bytes as people write them
=========== =======================================================================================
"""

from lightning_zero.memory.live_bytes import LiveBytes
from lightning_zero.memory.model import OF_STAGE_3, ModelPlan
from lightning_zero.memory.prediction import (
    Estimate,
    advise,
    compare,
    estimate,
    estimate_of,
    named_offloads,
)
from lightning_zero.memory.report import draw, estimate_table, table, write_report
from lightning_zero.memory.size import format_bytes, format_ranks, parse_bytes, parse_numel
from lightning_zero.memory.summary import summary
from lightning_zero.memory.terms import AWAY_ROWS, KINDS
from lightning_zero.memory.walk import Walk
from lightning_zero.plan import Offload
