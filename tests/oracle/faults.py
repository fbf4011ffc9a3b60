"""Faults at any place of a step, a save or a load, of any kind, on one rank.

The rank raises, is killed, hangs or stalls.

A **cell** is one place, one kind of fault and one transport on so many ranks, which are processes
of their own. It must end in one of two ways within :data:`LIMIT`: every rank goes on to the numbers
of an undisturbed run, or every rank that is left raises the same error, which names the rank.

    cell = run(Job("the user's forward", "kill", "windows"))
    assert cell.ending == "named"

``make faults`` runs all cells.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import itertools
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.oracle.devices import join, leave, trainer_options
from tests.oracle.models import Blocks
from tests.oracle.projects import (
    WAYS,
    WIDTH,
    Regression,
    communicator_by,
    make_trainer,
    rows,
    wired,
)
from tests.oracle.ranks import Pool
from tests.oracle.sharded import adamw, shard

NCCL = "nccl"
"""The transport of ranks on GPUs, besides those of `WAYS`."""
Kind = Literal["raise", "kill", "hang", "stall"]
KINDS: tuple[Kind, ...] = ("raise", "kill", "hang", "stall")

GOOD = ("goes on", "named", "too late to matter")
"""How a run may end."""

QUICK = KINDS[:2]
"""Those after which nobody waits for a time limit."""

LIMIT = 90.0
"""Seconds from the fault to the last rank's end; a run is killed after twice as many."""
STALL = 3.0
"""Seconds that a stalled rank does nothing: longer than any patience but the group's."""
HANG = 4
"""The time limit of the process group, in seconds, where a rank hangs."""
SECONDS = 240.0
"""After which a run is killed, whatever it waits for."""


class Place(NamedTuple):
    """A function of the package or of the user, and the call of it that fails.

    Attributes:
        target: ``module:attribute``.
        number: The number of the call.
        only_trainer: Whether a plain loop never comes there.
        on_rank_0: Whether only rank 0 comes there.
    """

    target: str
    number: int = 1
    only_trainer: bool = True
    on_rank_0: bool = False

    def found(self) -> tuple[Any, str]:
        """Return the owner of the function, and its name there."""
        module, _, names = self.target.partition(":")
        *path, name = names.split(".")
        return functools.reduce(getattr, path, importlib.import_module(module)), name


_ENGINE, _COMM = "lightning_zero.engine", "lightning_zero.comm"
_CHECKPOINT = "lightning_zero.checkpoint"

PLACES = {
    # A step.
    "the setup": Place(f"{_ENGINE}.unit_builder:MetaInitializer.fill", 1, False),
    "the adoption of an optimizer": Place(f"{_ENGINE}.engine:OptimizerHooks", 1, False),
    "the start of a batch": Place("tests.oracle.faults:Module.on_train_batch_start", 2),
    "the user's forward": Place("tests.oracle.models:Block.forward", 5, False),
    "a gather": Place(f"{_COMM}.transport:Transport._note", 9, False),
    "the user's backward": Place("tests.oracle.faults:Backward.backward", 2, False),
    "the start of a backward": Place(f"{_ENGINE}.reductions:ReductionOrder.begin", 2, False),
    "the order of the first": Place(f"{_COMM}.control:Control.broadcast_object", 1, False),
    "a reduction": Place("lightning_zero.parameters.gradients:FlatGradients.reduce", 7, False),
    "the end of a reduction": Place(f"{_ENGINE}.unit:Unit.finish", 7, False),
    "the end of a backward": Place(f"{_ENGINE}.reductions:ReductionOrder.finish", 2, False),
    "a sync point": Place(f"{_COMM}.control:Control.call", 6, False),
    "a logged value": Place("lightning_zero.trainer.strategy:ZeROStrategy.reduce", 2),
    "the optimizer": Place("torch.optim.adam:adam", 2, False),
    "the refresh of weights": Place(f"{_ENGINE}.sharded_model:ShardedModel.refresh", 2, False),
    "the end of a batch": Place("tests.oracle.faults:Module.on_train_batch_end", 2),
    # A save and a load.
    "a save, laid out": Place(f"{_CHECKPOINT}.save:FileSave._layout", on_rank_0=True),
    "a save, written": Place(f"{_CHECKPOINT}.files:Writer.write", 3),
    "a save, renamed": Place(f"{_CHECKPOINT}.save:put_in_place", on_rank_0=True),
    "a load, compared": Place(f"{_CHECKPOINT}.load:_identity"),
    "a load, weights": Place("lightning_zero.trainer.strategy:load_module_state"),
    "a load, optimizer": Place("lightning_zero.fabric.checkpointing:load_optimizer_state"),
    # The end.
    "the whole weights": Place(f"{_ENGINE}.sharded_model:ShardedModel.restore", 1, False),
}
"""Functions that fail, by the name that the table has for them."""


