"""What ZeROStrategy does besides training, its end, and what it rounds on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from lightning_zero import ZeROStrategy, estimate
from tests.oracle import by_trainer
from tests.oracle.messages import messages
from tests.oracle.models import MODELS, Block
from tests.oracle.projects import Regression, fit, make_strategy, make_trainer, rows
from tests.oracle.ranks import Pools


class _Alone(Regression):
    """Notes what is broadcast from the end of a batch to the start of the next."""

    def on_fit_start(self) -> None:
        self.sent: list[Any] = []
        self._broadcast: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        self._broadcast, dist.broadcast = dist.broadcast, lambda *args, **_: self.sent.append(args)

    def on_train_batch_start(self, *_: Any) -> None:
        if self._broadcast is not None:
            dist.broadcast, self._broadcast = self._broadcast, None

    def on_train_epoch_end(self) -> None:
        self.on_train_batch_start()


def _fit_alone() -> None:
    module = _Alone()
    fit(module, 3)
    assert len(module.losses) > 1
    assert not module.sent


def test_no_rank_asks_another_between_batches_whether_to_end(ranks: Pools) -> None:
    """Lightning does, and waits for the answer: a device would be drained at each batch."""
    ranks(2).run(_fit_alone)


def _logged(stage: int) -> list[str]:
    with messages() as said:
        trainer = make_trainer(stage, max_epochs=1)
        module = Regression()
        trainer.validate(module, rows(4), verbose=False)
        trainer.fit(module, rows(), rows(4))
        trainer.test(module, rows(4), verbose=False)
    return [text for text in said if "ZeRO stage" in text or "element-wise" in text]


def test_a_run_is_summed_up_once_by_rank_0(ranks: Pools) -> None:
    """Again when fit begins, as validation has no optimizer, and not when test does."""
    first, second = ranks(2).run(_logged, 3)
    assert second == []
    validated, fitted = (summary.splitlines() for summary in first)
    head, *rows = validated
    assert head == "ZeRO stage 3 over 2 ranks"
    assert [row[:14] for row in rows] == ["  model       ", "  per rank    ", "  checkpoint  "]
    assert "4 units, 246 parameters; the largest, root, has 84" in rows[0]
    assert "of weights" in rows[1]
    assert fitted[:2] == validated[:2]
    assert "between steps" in fitted[2]
    assert fitted[3] == "  optimizer   AdamW: element-wise, sharded"


class _Plugin(TorchCheckpointIO):
    """A checkpoint plugin of the user's, which is told of the end."""

    def __init__(self) -> None:
        self.is_broken = self.was_told = False

    def teardown(self) -> None:
        self.was_told = True
        if self.is_broken:
            _give_up()


def _give_up() -> None:
    raise OSError("it cannot be ended")


