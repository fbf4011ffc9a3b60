"""What ranks' places prove, and the errors that end a run on all of them."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_zero.comm.reports import Whereabouts

PATIENCE = 2.0
"""Seconds of waiting before a rank reports where it is."""

FOREIGN_PATIENCE = 5.0
"""The same in collectives of other code, of which nobody knows whether other ranks have begun them,
and where a rank may only compute."""

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


def lost(answers: Mapping[int, str], error: BaseException, world_size: int) -> str:
    """Return the error for a broken connection, with the places of the ranks that answered."""
    gone = [rank for rank in range(world_size) if rank not in answers]
    cause = f"A connection between ranks has failed ({str(error).splitlines()[0]})"
    if gone:
        these = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        cause = (
            f"The run has lost {these}: killed, out of memory, stopped, or exited without an error;"
            f" see {'their' if len(gone) > 1 else 'its'} output or the system log"
        )
    places = "".join(f"; rank {rank} {answer}" for rank, answer in sorted(answers.items()))
    return f"{cause}{places}."


def patience_with(here: Whereabouts) -> float:
    """Return the seconds after which a rank reports where it is."""
    return PATIENCE if here.number and not here.is_blocked else FOREIGN_PATIENCE


def wait_for_each_other(everyone: dict[int, Whereabouts]) -> bool:
    """Return whether each rank waits for a collective that another waiting rank has not begun."""
    ours = [here for here in everyone.values() if here.number]
    foreign = [here for here in everyone.values() if here.place and not here.number]
    if any(here.is_blocked for here in ours) and not all(here.is_of_all for here in foreign):
        # Some ranks may exchange what the one that has gone on has no part in.
        return False
    if ours and all(
        any(other.begun.get(here.channel, 0) < here.number for other in everyone.values())
        for here in ours
    ):
        return True
    # All are in the same collective, but in different calls within it: one is a call late.
    functions = {here.function for here in everyone.values()}
    collectives = {(here.channel, here.number) for here in everyone.values()}
    waits_long = all(here.seconds > FOREIGN_PATIENCE for here in everyone.values())
    return waits_long and len(functions) > 1 and len(collectives) == 1 and bool(ours)


def stays(before: Whereabouts, now: Whereabouts) -> bool:
    """Return whether a rank stayed in the same place between two reports.

    The first report may be old, and the next look may have been taken before it was read; the look
    after that cannot have been.
    """
    return before.wait == now.wait and (not now.place or now.look >= before.look + 2)
