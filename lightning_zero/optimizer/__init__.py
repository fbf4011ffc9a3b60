"""The user's optimizer: how it may be stepped, its steps on pieces, and its states.

=========== ========================================================================================
known       the three ways to step, and the classes for which the way is known
watch       how an optimizer is stepped: the setting, the table, or steps of toys that are watched
toys        copies of optimizers that own toy parameters, and the sizes of states that these show
attached    functions in place of an optimizer's methods
pieces      members of groups, and parts of states
steppers    what an optimizer shows between steps and holds within: parameters and their states;
            it steps by element unless it is one of the next two
whole_step  steps of whole parameters, for optimizers that mix their elements
unit_step   steps of masters or states that rest elsewhere: in host memory, or batch by batch, as in
            bf16 with stochastic rounding
staging     steps of states in files
hooks       what happens before and after an optimizer's step
clip        norms, clipping and unscaling of gradients over all ranks
=========== ========================================================================================
"""

from lightning_zero.optimizer.attached import (
    Announced,
    bare,
    follow,
)
from lightning_zero.optimizer.hooks import OptimizerHooks
from lightning_zero.optimizer.known import Way, wraps_states
from lightning_zero.optimizer.pieces import owned, parameter_of
from lightning_zero.optimizer.staging import FileStep
from lightning_zero.optimizer.steppers import (
    kept_states,
    members,
    stepper_of,
)
from lightning_zero.optimizer.toys import state_bytes
from lightning_zero.optimizer.unit_step import RoundedStep, UnitStep
from lightning_zero.optimizer.watch import verdict_of
from lightning_zero.optimizer.whole_step import owners_of
