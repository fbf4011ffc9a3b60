"""The error of ranks that wait for each other in different places."""

from __future__ import annotations

from collections.abc import Mapping

TOUCH = "access between steps to the weights of"
GRADIENT = "access to a gradient"
"""Places at which ranks usually diverge because only some of them run the code."""


def diverged(places: Mapping[int, object]) -> str:
    """Return the error for ranks in different places, by rank."""
    where = "; ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
    cure = next(cure for what, cure in _CURES.items() if what in where)
    return f"The ranks have diverged: {where}. {cure}"


_CURES = {
    TOUCH: (
        "Between steps, code that reads or changes a sharded parameter gathers its unit, which"
        " needs all ranks. Run that code on every rank, or first gather on every rank:"
        " `with lightning_zero.gathered(module):`."
    ),
    GRADIENT: (
        "Gradients are sharded, so reading one needs all ranks. Before code that only some ranks"
        " run, call `lightning_zero.full_grad(parameter)` for a whole gradient or"
        " `lightning_zero.grad_norm(module)` for the norm on every rank."
    ),
    "": (
        "Every rank must run the same units, backward passes and steps. If the ranks have different"
        " amounts of data, or one rank takes a branch that others do not, run the same modules on"
        " every rank, with a repeated batch or a loss multiplied by 0; gather the weights first"
        " (`with lightning_zero.gathered(module):`); or, without gradients, run the modules in"
        " `with lightning_zero.join(module):`."
    ),
}
"""What to do, by the first of these keys that a rank's place contains."""
