"""What a watch does about a verdict where its rank seems to compute, and of whom it is free."""

from __future__ import annotations

import gc
import re
import sys
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytest_mock import MockerFixture

from lightning_zero.comm import Control, SyncPoint, verdicts, watchdog
from lightning_zero.comm import control as control_module
from lightning_zero.comm.collective_log import Course
from tests.oracle.ranks import Pools, RankError
from tests.oracle.watch import impatient


def test_a_rank_blocked_by_its_device_gives_up_its_groups_once(mocker: MockerFixture) -> None:
    now = mocker.patch.object(watchdog, "monotonic", return_value=0.0)
    mocker.patch.object(watchdog.Observer, "look", return_value=None)
    reports: Any = mocker.Mock(verdict="the verdict", is_over=False)
    reports.look.return_value = ""
    give_up, devices = mocker.Mock(), mocker.Mock()
    log = Control(alone=True).log
    watch = watchdog.Watchdog(log, reports, give_up, devices)
    watch.forget()  # the thread looks at it no more, but this test

    now.return_value = 100.0  # long in the run: patience begins with the verdict
    watch.look()
    reports.look.return_value = "the verdict"
    watch.look()
    now.return_value += watchdog.GRACE_SECONDS
    watch.look()
    assert not devices.called
    assert not watch.has_given_up
    now.return_value += 1.0
    watch.look()
    watch.look()
    assert devices.call_count == 1
    assert not give_up.called
    assert watch.has_given_up


def test_a_broken_connection_gives_up_devices_once(mocker: MockerFixture) -> None:
    """Messages on a device never end without the lost rank, and would keep this one from ending."""
    reports: Any = mocker.Mock(verdict="", is_over=False)
    reports.look.return_value = ""
    reports.board.world_size = 2
    reports.call_roll.return_value = {0: "is here"}
    reports.publish.side_effect = lambda verdict: setattr(reports, "verdict", verdict)
    devices = mocker.Mock()
    log = Control(alone=True).log
    watchdog.Watchdog(log, reports, mocker.Mock(), devices).forget()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has lost rank 1"):
            log.explain(dist.DistError("Connection closed by peer"))
    assert devices.call_count == 1


def test_what_the_backend_of_a_device_reports_ends_the_run(mocker: MockerFixture) -> None:
    """Its thread sees a peer go while this rank is blocked, in a place that no log knows."""
    mocker.patch.object(watchdog.Observer, "look", return_value=None)
    reports: Any = mocker.Mock(verdict="", is_over=False)
    reports.look.return_value = ""
    reports.board.world_size = 2
    reports.call_roll.return_value = {0: "is here"}
    reports.publish.side_effect = lambda verdict: setattr(reports, "verdict", verdict)
    log = Control(alone=True).log
    failures = iter(["", "ProcessGroupNCCL reports COMM_ERROR"])
    given_up: list[str] = []

    def give_up_devices() -> None:
        given_up.append(log.verdict)

    watch = watchdog.Watchdog(log, reports, mocker.Mock(), give_up_devices, failures.__next__)
    watch.forget()
    watch.look()
    assert not log.verdict
    for _ in range(3):
        watch.look()
    # The verdict is there when the device lets go of the rank, whose next message raises it.
    (verdict,) = given_up
    assert "has lost rank 1" in verdict
    with pytest.raises(RuntimeError, match="has lost rank 1"):
        log.begin("a gather")


hasty = mock.patch.multiple(verdicts, PATIENCE=0.5, FOREIGN_PATIENCE=0.5)
"""A function's decorator, as `impatient`, also where ranks may only compute."""


@hasty
@mock.patch.object(watchdog, "GRACE_SECONDS", 0.5)
def _come_to_the_end(last: dict[int, str], foreign: str = "") -> None:
    """A device of each rank has begun messages; the host of rank 1 is slow, or waits for them."""
    control = Control()
    control.log.begin_untagged("the weights of a", "gather")
    if control.rank in last:
        control.log.begin_untagged(last[control.rank], "gather")
    deadline = time.monotonic() + 4.0
    while control.rank == 1 and not control.log.verdict and time.monotonic() < deadline:
        time.sleep(0.05)
    if foreign == "barrier" and not control.rank:
        dist.barrier()
    elif foreign == "message":
        (dist.send if control.rank else dist.recv)(torch.zeros(1), 1 - control.rank)
        if not control.rank:
            control.log.begin_untagged(last[1], "gather")
    control.call(SyncPoint.END).wait()


