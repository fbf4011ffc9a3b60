"""A model on ``meta`` with its optimizer and batch, and the bytes that a rank will hold of it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from lightning_zero.comm import pretended_mesh
from lightning_zero.memory.dry_run import Event, Microbatch, Step, meta_copy
from lightning_zero.memory.states import Optimizers, OptimizerStates, optimizers_for
from lightning_zero.memory.walk import (
    KINDS,
    RESTING,
    Buckets,
    Gathered,
    Kinds,
    Reductions,
    Snapshot,
    UnitTerms,
    Walk,
    terms_of_specs,
)
from lightning_zero.parameters import make_local
from lightning_zero.plan import (
    RECIPES,
    Medium,
    Offload,
    Settings,
    derived_class,
    specify_units,
    strategy_arguments,
    whole_tensors,
)
from lightning_zero.tensors import bytes_held, tensors_in

_META = torch.device("meta")
OF_STAGE_3 = ("reshard_after_forward",)
"""Settings that apply to stage 3 only."""
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""Precisions by the short names that the Trainer takes, too."""
_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_MOST_STAGED = 2**25
"""Bytes of host memory in which a step from files stages Adam's states."""


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
        host: The most bytes of each kind in the host memory of an accelerator, or for staging.
        disk: Bytes in files, by kind.
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
    host: Kinds
    disk: Kinds
    whole: int
    is_on_host: bool
    offload: Offload | None

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
    def host_peak(self) -> int:
        """The most bytes in host memory within a step; on a CPU, the device's are included."""
        rests = sum(self.host[kind] for kind in RESTING)
        return rests + max(m.staging + m.total * self.is_on_host for m in self.snapshots)

    @property
    def leaves_device(self) -> bool:
        """Return whether anything is offloaded, activations included."""
        return self.offload is not None or (not self.is_on_host and self.host_peak > 0)

    @property
    def device_peak(self) -> int:
        """The most bytes in device memory within a step; on a CPU, staging is included."""
        return self.host_peak if self.is_on_host else self.peak.total


@dataclass(frozen=True)
class Run:
    """Which run is predicted, and for which of its ranks.

    Attributes:
        stage: 1, 2 or 3; 0 is DDP.
        world_size: Number of ranks.
        rank: The rank that holds the bytes.
        num_microbatches: Microbatches of a step.
        offload: What rests outside the device.

    Raises:
        ValueError: The stage allows no such rank or no such offload.
    """

    stage: int
    world_size: int
    rank: int = 0
    num_microbatches: int = 1
    offload: Offload | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(f"Expected world_size >= 1, got {self.world_size!r}.")
        if not 0 <= self.rank < self.world_size:
            last = self.world_size - 1
            raise ValueError(f"Expected a rank from 0 to {last}, got {self.rank!r}.")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"Expected stage among 0 (DDP), 1, 2, 3, got {self.stage!r}.")
        if self.offload is not None and self.stage == 0:
            raise ValueError(
                f"Expected stage 1, 2 or 3 with offload, got stage=0 (DDP) and {self.offload}."
            )


