"""Modules: compilation, buffers, recomputation, complex parameters, callbacks."""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
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
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from tests.cases import FILES, SAVED, scheduled, user
from tests.oracle.models import Block
from tests.oracle.own_optimizers import Own
from tests.oracle.play import UNUSED, Player, case, widen
from tests.oracle.projects import WIDTH, Noted, Regression, Trace, rows

HAS_PSUTIL = find_spec("psutil") is not None

# -- torch.compile ---------------------------------------------------------------------------------


def submodules(module: Regression) -> Any:
    for index, block in enumerate(module.net.blocks):
        module.net.blocks[index] = torch.compile(block, backend="aot_eager")
    return module


def in_place(module: Regression, backend: str = "aot_eager") -> Any:
    for block in module.net.blocks:
        block.compile(backend=backend)
    return module


def body(module: Regression) -> Any:
    module.net = torch.compile(module.net, backend="aot_eager")
    return module


# At stage 3 the weights of a unit come and go between two graphs, so one that is compiled with the
# code around it has graphs of its own.
WAYS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "submodules": (submodules, (3,), {"data": lambda: (rows(), rows(8, seed=1))}),
    "in_place": (in_place, (3,), {"accumulate_grad_batches": 2}),
    "body": (body, (1, 2), {"gradient_clip_val": 0.1}),
    "module": (partial(torch.compile, backend="eager"), (2,), {"accumulate_grad_batches": 2}),
    "by_inductor": (partial(in_place, backend="inductor"), (3,), {}),
}
"""How it is compiled, at which stages, and options of the Trainer."""