@pytest.mark.parametrize(
    ("last", "foreign", "place"),
    [
        ({1: "b"}, "", "the end of a backward pass"),
        ({0: "b", 1: "c"}, "", "the end of a backward pass"),
        ({1: "b"}, "barrier", "torch.distributed.barrier"),
    ],
)
def test_ranks_part_while_one_is_blocked_by_its_device(
    ranks: Pools, last: dict[int, str], foreign: str, place: str
) -> None:
    """It looks like a rank that computes, behind a message that the other never sends."""
    with pytest.raises(RankError) as error:
        ranks(2).run(_come_to_the_end, last, foreign, timeout=30.0)
    text = str(error.value)
    told = text.count(f"The ranks have diverged: rank 0 waits in step 0 for {place} (called")
    assert told >= (1 if foreign else 2)  # code of one's own shows the backend's error
    assert re.search(rf"rank 1 is in step 0 at \S*test_watchdog.py:\d+, after {last[1]}\. ", text)


@pytest.mark.parametrize(("last", "foreign"), [({0: "b", 1: "b"}, ""), ({1: "b"}, "message")])
def test_a_rank_may_compute_for_as_long_as_it_likes(
    ranks: Pools, last: dict[int, str], foreign: str
) -> None:
    """Also while another waits for its message, which comes before what is the same on both."""
    ranks(2).run(_come_to_the_end, last, foreign, timeout=30.0)


def test_courses_part_where_one_has_met_what_another_has_not() -> None:
    course, other = Course(), Course()
    for event in "abc":
        course.note(event)
    assert not course.parts_from(other.last)
    other.note("a")
    assert not course.parts_from(other.last)
    assert not other.parts_from(course.last), "it may come there yet"
    other.note("c")
    assert course.parts_from(other.last)
    assert not Course(1).parts_from(other.last), "what was before they went on together"
    other.note("b")
    assert course.parts_from(other.last), "the same events in another order"
    for _ in range(5000):
        course.note("d")
    assert not course.parts_from(other.last), "too far back to know"


def test_a_rank_that_computes_leaves_when_the_store_is_about_to_end(mocker: MockerFixture) -> None:
    """Also one whose device may block it: the host of the store would wait for it in vain."""
    reports: Any = mocker.Mock(verdict="", is_over=True)
    reports.look.return_value = ""
    log = Control(alone=True).log
    log.begin_untagged("the weights of a", "gather")
    watch = watchdog.Watchdog(log, reports)
    watch.forget()
    watch.look()
    reports.board.put.assert_called_with("left")


class _Owner:
    """What leaves when it is collected as garbage, such as Fabric's strategy."""

    def __init__(self, control: Control) -> None:
        self.itself = self
        weakref.finalize(self, control.leave)


@impatient
def _diverge_when_an_owner_was_collected() -> None:
    left, control = Control(), Control()
    look, owner = watchdog.Observer.look, _Owner(left)

    def collecting(observer: watchdog.Observer) -> Any:
        if observer is left.watchdog._observer:
            gc.collect()
        return look(observer)

    gc.disable()
    try:
        with mock.patch.object(watchdog.Observer, "look", collecting):
            del owner
            if control.rank:
                control.broadcast_object("another value")
            control.call(SyncPoint.STEP).wait()
    finally:
        gc.enable()


@impatient
def _diverge_when_a_rank_counted_otherwise() -> None:
    if dist.get_rank():
        control_module._last_number += 1  # as if it had begun one that the other did not
    control = Control()
    if control.rank:
        control.broadcast_object("another value")
    control.call(SyncPoint.STEP).wait()


def test_a_rank_that_counted_otherwise_is_watched(ranks: Pools) -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(_diverge_when_a_rank_counted_otherwise, timeout=30.0)
    assert str(error.value).count("The ranks have diverged") >= 2


def test_an_owner_may_be_collected_in_the_thread_that_looks(ranks: Pools) -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(_diverge_when_an_owner_was_collected)
    assert str(error.value).count("The ranks have diverged") >= 2


def test_nothing_is_collected_while_frames_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: found.append(gc.isenabled()) or frames())
    observer = watchdog.Observer(Control().log)
    observer.look()
    observer.describe()
    assert gc.isenabled()
    assert not any(found)
    assert len(found) > 1
