"""A rank that fails, hangs or dies anywhere: the others go on, or all end with an error naming it.

`make faults` runs all cells of the matrix, others only a few.
"""

from __future__ import annotations

import pytest

from tests.oracle.faults import PLACES, Job, jobs, run_all

FEW = [
    Job("the user's forward", "raise", "windows"),
    Job("a reduction", "kill", "point to point", 2, "loop"),
    Job("a sync point", "kill", "windows", 2, "loop"),
    Job("the user's backward", "raise", "backend", 4, "loop"),
    Job("a save, written", "kill", "windows"),
    Job("a load, weights", "raise", "point to point"),
    Job("the end of a batch", "stall", "backend"),
    Job("a reduction", "hang", "windows"),
    Job("the optimizer", "raise", "windows", 2, "loop"),
    Job("the end of a reduction", "kill", "point to point", 2, "loop"),
]


def failures(these: list[Job], at_once: int) -> list[str]:
    cells = run_all(these, at_once=at_once)
    return [f"{job}: {cell}" for job, cell in cells if not cell.is_good]


def test_every_place_is_there() -> None:
    for place in PLACES.values():
        owner, name = place.found()
        assert name in vars(owner), place


def test_faults_end_in_an_error_that_names_the_rank() -> None:
    assert failures(FEW, len(FEW)) == []


@pytest.mark.slow
def test_every_fault_at_every_place() -> None:
    assert failures(jobs(), 4) == []
