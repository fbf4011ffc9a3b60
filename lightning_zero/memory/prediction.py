"""Bytes per rank before a run: no data, no device, no process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_zero.memory.dry_run import Step
from lightning_zero.memory.moments import Moment
from lightning_zero.memory.subject import Optimizers, Subject
from lightning_zero.memory.terms import KINDS, RESTING, Kinds
from lightning_zero.wrap import UnitPolicy


@dataclass(frozen=True)
class Estimate:
    """What one rank will hold.

    Attributes:
        stage: 1, 2 or 3; 0 is DDP.
        world_size: Number of ranks.
        precision: A precision of the Trainer.
        num_parameters: Elements of all parameters, ties counted once.
        has_units: Whether the model's units are known, and so what is gathered and unreduced.
        has_activations: Whether activations are counted.
        moments: A step from its begin to the rest after it.
    """

    stage: int
    world_size: int
    precision: str
    num_parameters: int
    has_units: bool
    has_activations: bool
    moments: tuple[Moment, ...]

    @property
    def name(self) -> str:
        """The strategy's name."""
        return f"zero{self.stage}" if self.stage else "ddp"

    @property
    def resting(self) -> Kinds:
        """Bytes between steps, by kind, after the first step."""
        return {kind: self.moments[-1].kinds[kind] for kind in RESTING}

    @property
    def model_states(self) -> int:
        """Bytes of weights, gradients, master and optimizer states between steps."""
        return sum(count for kind, count in self.resting.items() if kind != "buffers")

    @property
    def peak(self) -> Moment:
        """The moment at which most bytes are held."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def most(self) -> Kinds:
        """The most of each kind, whenever it is held."""
        return {kind: max(moment.kinds[kind] for moment in self.moments) for kind in KINDS}


def estimate(
    model_or_numel: nn.Module | Callable[[], nn.Module] | int,
    *,
    stage: int = 3,
    world_size: int = 1,
    precision: str = "32-true",
    optimizer: Optimizers = None,
    batch: Any = None,
    step: Step | None = None,
    activation_checkpointing: bool = False,
    accumulate_grad_batches: int = 1,
    accumulate: str | None = None,
    units: UnitPolicy = "auto",
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    reduce_dtype: torch.dtype | None = None,
    rank: int = 0,
    device: torch.device | str = "cpu",
) -> Estimate:
    """Bytes that one rank will hold, by kind, through a step.

    Args:
        model_or_numel: A module on any device, a function that builds one (it is called on
            ``meta``), or a number of parameters.
        stage: 1, 2 or 3; 0 is DDP.
        world_size: Number of ranks.
        precision: As in ``Trainer(precision=...)``.
        optimizer: Makes an optimizer from a list of parameters, or its name in ``torch.optim``; by
            default the module's ``configure_optimizers``, else AdamW.
        batch: One rank's batch (only shapes and dtypes matter), to count activations as well.
        step: Computes the loss from the module and the batch; by default ``training_step``, or the
            module's own outputs.
        activation_checkpointing: Recompute every unit's activations in backward.
        accumulate_grad_batches: As in the Trainer.
        accumulate: As in ``ZeROStrategy``.
        units: As in ``ZeROStrategy``.
        prefetch: As in ``ZeROStrategy``.
        reshard_after_forward: As in ``ZeROStrategy``.
        reduce_dtype: As in ``ZeROStrategy``.
        rank: The rank that is asked about; they differ by what is padding.
        device: Where the model will run: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: An argument is out of range, or the model needs what a dry run lacks.
    """
    subject = Subject(
        model_or_numel, precision=precision, optimizer=optimizer, batch=batch, step=step,
        checkpointing=activation_checkpointing, units=units, device=torch.device(device),
    )  # fmt: skip
    return estimate_of(
        subject, stage, world_size, rank=rank, num_microbatches=accumulate_grad_batches,
        prefetch=prefetch, accumulate=accumulate, reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
    )  # fmt: skip


def estimate_of(subject: Subject, stage: int, world_size: int, **settings: Any) -> Estimate:
    """The estimate of a stage over a number of ranks; ``settings`` as in ``Subject.moments``."""
    return Estimate(
        stage,
        world_size,
        subject.precision,
        subject.num_parameters,
        has_units=subject.module is not None,
        has_activations=subject.has_activations,
        moments=tuple(subject.moments(stage, world_size, **settings)),
    )


def compare(
    subject: Subject, stages: Iterable[int], world_sizes: Iterable[int], **settings: Any
) -> list[Estimate]:
    """Every stage over every number of ranks."""
    return [
        estimate_of(subject, stage, world_size, **settings)
        for world_size in world_sizes
        for stage in stages
    ]
