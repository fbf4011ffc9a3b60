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

from tests.oracle.models import Block
from tests.oracle.own_optimizers import Own
from tests.oracle.play import UNUSED, Player, case, widen
from tests.oracle.projects import WIDTH, Noted, Regression, Trace, rows

HAS_PSUTIL = find_spec("psutil") is not None

# -- torch.compile ---------------------------------------------------------------------------------


class Silent(Noted):
    """Logs nothing: dynamo cannot read Lightning's `self.log`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _blocks(module: Regression) -> Any:
    for index, block in enumerate(module.net.blocks):
        module.net.blocks[index] = torch.compile(block, backend="aot_eager")
    return module


def _in_place(backend: str, module: Regression) -> Any:
    for block in module.net.blocks:
        block.compile(backend=backend)
    return module


def _body(module: Regression) -> Any:
    module.net = torch.compile(module.net, backend="aot_eager")
    return module


WAYS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "submodules": (_blocks, (3,), {"data": lambda: (rows(), rows(8, seed=1))}),
    "in_place": (partial(_in_place, "aot_eager"), (3,), {"accumulate_grad_batches": 2}),
    "body": (_body, (1, 2), {"gradient_clip_val": 0.1}),
    "module": (partial(torch.compile, backend="eager"), (2,), {"accumulate_grad_batches": 2}),
    "by_inductor": (partial(_in_place, "inductor"), (3,), {}),
}
"""How it is compiled, at which stages, and options of the Trainer."""


def compiled(way: str) -> Any:
    """The same numbers from the same graphs: no break and no recompilation is our hooks'.

    At stage 3 the weights of a unit come and go between two graphs, so one that is compiled with
    the code around it has graphs of its own.
    """

    def loop(play: Player) -> Trace:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        module = Silent()
        compiles, _, options = WAYS[way]
        trace = play.fit(compiles(module), max_epochs=2, **options)
        assert counters["frames"]["ok"] >= 1, "something was compiled"
        assert not counters["graph_break"]
        counted = [dict(counters["frames"]), dict(counters["stats"])]
        own = play.way.strategy == 3 and way in ("body", "module")
        params = {n.replace("_orig_mod.", ""): p for n, p in Trace.of(module).params.items()}
        return Trace(params, losses=trace.losses, notes=None if own else counted)

    return loop


for way in WAYS if shutil.which("g++") else [*WAYS][:-1]:
    case("compile", name=f"compile_{way}", loop=compiled(way), stages=WAYS[way][1], ulps=64,
         is_slow=way == "by_inductor")  # fmt: skip


# -- buffers ---------------------------------------------------------------------------------------


class WithBuffers(Noted):
    """Batch norms in units and at the root, and a buffer that counts its own way on each rank."""

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
        if self.training:
            self.count += self.global_rank + 1
            self.number += self.global_rank + 1
        return self.norm(super().forward(x))


class Drifting(WithBuffers):
    """A buffer that each rank changes its own way in every forward, also in those of a hook."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.global_rank + 1
        return super().forward(x + 0.01 * self.count[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 2):
            with torch.no_grad():
                self(batch[0])


class Manual(Drifting):
    """Sends gradients or not, within a step and behind it."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx != 0):
            self.manual_backward(self.loss(batch))
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 2:
            self.manual_backward(self.loss(batch))
            self.zero_grad()


BATCHES: dict[str, Any] = {
    "data": lambda: (rows(64, batch_size=8), rows(16, batch_size=8, seed=1)),
    "max_epochs": 2,
    "ulps": 256,
}
case("buffers", WithBuffers, **BATCHES, stages=(1, 2, 3))
case("buffers", WithBuffers, "buffers_accumulating", **BATCHES, accumulate_grad_batches=2)
for module in (Drifting, Manual):
    case("buffers", module, f"buffers_{module.__name__}", **BATCHES, val_check_interval=2, stages=(1, 2, 3))  # fmt: skip


@case("buffers", ulps=256)
def buffers_of_each_rank(play: Player) -> Trace:
    strategy: Any = play.strategy(broadcast_buffers=False)
    if play.is_ddp:
        strategy = DDPStrategy(broadcast_buffers=False)
    with warnings.catch_warnings():  # torch 2.13 deprecates the argument's name
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return play.fit(WithBuffers(), *BATCHES["data"](), strategy=strategy, max_epochs=2)


class Spare(Regression):
    """Has a batch norm that is not called: torch synchronizes none on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.BatchNorm1d(WIDTH)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.notes.append(type(self.spare).__name__)


@case("buffers", stages=(1, 2, 3))
def batch_norms_are_converted_and_back(play: Player) -> Trace:
    """Torch's own refuses to run on CPU, also under DDP, so that it is not called."""
    if not play.is_ddp:
        module = Spare()
        weight = module.spare.weight
        trace = play.fit(module, sync_batchnorm=True)
        assert set(trace.notes) == {"SyncBatchNorm"}
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


class Lending(Regression):
    """Calls a unit with tensors of its own making, with another's weights, and with its own."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.unit, self.other = Shifted(), Shifted()

    def forward(self, x: Tensor) -> Tensor:
        made = {name: 1.5 * p for name, p in self.unit.named_parameters()}
        x = torch.func.functional_call(self.unit, {**made, "mean": torch.ones(())}, (x,))
        x = torch.func.functional_call(self.unit, dict(self.other.named_parameters()), (x,))
        return super().forward(self.other(self.unit(x)))


AGAIN: list[Any] = [
    {"units": {Shifted}, "activation_checkpointing": a} for a in (True, [nn.Linear])
]
case("recompute", Lending, settings=AGAIN, ulps=16)


class Noisy(Regression):
    """Draws random numbers, which a second forward must draw again."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.2)), 0.5)


case("recompute", Noisy, settings=({"activation_checkpointing": True}, {"activation_checkpointing": {Block}}))  # fmt: skip


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


class Conjugating(Spectral):
    """Gradients come as conjugated views, with which torch's Adam ends in an error under DDP."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (self.tone.conj() * self.net.blocks[3].turn.mH).abs().mean())


class Looking(Spectral):
    """Reads, measures and changes weights and gradients where users do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        turn = self.net.blocks[3].turn
        self.losses += [float(turn.grad.abs().sum()), float(turn.grad.norm())]
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.requires_grad])
        self.losses.append(float(norm))
        turn.grad.mul_(1j)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.net.blocks[4].phase.mul_(0.5 + 0.5j)
            self.losses.append(float(self.net.blocks[3].turn.imag.sum()))


