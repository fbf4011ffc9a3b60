"""Lightning's own callbacks, unmodified, held against DDP."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.oracle.projects import (
    Regression,
    Run,
    assert_like_ddp,
    fit,
    make_trainer,
    rows,
    under_all,
)
from tests.oracle.ranks import Pools
from tests.oracle.turns import STAGES

HAS_PSUTIL = find_spec("psutil") is not None


class Scheduled(Regression):
    """SGD with a schedule, so that rounding stays small and the rate changes."""

    def __init__(self) -> None:
        super().__init__(lr=0.1, optimizer=torch.optim.SGD)
        self.notes: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


def _fit(strategy: Any, module: Regression, *callbacks: Any, **options: Any) -> Run:
    run = fit(
        module,
        strategy,
        **{
            "callbacks": list(callbacks),
            "max_epochs": 3,
            "data": (rows(), rows(8, seed=1)),
            **options,
        },
    )
    run.notes = getattr(module, "notes", None)
    return run


# ------------------------------------------------------------------------------- finetuning


class WithBackbone(Scheduled):
    """Trains its head; the callback unfreezes the backbone later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def on_train_epoch_end(self) -> None:
        (optimizer,) = self.trainer.optimizers
        groups = [[group["lr"], len(group["params"])] for group in optimizer.param_groups]
        self.notes.append([groups, [p.requires_grad for p in self.parameters()]])


def _finetune(strategy: Any, batch_size: int = 2) -> Run:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)
    module = WithBackbone()
    data = rows(batch_size=batch_size), rows(8, seed=1)
    run = _fit(strategy, module, callback, data=data)
    return Run(run.params, notes=run.notes)


def _finetune_at_all_stages() -> dict[Any, Run]:
    return {stage: _finetune(stage) for stage in STAGES}


def test_backbone_joins_in_mid_run(ranks: Pools) -> None:
    # Over several ranks DDP never averages gradients of parameters that join in later.
    (expected,) = ranks(1).run(_finetune, "ddp", batch_size=4)
    frozen, joined, _ = expected.notes
    assert not all(frozen[1])
    assert all(joined[1])
    assert len(joined[0]) == 2
    runs = ranks(2).run(_finetune_at_all_stages)
    assert_like_ddp([{"ddp": expected, **by_stage} for by_stage in runs], ulps=64)


# ------------------------------------------------------------------------------- watching


def _watch(strategy: Any, folder: str) -> Run:
    path = f"{folder}/{strategy}"
    module = Scheduled()
    callbacks = [
        ModelCheckpoint(path, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True),
        EarlyStopping("val_loss", min_delta=10.0, patience=1),
        LearningRateMonitor(log_momentum=True),
        DeviceStatsMonitor(cpu_stats=HAS_PSUTIL),
        Timer(duration={"hours": 1}),
        LambdaCallback(on_before_zero_grad=lambda *_: module.notes.append("zero_grad")),
    ]
    logger = CSVLogger(path, name="", version="")
    run = _fit(strategy, module, *callbacks, logger=logger, enable_checkpointing=True, max_epochs=5)
    best = callbacks[0]
    run.notes = [
        module.notes,
        module.current_epoch,
        [Path(name).name for name in sorted(best.best_k_models)],
        float(best.best_model_score),
        callbacks[2].lrs,
        callbacks[4].time_elapsed() > 0,
    ]
    if torch.distributed.get_rank() == 0:
        run.notes.append(sorted(path.name for path in Path(path).iterdir()))
        run.notes.append(sorted(logger.experiment.metrics_keys))
    return run


def test_callbacks_that_watch(ranks: Pools, tmp_path: Path) -> None:
    runs = ranks(2).run(under_all, _watch, str(tmp_path))
    assert runs[0]["ddp"].notes[1] == 2
    assert any("DeviceStats" in key for key in runs[0][3].notes[-1]) == HAS_PSUTIL
    assert_like_ddp(runs, ulps=64)


def _run_out_of_time(strategy: Any) -> Run:
    module = Scheduled()

    class FastClock(Timer):
        """On rank 0 the hour is over after three steps."""

        def time_elapsed(self, *args: Any) -> float:
            return 3600.0 if module.global_rank == 0 and len(module.losses) == 3 else 0.0

    run = _fit(strategy, module, FastClock(duration={"hours": 1}))
    run.notes = len(run.losses)
    return run


