"""ZeROStrategy in a Trainer: the loops in any order, the module afterwards, errors, exceptions."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_zero import ZeROPrecision, ZeROStrategy, fabric
from lightning_zero.plan import CURES
from tests.oracle.messages import messages
from tests.oracle.projects import (
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_strategy,
    make_trainer,
    rows,
    under_all,
)
from tests.oracle.ranks import Pools

# ------------------------------------------------------------------------------------ the loops


def _fit_with_validation(strategy: Any) -> Run:
    return fit(Regression(), strategy, max_epochs=2, data=(rows(), rows(8, seed=1)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_fit_is_that_of_ddp(ranks: Pools, world: int) -> None:
    assert_like_ddp(ranks(world).run(under_all, _fit_with_validation, stages=(1, 3)))


def _any_order(strategy: Any) -> Run:
    """Every loop before and after every other, with one Trainer."""
    module, notes = Regression(), []
    trainer = make_trainer(strategy, max_epochs=1)

    def note(*results: Any) -> None:
        notes.append(
            [{k: v.detach().clone() for k, v in trainer.callback_metrics.items()}, results]
        )

    note(trainer.test(module, rows(8, seed=2), verbose=False))
    note(trainer.validate(module, rows(8, seed=1), verbose=False))
    trainer.fit(module, rows(), rows(8, seed=1))
    note(trainer.predict(module, rows(8, seed=3)))
    note(trainer.validate(module, rows(8, seed=1), verbose=False))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rows(), rows(8, seed=1))
    note(trainer.test(module, rows(8, seed=2), verbose=False))
    note(trainer.test(module, rows(8, seed=2), verbose=False))
    return Run.of(module, trainer, notes)


def test_loops_in_any_order(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, _any_order, stages=(1, 3)))


def _loop_options(strategy: Any) -> Run:
    notes = []
    for options in (
        {"val_check_interval": 2, "limit_val_batches": 1},
        {"fast_dev_run": 2},
        {"overfit_batches": 2, "max_epochs": 2},
        {"detect_anomaly": True, "limit_train_batches": 2},
        {"inference_mode": False},
        {"barebones": True},
        {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2, "max_epochs": 2},
        {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    ):
        if "barebones" in options:
            options |= dict.fromkeys(("logger", "log_every_n_steps", "enable_checkpointing"))
            options |= dict.fromkeys(("enable_progress_bar", "enable_model_summary"))
        run = fit(
            _TwoLoaders(), strategy, data=(rows(), [rows(8, seed=1), rows(4, seed=2)]), **options
        )
        notes.append([run.params, run.metrics])
    return Run({}, notes=notes)


class _TwoLoaders(Regression):
    """Validates on two loaders, the second of which skips the head."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 0:
            self.log("val", self.loss(batch), sync_dist=True)
        else:
            self.log("val", self.net(batch[0]).mean(), sync_dist=True)


def test_options_of_the_loops(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, _loop_options, stages=(1, 3)))


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


def _two_trainers(strategy: Any) -> Run:
    module = Regression()
    first = fit(module, strategy)
    second = fit(module, strategy, max_epochs=2)
    return Run(second.params, second.metrics, second.losses, first.params)


def test_two_trainers_one_after_another(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, _two_trainers, stages=(2, 3)))


def _change_of_strategy() -> None:
    expected = Regression()
    for _ in range(5):
        fit(expected, "ddp", max_steps=3)
    module = Regression()
    for strategy in (3, "ddp", 1, 2, 3):
        fit(module, strategy, max_steps=3)
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_module_under_one_strategy_after_the_other(ranks: Pools) -> None:
    ranks(2).run(_change_of_strategy)


# ------------------------------------------------------------------------------------ afterwards


