"""The error of ranks that wait for each other in different places."""

from __future__ import annotations

from collections.abc import Sequence

TOUCH = "a touch between steps of the weights of"
GRADIENT = "the reading of a gradient"
"""Places at which ranks usually part because only some of them run the code."""


def parted(places: Sequence[str]) -> str:
    """Return the error for ranks in different places."""
    where = "; ".join(f"rank {rank} {place}" for rank, place in enumerate(places))
    cure = next(cure for what, cure in _CURES.items() if what in where)
    return f"The ranks have parted: {where}. {cure}"


_CURES = {
    TOUCH: (
        "Code between steps that reads or changes a sharded parameter gathers its unit on all ranks"
        " together. Run that code on every rank, or gather on every rank before only some go on:"
        " `with lightning_zero.gathered(module):`."
    ),
    GRADIENT: (
        "A gradient lies in parts over the ranks, so all ranks read it together: on every rank,"
        " before only some go on, `lightning_zero.full_grad(parameter)` for a whole gradient or"
        " `lightning_zero.grad_norm(module)` for the norm."
    ),
    "": (
        "Every rank must run the same units, backward passes and steps. If the ranks' data differ"
        " in length, or one rank takes a branch that others do not, let all take part: run the same"
        " modules on every rank, with a repeated batch or one whose loss is multiplied by 0; gather"
        " weights beforehand (`with lightning_zero.gathered(module):`); or, without gradients, run"
        " the modules in `with lightning_zero.join(module):`."
    ),
}
"""What to do, by the first of these keys that a rank's place contains."""