def test_one_clock_ends_the_run_on_all_ranks(ranks: Pools) -> None:
    runs = ranks(2).run(under_all, _run_out_of_time)
    assert [run["ddp"].notes for run in runs] == [3, 3]
    assert_like_ddp(runs, ulps=64)


def _summary(stage: int) -> list[Any]:
    counts = []

    class Looks(ModelSummary):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            summary = self._summary(trainer, pl_module)
            counts.append([summary.total_parameters, summary.trainable_parameters])
            counts.append([summary.model_size, str(summary)])

    module = Regression()
    module.head.requires_grad_(False)
    callbacks = [Looks(max_depth=3), RichProgressBar()]
    fit(module, stage, callbacks=callbacks, enable_progress_bar=True, enable_model_summary=True)
    return counts


def test_summary_counts_whole_parameters(ranks: Pools) -> None:
    expected = ranks(2).run(_summary, "ddp")
    assert expected[0][0] == [246, 204]
    for stage in STAGES:
        assert ranks(2).run(_summary, stage) == expected


# ------------------------------------------------------------------------------- tuning


def _find_rate(strategy: Any, folder: str) -> Run:
    module = Scheduled()
    finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None)
    run = _fit(strategy, module, finder, default_root_dir=folder, max_epochs=2)
    tuned = Scheduled()
    tuner = Tuner(make_trainer(strategy, max_epochs=2, default_root_dir=folder))
    found = tuner.lr_find(tuned, rows(), num_training=10, early_stop_threshold=None)
    run.notes = [finder.optimal_lr.results, module.lr, found.results, tuned.lr]
    return run


def test_learning_rate_finder(ranks: Pools, tmp_path: Path) -> None:
    runs = ranks(2).run(under_all, _find_rate, str(tmp_path))
    assert len(runs[0]["ddp"].notes[0]["loss"]) == 8
    assert_like_ddp(runs, ulps=256)


def _find_batch_sizes(stage: int) -> None:
    for method in ("fit", "validate", "test", "predict"):
        trainer = make_trainer(stage, callbacks=[BatchSizeFinder()])
        with pytest.raises(MisconfigurationException, match=r"lightning_zero\.estimate"):
            getattr(trainer, method)(Regression())
    with pytest.raises(ValueError, match="not supported with distributed"):
        Tuner(make_trainer(stage)).scale_batch_size(Regression())


def test_batch_size_finder_is_refused(ranks: Pools) -> None:
    for stage in STAGES:
        ranks(2).run(_find_batch_sizes, stage)


# ------------------------------------------------------------------------------- pruning

PRUNINGS: list[dict[str, Any]] = [
    {"pruning_fn": "l1_unstructured", "amount": 0.3, "use_lottery_ticket_hypothesis": False},
    {
        # Once only: what is left is reset to the first weights, which DDP then trains in place.
        "pruning_fn": "ln_structured",
        "amount": lambda epoch: 0.25 if epoch == 1 else 0,
        "pruning_dim": 0,
        "pruning_norm": 2,
        "use_global_unstructured": False,
        "parameter_names": ["weight"],
        "prune_on_train_epoch_end": False,
        "make_pruning_permanent": False,
    },
]


def _prune(strategy: Any, folder: str) -> Run:
    """Prunes in every epoch, and saves a checkpoint in between."""
    notes = []
    for number, options in enumerate(PRUNINGS):
        torch.manual_seed(0)
        module = Scheduled()
        layers = [module.net.stem, module.head, *(block.linear for block in module.net.blocks)]
        names = options.get("parameter_names", ["weight", "bias"])
        pruned = [(layer, name) for name in names for layer in layers]
        path = f"{folder}/{strategy}{number}"
        callbacks = [
            ModelPruning(parameters_to_prune=pruned, **options),
            ModelCheckpoint(path, "{epoch}", save_top_k=-1),
        ]
        run = _fit(strategy, module, *callbacks, enable_checkpointing=True)
        saved = [
            torch.load(path / f"epoch={epoch}.ckpt", weights_only=True)["state_dict"]
            for path in [Path(path)]
            for epoch in range(3)
        ]
        notes.append([dict(sorted(run.params.items())), run.losses, saved])
    return Run({}, notes=notes)


def test_pruning(ranks: Pools, tmp_path: Path) -> None:
    runs = ranks(2).run(under_all, _prune, str(tmp_path))
    params, _, saved = runs[0]["ddp"].notes[0]
    assert (params["head.weight"] == 0).any()
    assert "head.weight" in saved[-1]
    assert_like_ddp(runs)
