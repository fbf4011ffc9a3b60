"""The comparison of what must be equal on all ranks.

Each rank describes its model, settings and optimizers by lines of text. One sync point compares
digests of the lines. Only if these differ do the ranks exchange the lines, and all raise the same
error, which shows the lines that not all ranks have.

What may change on one rank only, such as which parameters are trained (a callback may freeze
layers) and hyperparameters (a scheduler may follow a metric that is not synced), is compared again
by a few flags that ranks exchange when a backward pass begins.

Within a tensor-parallel group the gradients of parameters that are not cut must be equal as well.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_zero.comm import Control, SyncPoint, listed, with_complements
from lightning_zero.engine.sharded_model import ShardedModel
from lightning_zero.optimizer import bare, parameter_of
from lightning_zero.plan import Settings, cut_of, find_units, whole_shape

Facts = Mapping[str, Mapping[str, Any]]
"""Named things with their attributes: ``{"The strategy": {"stage": 3}}``."""

_MOST_SHOWN = 16
_DIGEST_BYTES = 16
_CHOICES_OF_ONE_RANK = ("params", "foreach", "fused")
"""Entries of a param group that may differ: its members, and choices among equal kernels."""


def require_equal(control: Control, make_lines: Callable[[], list[str]]) -> None:
    """Compare lines of all ranks, in order; a collective, with one small message if they agree.

    Raises:
        RuntimeError: The lines differ. All ranks raise the same text.
    """
    if control.world_size > 1:
        lines = make_lines()
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).digest()
        if not control.all_equal(SyncPoint.COMPARE, digest):
            refuse(control.gather_objects(lines))


def refuse(of_ranks: Sequence[Sequence[str]]) -> None:
    """Raise a ``RuntimeError`` that says how the ranks' lines differ, if they do."""
    found = differences(of_ranks)
    if not found:
        return
    shown = [f"\n- {difference}" for difference in found[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        shown.append(f"\n- {len(found) - _MOST_SHOWN} more differences")
    raise RuntimeError(
        "The ranks differ, so they cannot train one model together:"
        + "".join(shown)
        + "\nBuild the same model with the same settings and optimizers on every rank. Only the"
        " data may depend on the rank, on unseeded random numbers, or on one host's files and"
        " environment variables."
    )


def differences(of_ranks: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines that not all ranks have, or the first in another order, with their ranks."""
    sets = [set(lines) for lines in of_ranks]
    found = []
    for line in dict.fromkeys(chain.from_iterable(zip_longest(*of_ranks))):
        ranks = [rank for rank, lines in enumerate(sets) if line in lines]
        if line is not None and len(ranks) < len(sets):
            found.append(f"{listed(ranks)}: {line}")
    if not found:
        first = next((row for row in zip_longest(*of_ranks) if len(set(row)) > 1), ())
        found = [f"{listed([rank])}, in another order: {line}" for rank, line in enumerate(first)]
    return found


# -- lines -----------------------------------------------------------------------------------------


def lines_of(facts: Facts) -> Iterator[str]:
    """Yield a line for each attribute that can be compared."""
    for thing, attributes in facts.items():
        for name, value in attributes.items():
            if (text := _text(value)) is not None:
                yield f"{thing}: {name} {text}"


def model_lines(module: nn.Module, settings: Settings, facts: Facts) -> list[str]:
    """Return the lines of a model that is not sharded yet, of its settings, and of other facts."""
    own = {field.name: getattr(settings, field.name) for field in fields(settings)}
    lines = list(lines_of({**facts, "The strategy": {**facts.get("The strategy", {}), **own}}))
    first_names: dict[int, str] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        tied_to = first_names.setdefault(id(p), name)
        tie = "" if tied_to == name else f", tied to {tied_to!r}"
        kind = "trained" if p.requires_grad else "frozen"
        lines.append(f"Parameter {name!r}: {_form(p)}, {kind}{tie}")
    buffers = module.named_buffers(remove_duplicate=False)
    lines += [f"Buffer {name!r}: {_form(buffer)}" for name, buffer in buffers]
    return lines + [f"Unit {name!r}" for name in _unit_names(module, settings)]


def optimizer_lines(optimizers: Sequence[Optimizer], module: nn.Module) -> list[str]:
    """Return the lines of optimizers, including the members of groups."""
    names = {id(p): f"Parameter {name!r}" for name, p in module.named_parameters()}
    lines = []
    for number, optimizer in enumerate(optimizers):
        lines += group_lines(optimizer, label := f"optimizer {number}")
        for index, group in enumerate(optimizer.param_groups):
            for place, p in enumerate(map(parameter_of, group["params"])):
                other = f"Parameter {place} (shape {tuple(p.shape)}, not in the model)"
                kind = "trained" if p.requires_grad else "frozen"
                lines.append(f"{names.get(id(p), other)} of {label}: in group {index}, {kind}")
    return lines


def group_lines(optimizer: Optimizer, label: str, *, with_sizes: bool = False) -> list[str]:
    """Return the lines of an optimizer's class and groups, without their members."""
    facts: dict[str, dict[str, Any]] = {label.capitalize(): {"class": type(bare(optimizer))}}
    for index, group in enumerate(optimizer.param_groups):
        facts[f"Group {index} of {label}"] = _hyperparameters(group)
        if with_sizes:
            facts[f"Group {index} of {label}"]["parameters"] = len(group["params"])
    return list(lines_of(facts))


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _CHOICES_OF_ONE_RANK}


def _form(tensor: Tensor) -> str:
    # Tensor-parallel ranks may have parts of different sizes.
    shape = "unknown" if is_lazy(tensor) else whole_shape(tensor, tensor.shape)
    values = ", without values (meta device)" if tensor.is_meta else ""
    return f"shape {shape}, {_text(tensor.dtype)}{values}"


def _unit_names(module: nn.Module, settings: Settings) -> list[str]:
    """Return the names of the units, or the reason why there are none."""
    if not callable(settings.units) and not isinstance(settings.units, Collection):
        return []  # an iterator, which can be read only once
    try:
        return list(find_units(module, settings.units, settings.min_num_params))
    except (TypeError, ValueError) as error:
        return [str(error)]


def _text(value: Any) -> str | None:
    """Return a value as text that is equal in every process; ``None`` if it has no such text."""
    if isinstance(value, Enum):
        return _text(value.value)
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, int | float):
        # A subclass such as numpy's has another text for the same number.
        return repr(float(value) if isinstance(value, float) else int(value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return value.type  # each rank has its own index
    if isinstance(value, Tensor):
        return repr(value.item()) if not value.dim() and value.device.type == "cpu" else None
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(str(_text(item)) for item in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(str(_text(item)) for item in value))}}}"
    if is_dataclass(value) and not isinstance(value, type):
        return _text({field.name: getattr(value, field.name) for field in fields(value)})
    if not callable(value):
        return None
    named = value if hasattr(value, "__qualname__") else type(value)
    # A launcher may import the main module of some ranks under another name.
    is_main = named.__module__ in ("__main__", "__mp_main__")
    return str(named.__qualname__ if is_main else f"{named.__module__}.{named.__qualname__}")