class ModelPlan:
    """A model on ``meta`` with its optimizer and batch, and the settings of its run.

    The arguments are those of :func:`estimate`, and ``kernels``: the device whose kernels decide
    what activations are, if it is another one.

    Attributes:
        module: The model on ``meta``.
        settings: The settings, of which each prediction takes another stage or another offload.
        has_units: Whether the model itself is known, not only its number of parameters.
        num_parameters: Elements of all parameters, ties counted once.
        nbytes: Bytes of all parameters and buffers, unsharded and in their own dtypes.
        microbatch: The batch, and how a rank computes with it.
    """

    def __init__(
        self,
        model_or_numel: nn.Module | Callable[[], nn.Module] | int,
        settings: Settings | None = None,
        *,
        precision: str = "32-true",
        optimizer: Optimizers = None,
        batch: Any = None,
        step: Step | None = None,
        device: torch.device,
        kernels: torch.device | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        if settings.tensor_parallel_size != 1:
            raise ValueError(
                "tensor_parallel_size > 1 cuts a model that is known. Pass the model to"
                " lightning_zero.estimate(), or remove it to estimate the whole model."
            )
        checkpointing = settings.activation_checkpointing
        if batch is not None and not isinstance(checkpointing, bool):
            raise ValueError(
                "Activations are counted with activation_checkpointing=True, of every unit, or"
                f" without, got {checkpointing!r}. Remove `batch`, or pass True."
            )
        precision = _SHORT.get(str(precision), precision)
        if precision not in RECIPES:
            raise ValueError(
                f"Expected a precision among {', '.join(map(repr, RECIPES))}, got {precision!r}."
            )
        kernels = kernels or device
        present = torch.accelerator.current_accelerator(check_available=True)
        if batch is not None and kernels.type not in ("cpu", present and present.type):
            raise ValueError(
                f"Activations on {device.type!r} are counted only where torch finds such a device,"
                " because its kernels decide what they keep. Remove `batch`, or pass device='cpu'."
            )
        dtype = _TRUE_DTYPES.get(precision)
        self.precision, self.device = precision, device
        recipe, kept = RECIPES[precision], (checkpointing is True, settings.activation_offload)
        self.microbatch = Microbatch(batch, step, *kept, recipe, dtype, kernels)
        self.has_units = not isinstance(model_or_numel, int)
        if isinstance(model_or_numel, int):
            if model_or_numel < 1:
                raise ValueError(f"Expected a number of parameters >= 1, got {model_or_numel}.")
            if batch is not None:
                raise ValueError(
                    "A number of parameters has no activations. Pass the model, or remove `batch`."
                )
            self.settings = replace(settings, units="auto")
            self.module: nn.Module = nn.Linear(
                model_or_numel, 1, bias=False, device=_META, dtype=dtype
            )
        else:
            self.module = meta_copy(_built(model_or_numel), self.microbatch.dtype_of)
        parameters = list(self.module.parameters())
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        self.nbytes = sum(parameter.nbytes for parameter in parameters) + self._buffers
        self._states = OptimizerStates(
            optimizers_for(self.module, parameters, optimizer), choices=settings.optimizer_step
        )
        self._events: dict[bool, list[Event]] = {}

    @property
    def has_activations(self) -> bool:
        """Return whether there is a batch to count activations with."""
        return self.microbatch.batch is not None

    def describe(self) -> str:
        """Return the model, its size, precision, optimizers and batch in one line."""
        batch = " ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
            for tensor in tensors_in(self.microbatch.batch)
        )
        return ", ".join(
            [
                *([type(self.module).__name__] if self.has_units else []),
                f"{self.num_parameters:,} parameters",
                self.precision,
                *self._states.names,
                *([f"batch {batch}"] if batch else []),
            ]
        )

    def checkpointed(self) -> ModelPlan:
        """Return the same plan with activation checkpointing."""
        other = copy.copy(self)
        other.microbatch = replace(self.microbatch, checkpointing=True)
        other._events = {}
        return other

    def estimate(
        self,
        stage: int,
        world_size: int,
        *,
        rank: int = 0,
        num_microbatches: int = 1,
        offload: Offload | str | None = None,
    ) -> Estimate:
        """Return what a rank will hold in a step's last microbatch, and at rest after it.

        Stage 0 is DDP; ``offload`` may be that of a named strategy, ``"cpu"`` or ``"nvme"``.
        """
        if isinstance(offload, str):
            offload = Offload.of_stage(stage, offload)
        run = Run(stage, world_size, rank, num_microbatches, offload)
        units = self._terms(run) if stage else []
        rests = {
            medium: {kind: sum(unit.resting[medium][kind] for unit in units) for kind in RESTING}
            for medium in Medium
        }
        if stage == 0:
            snapshots = self._under_ddp(adds=num_microbatches > 1)
        else:
            snapshots = self._under_engine(run, units, rests)
        staging = max(part.staging for part in snapshots)
        return Estimate(
            stage, world_size, self.precision, self.num_parameters, self.has_units,
            self.has_activations, tuple(snapshots), {**rests[Medium.HOST], "staging": staging},
            rests[Medium.DISK], self.nbytes,
            is_on_host=self.device.type == "cpu"
            and not (self.microbatch.offloading and stage)
            and (offload is None or offload.is_mapped(self.device)),
            offload=offload,
        )  # fmt: skip

    def _terms(self, run: Run) -> list[UnitTerms]:
        """Return what each unit will hold on the rank; raise a ``ValueError`` where a run would."""
        on_host = run.offload is not None and run.offload.is_mapped(self.device)
        self._require_support(self._at(run.stage, run.offload), on_host=on_host)
        settings = self._at(run.stage)  # terms know of offload themselves
        num_shards = settings.division(run.world_size)["num_shards"]
        place = run.rank % num_shards
        return terms_of_specs(
            specify_units(self.module, settings),
            lambda parameter, numel: self._states.nbytes(parameter, numel, place, num_shards),
            num_shards=num_shards,
            num_copies=run.world_size // num_shards,
            rank=place,
            offload=run.offload,
            on_host=on_host,
        )

    def _under_engine(
        self, run: Run, units: list[UnitTerms], rests: dict[Medium, Kinds]
    ) -> list[Snapshot]:
        """Return a step under the engine, between whose steps a rank holds ``rests``."""
        settings, adds = self._at(run.stage), run.num_microbatches > 1
        num_shards = settings.division(run.world_size)["num_shards"]
        is_local = not settings.plan(torch.float32).reduces_every_microbatch
        still = {**dict.fromkeys(KINDS, 0), **rests[Medium.DEVICE], "buffers": self._buffers}
        if not self.has_units:
            kept = sum(unit.partial for unit in units) if is_local and adds else 0
            return [
                Snapshot("", "backward", {**still, "unreduced": kept}),
                Snapshot("", "rest", still),
            ]
        events = self.events(is_cast=True)
        parameters = list(self.module.parameters())
        dtype = self.microbatch.recipe.weight
        reductions = Reductions(
            events,
            [p.numel() * (dtype or p.dtype).itemsize for p in parameters],
            still["gradients"],
            units,
            list(map(id, parameters)),
            is_local=is_local,
            num_microbatches=run.num_microbatches,
            num_shards=num_shards,
            receives=self.device.type == "cpu" and num_shards > 1,
        )
        found = Walk(events, still, reductions, Gathered(events, reductions, settings)).parts()
        stepped = self._states.stepped(run.rank % num_shards, num_shards)
        stepped += max(unit.lent for unit in units)
        is_staged = run.offload is not None and run.offload.optimizer == "nvme"
        staged = min(rests[Medium.DISK]["states"], _MOST_STAGED) if is_staged else 0
        if stepped or staged:
            found.append(Snapshot("", "step", {**still, "gathered": stepped}, staging=staged))
        found.append(Snapshot("", "rest", still))
        for part in found:
            part.staging += max(unit.ring for unit in units)
        return found

    def _at(self, stage: int, offload: Offload | None = None) -> Settings:
        """Return the settings of a step without data at a stage; those of stage 3 only go below."""
        varied = {name: getattr(Settings, name) for name in OF_STAGE_3} if stage < 3 else {}
        return replace(
            self.settings,
            stage=stage,
            offload=offload,
            recipe=self.microbatch.recipe,
            device=_META,
            broadcast_buffers=False,
            async_checkpoint=False,
            # The events of the step have what becomes of activations.
            activation_checkpointing=False,
            activation_offload=False,
            **varied,
        )

    def _require_support(self, asked: Settings, *, on_host: bool) -> None:
        """Raise a ``ValueError`` where a run would, ``on_host`` or beside an accelerator."""
        if not on_host:
            asked.on_device().plan(torch.float32)  # raises if it has none
        elif self.microbatch.offloading:
            raise ValueError(
                "activation_offload=True needs a device beside the host, but offload to files is"
                f" predicted for device={str(self.device)!r}. Remove it, or pass device='cuda'."
            )
        if asked.steps_by_unit and self._states.against_units:
            raise ValueError(self._states.against_units)

    def _under_ddp(self, *, adds: bool) -> list[Snapshot]:
        """Return a step under DDP."""
        parameters = list(self.module.parameters())
        trainable = [p for p in parameters if p.requires_grad]
        total = sum(p.nbytes for p in trainable)
        still = {
            **dict.fromkeys(KINDS, 0),
            "weights": sum(p.nbytes for p in parameters),
            "gradients": total,
            "states": sum(self._states.nbytes(p, p.numel(), 0, 1) for p in trainable),
            "buffers": self._buffers,
        }
        if not self.has_units:
            return [Snapshot("", "rest", still)]
        buckets = Buckets([p.nbytes for p in parameters], total, adds=adds)
        found = Walk(self.events(is_cast=False), still, buckets).parts()
        return [*found, Snapshot("", "rest", {**still, "unreduced": total})]

    @property
    def _buffers(self) -> int:
        return sum(map(bytes_held, whole_tensors(self.module)))

    def events(self, *, is_cast: bool) -> list[Event]:
        """Return the events of a step, as in :meth:`Microbatch.events`."""
        # Where nothing is cast or kept on the host, a step is the same under DDP.
        is_cast &= self.microbatch.recipe.weight is not None or self.microbatch.offloading
        if is_cast not in self._events:
            module = meta_copy(self.module)
            specs = specify_units(module, self._at(3))
            self._events[is_cast] = self.microbatch.events(module, specs, is_cast=is_cast)
        return self._events[is_cast]


