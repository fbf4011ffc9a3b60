"""Random numbers that are equal on the ranks of one tensor-parallel group.

They compute one forward together, so a dropout of what each of them has whole must drop the same.
"""

from __future__ import annotations

import torch

from lightning_zero.comm import Communicator
from lightning_zero.fabric import internals


def share_random_states(comm: Communicator) -> None:
    """Take over the states of all generators from the first rank of the tensor-parallel group."""
    if (axis := comm.mesh.tensor) is None:
        return
    module = None if comm.device.type == "cpu" else torch.get_device_module(comm.device)
    own = None if module is None else module.get_rng_state(comm.device)
    states = comm.control.gather_objects((internals.random_states(), own))
    of_host, of_device = states[axis.ranks[0]]
    internals.set_random_states(of_host)
    if module is not None:
        module.set_rng_state(of_device, comm.device)
