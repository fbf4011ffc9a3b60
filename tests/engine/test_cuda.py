"""A device: the plain loop's numbers, no waiting of the host, overlap, memory, checkpoints.

Nothing here needs more than one rank. Each test runs on a GPU if there is one; its body is
rehearsed on the CPU, through the same wire of collectives, where what only a device can show is
left out.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero import MemoryMonitor, ZeROStrategy
from lightning_zero.checkpoint import optimizer_state
from lightning_zero.comm import Communicator, Control, process_groups
from lightning_zero.comm.transport import Collectives
from lightning_zero.engine import Engine, materialize
from lightning_zero.optimizer import clip, kept_states
from lightning_zero.plan import RECIPES, Offload, Settings
from tests.oracle.device import beside_the_host
from tests.oracle.devices import DEVICES
from tests.oracle.models import MODELS, Block
from tests.oracle.parity import assert_parity, reference
from tests.oracle.projects import Regression, rows
from tests.oracle.ranks import Pools
from tests.oracle.sharded import adamw, sgd, train


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


def over_collectives(device: torch.device) -> Communicator:
    """The wire of NCCL, whatever the device."""
    return Communicator(device, direct=False)


# ---------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_to_the_host_is_without(device: torch.device, stage: int) -> None:
    """States, masters, gradients and activations beside the device; bits, as it sums alike."""
    case, comm = MODELS["transformer"], over_collectives(device)
    how = {"stage": stage, "precision": "bf16-mixed", "accumulate": 2, "clip_norm": 0.1}
    expected = train(case, momentum_on_host, comm=comm, **how)
    is_played = device.type == "cpu"
    with beside_the_host() if is_played else contextlib.nullcontext():
        offload, comm = Offload.of_stage(stage, "cpu"), over_collectives(device)
        actual = train(case, momentum_on_host, comm=comm, offload=offload, **how)
    # A GPU's fused step and norm round otherwise than its host's.
    assert_parity(actual, expected, ulps=0 if is_played else 8)


def momentum_on_host(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_step_is_the_plain_loops(device: torch.device, precision: str) -> None:
    """Clipping and loss scaling included; a device sums in another order."""
    case, dtype = MODELS["nested"], RECIPES[precision].weight
    expected = reference(case, sgd, 4, clip=0.1, precision=precision)
    for stage in (1, 2, 3):
        how = {"stage": stage, "units": "leaves", "comm": over_collectives(device)}
        actual = train(case, sgd, steps=4, precision=precision, clip_norm=0.1, **how)
        if device.type == "cpu":
            assert_parity(actual, expected, ulps=4)
        else:
            assert_parity(actual, expected, ulps=64 if dtype is None else 8, dtype=dtype)


# ---------------------------------------------------------------------------- steps

WIDTH, NUM_LAYERS = 64, 4


class Job:
    """Layers of one size, each a unit, on a device."""

    def __init__(
        self,
        device: torch.device,
        stage: int = 3,
        *,
        width: int = WIDTH,
        num_rows: int = 32,
        precision: str = "bf16-mixed",
        offload: Offload | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.recipe = device, RECIPES[precision]
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))
        self.model.to(device)
        settings = Settings(
            stage, recipe=self.recipe, units=[nn.Linear], device=device, offload=offload
        )
        self.engine = Engine(self.model, settings, over_collectives(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.engine.adopt(self.optimizer)
        self.x = torch.ones(num_rows, width, device=device)

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


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Torch raises where the host would wait for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_host_never_waits(device: torch.device, stage: int, precision: str) -> None:
    """Whole steps, clipping included. Only a loss scale must be decided on by the host."""
    job = Job(device, stage, precision=precision)
    for _ in range(2):
        job.step()
    with no_waiting(device):
        losses = [job.step() for _ in range(3)]
    job.wait()
    assert losses[0] > losses[1] > losses[2]
    job.engine.close()


def test_a_rank_alone_holds_each_gradient_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is its own sum: nothing is sent, and pieces get the buffer that autograd's came to."""
    job, buffers = Job(device, precision="32-true"), []
    reduce_buffer = type(job.engine.comm.transport).reduce_buffer

    def noted(transport: Any, numel: int, dtype: torch.dtype) -> Any:
        buffers.append(reduce_buffer(transport, numel, dtype))
        return buffers[-1]

    monkeypatch.setattr(type(job.engine.comm.transport), "reduce_buffer", noted)
    job.model(job.x).square().mean().backward()
    places = {buffer.tensor.untyped_storage().data_ptr() for buffer in buffers}
    held = {p.grad.untyped_storage().data_ptr() for p in job.engine.sharded.pieces}
    assert held == places
    job.engine.close()


