"""Bytes per rank before a run, without data, device or process group."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lightning_zero.comm import pretended_mesh
from lightning_zero.memory.dry_run import Step
from lightning_zero.memory.model import ModelPlan, require_sense
from lightning_zero.memory.size import format_bytes, format_ranks
from lightning_zero.memory.states import Optimizers
from lightning_zero.memory.terms import HOST_KINDS, KINDS, RESTING, Kinds
from lightning_zero.memory.walk import Snapshot
from lightning_zero.parameters import make_local
from lightning_zero.plan import Offload, Settings, derived_class, strategy_arguments


@dataclass(frozen=True)
class Estimate:
    """The bytes that one rank will hold.

    Attributes:
        stage: 1, 2 or 3; 0 is DDP.
        world_size: Number of ranks.
        precision: A precision of the Trainer.
        num_parameters: Elements of all parameters, ties counted once.
        has_units: Whether the model's units are known, and so what is gathered and unreduced.
        has_activations: Whether activations are counted.
        snapshots: A step from its start to the rest after it.
        whole: Bytes of the whole module, which each rank has in host memory before setup, unless it
            is built on ``meta``, and after ``fit``, unless ``restore_weights=False``.
        is_on_host: Whether the device is the host itself.
        offload: What rests outside the device.
    """

    stage: int
    world_size: int
    precision: str
    num_parameters: int
    has_units: bool
    has_activations: bool
    snapshots: tuple[Snapshot, ...]
    whole: int = 0
    is_on_host: bool = False
    offload: Offload | None = None

    @property
    def name(self) -> str:
        """The strategy's name, or its stage and what is offloaded where no strategy has a name."""
        if self.offload is None:
            return f"zero{self.stage}" if self.stage else "ddp"
        for medium, word in (("cpu", "offload"), ("nvme", "nvme")):
            if (self.stage, self.offload) in named_offloads(medium):
                return f"zero{self.stage}_{word}"
        homes = {"optimizer": self.offload.optimizer, "weights": self.offload.weights}
        moved = [f"{kind} on {medium}" for kind, medium in homes.items() if medium]
        return f"zero{self.stage}, {', '.join(moved)}"

    @property
    def resting(self) -> Kinds:
        """Bytes on the device between steps, by kind, after the first step."""
        return {kind: self.snapshots[-1].kinds[kind] for kind in RESTING}

    @property
    def model_states(self) -> int:
        """Bytes of weights, gradients, master and optimizer states on the device between steps."""
        return sum(count for kind, count in self.resting.items() if kind != "buffers")

    @property
    def peak(self) -> Snapshot:
        """The snapshot with the most bytes on the device."""
        return max(self.snapshots, key=lambda snapshot: snapshot.total)

    @property
    def most(self) -> Kinds:
        """The most bytes of each kind on the device, at any time."""
        held = [kinds for m in self.snapshots for kinds in (m.kinds, m.at_other_times)]
        return {kind: max(kinds.get(kind, 0) for kinds in held) for kind in KINDS}

    @property
    def host(self) -> Kinds:
        """The most bytes of each kind in host memory apart from the device's, at any time."""
        return {kind: max(m.host.get(kind, 0) for m in self.snapshots) for kind in HOST_KINDS}

    @property
    def host_peak(self) -> int:
        """The most bytes in host memory within a step; on a CPU, the device's are included."""
        return max(
            sum(one.host.values()) + (one.total if self.is_on_host else 0) for one in self.snapshots
        )

    @property
    def leaves_device(self) -> bool:
        """Return whether anything is offloaded, activations included."""
        return self.offload is not None or (not self.is_on_host and self.host_peak > 0)

    @property
    def device_peak(self) -> int:
        """The most bytes in device memory within a step; on a CPU, staging is included."""
        return self.host_peak if self.is_on_host else self.peak.total

    @property
    def disk(self) -> Kinds:
        """Bytes in files, by kind."""
        return {kind: self.snapshots[-1].disk.get(kind, 0) for kind in RESTING}


class Configured(Protocol):
    """A strategy, as far as its memory depends on it."""

    settings: Settings


