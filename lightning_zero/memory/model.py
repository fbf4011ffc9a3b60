"""A model on ``meta`` with its optimizer and batch, and the bytes that a rank will hold of it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm import pretended_mesh
from lightning_zero.memory.dry_run import Event, Microbatch, Step, copy_with
from lightning_zero.memory.states import Optimizers, OptimizerStates, optimizers_for
from lightning_zero.memory.walk import KINDS, RESTING, Snapshot, StateOf, UnitTerms, Walk, in_order
from lightning_zero.parameters import make_local
from lightning_zero.plan import (
    RECIPES,
    STRATEGIES,
    Offload,
    Settings,
    derived_class,
    specify_units,
    stays_whole,
    strategy_arguments,
    whole_tensors,
)
from lightning_zero.tensors import bytes_held, rewrapped, tensors_in

_META = torch.device("meta")
OF_STAGE_3 = ("reshard_after_forward", "prefetch")
"""Settings that apply to stage 3 only."""
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""Precisions by the short names that the Trainer takes, too."""
_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


@dataclass(frozen=True)
class Estimate:
    """The bytes that one rank will hold.

    Attributes:
        stage: 1, 2 or 3; 0 is DDP.
        world_size: Number of ranks.
        precision: A precision of the Trainer.
        num_parameters: Elements of all parameters, ties counted once.
        snapshots: A step on the device from its start to the rest after it.
        most: The most bytes of each kind on the device, at any time.
        rests: Bytes between steps after the first one, by kind and medium.
        whole: Bytes of the whole module, which each rank has in host memory before setup, unless it
            is built on ``meta``, and after ``fit``, unless ``restore_weights=False``.
        is_on_host: Whether the device is the host itself.
        offload: What rests outside the device.
    """

    stage: int
    world_size: int
    precision: str
    num_parameters: int
    snapshots: tuple[Snapshot, ...]
    most: dict[str, int]
    rests: Counter[str]
    whole: int
    is_on_host: bool
    offload: Offload | None

    @property
    def name(self) -> str:
        """The strategy's name, or its stage and what is offloaded where no strategy has a name."""
        if self.stage == 0:
            return "ddp"
        for name, (_, arguments) in STRATEGIES.items():
            named = Settings.of(**arguments)
            if (self.stage, self.offload) == (named.stage, named.offload):
                return name
        assert self.offload is not None
        homes = {"optimizer": self.offload.optimizer, "weights": self.offload.weights}
        moved = [f"{kind} on {medium}" for kind, medium in homes.items() if medium]
        return f"zero{self.stage}, {', '.join(moved)}"

    @property
    def resting(self) -> dict[str, int]:
        """Bytes on the device between steps, by kind, after the first step."""
        return {kind: self.rests[kind] for kind in RESTING}

    @property
    def host(self) -> dict[str, int]:
        """Bytes of each kind in the host memory of an accelerator."""
        return {kind: self.rests[f"host {kind}"] for kind in RESTING}

    @property
    def disk(self) -> dict[str, int]:
        """Bytes of each kind in files."""
        return {kind: self.rests[f"disk {kind}"] for kind in RESTING}

    @property
    def model_states(self) -> int:
        """Bytes of weights, gradients, master and optimizer states on the device between steps."""
        return sum(count for kind, count in self.resting.items() if kind != "buffers")

    @property
    def peak(self) -> Snapshot:
        """The snapshot with the most bytes on the device."""
        return max(self.snapshots, key=lambda snapshot: snapshot.total)

    @property
    def host_peak(self) -> int:
        """The most bytes in host memory within a step; on a CPU, the device's are included."""
        return sum(self.host.values()) + self.peak.total * self.is_on_host


