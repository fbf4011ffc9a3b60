"""The life of a step: when units are unsharded, resharded, reduced and refreshed.

engine             the training of a sharded model, and the public functions on it
sharded_model      the model in units: parameters, pieces, whole values, bytes
unit_builder       units from modules, one after the other, also from the meta device
unit               one module with its weights, gradients and the calls of its forward
step               calls of modules, backward passes, and the end of a step
reductions         the order in which all ranks reduce gradients
hooks              hooks on modules, safe to copy and to compile, and in graphs
schedule           the order in which units are needed, prefetching, and `join`
rank_check         what must be equal on all ranks: models, settings, optimizers
activations        activation checkpointing, and offload of activations to host memory
"""

from lightning_zero.engine.activations import (
    ActivationOffload,
    Replacements,
    checkpoint_activations,
)
from lightning_zero.engine.engine import (
    Engine,
    broadcast_buffers,
    engines_of,
    full_grad,
    gathered,
    grad_norm,
    join,
    open_engines,
    piece_among,
)
from lightning_zero.engine.rank_check import differences, group_lines
from lightning_zero.engine.unit_builder import forget_values
