"""A model on ``meta`` with its optimizer and batch, whose memory is predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.comm import DryCommunicator, dry_transport
from lightning_zero.engine import Engine
from lightning_zero.memory.cluster import Timeline
from lightning_zero.memory.dry_run import Microbatch, Step, meta_copy
from lightning_zero.memory.snapshots import Snapshot
from lightning_zero.memory.states import Optimizers, OptimizerStates, optimizers_for
from lightning_zero.memory.steps import replicated_step, sharded_step, without_units
from lightning_zero.memory.terms import KINDS, terms_of_specs
from lightning_zero.memory.trace import Event
from lightning_zero.plan import (
    RECIPES,
    Offload,
    Settings,
    specify_units,
)
from lightning_zero.tensors import tensors_in

_META = torch.device("meta")
OF_STAGE_3 = ("reshard_after_forward",)
"""Settings that apply to stage 3 only."""
_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


class ModelPlan:
    """A model on ``meta`` with its optimizer and batch, and the settings of its run.

    The arguments are those of ``estimate``.

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
        if precision not in RECIPES:
            raise ValueError(
                f"Expected a precision among {', '.join(map(repr, RECIPES))}, got {precision!r}."
            )
        present = torch.accelerator.current_accelerator(check_available=True)
        if batch is not None and device.type not in ("cpu", present and present.type):
            raise ValueError(
                f"Activations on {device.type!r} are counted only where torch finds such a device,"
                " because its kernels decide what they keep. Remove `batch`, or pass device='cpu'."
            )
        dtype = _TRUE_DTYPES.get(precision)
        self.precision, self.device = precision, device
        recipe, kept = RECIPES[precision], (checkpointing is True, settings.activation_offload)
        self.microbatch = Microbatch(batch, step, *kept, recipe, dtype, device)
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
        self._states = OptimizerStates(optimizers_for(self.module, parameters, optimizer))
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

    @classmethod
    def of_engine(
        cls,
        engine: Engine,
        optimizers: Sequence[Optimizer],
        *,
        precision: str,
        batch: Any = None,
    ) -> ModelPlan:
        """Return the plan of the model that ``engine`` shards and ``optimizers`` step."""
        settings = engine.sharded.settings
        dtypes = {
            id(parameter): flat.plan.master.dtype
            for unit in engine.sharded.units
            for flat in unit.flat_parameters
            for parameter in flat.parameters
        }
        bare = meta_copy(engine.module, lambda tensor: dtypes.get(id(tensor), tensor.dtype))
        model = cls(
            bare,
            # The module itself is checkpointed and cut.
            replace(settings, activation_checkpointing=False, tensor_parallel_size=1),
            precision=precision,
            optimizer=torch.optim.SGD,
            batch=batch,
            device=settings.device,
        )
        pairs = zip(engine.module.parameters(), model.module.parameters(), strict=True)
        own = {id(parameter): bare for parameter, bare in pairs}
        model._states = OptimizerStates(optimizers, own)
        return model

    def snapshots(
        self,
        stage: int,
        world_size: int,
        *,
        rank: int = 0,
        num_microbatches: int = 1,
        shares_memory: bool = False,
        offload: Offload | None = None,
        timeline: Timeline | None = None,
        ranks_on_node: int | None = None,
        **varied: Any,
    ) -> list[Snapshot]:
        """Return the snapshots of a step at a stage (0: DDP), and record it in any ``timeline``.

        ``varied`` are settings that differ from the model's own.
        """
        require_sense(stage, world_size, rank, offload)
        if stage == 0:
            return self._under_ddp(adds_gradients=num_microbatches > 1)
        on_host = offload is not None and offload.is_mapped(self.device)
        asked = self._at(stage, offload, **varied)
        self._require_support(asked, on_host=on_host)
        chosen = replace(asked, offload=None)  # what rests is that of the terms
        division = chosen.division(world_size, ranks_on_node)
        num_shards = division["num_shards"]
        place = rank % num_shards
        specs = specify_units(self.module, chosen)
        on_rank = {"num_shards": num_shards, "num_copies": world_size // num_shards, "rank": place}
        terms = terms_of_specs(
            specs,
            lambda parameter, numel: self.state_bytes(parameter, numel, place, num_shards),
            **on_rank,
            offload=offload,
            on_host=on_host,
        )
        plans = (flat.plan for spec in specs for flat in spec.flat_parameters)
        is_local = not next(plans).reduces_every_microbatch
        if not self.has_units:
            return without_units(terms, is_kept=is_local and num_microbatches > 1)
        reads_peers = shares_memory and num_shards > 1
        transport = dry_transport(self.device, reads_peers=reads_peers)
        stages_states = offload is not None and offload.optimizer == "nvme"
        on_message = None if timeline is None else timeline.begin
        return sharded_step(
            self.events(is_cast=True),
            meta_copy(self.module),
            chosen if on_host else replace(asked, offload=offload and offload.to_host),
            DryCommunicator(rank, world_size, transport, num_shards, on_message),
            terms,
            buffers=self._buffers,
            staged=self._states.staged([unit.pieces for unit in terms]) if stages_states else 0,
            stepped=self._states.stepped(place, num_shards) + max(unit.lent for unit in terms),
            num_microbatches=num_microbatches,
            timeline=timeline,
        )

    def _at(self, stage: int, offload: Offload | None = None, **varied: Any) -> Settings:
        """Return the settings of a step without data at a stage; those of stage 3 only go below."""
        if stage < 3:
            varied |= {name: getattr(Settings, name) for name in OF_STAGE_3}
        return replace(
            self.settings,
            stage=stage,
            offload=offload,
            recipe=self.microbatch.recipe,
            device=_META,
            **{
                "broadcast_buffers": False,
                "async_checkpoint": False,
                # The events of the step have what becomes of activations.
                "activation_checkpointing": False,
                "activation_offload": False,
                **varied,
            },
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

    def _under_ddp(self, *, adds_gradients: bool) -> list[Snapshot]:
        parameters = list(self.module.parameters())
        trainable = [p for p in parameters if p.requires_grad]
        kinds = dict.fromkeys(KINDS, 0)
        kinds["weights"] = sum(p.nbytes for p in parameters)
        kinds["gradients"] = sum(p.nbytes for p in trainable)
        kinds["states"] = sum(self.state_bytes(p, p.numel()) for p in trainable)
        kinds["buffers"] = self._buffers
        if not self.has_units:
            return [Snapshot("", "rest", kinds)]
        events, sizes = self.events(is_cast=False), [p.nbytes for p in parameters]
        return replicated_step(events, sizes, kinds, adds_gradients=adds_gradients)

    @property
    def _buffers(self) -> int:
        return sum(buffer.nbytes for buffer in self.module.buffers())

    def state_bytes(
        self, parameter: Parameter, numel: int, rank: int = 0, world_size: int = 1
    ) -> int:
        """Return the optimizer state bytes of a rank with ``numel`` elements of a parameter."""
        return self._states.nbytes(parameter, numel, rank, world_size)

    def events(self, *, is_cast: bool) -> list[Event]:
        """Return the events of a step, as in :meth:`Microbatch.events`."""
        # Where nothing is cast or kept on the host, a step is the same under DDP.
        is_cast &= self.microbatch.recipe.weight is not None or self.microbatch.offloading
        if is_cast not in self._events:
            module = meta_copy(self.module)
            specs = specify_units(module, self._at(3))
            self._events[is_cast] = self.microbatch.events(module, specs, is_cast=is_cast)
        return self._events[is_cast]


def require_sense(stage: int, world_size: int, rank: int, offload: Offload | None) -> None:
    """Raise a ``ValueError`` unless the stage allows such a rank and such an offload."""
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"Expected world_size >= 1, got {world_size!r}.")
    if not 0 <= rank < world_size:
        raise ValueError(f"Expected a rank from 0 to {world_size - 1}, got {rank!r}.")
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"Expected stage among 0 (DDP), 1, 2, 3, got {stage!r}.")
    if offload is not None and stage == 0:
        raise ValueError(f"Expected stage 1, 2 or 3 with offload, got stage=0 (DDP) and {offload}.")


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