class ByParameter(Own):
    """Mixes the elements of a parameter, so it has owners."""

    def update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        average.mul_(0.9).add_(grad)
        p.sub_(0.05 * average / (grad.abs().square().mean().sqrt() + 1e-3))


MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
COMPLEX: dict[str, Any] = {"ulps": 16, "dtype": torch.float32, "ddp": UNUSED}
SAVED: dict[str, Any] = {"max_epochs": 2, "save_at": 1}
HOMES = {"offload_optimizer": "nvme", "offload_weights": "nvme"}
SPECTRAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (lambda: Spectral(optimizer=partial(torch.optim.SGD, **MOMENTUM)), {}),
    "by_parameter": (lambda: Spectral(optimizer=ByParameter), {}),
    "looked_at": (Looking, {"stages": (1, 2, 3), "gradient_clip_val": 0.1}),
    "conjugated": (lambda: Conjugating(optimizer=Own), {}),
    "lbfgs": (lambda: Spectral(optimizer=lambda p, lr: torch.optim.LBFGS(p, lr, max_iter=4)), {"max_steps": 2}),
    "saved": (Spectral, {**SAVED, "readers": ("ddp", 2)}),
    "directory": (Spectral, {**SAVED, "stages": (3,), "readers": (2,), "settings": ({"checkpoint": "dcp"},)}),
    "in_copies": (Spectral, {"worlds": (4,), "stages": (3,), "settings": ({"shard": 2},)}),
    "in_files": (Spectral, {"worlds": (1,), "stages": (3,), "settings": (HOMES,)}),
}  # fmt: skip
for name, (module, how) in SPECTRAL.items():
    case("complex", module, f"complex_{name}", **COMPLEX, **how)


# -- Lightning's callbacks -------------------------------------------------------------------------


class Scheduled(Noted):
    """SGD with a schedule, so that rounding stays small and the rate changes."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


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


LONG: dict[str, Any] = {"max_epochs": 3, "data": lambda: (rows(), rows(8, seed=1)), "ulps": 64}


# On several ranks DDP never averages gradients of parameters that join in later.
case("callbacks", WithBackbone, "finetuning", **LONG, worlds=(1,), stages=(1, 2, 3),
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
    trace = play.fit(module, *LONG["data"](), callbacks=callbacks, **how)
    names = [Path(name).name for name in sorted(best.best_k_models)]
    trace.notes = [
        module.notes,
        module.current_epoch,
        names,
        float(best.best_model_score),
        rates.lrs,
    ]
    assert module.current_epoch == 2
    assert timer.time_elapsed() > 0
    if play.rank == 0:
        trace.notes.append(sorted(logger.experiment.metrics_keys))
    return trace


@case("callbacks", ulps=64)
def one_clock_ends_the_run_on_all_ranks(play: Player) -> Trace:
    module = Scheduled()

    class FastClock(Timer):
        """On rank 0 the hour is over after three steps."""

        def time_elapsed(self, *args: Any) -> float:
            return 3600.0 if module.global_rank == 0 and len(module.losses) == 3 else 0.0

    trace = play.fit(module, callbacks=[FastClock(duration={"hours": 1})], max_epochs=3)
    assert len(trace.losses) == 3
    return trace


class Looks(ModelSummary):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        summary = self._summary(trainer, pl_module)
        counts = [summary.total_parameters, summary.trainable_parameters, summary.model_size]
        pl_module.notes += [*counts, str(summary)]


class Frozen(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)


case("callbacks", Frozen, "a_summary", stages=(1, 2, 3), enable_progress_bar=True, enable_model_summary=True,
     callbacks=lambda: [Looks(max_depth=3), RichProgressBar()])  # fmt: skip


@case("callbacks", ulps=256)
def learning_rate_finder(play: Player) -> Trace:
    module, tuned = Scheduled(), Scheduled()
    finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None)
    trace = play.fit(module, callbacks=[finder], max_epochs=2)
    found = Tuner(play.trainer(max_epochs=2)).lr_find(
        tuned, rows(), num_training=10, early_stop_threshold=None
    )
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
