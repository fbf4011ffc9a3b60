"""One runner of all cases: what users do, under DDP and under every way of sharding.

A case is declared in `tests/cases`, by a module, options and what hooks do, or by a function:

    case("loops", Regression, max_epochs=2)          # fits; params, losses, metrics are DDP's
    case("loops", name="norms", moments={"on_train_batch_end": lambda m, *_: m.head.weight.norm()})

    @case("loops")
    def two_trainers(play: Player) -> Trace:         # whatever a user may write
        first = play.fit(module := Regression())
        return play.fit(module, notes=first.params)

`tests/test_cases.py` plays each: DDP once for each world size and precision, and the ways that
`Case.ways` generates. Ranks compare by themselves and return what differs. Observed in each way:

- the transport that was taken is that of the way (`wired`);
- parameters, buffers, losses, metrics, notes and written files are DDP's, in fp32 to the bit;
- between steps a rank holds the bytes that were predicted, and no gathered weights;
- where a case has `save_at`, its `readers` resume from the file and end where DDP does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import random
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import lightning_zero
from lightning_zero import ZeROStrategy, estimate
from lightning_zero.memory.summary import resting, terms_of
from tests.oracle.models import Block
from tests.oracle.parity import differences
from tests.oracle.projects import WAYS, Noted, Trace, make_trainer, rows, wired

TRANSPORTS = tuple(WAYS)
DTYPES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}
"""The dtype whose roundings count in each precision."""
WIDE: dict[str, Any] = {"worlds": (1, 2), "precisions": ("bf16-mixed", "32-true")}
"""One rank in mixed precision, and two."""
UNUSED = "ddp_find_unused_parameters_true"


@dataclass(frozen=True)
class Way:
    """How a case is run: `strategy` is a stage, or a name of Lightning's."""

    strategy: str | int
    world: int = 2
    precision: str = "32-true"
    transport: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        stage = f"stage {self.strategy}" if isinstance(self.strategy, int) else self.strategy
        more = [f"{name}={value}" for name, value in self.settings.items()]
        return ", ".join([stage, self.precision, *([self.transport] * (self.world > 1)), *more])


@dataclass
class Case:
    """What a user does.

    Attributes:
        feature: The feature that it belongs to, for the table of covered pairs.
        name: Unique among all.
        module: Makes the module that is fitted.
        loop: A function of a `Player` that does everything; by default it fits the module.
        options: Of the Trainer; `callbacks` and `data` are functions that make them.
        moments: Functions of the module, and of what else a hook is given, by hook; what they
            return is noted.
        stages, worlds, precisions, transports: Each value of each occurs in a way.
        settings: Of the strategy: one dictionary, or several of which each occurs in a way.
        ddp: Lightning's strategy that it is held against.
        save_at: The number of epochs after which it saves.
        readers: Who goes on from there: stages, "ddp", "own", which is the same way again, or
            "of ddp", which is this way from DDP's file. "again" goes on under DDP too, and what
            that leaves is compared.
        warns: What rank 0 is told of states that are not loaded; "" is nothing, None anything.
        ulps: How far parameters and buffers may be off, in roundings of the largest value.
        rests: Whether resting bytes are as predicted, and nothing is gathered between steps.
        is_slow: Whether only `make slow` plays it.
        dtype: The dtype whose roundings count; by default each tensor's own, or the precision's.
        bits: Whether bits are equal in half precision too.
        where: The module that declares it.
        cut: The number of ranks over which tensor parallelism cuts, which share their rows.
    """

    feature: str
    name: str
    module: Callable[[], LightningModule] = Noted
    loop: Callable[[Player], Trace] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    moments: dict[str, Callable[..., Any]] = field(default_factory=dict)
    stages: Sequence[int] = ()
    worlds: Sequence[int] = (2,)
    precisions: Sequence[str] = ("32-true",)
    transports: Sequence[str] = ()
    settings: Sequence[Mapping[str, Any]] = ({},)
    ddp: str = "ddp"
    save_at: int = 0
    readers: Sequence[str | int] = ()
    warns: str | None = None
    ulps: float = 0.0
    rests: bool = False
    bits: bool = False
    is_slow: bool = False
    dtype: torch.dtype | None = None
    cut: int = 1
    where: str = ""

    @property
    def number(self) -> int:
        """Choose what goes round from case to case, whatever other cases there are."""
        return zlib.crc32(self.name.encode())

    def ways(self, world: int) -> list[Way]:
        """Return ways that have each value of each dimension once, at least, for this world.

        Where stages or transports are not given, they go round from case to case.
        """
        stages = self.stages or (3, 1 + self.number % 2)
        turn = [TRANSPORTS[(self.number + i) % 3] for i in range(len(stages))]
        transports = self.transports or turn
        if world == 1:
            transports = transports[:1]
        at = self.worlds.index(world)
        precisions = self.precisions
        if len(self.worlds) > 1 and len(precisions) == len(self.worlds):
            precisions = precisions[at : at + 1]
        dimensions = (stages, precisions, transports, self.settings)
        num = max(map(len, dimensions))
        picked = [[values[i % len(values)] for i in range(num)] for values in dimensions]
        return [
            Way(stage, world, precision, transport, settings)
            for stage, precision, transport, settings in zip(*picked, strict=True)
        ]


