"""One group of parameters on flat memory, from the buffer to what optimizer and user see.

================ ===============================================================================
buffer           a flat tensor with a view for each parameter, whose memory can be released
stores           where weights, gradients and masters rest
living_views     the living views of a parameter, which move when its data is replaced
ownership        which engine a parameter belongs to
guards           the classes that intercept uses of parameters, at rest or whole
classes          the class and the data of each parameter of a group
local_form       parameters that tensor parallelism has cut
edits            changes that users make to whole weights
stand_in         tensors without memory that stand for gradients, here a rank's own
sharded_grad     stand-ins for whole averaged gradients
grad_view        what ``parameter.grad`` shows, as named states
piece_range      the range of a parameter that a rank owns
piece            what the optimizer holds
grad_shard       the averaged gradients, until pieces hold them
reducer          gradients on their way from autograd to there
flat_parameters  all of these for the parameters of a unit that share a dtype and trainability
================ ===============================================================================
"""

from lightning_zero.parameters.buffer import Buffer
from lightning_zero.parameters.classes import Lent, are_views
from lightning_zero.parameters.flat_parameters import FlatParameters
from lightning_zero.parameters.grad_shard import Reach
from lightning_zero.parameters.local_form import (
    loading_whole,
    local_of,
    make_distributed,
    make_local,
    put_values,
    uncut,
)
from lightning_zero.parameters.ownership import Owner, ownership_of
from lightning_zero.parameters.piece import Piece, averages, follow_again, stop_following
from lightning_zero.parameters.reducer import Reducer
from lightning_zero.parameters.sharded_grad import stack_on
from lightning_zero.parameters.stores import Store, memory_for_masters, store_for