class _Filled:
    """Stands for what gives values to models on meta."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def fill(self, owners: Any) -> None: ...

    def finish(self, gathered: Any) -> None: ...


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device whose numbers nobody can read, of rank 0 of four.

    Whatever would make the host wait for a GPU raises here: ``item``, ``if tensor``, copies to and
    from the host, and operations between the two.
    """
    monkeypatch.setattr(materialize, "MetaInitializer", _Filled)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield torch.device("meta")
    finally:
        dist.destroy_process_group()


def test_the_host_reads_nothing_in_a_step(unreadable: torch.device) -> None:
    """Every stage, precision and way to step, over the wire of NCCL; clipping included."""
    cases = itertools.product((1, 2, 3), ("32-true", "bf16-mixed", "bf16-true"), (False, True))
    for stage, precision, foreach in cases:
        recipe = RECIPES[precision]
        with unreadable:
            layers = (nn.Linear(8, 8) for _ in range(3))
            model = nn.Sequential(*layers, nn.BatchNorm1d(8)).to(recipe.weight)
            x = torch.ones(4, 8, dtype=recipe.weight)
        settings = Settings(stage, recipe=recipe, units=[nn.Linear], device=unreadable)
        engine = Engine(model, settings)
        assert isinstance(engine.comm.transport, Collectives)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        engine.adopt(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            with engine.step() as watch:
                loss = model(x).square().mean()
                watch(loss)
            loss.backward()
            norm = clip.clip_by_norm(engine.sharded.pieces, engine.comm, 0.1)
            clip.clip_by_value(engine.sharded.pieces, 0.1)
            optimizer.step()
        assert engine.sharded.memory()["states"] > 0
        with pytest.raises(RuntimeError):
            float(norm)


def train_late() -> None:
    """Two ranks, whose collectives happen some time before they are waited for."""
    comm = Communicator(torch.device("cpu"), direct=False)
    precisions = {"leaves": "32-true", "nested": "bf16-mixed"}
    ways = [
        {"stage": stage, "units": units, "precision": precision, "accumulate": accumulate}
        for stage in (1, 2, 3)
        for accumulate, (units, precision) in enumerate(precisions.items(), start=1)
    ]
    for how in ways:
        expected = train("nested", adamw, clip_norm=0.1, comm=comm, steps=2, **how)
        with beside_the_host() as device:
            actual = train("nested", adamw, clip_norm=0.1, comm=comm, steps=2, **how)
            assert device.overlapped("collective") > 0
        assert_parity(actual, expected, ulps=0)


def test_nothing_is_used_or_freed_before_it_has_arrived(ranks: Pools) -> None:
    ranks(2).run(train_late)


# ---------------------------------------------------------------------------- optimizers


def test_torchs_functions_take_all_gradients_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for plain parameters: optimizers by default, and a clipping with a single message."""
    job = Job(device, precision="32-true")
    loss = job.model(job.x).square().mean()
    loss.backward()
    sums = []
    monkeypatch.setattr(Control, "sum", lambda _, tensor, *__: sums.append(tensor.numel()))
    nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
    assert sums == [2 * NUM_LAYERS]
    optimizers = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(
        optimizers, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"]
    )
    choose: Any = optimizers._default_to_fused_or_foreach
    assert choose(job.engine.sharded.pieces, differentiable=False) == (False, True)
    job.optimizer.step()
    job.engine.close()


def test_a_profile_shows_what_a_step_does_and_overlaps(device: torch.device) -> None:
    is_cuda = device.type == "cuda"
    # Enough for the device to be behind the host, or nothing could overlap.
    sizes = {"width": 2048, "num_rows": 16384} if is_cuda else {}
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with contextlib.nullcontext() if is_cuda else beside_the_host():
        job = Job(device, **sizes, offload=Offload.of_stage(3, "cpu"))
        for _ in range(3):
            job.step()
        job.wait()
        with profile(activities=activities) as seen:
            for _ in range(4):
                job.step()
            job.wait()
        job.engine.close()
    events = seen.events()
    assert events is not None
    names = {event.name for event in events}
    for number in range(NUM_LAYERS):
        for verb in ("unshard", "wait", "reduce", "finish_reduce", "reshard"):
            assert f"zero.{verb} {number}" in names
    if is_cuda:
        on_device = torch.autograd.DeviceType.CUDA
        kernels = [event for event in events if event.device_type == on_device]
        # Named ranges are shown on the device too.
        _assert_overlap([e for e in kernels if not e.name.startswith(("zero.", "nccl:"))])


def _assert_overlap(kernels: list[Any]) -> None:
    """Work on another stream than most runs while that one is busy.

    A rank alone sends nothing, but offload copies on streams of its own.
    """
    streams: dict[int, list[tuple[float, float]]] = {}
    for kernel in kernels:
        span = (kernel.time_range.start, kernel.time_range.end)
        streams.setdefault(kernel.device_resource_id, []).append(span)
    busiest = max(streams, key=lambda stream: len(streams[stream]))
    others = [span for stream, spans in streams.items() if stream != busiest for span in spans]
    assert others, "everything ran on one stream"
    assert any(
        start < end_of_other and start_of_other < end
        for start, end in streams[busiest]
        for start_of_other, end_of_other in others
    )


# ---------------------------------------------------------------------------- memory


@pytest.mark.parametrize("stage", [1, 3])
def test_the_allocator_holds_what_is_counted(device: torch.device, stage: int) -> None:
    """Between steps, to the rounding of each block; within one, no more than two units beyond."""
    width = 1024 if device.type == "cuda" else 128
    # What cuBLAS keeps for itself, it takes before the first look.
    warm = Job(device, stage, width=width)
    warm.step()
    warm.wait()
    warm.engine.close()
    del warm
    gc.collect()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    job = Job(device, stage, width=width)
    for _ in range(2):
        job.step()
    job.wait()
    held = job.engine.sharded.memory()
    unit = (width + 1) * width
    numel = NUM_LAYERS * unit
    assert held["weights"] == pytest.approx({1: 2 * numel, 3: 0}[stage], rel=0.01)
    assert held["master"] == pytest.approx(4 * numel, rel=0.01)
    assert held["gradients"] == pytest.approx(4 * numel, rel=0.01)
    assert held["states"] == pytest.approx(8 * numel, rel=0.01)
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


def fit(device: torch.device, module: Project, folder: Path, **options: Any) -> Trainer:
    ckpt_path = options.pop("ckpt_path", None)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=ZeROStrategy(3, units={Block}),
        default_root_dir=folder,
        enable_checkpointing=False,
        **{"max_epochs": 1, **quiet, **options},
    )
    trainer.fit(module, rows(), ckpt_path=ckpt_path)
    return trainer


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}


def test_a_checkpoint_of_a_device_is_everybodys(device: torch.device, tmp_path: Path) -> None:
    """Save what was trained, and resume to the end of a run that did not stop."""
    whole, half = Project(), Project()
    fit(device, whole, tmp_path, max_epochs=2)
    trainer = fit(device, half, tmp_path, max_epochs=1)
    path = str(tmp_path / "half.ckpt")
    trainer.save_checkpoint(path)
    saved = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    for name, value in values(half).items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)
    resumed = Project()
    fit(device, resumed, tmp_path, max_epochs=2, ckpt_path=path)
    for name, value in values(whole).items():
        torch.testing.assert_close(values(resumed)[name], value)


def test_a_model_may_be_on_the_device_before_fit(device: torch.device, tmp_path: Path) -> None:
    from_host, from_device = Project(), Project().to(device)
    for module in (from_host, from_device):
        fit(device, module, tmp_path)
    for name, value in values(from_host).items():
        torch.testing.assert_close(values(from_device)[name], value, rtol=0, atol=0)


def test_states_travel_between_hosts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is unpickled takes memory on the device that it came from: of another rank."""
    job = Job(device)
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

    monkeypatch.setattr(Control, "gather_objects", gathered)
    whole = optimizer_state(job.optimizer, job.engine, "optimizer 0")["state"]
    assert {entry.device.type for entry in sent if isinstance(entry, Tensor)} == {"cpu"}
    assert {name: tuple(value.shape) for name, value in whole[0].items()} == {
        "step": (),
        "exp_avg": (WIDTH, WIDTH),
        "exp_avg_sq": (WIDTH, WIDTH),
    }
    job.engine.close()


# ---------------------------------------------------------------------------- groups


def on_gloo() -> None:
    with pytest.raises(ValueError, match=r"type 'cuda'.*'gloo'.*process_group_backend='nccl'"):
        Communicator(torch.device("cuda", 0))


def test_a_device_needs_a_backend_of_its_own(ranks: Pools) -> None:
    ranks(2).run(on_gloo)


class Group:
    """Notes its end; its device's communicators are ended together."""

    def __init__(self, kind: str, events: list[str]) -> None:
        self.kind, self.events = kind, events

    _device_types = (torch.device("xpu"),)

    def _get_backend(self, device: torch.device) -> Group:
        assert device.type == "xpu"
        return self

    def _group_start(self) -> None:
        self.events.append("start")

    def _group_end(self) -> None:
        self.events.append("end")

    def abort(self) -> None:
        self.events.append(f"abort {self.kind}")

    def get_error(self) -> SimpleNamespace:
        if self.kind == "old":
            raise RuntimeError("Backend old does not support getError")
        return SimpleNamespace(name=self.events[0])


@pytest.mark.parametrize("error", ["SUCCESS", "COMM_ERROR", "TIMEOUT"])
def test_a_failure_of_a_devices_group_is_seen(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    kinds = {"gloo": "COMM_ERROR", "old": "COMM_ERROR", "nccl": error}
    all_groups = [Group(kind, [name]) for kind, name in kinds.items()]
    monkeypatch.setattr(process_groups, "_all_groups", lambda: all_groups)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.kind)
    expected = "" if error == "SUCCESS" else f"Group reports {error}"
    assert process_groups.failure_on_device() == expected


def test_devices_are_given_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    all_groups = [Group(kind, events) for kind in ("nccl", "gloo", "nccl", "fake")]
    monkeypatch.setattr(process_groups, "_all_groups", lambda: all_groups)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.kind)
    process_groups.give_up_devices()
    assert events == ["start", "abort nccl", "abort nccl", "end"]


def test_the_monitor_tells_the_allocators_figures(device: torch.device, tmp_path: Path) -> None:
    monitor = MemoryMonitor()
    fit(device, Project(), tmp_path, callbacks=[monitor], precision="bf16-mixed")
    for point in ("forward", "backward", "step"):
        held = monitor.measured[point]
        counted = sum(held[kind] for kind in ("weights", "master", "states", "gradients"))
        assert counted > 0
        if device.type == "cuda":
            assert counted <= held["allocated"] <= held["peak"] <= held["reserved"]
            assert held["fragmentation"] >= 0
        else:
            assert held["resident"] > counted


def test_compiled_units(device: torch.device, tmp_path: Path) -> None:
    """By inductor on a device, where it has the compiler that its kernels are started with."""
    torch._dynamo.reset()
    has_inductor = device.type == "cuda" and shutil.which("g++") is not None
    plain, compiled = Project(), Project("inductor" if has_inductor else "aot_eager")
    fit(device, plain, tmp_path)
    torch._dynamo.utils.counters.clear()
    fit(device, compiled, tmp_path)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "one for all blocks"
    for name, value in values(plain).items():
        torch.testing.assert_close(values(compiled)[name], value, rtol=1e-4, atol=1e-5)
