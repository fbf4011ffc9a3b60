"""Hosts, played by network namespaces, that are killed or lose their cable while ranks train."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.oracle.devices import NO_HOSTS
from tests.oracle.ranks import ROOT

LIMIT = 60.0
SCRIPT = ROOT / "examples" / "benchmarks" / "hosts.py"


@NO_HOSTS
@pytest.mark.timeout(170)
def test_the_others_end_and_name_the_ranks_of_a_lost_host() -> None:
    """Also if it has the store. All hosts are lost at once, as their ranks mostly wait."""
    words = [sys.executable, "-W", "ignore", str(SCRIPT), "--faults", "--limit", str(LIMIT)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=160, cwd=ROOT)
    assert not ran.returncode, ran.stderr
    cases = json.loads(ran.stdout)
    assert {(case["how"], case["stage"]) for case in cases} == {
        ("kill", 1),
        ("kill", 3),
        ("cut", 1),
        ("cut", 3),
    }
    for case in cases:
        for rank, found in case["ranks"].items():
            assert found["seconds"] is not None, (case["how"], rank, "hangs")
            if case["how"] == "kill":
                assert "A connection between ranks has failed" in found["said"]
                assert found["seconds"] < LIMIT / 4
            else:
                other = "2, 3" if int(rank) < 2 else "0, 1"
                assert f"The host of ranks {other} is lost" in found["said"], (case, rank)