def estimate(
    model_or_numel: nn.Module | Callable[..., nn.Module] | int,
    strategy: str | Configured | Settings = "zero3",
    *,
    world_size: int = 1,
    precision: str = "32-true",
    optimizer: Optimizers = None,
    batch: Any = None,
    step: Step | None = None,
    accumulate_grad_batches: int = 1,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> Estimate:
    """Estimate the bytes that one rank will hold, by kind, through a step.

    An offload that a strategy refuses is refused here too, and so is an optimizer that it refuses
    to step unit by unit.

    Args:
        model_or_numel: A module on any device, a function that builds one (it is called on
            ``meta``), or a number of parameters. With ``tensor_parallel_size``, a function of the
            device mesh, or a module whose ``configure_model`` builds and cuts it.
        strategy: A registered name, such as ``"zero3"``, a ``ZeROStrategy(...)``, or ``"ddp"``.
            Offload to host memory, or of a share, is assumed to be to that beside an accelerator,
            and so is offload of activations, also with ``device="cpu"``.
        world_size: Number of ranks.
        precision: As in ``Trainer(precision=...)``.
        optimizer: Makes an optimizer from a list of parameters, or its name in ``torch.optim``; by
            default the module's ``configure_optimizers``, else AdamW.
        batch: One rank's batch (only shapes and dtypes matter), to count activations as well.
        step: Computes the loss from the module and the batch; by default ``training_step``, or the
            module's own outputs.
        accumulate_grad_batches: As in the Trainer.
        rank: The rank to estimate. Ranks differ in padding.
        device: Where the model will run: ``"cpu"``, or an accelerator such as ``"cuda"``.
    """
    settings = _settings_of(strategy)
    stage = 0 if strategy == "ddp" else settings.stage
    require_sense(settings.stage, world_size, rank, None)
    with _uncut(model_or_numel, settings, rank, world_size, batch) as (model, own, size):
        subject = ModelPlan(
            model, own, precision=precision, optimizer=optimizer, batch=batch, step=step,
            device=torch.device(device),
        )  # fmt: skip
        return estimate_of(
            subject, stage, world_size // size, rank=rank // size, offload=own.offload,
            num_microbatches=accumulate_grad_batches,
        )  # fmt: skip


@contextlib.contextmanager
def _uncut(
    model: Any, settings: Settings, rank: int, world_size: int, batch: Any
) -> Iterator[tuple[Any, Settings, int]]:
    """Enter a context with a model that no tensor parallelism cuts: if any does, a rank's part.

    Yields that, the settings of its ranks, and the number of ranks that hold a part each.

    Raises:
        ValueError: The model is not cut, or this process belongs to a process group.
    """
    size = settings.division(world_size)["tensor_size"]
    if size == 1:
        yield model, settings, 1
        return
    if batch is not None:
        raise ValueError(
            f"Activations are not counted with tensor_parallel_size={size}. Remove `batch`."
        )
    if isinstance(model, int):
        raise ValueError(
            f"tensor_parallel_size={size} cuts a model that is known. Pass the model instead of a"
            " number of parameters."
        )
    with pretended_mesh(rank, world_size, size) as mesh:
        with torch.device("meta"):
            built = model if isinstance(model, nn.Module) else model(mesh)
            if (configure := getattr(built, "configure_model", None)) is not None:
                # Modules of Lightning read the mesh that they cut themselves by.
                cls = type(built)
                built.__class__ = derived_class(cls, {"device_mesh": mesh})
                try:
                    configure()
                finally:
                    built.__class__ = cls
        make_local(built, mesh)
        yield built, dataclasses.replace(settings, tensor_parallel_size=1), size


def _settings_of(strategy: str | Configured | Settings) -> Settings:
    if isinstance(strategy, Settings):
        return strategy
    if isinstance(strategy, str):
        return Settings() if strategy == "ddp" else Settings.of(**strategy_arguments(strategy))
    found = getattr(strategy, "settings", None)
    if not isinstance(found, Settings):
        raise TypeError(f"Expected a strategy's name or a ZeROStrategy, got {strategy!r}.")
    return found


def estimate_of(
    model: ModelPlan,
    stage: int,
    world_size: int,
    *,
    offload: Offload | str | None = None,
    **how: Any,
) -> Estimate:
    """Return the estimate for a stage; ``how`` as in ``ModelPlan.snapshots``."""
    if isinstance(offload, str):
        offload = Offload.of_stage(stage, offload)
    snapshots = tuple(model.snapshots(stage, world_size, offload=offload, **how))
    return Estimate(
        stage,
        world_size,
        model.precision,
        model.num_parameters,
        has_units=model.has_units,
        has_activations=model.has_activations,
        snapshots=snapshots,
        whole=model.nbytes,
        is_on_host=model.device.type == "cpu"
        and not (model.microbatch.offloading and stage)
        and (offload is None or offload.is_mapped(model.device)),
        offload=offload,
    )


def compare(
    model: ModelPlan,
    stages: Iterable[int],
    world_sizes: Iterable[int],
    *,
    offloads: Iterable[tuple[int, Offload]] = (),
    **how: Any,
) -> list[Estimate]:
    """Estimate, for each number of ranks, every stage and then every stage with an offload."""
    columns = [*((stage, None) for stage in stages), *offloads]
    return [
        estimate_of(model, stage, world_size, offload=offload, **how)
        for world_size in world_sizes
        for stage, offload in columns
    ]


def named_offloads(*media: str) -> list[tuple[int, Offload]]:
    """Return the offloads that the names ``"cpu"`` and ``"nvme"`` mean, each with its stage."""
    stages = {"cpu": (2, 3), "nvme": (3,)}
    return [
        (stage, Offload.of_stage(stage, medium)) for medium in media for stage in stages[medium]
    ]


def advise(
    model: ModelPlan,
    estimates: Sequence[Estimate],
    device_memory: int,
    num_microbatches: int = 1,
) -> tuple[Estimate | None, str]:
    """Return the first estimate that fits a device, and a sentence: it, or what to try instead."""
    limit = format_bytes(device_memory)
    for found in estimates:
        if found.device_peak <= device_memory:
            size, where = format_bytes(found.device_peak), format_ranks(found.world_size)
            return found, f"On {where}, {found.name} fits: at most {size} of {limit}."
    least = min(estimates, key=lambda one: one.device_peak)
    ranks = least.world_size
    tried: list[tuple[str, ModelPlan, int, str | None]] = [
        (f"zero3 on {4 * ranks} ranks", model, 4 * ranks, None)
    ]
    if model.has_activations and not model.microbatch.checkpointing:
        leaner = model.checkpointed()
        tried.append(("zero3 with activation_checkpointing=True", leaner, ranks, None))
    if Offload.of_stage(3, "cpu").runs_on(model.device):
        tried.append(("zero3_offload", model, ranks, "cpu"))
    tried.append(("zero3_nvme", model, ranks, "nvme"))
    texts = []
    for name, subject, world_size, medium in tried:
        with contextlib.suppress(ValueError):  # not with these settings or this optimizer
            found = estimate_of(
                subject, 3, world_size, offload=medium, num_microbatches=num_microbatches
            )
            texts.append(f"{name} needs {format_bytes(found.device_peak)}")
    return None, (
        f"Nothing fits: {least.name} on {format_ranks(ranks)} needs"
        f" {format_bytes(least.device_peak)} of {limit}; {', '.join(texts)}."
    )