# -- what changes ----------------------------------------------------------------------------------


class ChangeCheck:
    """A comparison of the ranks by a few extra flags at a sync point.

    Attributes:
        has_frozen: Whether this rank trains other parameters than in its previous pass.
    """

    NUM_FLAGS = 8

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        parameters = [p for unit in sharded.units for p in unit.parameters]
        self._trained = zlib.crc32(bytes(p.requires_grad for p in parameters))
        self.has_frozen = False

    def flags(self) -> bytes:
        """Return this rank's flags, to be reduced to their maxima over the ranks.

        All units must expect their gradients by now.
        """
        wants = [wants for unit in self._sharded.units for wants in unit.wants]
        checksum = zlib.crc32(bytes(wants))
        self.has_frozen, self._trained = checksum != self._trained, checksum
        for optimizer in self._sharded.optimizers:
            for group in optimizer.param_groups:
                lines = sorted(lines_of({"": _hyperparameters(group)}))
                checksum = zlib.crc32("\n".join(lines).encode(), checksum)
        return with_complements(checksum.to_bytes(self.NUM_FLAGS // 2, "big"))

    def compare(self, flags: bytes) -> None:
        """Raise the same ``RuntimeError`` on all ranks if the maxima show that they differ."""
        if flags != with_complements(flags[: len(flags) // 2]):
            lines = [
                f"Parameter {name!r}: {'trained' if p.requires_grad else 'frozen'}"
                for name, p in self._sharded.module.named_parameters()
            ]
            for number, optimizer in enumerate(self._sharded.optimizers):
                lines += group_lines(optimizer, f"optimizer {number}")
            refuse(self._sharded.comm.control.gather_objects(lines))


# -- gradients of tensor-parallel ranks ------------------------------------------------------------

_TOLERANCE = 0.02
"""Of a gradient's norm: more than rounding in half precision, less than a missing summand."""


@torch.no_grad()
def require_equal_gradients(sharded: ShardedModel) -> None:
    """Raise unless all ranks of a tensor-parallel group have the same gradients; a collective.

    Every rank updates its own copy of a parameter that is not cut. If the gradient of each is only
    its own heads' summand, or if batches or dropout differ, the copies drift apart.

    Raises:
        RuntimeError: Gradients differ; raised on all ranks.
    """
    comm, differing = sharded.comm, []
    for flat in sharded.flats:
        averaged = [
            (piece, flat.gradients.average(index))
            for index, piece in enumerate(flat.pieces)
            if cut_of(piece.parameter) is None and flat.gradients.averaged[index]
        ]
        if averaged:
            parts = [(piece.range.in_shard, grad.part) for piece, grad in averaged]
            views = flat.store.assemble(parts).views
            grads = [views[grad.place].flatten() for _, grad in averaged]
            comm.broadcast_copies(firsts := [grad.clone() for grad in grads])
            for (piece, _), own, first in zip(averaged, grads, firsts, strict=True):
                if (own - first).norm() > _TOLERANCE * first.norm():
                    differing.append(piece.range.slot.name)
    names = [*dict.fromkeys(chain(*comm.control.gather_objects(differing)))]
    if names:
        some = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        raise RuntimeError(
            f"The gradients of {len(names)} parameters differ between the ranks of a"
            f" tensor-parallel group, which hold them whole: {some}. If a module sees only this"
            " rank's heads or tokens, give it a style that sums its gradients: torch's"
            " SequenceParallel, or 'replicated_with_grad_allreduce' in a Transformers plan."
            " Otherwise make batches and random numbers equal within the group."
        )