def _built(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    with _META:
        built = model()
    if not isinstance(built, nn.Module):
        raise TypeError(
            f"Expected a module, a function that builds one or a number, got {built!r}."
        )
    return built


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
            Offload to host memory, activations included, is assumed to be from an accelerator, also
            with ``device="cpu"``.
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
    Run(settings.stage, world_size, rank)  # raises if there is no such rank
    with _uncut(model_or_numel, settings, rank, world_size, batch) as (model, own, size):
        subject = ModelPlan(
            model, own, precision=precision, optimizer=optimizer, batch=batch, step=step,
            device=torch.device(device),
        )  # fmt: skip
        return subject.estimate(
            stage, world_size // size, rank=rank // size, offload=own.offload,
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
        yield built, replace(settings, tensor_parallel_size=1), size


def _settings_of(strategy: str | Configured | Settings) -> Settings:
    if isinstance(strategy, Settings):
        return strategy
    if isinstance(strategy, str):
        return Settings() if strategy == "ddp" else Settings.of(**strategy_arguments(strategy))
    found = getattr(strategy, "settings", None)
    if not isinstance(found, Settings):
        raise TypeError(f"Expected a strategy's name or a ZeROStrategy, got {strategy!r}.")
    return found


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
        model.estimate(stage, world_size, offload=offload, **how)
        for world_size in world_sizes
        for stage, offload in columns
    ]


def named_offloads(*media: str) -> list[tuple[int, Offload]]:
    """Return the offloads that the names ``"cpu"`` and ``"nvme"`` mean, each with its stage."""
    stages = {"cpu": (2, 3), "nvme": (3,)}
    return [
        (stage, Offload.of_stage(stage, medium)) for medium in media for stage in stages[medium]
    ]
