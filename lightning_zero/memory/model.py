"""A model on ``meta`` with its optimizer and batch, whose memory is predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from lightning_zero.memory.dry_run import Event, Microbatch, Step, meta_copy
from lightning_zero.memory.states import Optimizers, OptimizerStates, optimizers_for
from lightning_zero.memory.terms import KINDS, RESTING, UnitTerms, terms_of_specs
from lightning_zero.memory.walk import Snapshot, Walk, replicated_parts
from lightning_zero.plan import RECIPES, Medium, Offload, Settings, specify_units, whole_tensors
from lightning_zero.tensors import bytes_held, tensors_in

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

    def snapshots(
        self,
        stage: int,
        world_size: int,
        *,
        rank: int = 0,
        num_microbatches: int = 1,
        offload: Offload | None = None,
    ) -> list[Snapshot]:
        """Return what a rank holds in the parts of a step's last microbatch, and at rest after it.

        Stage 0 is DDP.
        """
        require_sense(stage, world_size, rank, offload)
        if stage == 0:
            return self._under_ddp(adds_gradients=num_microbatches > 1)
        on_host = offload is not None and offload.is_mapped(self.device)
        asked = self._at(stage, offload)
        self._require_support(asked, on_host=on_host)
        chosen = replace(asked, offload=None)  # what rests is that of the terms
        num_shards = chosen.division(world_size)["num_shards"]
        place = rank % num_shards
        specs = specify_units(self.module, chosen)
        units = terms_of_specs(
            specs,
            lambda parameter, numel: self._states.nbytes(parameter, numel, place, num_shards),
            num_shards=num_shards,
            num_copies=world_size // num_shards,
            rank=place,
            offload=offload,
            on_host=on_host,
        )
        plans = (flat.plan for spec in specs for flat in spec.flat_parameters)
        is_local = not next(plans).reduces_every_microbatch
        still = {**dict.fromkeys(KINDS, 0), **_resting(units, Medium.DEVICE)}
        still["buffers"] = self._buffers
        host, disk = _resting(units, Medium.HOST), _resting(units, Medium.DISK)
        ring = max(unit.ring for unit in units) if self.has_units else 0
        if self.has_units:
            walk = Walk(
                self.events(is_cast=True),
                units,
                [(id(p), self._grad_bytes(p)) for p in self.module.parameters()],
                still,
                asked,
                is_local=is_local,
                num_microbatches=num_microbatches,
                num_shards=num_shards,
                receives=self.device.type == "cpu" and num_shards > 1,
            )
            found = walk.parts()
        else:
            kept = sum(unit.partial for unit in units) if is_local and num_microbatches > 1 else 0
            found = [Snapshot("", "backward", {**still, "unreduced": kept})]
        for part in found:
            part.host, part.disk = {**host, "staging": ring + part.away}, disk
        is_staged = offload is not None and offload.optimizer == "nvme" and self.has_units
        staged = self._states.staged([unit.pieces for unit in units]) if is_staged else 0
        stepped = self._states.stepped(place, num_shards) + max(unit.lent for unit in units)
        if self.has_units and (stepped or staged):
            kinds = {**still, "gathered": stepped}
            found.append(Snapshot("", "step", kinds, {**host, "staging": ring + staged}, disk))
        return [*found, Snapshot("", "rest", still, {**host, "staging": ring}, disk)]

    def _grad_bytes(self, parameter: Parameter) -> int:
        dtype = self.microbatch.recipe.weight or parameter.dtype
        return parameter.numel() * dtype.itemsize

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

    def _under_ddp(self, *, adds_gradients: bool) -> list[Snapshot]:
        parameters = list(self.module.parameters())
        trainable = [p for p in parameters if p.requires_grad]
        kinds = dict.fromkeys(KINDS, 0)
        kinds["weights"] = sum(p.nbytes for p in parameters)
        kinds["gradients"] = sum(p.nbytes for p in trainable)
        kinds["states"] = sum(self._states.nbytes(p, p.numel(), 0, 1) for p in trainable)
        kinds["buffers"] = self._buffers
        if not self.has_units:
            return [Snapshot("", "rest", kinds)]
        events, sizes = self.events(is_cast=False), [p.nbytes for p in parameters]
        return replicated_parts(events, sizes, kinds, adds_gradients=adds_gradients)

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


def _resting(units: Sequence[UnitTerms], medium: Medium) -> dict[str, int]:
    """Return the bytes of all units between steps in one medium, by kind."""
    return {kind: sum(unit.resting[medium][kind] for unit in units) for kind in RESTING}


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