def _module_after_fit(stage: int) -> None:
    module = Regression()
    parameters = list(module.parameters())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    fit(module, stage)
    assert all(ours is theirs for ours, theirs in zip(module.parameters(), parameters, strict=True))
    for parameter in parameters:
        assert type(parameter) is Parameter
        assert parameter.device.type == "cpu"
        assert parameter.is_contiguous()
        assert parameter.isfinite().all()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.grad is None
        assert not parameter._post_accumulate_grad_hooks
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    assert module.trainer.strategy.memory()["gathered"] == 0
    # It works as any module does.
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    ):
        twin(torch.randn(2, 6)).sum().backward()
        assert all(parameter.grad is not None for parameter in twin.parameters())
        pairs = zip(twin.state_dict().values(), module.state_dict().values(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def _without_restoring(stage: int) -> None:
    module = Regression()
    trainer = make_trainer(make_strategy(stage, restore_weights=False))
    trainer.fit(module, rows())
    with pytest.raises(RuntimeError, match=r"'net.blocks.0.linear.weight'.*restore_weights=True"):
        module.net.blocks[0].linear.weight.sum()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_module_is_whole_and_ordinary_after_fit(ranks: Pools, stage: int) -> None:
    ranks(2).run(_module_after_fit, stage)


def test_weights_stay_at_rest_on_demand(ranks: Pools) -> None:
    ranks(2).run(_without_restoring, 3)


def _logged(stage: int) -> list[str]:
    with messages() as said:
        trainer = make_trainer(stage, max_epochs=1)
        module = Regression()
        trainer.validate(module, rows(4), verbose=False)
        trainer.fit(module, rows(), rows(4))
        trainer.test(module, rows(4), verbose=False)
    return [text for text in said if "ZeRO stage" in text or "steps by" in text]


def test_a_run_is_summed_up_once_by_rank_0(ranks: Pools) -> None:
    """The optimizer, which validation does not have, in a line of its own when fit begins."""
    first, second = ranks(2).run(_logged, 3)
    assert second == []
    summary, optimizer = first
    head, *rows = summary.splitlines()
    assert head == "ZeRO stage 3 over 2 ranks"
    assert [row[:14] for row in rows] == ["  units       ", "  per rank    ", "  checkpoint  "]
    assert "4, the largest root with 84 of 246 parameters" in rows[0]
    assert "of weights" in rows[1]
    assert optimizer == "AdamW steps by element, each rank its own part"


@pytest.mark.parametrize("make", [ZeROStrategy, fabric.ZeROStrategy])
def test_arguments_of_other_strategies_are_refused_with_what_to_do(make: Any) -> None:
    for name, cure in CURES.items():
        with pytest.raises(TypeError, match=re.escape(f"{name!r}: {cure}")):
            make(**{name: True})
    with pytest.raises(TypeError, match="unheard_of"):
        make(unheard_of=True)


# ------------------------------------------------------------------------------------ errors


class _Gloomy(Regression):
    """Raises in one training step, on some ranks."""

    def __init__(self, bad_ranks: set[int], bad_step: int = 2) -> None:
        super().__init__()
        self.bad_ranks, self.bad_step = bad_ranks, bad_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.bad_step and self.global_rank in self.bad_ranks:
            raise ArithmeticError(f"rank {self.global_rank} gave up")
        return loss


def _raise_on_all_ranks(strategy: Any) -> Run:
    module = _Gloomy({0, 1})
    with pytest.raises(ArithmeticError, match="gave up"):
        fit(module, strategy)
    first = Run.of(module)
    assert all(type(parameter) is Parameter for parameter in module.parameters())
    module.bad_ranks = set()
    second = fit(module, strategy)
    return Run(second.params, second.metrics, second.losses, first.params)


def test_exception_on_all_ranks_leaves_a_module_that_trains_on(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, _raise_on_all_ranks, stages=(1, 3)))


class _Lossless(Regression):
    """Returns no loss for its second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.skips = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.skips and batch_idx == 1 else loss


def _skip_on_one_device(strategy: Any) -> Run:
    return fit(_Lossless(), strategy)


def test_no_loss_on_one_device_is_a_skipped_batch(ranks: Pools) -> None:
    [runs] = ranks(1).run(under_all, _skip_on_one_device, stages=(2, 3))
    assert len(runs["ddp"].losses) == 8
    assert_like_ddp([runs])


def _skip_on_all_ranks(strategy: Any) -> Run:
    module = _Lossless()
    with pytest.raises(RuntimeError, match="by returning None in distributed training is not"):
        fit(module, strategy)
    first = Run.of(module)
    module.skips = False
    second = fit(module, strategy)
    return Run(second.params, second.metrics, second.losses, first.params)


def test_no_loss_on_all_ranks_is_an_error_and_the_module_trains_on(ranks: Pools) -> None:
    assert_like_ddp(ranks(2).run(under_all, _skip_on_all_ranks, stages=(1, 3)))


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
            strategy._run.saver.close = _give_up
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
        assert comm.control.watchdog._has_left
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


def test_unsupported_arguments() -> None:
    with pytest.raises(ValueError, match=r"Expected stage to be 1, 2 or 3, got 4"):
        ZeROStrategy(4)
    with pytest.raises(ValueError, match=r"Expected launcher among subprocess, .*got 'mpi'"):
        ZeROStrategy(launcher="mpi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected prefetch to be a number of units >= 0, got -1"):
        ZeROStrategy(prefetch=-1)
    with pytest.raises(ValueError, match="restore_weights=False prevents"):
        ZeROStrategy(launcher="spawn", restore_weights=False)
    with pytest.raises(ValueError, match=r"accumulate='reduce' contradicts stage=1.* Use stage=2"):
        ZeROStrategy(1, accumulate="reduce")
    with pytest.raises(ValueError, match=r"reshard_after_forward=False has no effect.*stage=3"):
        ZeROStrategy(2, reshard_after_forward=False)
    with pytest.raises(ValueError, match=r"Expected reduce_dtype to be a torch dtype .* 'half8'"):
        ZeROStrategy(reduce_dtype="half8")
    with pytest.raises(ValueError, match="Expected reduce_dtype to be a floating-point dtype"):
        ZeROStrategy(reduce_dtype="int8")
    with pytest.raises(ValueError, match=r"Expected a precision among '64-true'.* got 'int4'"):
        ZeROPrecision("int4")
    with pytest.raises(ValueError, match="does not scale the loss"):
        ZeROPrecision("32-true", scaler=object())  # type: ignore[arg-type]


class _Empty(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.head = nn.Identity()


class _Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(6)


class _Twice(Regression):
    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.parameters())}, {"params": list(self.head.parameters())}]
        optimizer = torch.optim.SGD(groups[:1], lr=0.1)
        optimizer.param_groups.append({**optimizer.param_groups[0], **groups[1]})
        return optimizer


class _Hoarder(torch.optim.SGD):
    """Would step what it has put aside, whatever is in its param groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.aside = [one.data for one in self.param_groups[0]["params"]]


def _refused(stage: int) -> None:
    for module, message in (
        (_Empty(), "_Empty has no parameters, so there is nothing to shard"),
        (_Lazy(), "'head.weight' is lazily initialized and has no shape yet"),
        (Regression(optimizer=_Hoarder), "_Hoarder keeps views of parameters outside of"),
        (_Twice(), r"'?head.weight'? appears in more than one param group of SGD"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(module, ZeROStrategy(stage))
    for options, message in (
        ({"activation_checkpointing": {nn.LSTM}}, "activation_checkpointing=LSTM.* no such module"),
        ({"units": {nn.LSTM}}, "units=LSTM matches no module of Regression"),
        ({"units": "all"}, "Expected units='auto', classes or a callable, got units='all'"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(Regression(), make_strategy(stage, **options))
    for optimizer in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.AdamW):
        fit(Regression(optimizer=optimizer), stage, max_steps=1)


@pytest.mark.parametrize("stage", [1, 3])
def test_errors_at_the_door(ranks: Pools, stage: int) -> None:
    ranks(2).run(_refused, stage)