def compiled(way: str, play: Player) -> Trace:
    """The same numbers from the same graphs: no break and no recompilation is our hooks'."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # It logs nothing: dynamo cannot read Lightning's `self.log`.
    module = user(training_step=lambda m, batch, batch_idx: m.loss(batch))()
    trace = play.fit(WAYS[way][0](module), max_epochs=2, **WAYS[way][2])
    assert counters["frames"]["ok"] >= 1, "something was compiled"
    assert not counters["graph_break"]
    counted = [dict(counters["frames"]), dict(counters["stats"])]
    params = {n.replace("_orig_mod.", ""): p for n, p in Trace.of(module).params.items()}
    return Trace(params, losses=trace.losses, notes=counted)


for way in WAYS if shutil.which("g++") else [*WAYS][:-1]:
    case("compile", name=f"compile_{way}", loop=partial(compiled, way), stages=WAYS[way][1], ulps=64,
         is_slow=way == "by_inductor")  # fmt: skip


# -- buffers ---------------------------------------------------------------------------------------


class WithBuffers(Noted):
    """Batch norms in units and at the root, and buffers that each rank changes in its own way."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        for block in self.net.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(2), persistent=False)
        self.register_buffer("number", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append([float(self.count[0]), int(self.number)])
        self.count += self.global_rank + 1
        self.number += (self.global_rank + 1) * self.training
        return self.norm(super().forward(x + 0.01 * self.count[0]))


def forward_again(m: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    """Call the module in a hook too, without gradients or with."""
    if batch_idx in (1, 2):
        with torch.no_grad():
            m(batch[0])
    if batch_idx == 2 and not m.automatic_optimization:
        m.manual_backward(m.loss(batch))
        m.zero_grad()


def send_or_not(m: Any, batch: Any, batch_idx: int) -> None:
    optimizer = m.optimizers()
    with optimizer.toggle_model(sync_grad=batch_idx != 0):
        m.manual_backward(m.loss(batch))
    if batch_idx:
        optimizer.step()
        optimizer.zero_grad()


BATCHES: dict[str, Any] = {
    "data": lambda: (rows(64, batch_size=8), rows(16, batch_size=8, seed=1)),
    "max_epochs": 2,
    "ulps": 256,
}
BY_HAND = user(WithBuffers, training_step=send_or_not, automatic_optimization=False)
case("buffers", WithBuffers, "buffers_accumulating", **BATCHES, accumulate_grad_batches=2, stages=(1, 2, 3), rests=True)  # fmt: skip
for name, module in {"drifting": WithBuffers, "by_hand": BY_HAND}.items():
    case("buffers", module, f"buffers_{name}", **BATCHES, val_check_interval=2, stages=(1, 2, 3),
         moments={"on_train_batch_end": forward_again})  # fmt: skip


@case("buffers", ulps=256)
def buffers_of_each_rank(play: Player) -> Trace:
    strategy: Any = play.strategy(broadcast_buffers=False)
    if play.is_ddp:
        strategy = DDPStrategy(broadcast_buffers=False)
    with warnings.catch_warnings():  # torch 2.13 deprecates the argument's name
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return play.fit(WithBuffers(), *BATCHES["data"](), strategy=strategy, max_epochs=2)


@case("buffers", stages=(1, 2, 3))
def batch_norms_are_converted_and_back(play: Player) -> Trace:
    """Torch's own refuses to run on CPU, also under DDP, so that it is not called."""
    note = lambda m, *_: m.notes.append(type(m.spare).__name__)  # noqa: E731
    module = user(
        build=lambda m: m.add_module("spare", nn.BatchNorm1d(6)), on_train_batch_start=note
    )()
    if not play.is_ddp:
        weight = module.spare.weight
        assert set(play.fit(module, sync_batchnorm=True).notes) == {"SyncBatchNorm"}
        assert type(module.spare).__name__ == "_BatchNormXd"  # Lightning's own way back
        assert module.spare.weight is weight
    return Trace({})


# -- recomputed activations ------------------------------------------------------------------------


class Shifted(nn.Module):
    """A unit with a buffer that its forward replaces."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.mean
        self.mean = shift + 1
        return x + self.down((self.up(x) - 0.1 * shift).tanh())


def shifted(m: Any) -> None:
    m.unit, m.other = Shifted(), Shifted()


def lend(m: Any, x: Tensor) -> Tensor:
    """Call a unit with tensors of the caller's making, with another's weights, and with its own."""
    made = {name: 1.5 * p for name, p in m.unit.named_parameters()}
    x = torch.func.functional_call(m.unit, {**made, "mean": torch.ones(())}, (x,))
    x = torch.func.functional_call(m.unit, dict(m.other.named_parameters()), (x,))
    return Regression.forward(m, m.other(m.unit(x)))


AGAIN = [{"units": {Shifted}, "activation_checkpointing": a} for a in (True, [nn.Linear])]
case("recompute", user(Regression, shifted, forward=lend), "lending", settings=AGAIN, ulps=16)


def drop_out(m: Any, x: Tensor) -> Tensor:
    """Draw random numbers, which a second forward must draw again."""
    return F.dropout(Regression.forward(m, F.dropout(x, 0.2)), 0.5)


case("recompute", user(Regression, forward=drop_out), "Noisy",
     settings=({"activation_checkpointing": True}, {"activation_checkpointing": {Block}}))  # fmt: skip


# -- complex parameters ----------------------------------------------------------------------------


class Rotation(Block):
    """A unit with complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5 + 0.5j))

    def forward(self, x: Tensor) -> Tensor:
        turned = (x * self.phase) @ self.turn.mT * self.scale
        return super().forward(x + turned.real - turned.imag)


class Spectral(Regression):
    """Real and complex parameters, in units and in the root; one is never used, one is frozen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net.blocks.extend([Rotation(), Rotation()])
            self.tone = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.complex128))
            self.frozen = nn.Parameter(torch.randn(3, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x * self.tone).abs().float() + self.frozen.real.sum())


def conjugate(m: Any, x: Tensor) -> Tensor:
    """Gradients come as conjugated views, with which torch's Adam ends in an error under DDP."""
    return Spectral.forward(m, x * (m.tone.conj() * m.net.blocks[3].turn.mH).abs().mean())


def change_gradients(m: Any, optimizer: Any) -> Any:
    turn = m.net.blocks[3].turn
    norms = turn.grad.abs().sum(), turn.grad.norm(), nn.utils.get_total_norm([p.grad for p in m.parameters() if p.requires_grad])  # fmt: skip
    notes = [float(norm) for norm in norms]
    turn.grad.mul_(1j)
    return notes


