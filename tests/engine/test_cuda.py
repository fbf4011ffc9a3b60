"""A device: the plain loop's numbers, no waiting of the host, memory, offload, the Trainer, faults.

Each test runs on GPUs if there are any; ranks talk over NCCL, also where one GPU is all there is
(oracle/devices.py). Its body is rehearsed on the CPU, over the transport of NCCL, where what only a
device can show is left out.

Of the faults one was not named when a GPU was last seen: a kill in the optimizer. Since then the
watchdog asks NCCL's groups for errors (`process_groups.failure_on_device`). If it still ends so,
try what `docs/accelerators.md` lists under "NCCL's own watchdog", in that order. Also to be
seen: whether `group.abort` returns in seconds beside a rank that its device blocks, and whether the
groups of weights and gradients, aborted one after the other, wait for each other's kernels (then a
thread for each: `ncclGroupStart` counts per thread, and torch aborts in another).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero import MemoryMonitor
from lightning_zero.checkpoint import optimizer_state
from lightning_zero.comm import Control
from lightning_zero.comm.transport import Collectives
from lightning_zero.engine import Engine, sharded_model
from lightning_zero.optimizer import clip, kept_states
from lightning_zero.plan import RECIPES, Offload, Settings
from tests.oracle.device import beside_the_host
from tests.oracle.devices import DEVICES, NO_GPU, joined, trainer_options
from tests.oracle.faults import Job, run
from tests.oracle.parity import require_same
from tests.oracle.projects import Regression, Trace, communicator_by, make_trainer, rows
from tests.oracle.ranks import Pools
from tests.oracle.sharded import replicate, sgd, train

ON_DEVICES = pytest.mark.parametrize("kind", DEVICES)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[torch.device]:
    """A device whose only rank this process is."""
    kind: str = request.param
    store = dist.FileStore(str(tmp_path / "store"), 1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------- numbers


def _require_like(ours: Trace, theirs: Trace, kind: str, precision: str, ulps: int = 4) -> None:
    """Compare to a few roundings; a device adds in another order."""
    dtype = RECIPES[precision].weight
    if kind != "cpu":
        ulps = 64 if dtype is None else 8
    require_same(ours, theirs, ulps=ulps, dtype=None if kind == "cpu" else dtype)


def _train_all(kind: str, folder: str) -> None:
    """At every stage and precision, with two microbatches and clipping."""
    with joined(kind, folder) as device:
        comm, is_played = communicator_by("backend", device), kind == "cpu"
        for precision in ("16-mixed",) if is_played else ("32-true", "bf16-mixed", "16-mixed"):
            how = {"accumulate": 2, "clip_norm": 0.1, "precision": precision}
            expected = replicate("nested", sgd, device=device, **how)
            for stage in (3,) if is_played else (1, 2, 3):
                found = train("nested", sgd, stage=stage, units="leaves", comm=comm, **how)
                _require_like(found, expected, kind, precision)


def _train_copies(kind: str, folder: str) -> None:
    """Two copies of two shards."""
    with joined(kind, folder) as device:
        comms = (communicator_by("backend", device, num_shards=number) for number in (None, 2))
        whole, copies = (train("nested", sgd, comm=comm) for comm in comms)
        _require_like(copies, whole, kind, "32-true", ulps=256)


def _train_offloaded(kind: str, folder: str) -> None:
    """To the host, to files, and of activations alone."""
    with joined(kind, folder) as device:
        how = {"precision": "bf16-mixed", "accumulate": 2, "clip_norm": 0.1}
        expected = train("nested", sgd, comm=communicator_by("backend", device), **how)
        away = [(stage, {"offload": Offload.of_stage(stage, "cpu")}) for stage in (3, 2)]
        away += [(3, {"offload": Offload.of_stage(3, "nvme"), "offload_path": folder})]
        away += [(3, {"activation_offload": True})]
        for stage, more in away[:1] if kind == "cpu" else away:
            with beside_the_host() if kind == "cpu" else contextlib.nullcontext():
                comm = communicator_by("backend", device)
                found = train("nested", sgd, stage=stage, comm=comm, **how, **more)
            _require_like(found, expected, kind, "bf16-mixed", ulps=0)


WAYS = [(1, _train_all), (2, _train_all), (4, _train_copies), (2, _train_offloaded)]


@ON_DEVICES
@pytest.mark.parametrize(("world", "way"), WAYS)
def test_numbers(ranks: Pools, kind: str, tmp_path: Path, world: int, way: Any) -> None:
    ranks(world).run(way, kind, str(tmp_path))


# ---------------------------------------------------------------------------- steps

WIDTH, NUM_LAYERS = 64, 4


class Layers:
    """Layers of one size, each a unit, on a device."""

    def __init__(
        self,
        device: torch.device,
        stage: int = 3,
        *,
        width: int = WIDTH,
        precision: str = "bf16-mixed",
    ) -> None:
        torch.manual_seed(0)
        self.device, self.recipe = device, RECIPES[precision]
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))
        self.model.to(device)
        settings = Settings(stage, recipe=self.recipe, units=[nn.Linear], device=device)
        self.engine = Engine(self.model, settings, communicator_by("backend", device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.engine.adopt(self.optimizer)
        self.x = torch.ones(32, width, device=device)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        with self.engine.step() as watch, self._autocast():
            loss = self.model(self.x).square().mean()
            watch(loss)
        loss.backward()
        clip.clip_by_norm(self.engine.sharded.pieces, self.engine.comm, 0.1)
        self.optimizer.step()
        return loss.detach()

    def _autocast(self) -> Any:
        if self.recipe.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.recipe.autocast, cache_enabled=False)

    def wait(self) -> None:
        """Let everything that was started end."""
        for unit in self.engine.sharded.units:
            unit.weights.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def test_the_host_never_waits(device: torch.device) -> None:
    """Whole steps, clipping included. Only a loss scale must be decided on by the host."""
    for stage, precision in ((1, "bf16-mixed"), (2, "32-true"), (3, "32-true"), (3, "bf16-mixed")):
        job = Layers(device, stage, precision=precision)
        for _ in range(2):
            job.step()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            losses = [job.step() for _ in range(3)]
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        job.wait()
        assert losses[0] > losses[1] > losses[2]
        job.engine.close()


@contextlib.contextmanager
def unreadable() -> Iterator[torch.device]:
    """A device whose numbers nobody can read, of rank 0 of four.

    Whatever would make the host wait for a GPU raises here: ``item``, ``if tensor``, copies to and
    from the host, and operations between the two.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with mock.patch.object(sharded_model, "MetaInitializer"):  # gives models on meta values
            yield torch.device("meta")
    finally:
        dist.destroy_process_group()


