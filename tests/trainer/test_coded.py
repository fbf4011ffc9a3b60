"""Traffic in few bits by the strategy's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_zero import ZeROStrategy, estimate
from tests.oracle.by_trainer import observe
from tests.oracle.models import MODELS
from tests.oracle.ranks import Pools

CODED = {"gather_bits": 8, "reduce_bits": 8}


def test_a_trainer_sends_a_quarter_and_resumes(ranks: Pools, tmp_path: Path) -> None:
    plain = ranks(2).run(observe, str(tmp_path / "plain"), {})[0]
    coded = ranks(2).run(observe, str(tmp_path / "coded"), CODED)
    for one in coded:
        assert one["sent"] == {verb: sent * 17 // 64 for verb, sent in plain["sent"].items()}
        assert one["losses"] == pytest.approx(plain["losses"], rel=0.02)
        assert one["losses"] != plain["losses"]
    # A file holds masters: either way reads the other's.
    for written_by, bits in (("coded", {}), ("plain", CODED)):
        path = str(tmp_path / written_by / "mid.ckpt")
        resumed = ranks(2).run(observe, str(tmp_path), bits, path)[0]
        assert resumed["losses"] == pytest.approx(plain["losses"][-3:], rel=0.02)


def test_an_estimate_takes_them() -> None:
    build = MODELS["nested"].build
    plain = estimate(build, world_size=4)
    coded = estimate(build, ZeROStrategy(**CODED), world_size=4)
    assert coded.resting == plain.resting
    # Codes are held only while they are on the way, and the peak here has none.
    assert coded.most["gathered"] == plain.most["gathered"]
    # Inboxes hold codes, and what was coded is gone.
    assert coded.most["unreduced"] < plain.most["unreduced"]
    with pytest.raises(ValueError, match="gather_bits=8 has no effect"):
        estimate(build, ZeROStrategy(2, gather_bits=8), world_size=4)
    assert estimate(build, "ddp", world_size=4).stage == 0
