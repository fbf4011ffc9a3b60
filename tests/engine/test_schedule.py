"""What is predicted from the last step's order, also when this step goes another way."""

from lightning_zero.engine.schedule import Need, Schedule


def follow(schedule: Schedule, *units: int) -> list[list[int]]:
    """Record a step; the two units predicted before it and after each need."""
    schedule.begin()
    seen = [schedule.ahead(2)]
    for unit in units:
        schedule.record(Need(unit, is_backward=False))
        seen.append(schedule.ahead(2))
    return [[need.unit for need in ahead] for ahead in seen]


def test_the_last_step_predicts_this_one() -> None:
    schedule = Schedule()
    assert follow(schedule, 0, 1, 0, 2) == [[]] * 5
    assert follow(schedule, 0, 1, 0, 2) == [[0, 1], [1, 0], [0, 2], [2], []]
    follow(schedule)  # a step without needs keeps the record
    assert follow(schedule, 0, 1, 0, 2)[0] == [0, 1]


def test_a_detour_finds_back() -> None:
    schedule = Schedule()
    follow(schedule, 0, 1, 2, 3)
    # Unit 9 is news: the place is kept; unit 2 is a jump ahead.
    assert follow(schedule, 0, 9, 2, 3) == [[0, 1], [1, 2], [1, 2], [3], []]
    assert follow(schedule, 0, 9, 2, 3) == [[0, 9], [9, 2], [2, 3], [3], []]


def test_alternating_paths_are_wrong_guesses_and_no_more() -> None:
    schedule = Schedule()
    for _ in range(3):
        assert [0] not in follow(schedule, 3, 4)[1:]
        follow(schedule, 0, 1, 2)


def test_backward_and_forward_are_different_needs() -> None:
    schedule = Schedule()
    schedule.begin()
    for need in (Need(0, False), Need(1, False), Need(1, True), Need(0, True)):
        schedule.record(need)
    assert schedule.units_in_forward() == [0, 1]
    schedule.begin()
    schedule.record(Need(1, True))
    assert schedule.ahead(5) == [Need(0, True)]