def test_the_host_reads_nothing_in_a_step() -> None:
    """Every stage, precision and way to step, over the transport of NCCL; clipping included."""
    cases = zip((1, 2, 3, 3), ("32-true", "bf16-true", "bf16-mixed", "32-true"), strict=True)
    for (stage, precision), foreach in itertools.product(cases, (False, True)):
        recipe = RECIPES[precision]
        with unreadable() as device:
            with device:
                layers = (nn.Linear(8, 8) for _ in range(3))
                model = nn.Sequential(*layers, nn.BatchNorm1d(8)).to(recipe.weight)
                x = torch.ones(4, 8, dtype=recipe.weight)
            engine = Engine(model, Settings(stage, recipe=recipe, units=[nn.Linear], device=device))
            assert isinstance(engine.comm.transport, Collectives)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
            engine.adopt(optimizer)
            for _ in range(2):
                optimizer.zero_grad()
                with engine.step() as watch:
                    watch(loss := model(x).square().mean())
                loss.backward()
                norm = clip.clip_by_norm(engine.sharded.pieces, engine.comm, 0.1)
                clip.clip_by_value(engine.sharded.pieces, 0.1)
                optimizer.step()
            assert engine.sharded.memory()["states"] > 0
            with pytest.raises(RuntimeError):
                float(norm)


def test_torchs_functions_take_all_gradients_at_once(device: torch.device) -> None:
    """As for plain parameters: optimizers by default, and a clipping with a single message."""
    job, sums = Layers(device, precision="32-true"), []
    job.model(job.x).square().mean().backward()
    with mock.patch.object(Control, "sum", lambda _, tensor, *__: sums.append(tensor.numel())):
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
    assert sums == [2 * NUM_LAYERS]
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    kinds = ["cpu", "cuda"]
    with mock.patch.object(
        optimizers, "_get_foreach_kernels_supported_devices", return_value=kinds
    ):
        choose = optimizers._default_to_fused_or_foreach
        assert choose(job.engine.sharded.pieces, differentiable=False) == (False, True)
    job.engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_the_allocator_holds_what_is_counted(device: torch.device, stage: int) -> None:
    """Between steps, to the rounding of each block; within one, no more than two units beyond."""
    width = 1024 if device.type == "cuda" else 128
    # What cuBLAS keeps for itself, it takes before the first look.
    warm = Layers(device, stage, width=width)
    warm.step()
    warm.wait()
    warm.engine.close()
    del warm
    gc.collect()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    job = Layers(device, stage, width=width)
    for _ in range(2):
        job.step()
    job.wait()
    held = job.engine.sharded.memory()
    unit = (width + 1) * width
    numel = NUM_LAYERS * unit
    expected = {"weights": 2 * numel if stage == 1 else 0, "states": 8 * numel}
    for kind, nbytes in {"master": 4 * numel, "gradients": 4 * numel, **expected}.items():
        assert held[kind] == pytest.approx(nbytes, rel=0.01)
    assert held["gathered"] == held["unreduced"] == 0
    if device.type == "cuda":
        total = sum(held.values())
        slack = 4 * 2**20  # inputs, and blocks that are multiples of 512 bytes
        assert total <= torch.cuda.memory_allocated() - before <= total + slack
        idle = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        job.step()
        job.wait()
        # Two units whole, with weights and gradients in bf16 and gradients in fp32 on their way. At
        # stage 1 weights are whole anyway, and a rank alone needs no buffer to send gradients.
        peak = torch.cuda.max_memory_allocated() - idle
        assert {1: 2, 3: 4}[stage] * unit <= peak <= 2 * (2 + 2 + 4) * unit + slack
    job.engine.close()


