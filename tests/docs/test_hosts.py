"""Several hosts without shared memory: DDP's loss, and the ledger is what passes between them."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from tests.oracle.ranks import ROOT

NAMES = ["ddp", "zero3", "zero3, hybrid", "zero3, 8 bits"]
FOLDER = ROOT / "examples" / "benchmarks"


def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module, which finds its neighbours as when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_hosts", FOLDER / "hosts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_what_passes_between_hosts_is_in_the_ledger(
    monkeypatch: pytest.MonkeyPatch, num_hosts: int
) -> None:
    benchmark = load(monkeypatch)
    try:
        with benchmark.hosts(1, 1):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))
    job = benchmark.Job(
        dim=128, layers=2, heads=2, vocabulary=2048, length=16, batch=1, steps=4, warmup=1
    )
    found = benchmark.compare(NAMES, num_hosts=num_hosts, ranks=2, gbit=0, rounds=1, job=job)
    losses = {name: rounds[0]["loss"] for name, rounds in found.items()}
    assert losses["zero3"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert losses["zero3, hybrid"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert losses["zero3, 8 bits"] == pytest.approx(losses["ddp"], rel=2e-2)
    for name in NAMES[1:]:
        [one] = found[name]
        # Headers, acknowledgements and messages that are no data; a message at the edge of a step.
        assert 0.98 < one["through"] / one["ledger"] < 1.1, (name, one)
    assert found["zero3, hybrid"][0]["through"] < found["zero3"][0]["through"] / 2
    assert found["zero3, 8 bits"][0]["through"] < found["zero3"][0]["through"] / 3
