"""The life of a step: when units are unsharded, resharded, reduced and refreshed.

engine                    the training of a sharded model: its verbs, optimizers and end
open_units                whole weights for code between steps
sharded_model             the model in units: parameters, pieces, whole values, bytes
unit                      one module with its weights, gradients and calls
weights, gradients        the states of a unit's whole weights; its gradients until the optimizer
step                      the phases of a step
forward, backward         the events of its two halves
backward_events           calls of a unit, and how autograd marks their backward
module_hook               hooks on modules and parameters, also under copies and the compiler
schedule                  the order in which units are needed, and gathers ahead of it
reduction_order           one order of reductions on all ranks
early_step                steps of units whose gradients are reduced, amid a backward pass
rank_check                models, settings and optimizers that must be equal on all ranks
change_check              what one rank alone may change later: who is trained, hyperparameters
order_check, join         ranks that gather different weights: detected, or allowed
oom_trials                steps that fail on all ranks if on any
buffers                   buffers of the module, which follow rank 0's
materialize               models built on the meta device
activation_checkpointing  recomputation of modules
activation_offload        activations that wait in host memory
replacements              methods of other objects, replaced until they are given back
access                    the public functions
"""

from lightning_zero.engine.access import full_grad, gathered, grad_norm, join
from lightning_zero.engine.activation_checkpointing import ActivationCheckpointing
from lightning_zero.engine.activation_offload import ActivationOffload
from lightning_zero.engine.buffers import broadcast_buffers
from lightning_zero.engine.engine import Engine, engine_of
from lightning_zero.engine.materialize import forget_values
from lightning_zero.engine.oom_trials import OomTrials
from lightning_zero.engine.rank_check import Description, differences, optimizer_description
from lightning_zero.engine.replacements import Replacements

__all__ = [
    "ActivationCheckpointing",
    "ActivationOffload",
    "Description",
    "Engine",
    "OomTrials",
    "Replacements",
    "broadcast_buffers",
    "differences",
    "engine_of",
    "forget_values",
    "full_grad",
    "gathered",
    "grad_norm",
    "join",
    "optimizer_description",
]