class ModelPlan:
    """A model on ``meta`` with its optimizer and batch, and the settings of its run.

    The arguments are those of :func:`estimate`.

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
    ) -> None:
        settings = settings or Settings()
        self.has_units = not isinstance(model_or_numel, int)
        if settings.tensor_parallel_size != 1:
            raise ValueError(
                "tensor_parallel_size > 1 cuts a model that is known. Pass the model to"
                " lightning_zero.estimate(), or remove it to estimate the whole model."
            )
        precision = _SHORT.get(str(precision), precision)
        if precision not in RECIPES:
            raise ValueError(
                f"Expected a precision among {', '.join(map(repr, RECIPES))}, got {precision!r}."
            )
        if batch is not None:
            _require_countable(self.has_units, settings)
        recompute, dtype = settings.activation_checkpointing, _TRUE_DTYPES.get(precision)
        if not isinstance(recompute, bool):
            recompute = tuple(recompute)
        self.precision, self.device = precision, device
        present = torch.accelerator.current_accelerator(check_available=True)
        kernels = device if present and device.type == present.type else torch.device("cpu")
        self.microbatch = Microbatch(batch, step, recompute, RECIPES[precision], dtype, kernels)
        if isinstance(model_or_numel, int):
            if model_or_numel < 1:
                raise ValueError(f"Expected a number of parameters >= 1, got {model_or_numel}.")
            settings = replace(settings, units="auto")
            self.module: nn.Module = nn.Linear(
                model_or_numel, 1, bias=False, device=_META, dtype=dtype
            )
        else:
            self.module = copy_with(_built(model_or_numel), self._on_meta)
        self.settings = settings
        parameters = list(self.module.parameters())
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        self._buffers = sum(map(bytes_held, whole_tensors(self.module)))
        self.nbytes = sum(parameter.nbytes for parameter in parameters) + self._buffers
        self._states = OptimizerStates(
            optimizers_for(self.module, parameters, optimizer), settings.optimizer_step
        )
        self._events: dict[bool, list[Event]] = {}

    @property
    def has_activations(self) -> bool:
        """Return whether there is a batch to count activations with."""
        return self.microbatch.batch is not None

    def _on_meta(self, tensor: Tensor) -> Tensor:
        bare = rewrapped(tensor.detach(), partial(torch.empty_like, device="meta"))
        return bare if stays_whole(tensor) else bare.to(self.microbatch.dtype_of(tensor))

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

        Raises:
            ValueError: A run would be refused, or has no such rank.
        """
        if isinstance(offload, str):
            offload = Offload.of_stage(stage, offload)
        _require_possible(stage, world_size, rank, offload)
        adds, keeps_whole, num_shards = num_microbatches > 1, False, 1
        settings = self._at(stage or 3, offload)
        if stage:
            keeps_whole = adds and not settings.plan(torch.float32).reduces_every_microbatch
            adds = adds and not keeps_whole
            num_shards = settings.division(world_size)["num_shards"]
            if settings.offload is not None or settings.stochastic_rounding:
                self._states.require_units()
        own, num_copies = rank % num_shards, world_size // num_shards
        state_of = self._states.of_rank(own, num_shards)
        units = [] if stage else self._terms_of_ddp(state_of, adds=adds)
        for spec in specify_units(self.module, settings) if stage else ():
            flats = [
                (flat.plan, flat.layout(num_shards, num_copies), [p for _, p in flat.named],
                 flat.trainable)
                for flat in spec.flat_parameters
            ]  # fmt: skip
            units.append(UnitTerms.of(spec.name, flats, own, state_of))
        rests = sum((unit.rests for unit in units), Counter(buffers=self._buffers))
        still = {kind: rests[kind] for kind in KINDS}
        if self.has_units and not stage:
            still["unreduced"] = rests["gradients"]  # in the buckets that are sent
        snapshots, most = [], Counter[str]()
        if self.has_activations or (self.has_units and stage):
            is_cast = stage > 0
            events = self.events(is_cast=is_cast) if self.has_activations else in_order(units)
            walk = Walk(events, units, still, settings, keeps_whole=keeps_whole, adds=adds)
            snapshots, most = walk.parts, walk.most
        if self.has_units and stage and (stepped := self._states.stepped(own, num_shards)):
            snapshots.append(Snapshot("", "step", {**still, "gathered": stepped}))
        snapshots.append(Snapshot("", "rest", still))
        for snapshot in snapshots:
            most |= Counter(snapshot.kinds)
        return Estimate(
            stage, world_size, self.precision, self.num_parameters, tuple(snapshots),
            {kind: most[kind] for kind in KINDS}, rests, self.nbytes, offload=offload,
            is_on_host=self.device.type == "cpu"
            and (offload is None or offload.is_mapped(self.device)),
        )  # fmt: skip

    def _at(self, stage: int, offload: Offload | None = None) -> Settings:
        """Return the settings at a stage; those of stage 3 only go below.

        The device is ``meta``, like an accelerator, unless it is the host and maps the files.

        Raises:
            ValueError: A run would be refused.
        """
        varied = {name: getattr(Settings, name) for name in OF_STAGE_3} if stage < 3 else {}
        is_mapped = offload is not None and offload.is_mapped(self.device)
        return replace(
            self.settings,
            stage=stage,
            offload=offload,
            recipe=self.microbatch.recipe,
            device=self.device if is_mapped else _META,
            async_checkpoint=False,  # which offload refuses
            **varied,
        ).on_device()

    def _terms_of_ddp(self, state_of: StateOf, *, adds: bool) -> list[UnitTerms]:
        """Return the terms of parameters under DDP, whose gradients stay where they arrive."""
        found = []
        for name, p in self.module.named_parameters():
            grad = p.nbytes * p.requires_grad
            rests = Counter(weights=p.nbytes, gradients=grad, states=state_of(p, p.numel()))
            shard, trainable = 0 if adds else grad, {name} if p.requires_grad else set[str]()
            found.append(UnitTerms(name, rests, shard=shard, trainable=trainable))
        return found

    def events(self, *, is_cast: bool) -> list[Event]:
        """Return the events of a step, as in :meth:`Microbatch.events`."""
        is_cast &= self.microbatch.recipe.weight is not None  # else a step is the same under DDP
        if is_cast not in self._events:
            specs = specify_units(self.module, self._at(3))
            self._events[is_cast] = self.microbatch.events(self.module, specs, is_cast=is_cast)
        return self._events[is_cast]