class Job(NamedTuple):
    """A cell to run: a place, and what becomes of a rank there; without one nothing goes wrong."""

    place: str
    kind: Kind | Literal[""]
    way: str
    world: int = 2
    program: str = "fit"
    limit: float = LIMIT

    @property
    def odd(self) -> int:
        """The rank that is struck: the last one, or rank 0 where only it comes there."""
        if not self.place:
            return -1
        return 0 if PLACES[self.place].on_rank_0 else self.world - 1


class Injected(ValueError):
    """The exception of a fault."""


# ---------------------------------------------------------------------------- the test's side


class Cell(NamedTuple):
    """What became of a job.

    Attributes:
        ending: One of `GOOD`, or what is wrong, in capitals.
        answers: By rank, how it ended: ("numbers", digest) or ("error", text); none if it did not.
        seconds: From the fault to the end of the last rank that ended.
        output: What the ranks printed.
    """

    ending: str
    answers: dict[int, tuple[str, str]]
    seconds: float
    output: str

    @property
    def is_good(self) -> bool:
        """Return whether it ended as it must."""
        return self.ending in GOOD


def run(job: Job) -> Cell:
    """Run a job on new processes."""
    but = job.odd if job.kind == "hang" else -1
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        pool = Pool(job.world, grace=2 * job.limit)
        ended = pool.answers(be_struck, job, folder, timeout=SECONDS, but=but)
        struck = Path(folder) / "struck"
        begin = struck.stat().st_mtime if struck.exists() else None
    results = {rank: answer.result for rank, answer in ended.items() if not answer.complaint}
    output = "".join(answer.complaint or answer.result[3] for answer in ended.values())
    answers = {rank: (kind, text) for rank, (kind, text, *_) in results.items()}
    last = max((when for _, _, when, _ in results.values()), default=0.0)
    seconds = -1.0 if begin is None else max(last - begin, 0.0)
    return Cell(_ending(job, answers, seconds), answers, seconds, output)


def _ending(job: Job, given: dict[int, tuple[str, str]], seconds: float) -> str:
    if seconds < 0:
        return "NOT STRUCK"
    # A rank that fails when the others have got all they need from it ends alone.
    goes_on = given.get(job.odd, ("",))[0] == "numbers"
    left = [rank for rank in range(job.world) if rank != job.odd or goes_on]
    answers = [given.get(rank, ("", "")) for rank in left]
    kinds, texts = {kind for kind, _ in answers}, {text for _, text in answers}
    if "" in kinds:
        return "HANGS"
    if kinds == {"numbers"}:
        same = texts == {undisturbed(job._replace(place="", kind=""))}
        return ("goes on" if goes_on else "too late to matter") if same else "OTHER NUMBERS"
    if "numbers" in kinds:
        return "SOME GO ON"
    name = f"rank {job.odd}"
    if job.kind in ("kill", "hang"):
        name = "a connection between ranks has failed"  # the launcher names the rank
    elif len(texts) > 1:
        return "OTHER TEXTS"
    if not all(name in text.lower() for text in texts):
        return "NOT NAMED"
    return "named" if seconds <= job.limit else "LATE"


@functools.cache
def undisturbed(job: Job) -> str:
    """The digest of the numbers that every rank ends with where nothing goes wrong."""
    cell = run(job)
    (digest,) = {answer for kind, answer in cell.answers.values() if kind == "numbers"} or {""}
    if len(cell.answers) < job.world or not digest:
        raise AssertionError(f"an undisturbed run failed: {cell}")
    return digest


# ---------------------------------------------------------------------------- the rank's side


def be_struck(job: Job, folder: str) -> tuple[str, str, float, str]:
    """Run a program that a fault may strike; return how it ended and when, and a traceback."""
    rank, world, output = dist.get_rank(), dist.get_world_size(), ""
    timeout = timedelta(seconds=HANG if job.kind == "hang" else 60)
    leave()
    kind = "cuda" if job.way == NCCL else "cpu"
    store = _store(rank, world, Path(folder) / "port")
    device = join(kind, store=store, rank=rank, world_size=world, timeout=timeout)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def strike() -> None:
        (Path(folder) / "struck").touch()
        if job.kind == "raise":
            raise Injected(f"injected at {job.place}")
        if job.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STALL if job.kind == "stall" else SECONDS)

    program = {"fit": fit, "loop": loop}[job.program]
    try:
        with injected(job.place, strike) if rank == job.odd else contextlib.nullcontext():
            answer = ("numbers", program(job.way, device, folder))
    except BaseException as error:
        answer, output = ("error", str(error)), traceback.format_exc()
        # What the interpreter does with an exception that nobody catches.
        sys.last_value = error
        atexit._run_exitfuncs()
    return *answer, time.time(), output