# ---------------------------------------------------------------------------- the Trainer


class Project(Regression):
    """Blocks that may be compiled; nothing is read back to the host."""

    def __init__(self, backend: str | None = None) -> None:
        super().__init__()
        for block in self.net.blocks if backend else ():
            block.compile(backend=backend)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def _fit(kind: str, folder: str) -> dict[str, list[Tensor]]:
    with joined(kind, folder) as device:
        # By inductor on a device, where it has the compiler that its kernels are started with.
        has_inductor = device.type == "cuda" and shutil.which("g++") is not None
        options = {
            **trainer_options(device),
            "precision": "bf16-mixed",
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.1,
            "default_root_dir": folder,
        }
        monitor, found = MemoryMonitor(), {}

        def fit(name: str, strategy: Any, module: Any = None, **more: Any) -> Any:
            ckpt_path = more.pop("ckpt_path", None)
            module = Project() if module is None else module
            trainer = make_trainer(strategy, **options, **more)
            trainer.fit(module, rows(), rows(8, seed=1), ckpt_path=ckpt_path)
            values = [*Trace.of(module).params.values(), trainer.callback_metrics["val_loss"]]
            found[name] = [value.cpu() for value in values]
            return trainer

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fit("3", 3, Project("inductor" if has_inductor else "aot_eager"), callbacks=[monitor])
        assert not torch._dynamo.utils.counters["graph_break"]
        fit("ddp", "ddp")
        fit("1", 1) if device.type == "cuda" else None
        fit("2", 2, Project().to(device))  # which is there before the fit
        # A checkpoint from within the run of stage 3 goes on at stage 2.
        path = f"{folder}/saved.ckpt"
        fit("half", 3).save_checkpoint(path)
        fit("resumed", 2, max_epochs=2, ckpt_path=path)
        fit("whole", "ddp", max_epochs=2)
        saved = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        assert all(map(torch.equal, saved.values(), found["half"]))
        for point in ("forward", "backward", "step"):
            held = monitor.measured[point]
            counted = sum(held[row] for row in ("weights", "master", "states", "gradients"))
            assert counted > 0
            if device.type == "cuda":
                assert counted <= held["allocated"] <= held["peak"] <= held["reserved"]
                assert held["fragmentation"] >= 0
            else:
                assert held["resident"] > counted
        return found


@ON_DEVICES
def test_a_trainer_over_two_ranks_is_ddp(ranks: Pools, kind: str, tmp_path: Path) -> None:
    """Its weights, what it logs over the ranks, and a run that is resumed at another stage."""
    for found in ranks(2).run(_fit, kind, str(tmp_path)):
        pairs = [("ddp", "1"), ("ddp", "2"), ("ddp", "3"), ("whole", "resumed")]
        for expected, actual in pairs[kind == "cpu" :]:
            for value, target in zip(found[actual], found[expected], strict=True):
                torch.testing.assert_close(value, target, rtol=2e-3, atol=2e-3)


def test_states_travel_between_hosts(device: torch.device) -> None:
    """A tensor that is unpickled takes memory on the device that it came from: of another rank."""
    job = Layers(device)
    job.step()
    with FakeTensorMode():
        count = torch.ones((), device="cuda")
    for _, state in kept_states([job.optimizer]):
        state["step"] = count
    sent: list[Any] = []

    def gathered(_: Control, value: Any) -> list[Any]:
        _, states = value
        sent.extend(entry for state in states.values() for entry in state.values())
        return [value]

    with mock.patch.object(Control, "gather_objects", gathered):
        whole = optimizer_state(job.optimizer, job.engine, "optimizer 0")["state"]
    assert {entry.device.type for entry in sent if isinstance(entry, Tensor)} == {"cpu"}
    shapes = {name: tuple(value.shape) for name, value in whole[0].items()}
    assert shapes == {"step": (), "exp_avg": (WIDTH, WIDTH), "exp_avg_sq": (WIDTH, WIDTH)}
    job.engine.close()


# ---------------------------------------------------------------------------- faults


FAULTS = [
    ("the user's forward", "kill", "loop"),
    ("the user's backward", "raise", "loop"),
    ("a gather", "kill", "loop"),
    ("a reduction", "raise", "loop"),
    ("the optimizer", "kill", "loop"),
    ("the user's forward", "raise", "fit"),
    ("a reduction", "kill", "fit"),
    ("the end of a batch", "stall", "fit"),
]


@NO_GPU
@pytest.mark.parametrize(("place", "kind", "program"), FAULTS)
def test_a_fault_is_named_within_seconds(place: str, kind: Any, program: str) -> None:
    """Also by ranks that their device blocks, behind a message that never comes."""
    cell = run(Job(place, kind, "nccl", program=program, limit=20.0))
    assert cell.is_good, str(cell)
