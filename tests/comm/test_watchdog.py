"""What a watchdog proves, what it does about the end of a run, and how it leaves."""

from __future__ import annotations

import re
import socket
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pytest_mock import MockerFixture

from lightning_zero.comm import Control, SyncPoint, process_groups, watchdog
from lightning_zero.comm.watchdog import CollectiveId, Hub, Line, Place, are_stuck
from tests.oracle.launch import run_script
from tests.oracle.ranks import Pools, RankError, impatient

# ---------------------------------------------------------------------------- the proof


def at(name: str, number: int, *ranks: int, **begun: int) -> Place:
    return Place(CollectiveId(name, name, number, ranks), 0, "train.py:1", begun)


def queued(name: str, number: int, *ranks: int, **begun: int) -> Place:
    """A message without a tag."""
    last = CollectiveId(name, "gather", number, ranks)
    return Place(last, 0, begun={"gather": number, **begun}, queued=last)


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
        # Two copies are slow in different units; one of them waits for a rank that is elsewhere.
        ([at("a", 1, 0, 1, a=1), at("a", 1, 0, 1, a=1), *2 * [at("b", 1, 2, 3, b=1)]], False),
        ([*2 * [queued("x", 2, 0, 1)], *2 * [queued("y", 2, 2, 3)]], False),
        ([at("a", 1, 0, 1, a=1), at("b", 1, 0, 1, b=1), *2 * [at("b", 1, 2, 3, b=1)]], False),
        ([at("a", 1, 0, 1, a=1), at("", 0), at("b", 1, 2, 3, b=1), at("", 0)], True),
    ],
)
def test_when_ranks_are_stuck(everyone: list[Place], is_proven: bool) -> None:
    assert are_stuck(dict(enumerate(everyone))) is is_proven


class Ranks:
    """The ends of two ranks' lines to a hub."""

    def __init__(self) -> None:
        self.hub = Hub(2)
        self.hub.addresses = ["a", "b"]
        pairs = [socket.socketpair() for _ in range(2)]
        self.lines = [Line(ours) for ours, _ in pairs]
        for rank, (_, theirs) in enumerate(pairs):
            self.hub.add(theirs)
            self.say(rank, "hello", (self.hub.offer[1], rank))

    def say(self, rank: int, kind: str, value: Any) -> list[tuple[str, Any]]:
        """Send a message to the hub; return what it sends to that rank."""
        self.lines[rank].send(kind, value)
        self.hub.serve()
        return [(kind, value) for kind, value in self.lines[rank].receive()]


def test_strangers_are_not_heard() -> None:
    ranks = Ranks()
    for words in (b"GET / HTTP/1.1\n", b'["hello", ["x", 1]]\n["end", "no"]\n'):
        ours, theirs = socket.socketpair()
        ranks.hub.add(theirs)
        ours.sendall(words)
        assert ranks.say(0, "place", None) == []


# ---------------------------------------------------------------------------- the end of a run


@pytest.fixture
def given_up(mocker: MockerFixture) -> list[str]:
    """What connections are given up."""
    found: list[str] = []
    for name in ("give_up", "give_up_devices"):
        mocker.patch.object(process_groups, name, lambda name=name: found.append(name))
    return found


def watched() -> tuple[Line, watchdog.Watchdog]:
    """The hub's end of a line, and a watchdog that only the test looks with."""
    watch = watchdog.Watchdog()
    ours, theirs = socket.socketpair()
    watch._line, watch.has_left = Line(ours), False
    return Line(theirs), watch


def test_a_rank_that_waits_nowhere_gives_up_its_connections_once(
    mocker: MockerFixture, given_up: list[str]
) -> None:
    now = mocker.patch.object(watchdog, "monotonic", return_value=0.0)
    hub, watch = watched()
    now.return_value = 100.0  # long in the run: patience begins with its end
    watch.look()
    hub.send("end", "the verdict")
    watch.look()
    now.return_value += watchdog.GRACE_SECONDS
    watch.look()
    assert given_up == []
    now.return_value += 1.0
    watch.look()
    watch.look()
    assert given_up == ["give_up"]


def test_what_has_been_begun_ends_after_an_exception_of_another_rank(
    mocker: MockerFixture, given_up: list[str]
) -> None:
    """So each of several ranks that raise at one place gets there."""
    now = mocker.patch.object(watchdog, "monotonic", return_value=0.0)
    hub, watch = watched()
    hub.send("end", "the verdict")
    watch.look()
    watch.wait(watch.begin("a gather"), [])

    def never_comes() -> None:
        watch.look()
        assert given_up == []
        now.return_value += watchdog.LAST_SECONDS + 0.1
        watch.look()
        assert given_up == ["give_up"]
        raise dist.DistError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="the verdict"):
        watch.wait(watch.begin("a reduction"), [SimpleNamespace(wait=never_comes)])
    with pytest.raises(RuntimeError, match="the verdict"):
        watch.begin("a gather")


