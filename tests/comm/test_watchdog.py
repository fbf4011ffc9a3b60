"""What a watch does about a verdict where its rank seems to compute."""

from __future__ import annotations

from typing import Any

from pytest_mock import MockerFixture

from lightning_zero.comm import watchdog
from lightning_zero.comm.collective_log import CollectiveLog


def test_a_rank_blocked_by_its_device_gives_up_its_groups_once(mocker: MockerFixture) -> None:
    now = mocker.patch.object(watchdog, "monotonic", return_value=0.0)
    mocker.patch.object(watchdog.Observer, "look", return_value=None)
    reports: Any = mocker.Mock(verdict="the verdict")
    reports.look.return_value = ""
    give_up, devices = mocker.Mock(), mocker.Mock()
    log = CollectiveLog()
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
