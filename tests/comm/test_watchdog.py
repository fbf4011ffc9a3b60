"""What a watchdog proves, what it does about the end of a run, and how it leaves."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pytest_mock import MockerFixture

from lightning_zero.comm import Control, SyncPoint, process_groups, watchdog
from lightning_zero.comm import control as control_module
from lightning_zero.comm.watchdog import Report, are_stuck
from tests.oracle.launch import run_script
from tests.oracle.ranks import Pools, RankError, impatient

# ---------------------------------------------------------------------------- the proof


def at(name: str, number: int, *, wait: int = 1, look: int = 1, **begun: int) -> Report:
    return Report(name, name, number, 0, "train.py:1", wait, look, 9.0, begun)


def queued(name: str, number: int, **begun: int) -> Report:
    """A message without a tag."""
    return Report(
        name, "gather", number, 0, begun={"gather": number, **begun}, queued=(number, name)
    )


@pytest.mark.parametrize(
    ("everyone", "is_proven"),
    [
        # Each waits for what the other has not begun.
        ([at("a", 1, a=1), at("b", 1, b=1)], True),
        # The first is only slow: the second has sent its part.
        ([at("a", 1, a=1), at("b", 1, a=1, b=1)], False),
        # The same name, but not the same time.
        ([at("a", 2, a=2), at("b", 1, a=1, b=1)], True),
        # A rank that has left comes to nothing more.
        ([at("a", 1, a=1), at("", 0)], True),
        ([at("a", 1, a=1), at("", 0, a=1)], False),
        # Two wait for each other, a third for what is under way.
        ([at("a", 1, a=1, c=1), at("b", 1, b=1, c=1), at("c", 1, c=1)], False),
        # A device may wait for a message that the other rank has passed over.
        ([queued("x", 2), at("b", 1, b=1, gather=1)], True),
        ([queued("x", 2), at("b", 1, b=1, gather=2)], False),
        # Messages of two units have met.
        ([queued("x", 2), queued("y", 2)], True),
        ([queued("x", 2), queued("x", 2)], False),
    ],
)
def test_when_ranks_are_stuck(everyone: list[Report], is_proven: bool) -> None:
    assert are_stuck(dict(enumerate(everyone))) is is_proven


# ---------------------------------------------------------------------------- the end of a run


@pytest.fixture
def given_up(mocker: MockerFixture) -> list[str]:
    """What connections are given up."""
    found: list[str] = []
    for name in ("give_up", "give_up_devices"):
        mocker.patch.object(process_groups, name, lambda name=name: found.append(name))
    return found


def watched(mocker: MockerFixture) -> tuple[Any, Any, watchdog.Watchdog]:
    reports: Any = mocker.Mock(end="", rank=1, world_size=2)
    reports.get.return_value = {}
    reports.publish.side_effect = lambda end: reports.end or end
    log = Control(alone=True).log
    watch = watchdog.Watchdog(log, reports)
    watch.forget()  # the thread looks at it no more, but this test
    return log, reports, watch


def test_a_rank_that_waits_nowhere_gives_up_its_connections_once(
    mocker: MockerFixture, given_up: list[str]
) -> None:
    now = mocker.patch.object(watchdog, "monotonic", return_value=0.0)
    log, reports, watch = watched(mocker)
    now.return_value = 100.0  # long in the run: patience begins with its end
    watch.look()
    reports.end = "the verdict"
    watch.look()
    with pytest.raises(RuntimeError, match="the verdict"):
        log.begin("a gather")
    now.return_value += watchdog.GRACE_SECONDS
    watch.look()
    assert given_up == []
    now.return_value += 1.0
    watch.look()
    watch.look()
    assert given_up == ["give_up"]
    assert reports.put.call_args.args[0].name == "", "it asks the store for nothing more"


def test_a_broken_connection_ends_the_run(mocker: MockerFixture, given_up: list[str]) -> None:
    """Messages on a device never end without the lost rank, and would keep this one from ending."""
    log, reports, _ = watched(mocker)
    reports.get.return_value = {1: at("a", 1)}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"has failed .*rank 1 waits .*report from rank 0"):
            log.explain(dist.DistError("Connection closed by peer"))
    assert given_up == ["give_up_devices"]
    log, reports, _ = watched(mocker)
    reports.get.side_effect = RuntimeError("Broken pipe")
    with pytest.raises(RuntimeError, match=r"has failed .*rank 0 has exited"):
        log.explain(dist.DistError("Connection closed by peer"))
    log.explain(ValueError("another error is no fault of a connection"))


def test_what_the_backend_of_a_device_reports_ends_the_run(
    mocker: MockerFixture, given_up: list[str]
) -> None:
    """Its thread sees a peer go while this rank is blocked, in a place that no log knows."""
    failures = ["", "ProcessGroupNCCL reports COMM_ERROR"]
    mocker.patch.object(process_groups, "failure_on_device", side_effect=failures)
    log, _, watch = watched(mocker)
    watch.look()
    assert not log.verdict
    watch.look()
    assert given_up == ["give_up_devices"]
    with pytest.raises(RuntimeError, match="ProcessGroupNCCL reports COMM_ERROR"):
        log.begin("a gather")


# ---------------------------------------------------------------------------- devices


@impatient
@mock.patch.multiple(watchdog, QUIET_SECONDS=0.5, GRACE_SECONDS=0.5)
def _come_to_the_end(last: dict[int, str]) -> None:
    """A device of each rank has begun messages; the host of rank 1 is slow, or waits for them."""
    control = Control()
    control.log.begin_untagged("the weights of a", "gather")
    if control.rank in last:
        control.log.begin_untagged(last[control.rank], "gather")
    deadline = time.monotonic() + 4.0
    while control.rank == 1 and not control.log.verdict and time.monotonic() < deadline:
        time.sleep(0.05)
    control.call(SyncPoint.END).wait()


@pytest.mark.parametrize("last", [{1: "b"}, {0: "b", 1: "c"}])
def test_ranks_diverge_while_one_is_blocked_by_its_device(
    ranks: Pools, last: dict[int, str]
) -> None:
    """It looks like a rank that computes, behind a message that the other never sends."""
    with pytest.raises(RankError) as error:
        ranks(2).run(_come_to_the_end, last, timeout=30.0)
    place = "rank 0 waits in step 0 for the end of a backward pass (called"
    assert str(error.value).count(f"The ranks have diverged: {place}") >= 2


def test_a_rank_may_compute_for_as_long_as_it_likes(ranks: Pools) -> None:
    ranks(2).run(_come_to_the_end, {0: "b", 1: "b"}, timeout=30.0)


# ---------------------------------------------------------------------------- owners and threads


class _Owner:
    """What leaves when it is collected as garbage, such as Fabric's strategy."""

    def __init__(self, control: Control) -> None:
        self.itself = self
        weakref.finalize(self, control.leave)


