"""One group of parameters on flat memory, from the buffer to what optimizer and user see.

================ ===============================================================================
buffer           a flat tensor with a view for each parameter, whose memory can be given back
shards           a rank's shard, in one memory or in two
stores           where weights, gradients and masters rest
second_shards    a second copy of weights for the backward pass
streams          weights that are read where a checkpoint has them
living_views     views that somebody holds, for when other data takes their place
ownership        which engine a parameter belongs to
guards           what uses of parameters, at rest or whole, come to
classes          what each parameter of a group is now
edits            changes that users make in whole weights
stand_in         tensors without memory that stand for gradients
sharded_grad     stand-ins for whole averaged gradients
unsynced_grad    stand-ins for the gradients of a rank alone
grad_view        what ``parameter.grad`` shows, as named states
piece            a range of a parameter, and what the optimizer holds
reducer          gradients on their way from autograd to the optimizer
flat_parameters  all of these for the parameters of a unit that share a dtype and trainability
================ ===============================================================================
"""

from lightning_zero.parameters.buffer import Buffer
from lightning_zero.parameters.flat_parameters import FlatParameters
from lightning_zero.parameters.grad_view import drop_gradients
from lightning_zero.parameters.ownership import ownership_of
from lightning_zero.parameters.piece import Piece, settle, unsettle
from lightning_zero.parameters.reducer import Reach, Reducer
from lightning_zero.parameters.second_shards import shared_masters, store_for
from lightning_zero.parameters.sharded_grad import stack_on
from lightning_zero.parameters.stores import Store
from lightning_zero.parameters.streams import Reader, Source, stream_for

__all__ = [
    "Buffer",
    "FlatParameters",
    "Piece",
    "Reach",
    "Reader",
    "Reducer",
    "Source",
    "Store",
    "drop_gradients",
    "ownership_of",
    "settle",
    "shared_masters",
    "stack_on",
    "store_for",
    "stream_for",
    "unsettle",
]
