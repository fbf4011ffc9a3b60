"""The user's optimizer on pieces of parameters.

=============== ====================================================================================
pieces          how an optimizer's groups are pointed at pieces, and its states cut
owners          steps of whole parameters, for optimizers that mix their elements
unit_step       steps unit by unit
stepping_thread a thread for such steps amid a backward pass
states          where the states of such steps rest: memory, or files
staging         batches that are stepped from files, and memory and threads that read and write them
rounding        such steps in fp32 of what rests in bf16, rounded by chance
probe           proof of how an optimizer may be stepped: by element, by parameter, all at once
known           classes of which it is known without proof
trial           steps of toy parameters
unit_trial      such steps unit by unit, against steps of all at once
outside         what an optimizer keeps for all of its members
taint           following an element through the operations of an optimizer
operands        what operations read and write
twin            a copy of an optimizer that owns toy parameters
adopted         how optimizers that engines have adopted are stepped, and what they save
hooks           what happens before and after a step of it
clip            norms, clipping and unscaling of gradients over all ranks
loss_scaler     dynamic loss scaling
=============== ====================================================================================
"""

from lightning_zero.optimizer.adopted import (
    are_torn,
    own_form_of,
    require_whole_steps,
    unit_step_of,
    whole_members,
    whole_step_of,
)
from lightning_zero.optimizer.hooks import OptimizerHooks, Removable, end
from lightning_zero.optimizer.loss_scaler import LossScaler
from lightning_zero.optimizer.owners import owners_of
from lightning_zero.optimizer.pieces import (
    FindPiece,
    StateBytes,
    cut_state,
    members,
    missing_in_state,
    owned,
    parameter_of,
    pieces_of,
    state_bytes,
    whole_state_bytes,
)
from lightning_zero.optimizer.probe import verdict_of, way_of
from lightning_zero.optimizer.rounding import RoundedStates
from lightning_zero.optimizer.staging import Part, batches_of, staging_bytes
from lightning_zero.optimizer.states import StateFiles, States
from lightning_zero.optimizer.stepping_thread import SteppingThread
from lightning_zero.optimizer.taint import Way
from lightning_zero.optimizer.twin import bare, with_inner
from lightning_zero.optimizer.unit_step import UnitStep

__all__ = [
    "FindPiece",
    "LossScaler",
    "OptimizerHooks",
    "Part",
    "Removable",
    "RoundedStates",
    "StateBytes",
    "StateFiles",
    "States",
    "SteppingThread",
    "UnitStep",
    "Way",
    "are_torn",
    "bare",
    "batches_of",
    "cut_state",
    "end",
    "members",
    "missing_in_state",
    "own_form_of",
    "owned",
    "owners_of",
    "parameter_of",
    "pieces_of",
    "require_whole_steps",
    "staging_bytes",
    "state_bytes",
    "unit_step_of",
    "verdict_of",
    "way_of",
    "whole_members",
    "whole_state_bytes",
    "whole_step_of",
    "with_inner",
]