class _Breaks(Callback):
    """Makes one of what the strategy ends raise."""

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def on_train_end(self, trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        self.comm = strategy.engine.comm
        if self.broken == "saver":
            strategy._run.checkpoints.saver.close = _give_up
        elif self.broken == "weights":
            strategy.engine.sharded.restore = _give_up
        else:
            strategy.checkpoint_io.is_broken = True


def _end_in_spite_of_errors() -> None:
    for broken in ("saver", "weights", "plugin"):
        module, breaks = Regression(), _Breaks(broken)
        trainer = make_trainer(make_strategy(3, checkpoint_io=_Plugin()), callbacks=[breaks])
        with pytest.raises(OSError, match="it cannot be ended"):
            trainer.fit(module, rows(4))
        strategy, comm = trainer.strategy, breaks.comm
        assert strategy.engine.is_closed
        assert strategy.checkpoint_io.was_told
        assert comm.control.watchdog.has_left
        # The Trainer answers signals by itself again.
        assert not {"_sigterm_notifier_fn"} & set(vars(trainer._signal_connector))
        if broken == "weights":
            with pytest.raises(RuntimeError, match="was left sharded"):
                module.net.blocks[0].linear.weight.sum()
        else:
            assert {type(parameter) for parameter in module.parameters()} == {Parameter}
            fit(module, 3)


def test_everything_is_ended_though_one_end_fails(ranks: Pools) -> None:
    ranks(2).run(_end_in_spite_of_errors)


def _profiled() -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        fit(Regression(), 3, max_steps=1)
    return {event.name for event in profiler.events()}


def test_profilers_show_our_verbs(ranks: Pools) -> None:
    verbs = ["unshard", "wait", "reduce", "finish_reduce", "reshard"]
    units = ["root", *(f"net.blocks.{number}" for number in range(3))]
    for recorded in ranks(2).run(_profiled):
        assert recorded >= {f"zero.{verb} {unit}" for verb in verbs for unit in units}


# ---------------------------------------------------------------------------- rounded on purpose

CODED: dict[str, Any] = {"gather_bits": 8, "reduce_bits": 8}
REDUCED = {"reduce_bits": 8}
ROUNDED: dict[str, Any] = {"stochastic_rounding": True}


def _observe(folder: str, path: str | None = None, precision: Any = None, **how: Any) -> Any:
    """Six steps, of which `<folder>/mid.ckpt` has three, or those after another file."""
    module, strategy = by_trainer.model(), ZeROStrategy(**{"units": {Block}, **how})
    options: dict[str, Any] = {"max_steps": 6, "precision": precision}
    options["callbacks"] = [] if path else [by_trainer.Stop(f"{folder}/mid.ckpt", 3)]
    trainer = by_trainer.make_trainer(strategy, folder, **options)
    trainer.fit(module, by_trainer.Rows(), ckpt_path=path)
    sent = {key: (one.elements, one.bytes) for key, one in strategy.traffic.items()}
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    drawn = torch.get_rng_state().tolist()
    return {"losses": module.losses, "weights": weights, "sent": sent, "drawn": drawn}


@pytest.mark.parametrize(
    ("world", "how", "bits"),
    [
        (2, {"stage": 3}, CODED),
        (4, {"stage": 2, "shard": 2}, REDUCED),
        (4, {"stage": 3, "precision": "bf16-mixed"}, CODED),
    ],
)
def test_a_trainer_sends_fewer_bits(
    ranks: Pools, tmp_path: Path, world: int, how: dict[str, Any], bits: dict[str, int]
) -> None:
    """A byte for each element, and four for each block of 64; chance is the same in every run."""
    plain = ranks(world).run(_observe, str(tmp_path / "plain"), **how)[0]
    coded = ranks(world).run(_observe, str(tmp_path / "coded"), **how, **bits)
    expected = {
        (unit, verb): nbytes if (verb, bits) == ("gather", REDUCED) else -(-numel // 64) * 68
        for (unit, verb), (numel, nbytes) in plain["sent"].items()
    }
    for one in coded:
        assert {key: nbytes for key, (_, nbytes) in one["sent"].items()} == expected
        assert one["losses"] == pytest.approx(plain["losses"], rel=0.02)
        assert one["losses"] != plain["losses"]
        assert one["drawn"] == plain["drawn"]
        assert all(torch.equal(v, coded[0]["weights"][k]) for k, v in one["weights"].items())
    # A file holds masters: either way reads the other's.
    for written_by, other in (("coded", {}), ("plain", bits)):
        path = str(tmp_path / written_by / "mid.ckpt")
        resumed = ranks(world).run(_observe, str(tmp_path), path, **how, **other)[0]
        assert resumed["losses"] == pytest.approx(plain["losses"][-3:], rel=0.02)
    again = ranks(world).run(_observe, str(tmp_path / "again"), **how, **bits)[0]
    assert again["losses"] == coded[0]["losses"]


def test_an_estimate_takes_bits() -> None:
    build = MODELS["nested"].build
    plain, coded = (estimate(build, ZeROStrategy(**how), world_size=4) for how in ({}, CODED))
    assert coded.resting == plain.resting
    # Codes are held only while they are on the way, and the peak here has none.
    assert coded.most["gathered"] == plain.most["gathered"]
    assert coded.most["unreduced"] <= plain.most["unreduced"]


def test_a_run_in_bf16_goes_on_with_its_noise(ranks: Pools, tmp_path: Path) -> None:
    how: dict[str, Any] = {"precision": "bf16-true"}
    paths = {kind: str(tmp_path / kind / "mid.ckpt") for kind in ("plain", "rounded")}
    plain = ranks(2).run(_observe, str(tmp_path / "plain"), **how)[0]
    whole = ranks(2).run(_observe, str(tmp_path / "rounded"), **how, **ROUNDED)
    resumed = ranks(2).run(_observe, str(tmp_path), paths["rounded"], **how, **ROUNDED)
    for one, other in zip(whole, resumed, strict=True):
        assert one["losses"][3:] == other["losses"] != plain["losses"][3:]
        for name, value in one["weights"].items():
            assert value.dtype is torch.bfloat16
            assert torch.equal(value, other["weights"][name])
    files = [torch.load(path, weights_only=True)["optimizer_states"][0] for path in paths.values()]
    forms = [
        [
            (name, one.dtype, one.shape)
            for part in file["state"].values()
            for name, one in part.items()
        ]
        for file in files
    ]
    assert forms[0] == forms[1]
    for written_by, bits in (("plain", ROUNDED), ("rounded", {})):
        found = ranks(2).run(_observe, str(tmp_path), paths[written_by], **how, **bits)[0]
        assert found["losses"] == pytest.approx(plain["losses"][3:], rel=0.05)