@torch.no_grad()
def change_weights(m: Any, *_: Any) -> Any:
    m.net.blocks[4].phase.mul_(0.5 + 0.5j)
    return float(m.net.blocks[3].turn.imag.sum())


class ByParameter(Own):
    """Mixes the elements of a parameter, so it has owners."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        average.mul_(0.9).add_(grad)
        p.sub_(0.05 * average / (grad.abs().square().mean().sqrt() + 1e-3))


MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
COMPLEX: dict[str, Any] = {"ulps": 16, "dtype": torch.float32, "ddp": UNUSED}
SPECTRAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (partial(Spectral, optimizer=partial(torch.optim.SGD, **MOMENTUM)), {}),
    "in_files": (Spectral, {"worlds": (1,), "stages": (3,), "settings": (FILES,)}),
    "by_parameter": (partial(Spectral, optimizer=ByParameter), {}),
    "looked_at": (Spectral, {"stages": (1, 2, 3), "gradient_clip_val": 0.1,
                       "moments": {"on_before_optimizer_step": change_gradients, "on_train_batch_end": change_weights}}),
    "conjugated": (partial(user(Spectral, forward=conjugate), optimizer=Own), {}),
    "lbfgs": (partial(Spectral, optimizer=partial(torch.optim.LBFGS, max_iter=4)), {"max_steps": 2}),
    "saved": (Spectral, {**SAVED, "readers": ("ddp", 2)}),
    "directory": (Spectral, {**SAVED, "stages": (3,), "readers": (2,), "settings": ({"checkpoint": "dcp"},)}),
    "in_copies": (Spectral, {"worlds": (4,), "stages": (3,), "settings": ({"shard": 2},)}),
}  # fmt: skip
for name, (module, how) in SPECTRAL.items():
    case("complex", module, f"complex_{name}", **COMPLEX, **how)


# -- Lightning's callbacks -------------------------------------------------------------------------


# SGD with a schedule, so that rounding stays small and the rate changes.
Scheduled = user(configure_optimizers=lambda m: scheduled(Noted.configure_optimizers(m), 0.8, "epoch"))  # fmt: skip


def groups_of(m: Any) -> Any:
    groups = [[group["lr"], len(group["params"])] for group in m.trainer.optimizers[0].param_groups]
    return groups, [p.requires_grad for p in m.parameters()]


def finetuned(kind: Any) -> Any:
    """Train the head; the callback unfreezes the backbone later."""
    return user(
        build=lambda m: setattr(m, "backbone", m.net),
        configure_optimizers=lambda m: scheduled(kind(m.head.parameters(), lr=0.1), 0.7, "epoch"),
    )


# DDP averages no gradients of parameters that join in later, so all ranks have the same rows.
for kind in (torch.optim.SGD, torch.optim.Adafactor):
    case("callbacks", finetuned(kind), f"finetuning_{kind.__name__}", max_epochs=3, data=lambda: (rows(8),), ulps=64,
         use_distributed_sampler=False, worlds=(1, 2), stages=(1, 2, 3), precisions=("16-mixed", "32-true"), save_at=2,
         readers=("again",), moments={"on_train_epoch_end": groups_of},
         callbacks=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)])  # fmt: skip


@case("callbacks", ulps=64)
def callbacks_that_watch(play: Player) -> Trace:
    path, module = str(play.folder), Scheduled()
    best = ModelCheckpoint(path, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    rates, timer = LearningRateMonitor(log_momentum=True), Timer(duration={"hours": 1})
    callbacks = [
        *(best, rates, timer, EarlyStopping("val_loss", min_delta=10.0, patience=1)),
        DeviceStatsMonitor(cpu_stats=HAS_PSUTIL),
        LambdaCallback(on_before_zero_grad=lambda *_: module.notes.append("zero_grad")),
    ]
    logger = CSVLogger(path, name="", version="")
    how: dict[str, Any] = {"logger": logger, "enable_checkpointing": True, "max_epochs": 5}
    trace = play.fit(module, rows(), rows(8, seed=1), callbacks=callbacks, **how)
    names = [Path(name).name for name in sorted(best.best_k_models)]
    trace.notes = [module.notes, module.current_epoch, names, float(best.best_model_score), rates.lrs]  # fmt: skip
    assert module.current_epoch == 2
    assert timer.time_elapsed() > 0
    if play.rank == 0:
        trace.notes.append(sorted(logger.experiment.metrics_keys))
    return trace


class FastClock(Timer):
    """On rank 0 the hour is over after three steps."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.is_over = trainer.global_rank == 0 and trainer.global_step == 3
        super().on_train_batch_end(trainer, *args, **kwargs)

    def time_elapsed(self, *args: Any) -> float:
        return 3600.0 * getattr(self, "is_over", False)