@impatient
def _diverge_when_an_owner_was_collected() -> None:
    left, control = Control(), Control()
    place, owner = watchdog.Watchdog.place, _Owner(left)

    def collecting(watch: watchdog.Watchdog) -> Any:
        if watch is left.watchdog:
            gc.collect()
        return place(watch)

    gc.disable()
    try:
        with mock.patch.object(watchdog.Watchdog, "place", collecting):
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


@pytest.mark.parametrize(
    "how", [_diverge_when_an_owner_was_collected, _diverge_when_a_rank_counted_otherwise]
)
def test_all_are_watched(ranks: Pools, how: Any) -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(how, timeout=30.0)
    assert str(error.value).count("The ranks have diverged") >= 2


# ---------------------------------------------------------------------------- the exit

SHORT = """
import sys, time
from lightning_zero.engine.sharded_model import ShardedModel
from tests.oracle.projects import Regression, make_trainer, rows

restore = ShardedModel.restore

def late(self):
    restore(self)
    if self.comm.control.rank:
        time.sleep(float(sys.argv[1]))  # rank 0, which hosts the store, is ready to exit

ShardedModel.restore = late
make_trainer("zero3", devices=2, max_steps=2).fit(Regression(), rows())
"""

FAILS = """
import sys
import torch
from lightning.fabric import Fabric
from lightning_zero.fabric import ZeROStrategy
from tests.oracle.models import Blocks

fabric = Fabric(accelerator="cpu", devices=2, strategy=ZeROStrategy(3))
fabric.launch()
model = Blocks(2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))

def train():
    for step in range(4):
        if (step, fabric.global_rank) == (2, 1):
            raise ArithmeticError("in the user's own loop")
        fabric.backward(model(torch.ones(2, 6)).sum())
        optimizer.step()

try:
    train()
except ArithmeticError:
    if sys.argv[1] == "raises":
        raise
    del model, optimizer
    sys.exit(3)
"""


def test_nothing_asks_for_the_store_of_a_process_that_has_exited() -> None:
    """Torch would write its C++ stack to stderr."""
    assert "[c10d]" not in run_script(SHORT, 3.0, fresh=True).output


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raises", "RuntimeError: Rank 1 failed in step 2 at "),
        ("exits", "RuntimeError: A connection between ranks has failed"),
    ],
)
def test_an_exception_in_the_loop_of_a_user_of_fabric(how: str, text: str) -> None:
    output = run_script(FAILS, how, fresh=True, check=False).output
    assert text in output
    if how == "raises":
        assert "ArithmeticError: in the user's own loop\n" in output
    assert "finished training" not in output
