"""The user's optimizer on pieces of parameters.

=============== ====================================================================================
pieces          pointing an optimizer's groups at pieces, and cutting its states
steppers        what steps the engines' optimizers, by element unless it is one of these two:
whole_step      steps of whole parameters, for optimizers that mix their elements
unit_step       steps unit by unit
states          where the states of such steps rest: in memory or in files
file_places     where the entries of states rest in files
shown           what an optimizer shows between steps: parameters, and their whole states
whole_state     gathering a parameter's state from what the ranks keep of it
toys            steps of a lone toy, which show what an optimizer keeps for a parameter
staging         batches stepped from files, and the memory and threads that read and write them
rounding        steps by unit in fp32 of values that rest in bf16, with stochastic rounding
probe           proof of how an optimizer may be stepped: by element, by parameter, all at once
known           classes that need no proof
trial           steps of toy parameters
unit_trial      steps of toys unit by unit, compared with steps of all at once
shared_state    what an optimizer keeps for all of its members
dataflow        tracking of elements through the operations of an optimizer
operations      what is known of torch's operations: what they read, write and mix
optimizer_copy  a copy of an optimizer that owns toy parameters
announced       functions in place of an optimizer's methods
second_run      optimizers whose run has ended, in another run or by themselves
hooks           what happens before and after an optimizer's step
clip            norms, clipping and unscaling of gradients over all ranks
loss_scaler     dynamic loss scaling
=============== ====================================================================================
"""

from lightning_zero.optimizer.announced import Removable, follow
from lightning_zero.optimizer.hooks import OptimizerHooks
from lightning_zero.optimizer.known import Way
from lightning_zero.optimizer.loss_scaler import LossScaler
from lightning_zero.optimizer.pieces import FindPiece, owned, parameter_of
from lightning_zero.optimizer.rounding import RoundedStates
from lightning_zero.optimizer.second_run import end
from lightning_zero.optimizer.shared_state import Announced, bare
from lightning_zero.optimizer.shown import kept_states
from lightning_zero.optimizer.staging import PiecePart, batches_of, staging_bytes
from lightning_zero.optimizer.states import StateFiles, States
from lightning_zero.optimizer.steppers import (
    are_torn,
    members,
    pieces_of,
    require_whole_steps,
    stepper_of,
)
from lightning_zero.optimizer.toys import (
    StateBytes,
    state_bytes,
    whole_state_bytes,
    wraps_states,
)
from lightning_zero.optimizer.unit_step import UnitStep
from lightning_zero.optimizer.verdict import verdict_of
from lightning_zero.optimizer.whole_step import owners_of
