"""A rank that fails, hangs or dies anywhere: the others go on, or all end with an error naming it.

`make faults` runs all cells of the matrix, others only a few.
"""

from __future__ import annotations

import pytest

from tests.oracle.faults import PLACES, Job, jobs, run_all
from tests.oracle.projects import WAYS

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


def test_all_ranks_raise_the_same_text_whoever_found_out() -> None:
    """The order of reductions is agreed where one rank waits, and the other has gone on."""
    for _, cell in run_all([Job("", "", way, program="accumulate") for way in WAYS], at_once=3):
        (answer,) = set(cell.answers.values())
        assert len(cell.answers) == 2
        assert answer[0] == "error"
        assert "The ranks have diverged: rank 0 waits" in answer[1]