def test_what_the_backend_of_a_device_reports_ends_the_run(
    mocker: MockerFixture, given_up: list[str]
) -> None:
    """Its thread sees a peer go while this rank is blocked, in a place that no watchdog knows."""
    failures = ["", *["ProcessGroupNCCL reports COMM_ERROR"] * 3]
    mocker.patch.object(process_groups, "failure_on_device", side_effect=failures)
    hub, watch = watched()
    watch.look()
    assert [*hub.receive()] == []
    watch.look()
    assert [*hub.receive()] == [["lost", ["ProcessGroupNCCL reports COMM_ERROR", None]]]
    hub.close()  # it was rank 0 that has gone
    watch.look()
    assert given_up == ["give_up_devices"]
    with pytest.raises(RuntimeError, match="ProcessGroupNCCL reports COMM_ERROR"):
        watch.begin("a gather")


# ---------------------------------------------------------------------------- devices


@impatient
@mock.patch.multiple(watchdog, QUIET_SECONDS=0.5, GRACE_SECONDS=0.5)
def _come_to_the_end(last: dict[int, str]) -> None:
    """A device of each rank has begun messages; the host of rank 1 is slow, or waits for them."""
    control = Control()
    control.watchdog.begin_untagged("the weights of a", "gather")
    if control.rank in last:
        control.watchdog.begin_untagged(last[control.rank], "gather")
    deadline = time.monotonic() + 4.0
    while control.rank == 1 and not control.watchdog.verdict and time.monotonic() < deadline:
        time.sleep(0.05)
    control.call(SyncPoint.END).wait()


@pytest.mark.parametrize("last", [{1: "b"}, {0: "b", 1: "c"}])
def test_ranks_diverge_while_one_is_blocked_by_its_device(
    ranks: Pools, last: dict[int, str]
) -> None:
    """It looks like a rank that computes, behind a message that the other never sends."""
    with pytest.raises(RankError) as error:
        ranks(2).run(_come_to_the_end, last, timeout=30.0)
    found, place = str(error.value), "rank 0 waits in step 0 for the end of a backward pass (called"
    assert "ranks 0, 1 of 2 failed" in found
    assert found.count("RuntimeError: ") == found.count(f"The ranks have diverged: {place}") > 0


def test_a_rank_may_compute_for_as_long_as_it_likes(ranks: Pools) -> None:
    ranks(2).run(_come_to_the_end, {0: "b", 1: "b"}, timeout=30.0)


# ---------------------------------------------------------------------------- the exit

SHORT = """
import sys, time
from lightning_zero.engine.sharded_model import ShardedModel
from tests.oracle.projects import Regression, make_trainer, rows

restore = ShardedModel.restore

def late(self):
    restore(self)
    if self.comm.control.rank:
        time.sleep(float(sys.argv[1]))  # rank 0, which hosts the store, exits

ShardedModel.restore = late
make_trainer("zero3", devices=2, max_steps=2).fit(Regression(), rows())
"""

EXITS = """
import sys
import torch
from lightning.fabric import Fabric
from lightning_zero.fabric import ZeROStrategy
from tests.oracle.models import Blocks

fabric = Fabric(accelerator="cpu", devices=2, strategy=ZeROStrategy(3))
fabric.launch()
model = Blocks(2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
for step in range(4):
    if (step, fabric.global_rank) == (2, 1):
        del model, optimizer
        sys.exit(3)
    fabric.backward(model(torch.ones(2, 6)).sum())
    optimizer.step()
"""


def test_nothing_asks_for_the_store_of_a_process_that_has_exited() -> None:
    """Torch would write its C++ stack to stderr."""
    assert "[c10d]" not in run_script(SHORT, 3.0, fresh=True).output


def test_a_rank_that_exits_in_the_loop_of_a_user_of_fabric() -> None:
    """An exception there is in `tests/fabric/test_fabric.py`."""
    output = run_script(EXITS, fresh=True, check=False).output
    assert re.search(
        "RuntimeError: (A connection between ranks has failed|The ranks .* rank 1 has left)", output
    )
    assert "finished training" not in output
    assert "[c10d]" not in output
