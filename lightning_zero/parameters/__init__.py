"""One group of parameters on flat memory, from the buffer to what optimizer and user see.

================ ===============================================================================
stores           buffers, and where weights, gradients and masters rest
guarded          the classes of parameters, which ask their owner for values where they are used
local_form       parameters that tensor parallelism has cut
piece            the part of a parameter that a rank owns, which the optimizer holds
full_grad        whole averaged gradients without memory
gradients        gradients from autograd to the optimizer, and the ``grad`` of parameters
flat_parameters  all of these for the parameters of a unit that share a dtype and trainability
================ ===============================================================================
"""

from lightning_zero.parameters.flat_parameters import FlatParameters
from lightning_zero.parameters.full_grad import FullGrad, norms_of
from lightning_zero.parameters.gradients import begin_step, drop, have_new, settle
from lightning_zero.parameters.guarded import (
    Guarded,
    Lent,
    Owner,
    are_views,
    hook_last,
    ownership_of,
    restore_class,
    unfollowed,
)
from lightning_zero.parameters.local_form import (
    loading_whole,
    local_of,
    make_distributed,
    make_local,
    put_values,
    uncut,
)
from lightning_zero.parameters.piece import Piece
from lightning_zero.parameters.stores import stores_for