def _require_possible(stage: int, world_size: int, rank: int, offload: Offload | None) -> None:
    """Raise a ``ValueError`` if there are no such ranks, or is no such stage."""
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"Expected world_size >= 1, got {world_size!r}.")
    if not 0 <= rank < world_size:
        raise ValueError(f"Expected a rank from 0 to {world_size - 1}, got {rank!r}.")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"Expected stage among 0 (DDP), 1, 2, 3, got {stage!r}.")
    if offload is not None and stage == 0:
        raise ValueError(f"Expected stage 1, 2 or 3 with offload, got stage=0 (DDP) and {offload}.")


def _require_countable(has_units: bool, settings: Settings) -> None:
    """Raise a ``ValueError`` if activations cannot be counted."""
    if not has_units:
        raise ValueError(
            "A number of parameters has no activations. Pass the model, or remove `batch`."
        )
    if settings.activation_offload:
        raise ValueError(
            "Activations are not counted with activation_offload=True. Remove it, or `batch`."
        )


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


def estimate(
    model_or_numel: nn.Module | Callable[..., nn.Module] | int,
    strategy: str | Settings | object = "zero3",
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
            Offload to host memory is assumed to be from an accelerator, also with ``device="cpu"``.
        world_size: Number of ranks.
        precision: As in ``Trainer(precision=...)``.
        optimizer: Makes an optimizer from a list of parameters, or its name in ``torch.optim``; by
            default the module's ``configure_optimizers``, else AdamW.
        batch: One rank's batch (only shapes and dtypes matter), to count activations as well.
        step: Computes the loss from the module and the batch; by default ``training_step``, or the
            module's own outputs.
        accumulate_grad_batches: As in the Trainer.
        rank: The rank to estimate. Ranks differ in padding.
        device: Where the model will run: ``"cpu"``, or an accelerator such as ``"cuda"``. Where
            torch finds no such device, activations are those of CPU kernels.
    """
    settings = getattr(strategy, "settings", strategy)
    if isinstance(strategy, str):
        settings = Settings() if strategy == "ddp" else Settings.of(**strategy_arguments(strategy))
    if not isinstance(settings, Settings):
        raise TypeError(f"Expected a strategy's name or a ZeROStrategy, got {strategy!r}.")
    stage, size = 0 if strategy == "ddp" else settings.stage, 1
    if settings.tensor_parallel_size != 1:
        size = settings.division(world_size)["tensor_size"]
        if batch is not None:
            raise ValueError(
                f"Activations are not counted with tensor_parallel_size={size}. Remove `batch`."
            )
        if not isinstance(model_or_numel, int):
            settings = replace(settings, tensor_parallel_size=1)
            model_or_numel = _part_of(model_or_numel, rank, world_size, size)
    plan = ModelPlan(
        model_or_numel, settings, precision=precision, optimizer=optimizer, batch=batch, step=step,
        device=torch.device(device),
    )  # fmt: skip
    return plan.estimate(
        stage, world_size // size, rank=rank // size, offload=settings.offload,
        num_microbatches=accumulate_grad_batches,
    )  # fmt: skip


def _part_of(model: Any, rank: int, world_size: int, size: int) -> nn.Module:
    """Return a rank's part of a model that tensor parallelism cuts."""
    with pretended_mesh(rank, world_size, size) as mesh:
        with _META:
            built: nn.Module = model if isinstance(model, nn.Module) else model(mesh)
            if (configure := getattr(built, "configure_model", None)) is not None:
                # Modules of Lightning read the mesh that they cut themselves by.
                cls = type(built)
                built.__class__ = derived_class(cls, {"device_mesh": mesh})
                configure()
                built.__class__ = cls
        make_local(built, mesh)
    return built


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
