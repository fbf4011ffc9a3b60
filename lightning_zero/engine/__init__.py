"""The life of a step: when units are unsharded, resharded, reduced and refreshed.

engine                    the training of a sharded model: its steps, optimizers and end
sharded_model             the model in units: parameters, pieces, whole values, bytes
unit_builder              units from modules, one after the other
unit                      one module with its weights, gradients and calls
weights                   a unit's whole weights, and the masters that other code sees
gradients                 a unit's gradients up to the optimizer
step                      the phases of a step
forward, backward         the event handlers of its two halves
backward_events           calls of a unit's forward, and the autograd events of their backward
module_hook               hooks on modules and parameters, safe to copy and to compile
schedule                  the order in which units are needed, prefetching, and `join`
reduction_order           one order of reductions on all ranks
rank_check                models, settings and optimizers that must be equal on all ranks
buffers                   broadcasts of the module's buffers from rank 0
materialize               models built on the meta device
activation_checkpointing  activations recomputed in backward
activation_offload        activations offloaded to host memory
replacements              methods of other objects, replaced for a while
access                    the public functions
"""

from lightning_zero.engine.access import full_grad, gathered, grad_norm, join
from lightning_zero.engine.activation_checkpointing import ActivationCheckpointing
from lightning_zero.engine.activation_offload import ActivationOffload
from lightning_zero.engine.buffers import broadcast_buffers
from lightning_zero.engine.engine import Engine, engine_of, piece_among
from lightning_zero.engine.materialize import forget_values
from lightning_zero.engine.rank_check import differences, group_lines
from lightning_zero.engine.replacements import Replacements