def _store(rank: int, world: int, file: Path) -> dist.Store:
    """The store that rank 0 keeps, at a port that it finds."""
    start = functools.partial(dist.TCPStore, "127.0.0.1", timeout=timedelta(seconds=30))
    if rank == 0:
        store = start(0, world, True, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return start(int(file.read_text()), world, False)


@contextlib.contextmanager
def injected(name: str, strike: Callable[[], None]) -> Iterator[None]:
    """Call ``strike`` before the call of the function that the place names."""
    place = PLACES[name]
    owner, attribute = place.found()
    raw = vars(owner)[attribute]
    inner = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
    calls = itertools.count(1)

    @functools.wraps(inner)
    def counting(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == place.number:
            strike()
        return inner(*args, **kwargs)

    with mock.patch.object(owner, attribute, type(raw)(counting) if inner is not raw else counting):
        yield


class Backward(torch.autograd.Function):
    """The identity, with a backward of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class Module(Regression):
    """Hooks of the user's own, to fail in."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss((Backward.apply(x.requires_grad_()), y))
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Does nothing, unless it fails."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Does nothing, unless it fails."""


def fit(way: str, device: torch.device, folder: str) -> str:
    """Four steps with a checkpoint behind the second, and two more from there."""
    results = []
    with wired(way) if way in WAYS else contextlib.nullcontext():
        for path in (None, f"{folder}/saved/step=2.ckpt"):
            module = Module()
            folder_of_saves = f"{folder}/saved"
            saves = ModelCheckpoint(folder_of_saves, "{step}", every_n_train_steps=2, save_top_k=-1)
            trainer = make_trainer(
                3,
                callbacks=[saves],
                enable_checkpointing=True,
                max_steps=4,
                max_epochs=-1,
                **trainer_options(device),
            )
            trainer.fit(module, rows(32), ckpt_path=path)
            results += [value.detach().clone() for value in module.parameters()]
    return digest_of(results)


def loop(way: str, device: torch.device, folder: str) -> str:
    """Four steps of the engine in a plain loop."""
    torch.manual_seed(0)
    comm = communicator_by("backend" if way == NCCL else way, device)
    engine = shard(Blocks(3).to(device), comm=comm, device=device)
    optimizer = adamw(engine.module)
    engine.adopt(optimizer)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    for _ in range(4):
        with engine.step() as watch:
            x = torch.randn(2, WIDTH, generator=generator, device=device, requires_grad=True)
            loss = engine.module(Backward.apply(x)).square().sum()
            watch(loss)
        loss.backward()
        loss.item()  # waits for the device, and for whatever that waits for
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return digest_of(engine.module.parameters())


def digest_of(tensors: Iterable[Tensor]) -> str:
    """A few characters that are equal for equal bits."""
    content = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# ---------------------------------------------------------------------------- all of them


def jobs() -> list[Job]:
    """The cells of the matrix.

    Every place is struck by an exception and by a kill over every transport, in both programs. What
    lasts, and four ranks, goes round the transports from place to place.
    """
    listed = []
    for number, (place, where) in enumerate(PLACES.items()):
        for turn, way in enumerate(WAYS):
            is_due = number % len(WAYS) == turn
            struck = [(kind, 2, "fit") for kind in KINDS if is_due or kind in QUICK]
            struck += [(kind, 4, "fit") for kind in QUICK if is_due]
            struck += [(kind, 2, "loop") for kind in QUICK if not where.only_trainer]
            listed += [Job(place, kind, way, n, program) for kind, n, program in struck]
    return listed


def run_all(these: Iterable[Job], *, at_once: int) -> Iterator[tuple[Job, Cell]]:
    """Run cells side by side: most of them wait for most of their time.

    Those that went wrong run once more: on a busy machine an answer may come late.
    """
    listed = list(these)
    with ThreadPoolExecutor(at_once) as threads:
        for job, cell in zip(listed, threads.map(run, listed), strict=True):
            yield job, cell if cell.is_good or not job.place else run(job)
