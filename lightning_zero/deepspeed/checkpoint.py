"""DeepSpeed's ZeRO checkpoints, read as the checkpoint that DDP would have written.

Such a checkpoint is a folder that contains another, the **tag**, with the files of all ranks::

    x.ckpt/latest                                               the tag's name
    x.ckpt/checkpoint/mp_rank_00_model_states.pt                stages 1 and 2: the *model file*
    x.ckpt/checkpoint/zero_pp_rank_R_mp_rank_00_model_states.pt stage 3: the same, by rank
    x.ckpt/checkpoint/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt        the *optimizer files*

The model file has names and shapes, buffers, and what the program stored beside them, such as a
Trainer's loops. The optimizer files hold the masters and the optimizer's states as flat vectors
(:mod:`~lightning_zero.deepspeed.flat_vectors`).

(Format facts: DeepSpeed 0.19, ``runtime/engine.py``, ``runtime/zero``, ``utils/zero_to_fp32.py``.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_zero.checkpoint import LazyTensor
from lightning_zero.deepspeed.files import (
    MODEL,
    OPTIMIZER,
    CannotConvert,
    OptimizerFile,
    check_ranks,
    files_by_rank,
    one_dimensional,
    read_model,
    tag_of,
)
from lightning_zero.deepspeed.flat_vectors import (
    EachCut,
    EndToEnd,
    Flat,
    Shapes,
    counter,
    part_numel,
)
from lightning_zero.deepspeed.placeholder import Placeholder, placeholders

_OF_DEEPSPEED = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "csr_tensor_module_names", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts"),
}
"""DeepSpeed's own keys in a model file; all others are the program's."""

_OLD_PREFIX = "_forward_module."
"""The prefix of every name in files by Lightning before 2.1."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _understanding(method: _Method) -> _Method:
    """Wrap a method to raise a ``ValueError`` that names the folder when its content is wrong."""

    @functools.wraps(method)
    def understanding(self: DeepSpeedFolder, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"{str(self.path)!r} is damaged, or was written by an unsupported version of"
                f" DeepSpeed: {type(error).__name__}: {error}"
            ) from error

    return cast(_Method, understanding)