CASES: dict[str, Case] = {}
"""All cases that the imported modules of `tests/cases` have declared, by name."""


def case(feature: str, module: Any = None, name: str = "", **given: Any) -> Any:
    """Declare a case; as a decorator, one whose loop is the function.

    What is no field of `Case` is an option of the Trainer.
    """
    fields = {key: given.pop(key) for key in list(given) if key in Case.__dataclass_fields__}
    if module is not None:
        fields["module"] = module
    fields["where"] = sys._getframe(1).f_globals["__name__"]

    def declare(name: str) -> None:
        assert name not in CASES, f"two cases are called {name}"
        CASES[name] = Case(feature, name, options=given, **fields)

    if module is not None or name:
        return declare(name or module.__name__)

    def decorate(function: Callable[[Player], Trace]) -> Callable[[Player], Trace]:
        fields["loop"] = function
        declare(function.__name__)
        return function

    return decorate


def widen(*names: str, **fields: Any) -> None:
    """Let cases be played with one rank and in mixed precision too, or with other `fields`."""
    for name in names:
        CASES[name] = dataclasses.replace(CASES[name], **(fields or WIDE))


# ---------------------------------------------------------------------------- on the ranks


class Player:
    """What a case's function uses in place of Lightning's names: one way, and a folder for it."""

    def __init__(self, case: Case, way: Way, folder: Path) -> None:
        self.case, self.way, self.folder = case, way, folder
        self.is_ddp = not isinstance(way.strategy, int)
        self.rank = dist.get_rank()
        self.problems: list[str] = []

    def strategy(self, **settings: Any) -> Any:
        """Return the strategy of this way; its units are the blocks."""
        if self.is_ddp:
            return self.way.strategy
        cut = {"tensor_parallel_size": self.case.cut} if self.case.cut > 1 else {}
        how = {**cut, **self.way.settings, **settings}
        if "nvme" in how.values():
            how["offload_path"] = str(self.folder)
        return self.plain(self.way.strategy, **how)

    def plain(self, stage: Any, **settings: Any) -> ZeROStrategy:
        """Return a strategy whose units are the blocks."""
        units = {"units": "auto", "min_num_params": 0} if self.case.cut > 1 else {"units": {Block}}
        return ZeROStrategy(stage, **{**units, **settings})

    def trainer(self, strategy: Any = None, **options: Any) -> Trainer:
        """Return a quiet Trainer over all ranks."""
        given = {**self.case.options, **options}
        given.pop("data", None)
        callbacks = given.pop("callbacks", None)
        listed = callbacks() if callable(callbacks) else list(callbacks or ())
        if self.case.rests and not self.is_ddp:
            listed = [_Rests(self), *listed]
        if self.way.precision == "16-mixed":
            # On CPU the Trainer itself would turn this precision into "bf16-mixed".
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            given.setdefault("plugins", [MixedPrecision("16-mixed", "cpu", scaler)])
        elif "plugins" not in given:
            given.setdefault("precision", self.way.precision)
        given.setdefault("default_root_dir", str(self.folder))
        given.setdefault("devices", self.way.world)
        chosen = self.strategy() if strategy is None else strategy
        return make_trainer(chosen, callbacks=listed, **given)

    def fit(
        self,
        module: Any,
        *data: Any,
        ckpt_path: Any = None,
        notes: Any = None,
        strategy: Any = None,
        **options: Any,
    ) -> Trace:
        """Fit on the case's data, or on `data`, and return what is left."""
        make_data = options.pop("data", None) or self.case.options.get("data")
        loaders = data or (make_data() if make_data else (rows(),))
        chosen = self.strategy() if strategy is None else strategy
        if getattr(getattr(chosen, "settings", None), "tensor_parallel_size", 1) < self.case.cut:
            options["use_distributed_sampler"] = False
            loaders = tuple(map(self._shared, loaders))
        trainer = self.trainer(chosen, **options)
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
        return self.trace(module, trainer, notes)

    def _shared(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the rows that ranks of a group share, in the order in which Lightning shuffles."""
        num, rank = self.way.world // self.case.cut, self.rank // self.case.cut
        sampler = DistributedSampler(loader.dataset, num, rank)  # type: ignore[arg-type]
        return DataLoader(loader.dataset, loader.batch_size, sampler=sampler)

    def trace(self, module: nn.Module, trainer: Trainer | None = None, notes: Any = None) -> Trace:
        """Return what the module, which must be whole, the Trainer and the user hold."""
        return Trace.of(module, trainer, getattr(module, "notes", None) if notes is None else notes)

    def estimated(self, trainer: Trainer) -> Counter[str]:
        """Return the bytes between steps that are estimated for the case's module."""
        settings = trainer.strategy.settings
        if settings.shard == "node":  # of which an estimate does not know the size
            settings = dataclasses.replace(settings, shard=self.way.world)
        with torch.random.fork_rng(devices=[]):  # the run draws what it would draw anyway
            module = self.case.module()
        how: dict[str, Any] = {"world_size": self.way.world, "precision": self.way.precision}
        how["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        return estimate(module, settings, rank=self.rank, **how).rests

    def fabric(self, **settings: Any) -> Fabric:
        """Return a launched Fabric over all ranks."""
        given: Any = {"units": {Block}, **self.way.settings, **settings}
        stage: Any = self.way.strategy
        strategy = stage if self.is_ddp else lightning_zero.fabric.ZeROStrategy(stage, **given)
        how: dict[str, Any] = {"precision": self.way.precision, "devices": self.way.world}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = Fabric(accelerator="cpu", strategy=strategy, **how)
        made.launch()
        return made


def by_trainer(play: Player) -> Trace:
    """Fit the case's module; save in the middle, and let the readers go on from there.

    A file that is saved has what DDP's has.
    """
    case, path = play.case, play.folder / "mid.ckpt"

    def fit(strategy: Any = None, begin: Any = None) -> Trace:
        notes: list[Any] = []

        def note(use: Callable[..., Any], trainer: Trainer, module: Any, *given: Any) -> None:
            if (seen := use(module, *given)) is not None:
                notes.append(seen)

        def save(trainer: Trainer, module: Any) -> None:
            if trainer.current_epoch + 1 == case.save_at and begin is None:
                trainer.save_checkpoint(str(path))

        moments = {hook: functools.partial(note, use) for hook, use in case.moments.items()}
        callbacks = [*case.options.get("callbacks", list)(), LambdaCallback(**moments)]
        callbacks.append(LambdaCallback(on_train_epoch_end=save))
        trace = play.fit(case.module(), callbacks=callbacks, ckpt_path=begin, strategy=strategy)
        if notes:
            trace.notes = [trace.notes, notes]
        return trace

    trace = fit()
    for reader in case.readers:
        if reader == "again":
            first, trace = trace, fit(begin=str(path))
            trace.notes = [first.notes, trace.notes]
        elif not play.is_ddp:
            strategy: Any = {"ddp": case.ddp, "own": None, "of ddp": None}.get(reader, reader)
            strategy = play.plain(strategy) if isinstance(strategy, int) else strategy
            of_ddp = play.folder.parent / play.way.precision / "mid.ckpt"
            resumed = fit(strategy, str(of_ddp if reader == "of ddp" else path))
            far = differences(Trace(resumed.params), Trace(trace.params), case.ulps)
            play.problems += [f"resumed by {reader}: {text}" for text in far]
    if path.is_file():
        trace.saved = torch.load(path, weights_only=False)
        del trace.saved["callbacks"]
    return trace


class _Rests(Callback):
    """Compares what a rank holds between steps with the summary's prediction, and an estimate's."""

    def __init__(self, player: Player) -> None:
        self.player = player
        self.step = 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step != 2 or self.step == 2:  # amid a window less or more is held
            return
        engine = trainer.strategy.engine
        try:
            expected = {"the summary": resting(engine, terms_of(engine))}
        except ValueError:
            return  # only steps tell how much the optimizer keeps
        if self.player.case.cut == 1:
            expected["an estimate"] = self.player.estimated(trainer)
        held = engine.sharded.memory()
        for by, kinds in expected.items():
            for kind in {*held, *kinds} - {"gathered", "unreduced"}:
                if held.get(kind, 0) != kinds.get(kind, 0):
                    text = f"{held.get(kind, 0)} B held, {kinds.get(kind, 0)} predicted by {by}"
                    self.player.problems.append(f"at rest, {kind}: {text}")


def play(case: Case, way: Way, folder: Path) -> tuple[Trace, list[str]]:
    """Run a case in one way; return what it leaves, and what the observers find wrong."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    player = Player(case, way, folder)
    context: Any = contextlib.nullcontext() if player.is_ddp else wired(way.transport)
    with context, warnings.catch_warnings(record=case.warns is not None) as caught:
        warnings.simplefilter("always") if caught is not None else None
        trace = (case.loop or by_trainer)(player)
    if caught is not None and not player.is_ddp:
        told = [str(each.message) for each in caught if "states of" in str(each.message)]
        is_told = bool(case.warns) and player.rank == 0
        if len(told) != is_told or not all(case.warns in text for text in told):
            player.problems.append(f"warns {told}")
    dist.barrier()
    names = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    trace.files = sorted(name for name in names if ".ckpt/" not in name)  # of directories, the name
    return trace, player.problems


def play_all(module: str, name: str, world: int, folder: str) -> list[str]:
    """Play a case in all its ways and return what differs from DDP on this rank."""
    importlib.import_module(module)
    case = CASES[name]
    expected: dict[str, Trace] = {}
    found = []
    for number, way in enumerate(case.ways(world)):
        try:
            if way.precision not in expected:
                under = Way(case.ddp, world, way.precision)
                expected[way.precision], _ = play(case, under, Path(folder) / way.precision)
            trace, problems = play(case, way, Path(folder) / str(number))
        except BaseException as error:
            raise RuntimeError("\n".join([f"{name}, {way}: {error}", *found])) from error
        target = expected[way.precision]
        dtype = case.dtype or DTYPES[way.precision]
        # Gloo sums three ranks' numbers in another order.
        least = 0 if world < 3 and (dtype.itemsize >= 4 or case.bits) else 16
        far = differences(trace, target, max(case.ulps, least), dtype)
        found += [f"{way}: {text}" for text in (*problems, *far)]
    return found