case("callbacks", Scheduled, "one_clock_ends_the_run_on_all_ranks", ulps=64, max_epochs=3, callbacks=lambda: [FastClock(duration={"hours": 1})],
     moments={"on_train_end": lambda m: m.global_step})  # fmt: skip


class Looks(ModelSummary):
    """Notes a summary of a module of which a part is frozen."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.head.requires_grad_(False)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        summary = self._summary(trainer, pl_module)
        counts = [summary.total_parameters, summary.trainable_parameters, summary.model_size]
        pl_module.notes += [*counts, str(summary)]


case("callbacks", Scheduled, "a_summary", stages=(1, 2, 3), enable_progress_bar=True, enable_model_summary=True,
     callbacks=lambda: [Looks(max_depth=3), RichProgressBar()])  # fmt: skip


@case("callbacks", ulps=256)
def learning_rate_finder(play: Player) -> Trace:
    module, tuned = Scheduled(), Scheduled()
    finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None)
    trace = play.fit(module, callbacks=[finder], max_epochs=2)
    tuner = Tuner(play.trainer(max_epochs=2))
    how: dict[str, Any] = {"num_training": 10, "early_stop_threshold": None}
    found = tuner.lr_find(tuned, rows(), **how)
    assert finder.optimal_lr is not None
    assert found is not None
    trace.notes = [finder.optimal_lr.results, module.lr, found.results, tuned.lr]
    return trace


PRUNINGS: list[dict[str, Any]] = [
    {"pruning_fn": "l1_unstructured", "amount": 0.3, "use_lottery_ticket_hypothesis": False},
    # Once only: what is left is reset to the first weights, which DDP then trains in place.
    {"pruning_fn": "ln_structured", "amount": lambda epoch: 0.25 if epoch == 1 else 0, "pruning_dim": 0,
     "pruning_norm": 2, "use_global_unstructured": False, "parameter_names": ["weight"],
     "prune_on_train_epoch_end": False, "make_pruning_permanent": False},
]  # fmt: skip


@case("callbacks", ulps=16)
def pruning(play: Player) -> Trace:
    """Prunes in every epoch, and saves a checkpoint in between."""
    notes = []
    for number, options in enumerate(PRUNINGS):
        torch.manual_seed(0)
        module, path = Scheduled(), play.folder / str(number)
        layers = [module.net.stem, module.head, *(block.linear for block in module.net.blocks)]
        names = options.get("parameter_names", ["weight", "bias"])
        pruned = [(layer, name) for name in names for layer in layers]
        saves = ModelCheckpoint(path, "{epoch}", save_top_k=-1)
        callbacks = [ModelPruning(parameters_to_prune=pruned, **options), saves]
        trace = play.fit(module, callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
        files = [torch.load(path / f"epoch={epoch}.ckpt") for epoch in range(3)]
        saved = [file["state_dict"] for file in files]
        notes.append([dict(sorted(trace.params.items())), trace.losses, saved])
    return Trace({}, notes=notes)


widen("compile_body", transports=("backend", "windows"))
widen("compile_in_place", "buffers_accumulating", "Noisy", "one_clock_ends_the_run_on_all_ranks")
