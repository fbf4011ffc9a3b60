"""Data only: stages, precisions, layouts, units and settings. No communication, no Lightning.

plan              the homes of weights, gradients and masters; the table of stages; offload
settings          the user's settings of a run, validated, and the strategies that have names
units             the search for units, with their parameters and plans; what mixed precision casts
cuts              how tensor parallelism cuts a parameter
layout            the place of every parameter in its flat buffer, and every rank's part
"""

from lightning_zero.plan.cuts import (
    Cut,
    cut_of,
    derived_class,
    original_class,
    set_cut,
    whole_shape,
)
from lightning_zero.plan.layout import ALIGNMENT, Layout, PieceRange, Slot
from lightning_zero.plan.plan import RECIPES, Medium, Offload, Plan, Recipe
from lightning_zero.plan.settings import (
    ARGUMENTS,
    CURES,
    START_METHODS,
    STRATEGIES,
    Settings,
    as_dtype,
    refuses_others,
    strategy_arguments,
    suggestion,
)
from lightning_zero.plan.units import (
    MIN_NUMEL,
    FlatSpec,
    UnitPolicy,
    UnitSpec,
    check_parameter,
    find_units,
    specify_units,
    stays_whole,
    whole_tensors,
)