class DeepSpeedFolder:
    """A checkpoint by DeepSpeed's ZeRO, stages 1 to 3, whose tensors stay in memory-mapped files.

    Args:
        path: The folder with the file ``latest``, or the tag's folder in it.
        trust: Whether to make objects of any class that the files name. Otherwise placeholders
            stand in for them, and :meth:`checkpoint` refuses to return any.

    Raises:
        FileNotFoundError: A rank's file is missing.
        CannotConvert: The model is also parallelized in other ways.
        ValueError: A file is damaged, or the files do not belong together.
    """

    @_understanding
    def __init__(self, path: Path, *, trust: bool = False) -> None:
        self.path = path
        tag = tag_of(path)
        model_files, optimizer_files = files_by_rank(tag, MODEL), files_by_rank(tag, OPTIMIZER)
        if not optimizer_files:
            raise FileNotFoundError(
                f"{str(tag)!r} has no *_optim_states.pt files, which hold ZeRO's fp32 weights: they"
                " were not copied, or it was written at stage 0."
            )
        some = OptimizerFile.read(next(iter(optimizer_files.values())), trust=trust)
        self.stage, self.world_size = some.stage, some.world_size
        check_ranks(optimizer_files, self.world_size)
        check_ranks(model_files, self.world_size if self.stage == 3 else 1)
        self._optimizers = [
            OptimizerFile.read(optimizer_files[rank], trust=trust)
            for rank in range(self.world_size)
        ]
        self._models = [
            read_model(model_files[rank], trust=trust) for rank in range(len(model_files))
        ]
        self._model = self._models[0]
        self.version = str(self._model.get("ds_version"))
        self._flats = self._build_flats()

    def checkpoint(
        self, *, weights_only: bool = False, frozen_in_optimizer: bool = False
    ) -> dict[str, Any]:
        """Return the checkpoint that DDP would have written, without reading its tensors.

        Set ``frozen_in_optimizer`` if the optimizer was given the frozen parameters too.
        """
        found: dict[str, Any] = {"state_dict": self.weights()}
        if not weights_only:
            optimizer = self.optimizer_state(frozen_in_optimizer=frozen_in_optimizer)
            found = {**self.own_state(), "optimizer_states": [optimizer], **found}
        for name, origin in placeholders(found):
            raise ValueError(
                f"{str(self.path)!r} holds more than tensors and plain values: {name!r} is an"
                f" object of {origin}. Skip it with --weights-only, or load it with --trust if you"
                " trust whoever wrote the checkpoint."
            )
        return found

    @_understanding
    def own_state(self) -> dict[str, Any]:
        """Return what else the program stored, such as a Trainer's loops and callbacks."""
        own = {key: value for key, value in self._model.items() if key not in _OF_DEEPSPEED}
        scheduler = self._model.get("lr_scheduler")
        own.setdefault("lr_schedulers", [] if scheduler is None else [scheduler])
        scaler = _loss_scaler(self._optimizers[0].content.get("loss_scaler"))
        return own if scaler is None else {**own, "MixedPrecision": scaler}

    def _build_flats(self) -> list[Flat]:
        """Return the flat vectors, with their sizes checked."""
        of_ranks = [optimizer.masters for optimizer in self._optimizers]
        if len({len(masters) for masters in of_ranks}) != 1:
            raise ValueError(
                f"The optimizer files in {str(self.path)!r} have different numbers of flat vectors,"
                f" {sorted({len(masters) for masters in of_ranks})}: they do not belong together."
            )
        tables = self._shapes([part.numel() for part in of_ranks[0]])
        paddings = self._optimizers[0].content.get("param_alignment_paddings")
        flats: list[Flat] = []
        for number, (shapes, *masters) in enumerate(zip(tables, *of_ranks, strict=True)):
            kind = EachCut if self.stage == 3 else EndToEnd
            between = paddings[number] if paddings and self.stage < 3 else [0] * len(shapes)
            label = f"{str(self.path)!r}, flat vector {number}"
            flats.append(kind(label, shapes, between, masters))
            flats[-1].check(masters, "masters")
        return flats

    def _shapes(self, sizes: Sequence[int]) -> list[Shapes]:
        """Return the parameters of each flat vector, given the vectors' ``sizes`` on rank 0."""
        found = self._model["param_shapes"]
        tables = [found] if isinstance(found, dict) else list(found)
        shapes = [{name: tuple(shape) for name, shape in table.items()} for table in tables]
        if len(shapes) != len(sizes) and self.stage == 3:
            # Older versions have one table for all vectors; no parameter spans two of them.
            shapes = self._dealt({n: s for table in shapes for n, s in table.items()}, sizes)
        if len(shapes) != len(sizes):
            raise ValueError(
                f"{str(self.path)!r} names the parameters of {len(shapes)} param groups, but has"
                f" flat vectors for {len(sizes)}: the files do not belong together."
            )
        return shapes

    def _dealt(self, shapes: Shapes, sizes: Sequence[int]) -> list[Shapes]:
        """Assign parameters to flat vectors of stage 3 in order, until each is full."""
        rest = list(shapes.items())
        tables = []
        for size in sizes:
            table: Shapes = {}
            while rest and sum(part_numel(s, self.world_size) for s in table.values()) < size:
                name, shape = rest.pop(0)
                table[name] = shape
            tables.append(table)
        return tables if not rest else [*tables, dict(rest)]

    # -- weights -----------------------------------------------------------------------------------

    @_understanding
    def weights(self) -> dict[str, Any]:
        """Return masters, frozen parameters and buffers by name, 16-bit ones in fp32."""
        known = {name: flat.master(name) for flat in self._flats for name in flat.shapes}
        known |= self._frozen()
        shared = self._model.get("shared_params") or {}
        found: dict[str, Any] = {}
        for name, value in self._model["module"].items():
            if name in known:
                found[name] = known[name]
            elif name not in shared:
                found[name] = self._other(name, value)
        found |= {name: value for name, value in known.items() if name not in found}
        found |= {name: found[held] for name, held in shared.items() if held in found}
        return {name.removeprefix(_OLD_PREFIX): value for name, value in found.items()}

    def _frozen(self) -> dict[str, LazyTensor]:
        """Return the frozen parameters that are stored apart, as at stages 2 and 3."""
        fragments = [model.get("frozen_param_fragments") or {} for model in self._models]
        frozen = {}
        for name, shape in (self._model.get("frozen_param_shapes") or {}).items():
            parts = [one_dimensional(found[name]) for found in fragments if name in found]
            label = f"{str(self.path)!r}, frozen {name!r}"
            kind = EachCut if self.stage == 3 else EndToEnd
            flat = kind(label, {name: tuple(shape)}, [0], parts)
            flat.check(parts, "fragments")
            frozen[name] = flat.master(name)
        return frozen

    def _other(self, name: str, value: Any) -> Any:
        """Return a value of the model file as it was in the module."""
        if not isinstance(value, Tensor):
            return value
        if self.stage == 3 and name not in self._model["buffer_names"]:
            raise ValueError(
                f"{str(self.path)!r} has no values for {name!r}, which is neither a buffer nor a"
                " parameter of known shape."
            )
        if value.dtype in (torch.bfloat16, torch.float16):
            ranges = [(one_dimensional(value), 0, value.numel())]
            return LazyTensor.joined(lambda: ranges, value.shape, torch.float32)
        return value

    # -- optimizer ---------------------------------------------------------------------------------

    @_understanding
    def optimizer_state(self, *, frozen_in_optimizer: bool = False) -> dict[str, Any]:
        """Return the ``state_dict()`` of the same optimizer over whole parameters."""
        groups = self._optimizers[0].base["param_groups"]
        owners = [index for index, group in enumerate(groups) for _ in group["params"]]
        if len(owners) != len(self._flats):
            raise ValueError(
                f"The optimizer in {str(self.path)!r} has {len(owners)} flat parameters, but there"
                f" are {len(self._flats)} flat vectors: the files do not belong together."
            )
        by_group: list[dict[str, dict[str, Any]]] = [{} for _ in groups]
        of_ranks = [optimizer.states() for optimizer in self._optimizers]
        for owner, flat, *states in zip(owners, self._flats, *of_ranks, strict=True):
            by_group[owner] |= flat.states(states)
        if frozen_in_optimizer and len(groups) != 1:
            raise CannotConvert(
                f"The optimizer in {str(self.path)!r} has {len(groups)} param groups; frozen"
                " parameters can only be assigned to a group if there is one. Remove"
                " --frozen-in-optimizer (`frozen_in_optimizer`), or convert only the weights with"
                " --weights-only."
            )
        found: dict[int, dict[str, Any]] = {}
        written: list[dict[str, Any]] = []
        first = 0
        for index, (group, states_of) in enumerate(zip(groups, by_group, strict=True)):
            names = self._user_order(index, list(states_of), group)
            if frozen_in_optimizer:
                names = self._with_frozen(names)
            for number, name in enumerate(names, first):
                if entries := states_of.get(name):
                    found[number] = _with_step(entries, group)
            options = {key: value for key, value in group.items() if key != "step"}
            written.append({**options, "params": list(range(first, first + len(names)))})
            first += len(names)
        return {"state": found, "param_groups": written}

    def _user_order(self, index: int, names: list[str], group: Mapping[str, Any]) -> list[str]:
        """Return the parameters of a group in the order in which the user passed them."""
        named = group.get("param_names")
        if isinstance(named, list) and set(names) <= set(named):
            return named
        if self.stage == 3:
            return names
        counts = self._optimizers[0].entry("partition_count")
        world_size = counts[index] if isinstance(counts, list) else counts
        dealt = _undealt(names, world_size)
        config = self._model.get("ds_config")
        if isinstance(config, dict):
            zero = config.get("zero_optimization")
            return dealt if isinstance(zero, dict) and zero.get("round_robin_gradients") else names
        # The configuration was a file, so only the module's order can tell.
        for order in (names, dealt):
            if order == self._in_module_order(order):
                return order
        raise CannotConvert(
            f"{str(self.path)!r} does not record whether DeepSpeed ran with"
            " 'round_robin_gradients', so optimizer states cannot be matched to parameters. Convert"
            " only the weights with --weights-only."
        )

    def _in_module_order(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        return [name for name in self._model["module"] if name in wanted]

    def _with_frozen(self, names: list[str]) -> list[str]:
        """Return ``names`` and those of the frozen parameters, in the module's order."""
        other = {*self._model["buffer_names"], *(self._model.get("shared_params") or {})}
        every = [
            name
            for name, value in self._model["module"].items()
            if isinstance(value, Tensor) and name not in other
        ]
        if self._in_module_order(names) != names:
            raise ValueError(
                f"The optimizer in {str(self.path)!r} has its parameters in a different order than"
                " the module, so the places of the frozen ones among them are unknown. Convert only"
                " the weights with --weights-only."
            )
        return every


def _with_step(entries: dict[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with its ``step``, which fused optimizers count by group."""
    if "step" in entries or group.get("step") is None:
        return entries
    return {"step": counter(group["step"]), **entries}


def _undealt(names: list[str], world_size: int) -> list[str]:
    """Return ``names`` in the order that they had before they were dealt to the ranks in turn."""
    places = [place for rank in range(world_size) for place in range(rank, len(names), world_size)]
    original = dict(zip(places, names, strict=True))
    return [original[place] for place in range(len(names))]


def _loss_scaler(scaler: Any) -> dict[str, Any] | None:
    """Return the state of a dynamic loss scaler, named as ``torch.amp.GradScaler`` names it."""
    held = scaler.state if isinstance(scaler, Placeholder) else None
    if not isinstance(held, dict) or not held.get("dynamic"):
        return None
    window = int(held["scale_window"])
    return {
        "scale": float(held["cur_scale"]),
        "growth_factor": float(held["scale_factor"]),
        "backoff_factor": 1 / float(held["scale_factor"]),
        "growth_interval": window,
        "_growth_tracker": (held["cur_iter"] - held["last_overflow_iter"] - 1) % window,
    }
