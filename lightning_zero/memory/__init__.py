"""Bytes per rank before a run (``estimate``), and tables of bytes.

A model becomes an estimate in three steps: the user's own step runs once on tensors without data,
which yields events (a unit's forward begins, a gradient arrives) with the bytes of activations at
each; one walk over these events counts the whole weights and unreduced gradients that a rank holds
in between; what rests, by the plan's arithmetic, completes them.

======= ===========================================================================================
dry_run the events of the user's step, and the bytes of all live tensors
states  optimizers on meta, and the bytes of their states
walk    what rests, and the parts of a step with what a rank holds in each
model   a model on meta with its optimizer and batch; ``estimate`` and its result
report  formatted bytes, tables, ``memory.json`` and its plot
summary what a strategy prints when training begins, and when memory runs out
======= ===========================================================================================
"""

from lightning_zero.memory.model import (
    OF_STAGE_3,
    Estimate,
    ModelPlan,
    compare,
    estimate,
    named_offloads,
)
from lightning_zero.memory.report import (
    draw,
    estimate_table,
    format_bytes,
    format_ranks,
    parse_bytes,
    parse_numel,
    table,
    write_report,
)
from lightning_zero.memory.summary import explain, explained_memory, summary
from lightning_zero.memory.walk import AWAY_ROWS, KINDS
from lightning_zero.plan import Offload
