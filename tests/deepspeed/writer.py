"""Writes checkpoints as DeepSpeed's ZeRO lays them out, from a whole module and optimizer.

Compared by hand, key by key and value by value, with folders that DeepSpeed 0.19.8 itself wrote
under Lightning's DeepSpeedStrategy at stages 1 to 3. Padding, whose values mean nothing, is NaN
here.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class ZeroStageEnum(int, enum.Enum):
    """DeepSpeed's class of the same name, under which files hold the stage."""

    optimizer_states = 1
    gradients = 2
    weights = 3


class DynamicLossScaler:
    """DeepSpeed's scaler of the loss, an object that files hold."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


@dataclass
class fragment_address:
    """The place of a parameter in a rank's part of a flat vector."""

    numel: int
    start: int


_HOMES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@contextlib.contextmanager
def _deepspeed() -> Iterator[None]:
    """A DeepSpeed to pickle by, and none any more afterwards."""
    names = {
        ".".join(home.split(".")[: i + 1]) for home in _HOMES for i in range(home.count(".") + 1)
    }
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    for home, cls in _HOMES.items():
        cls.__module__ = home
        setattr(sys.modules[home], cls.__name__, cls)
    try:
        yield
    finally:
        for cls in _HOMES.values():
            cls.__module__ = __name__
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@dataclass
class Writer:
    """A way to write a folder.

    Attributes:
        stage: DeepSpeed's stage.
        world_size: How many ranks' files.
        client: What the program stores, a Trainer its loops.
        dtype: What the module's weights are cast to; the masters stay fp32.
        round_robin: Whether parameters are dealt to the ranks in turn, at stages 1 and 2.
        alignment: At stages 1 and 2, to how many elements each parameter's beginning is aligned.
        sub_group: At stage 3, after how many parameters a flat vector is closed.
        scaler: What the loss scaler holds.
        config: What the files tell of DeepSpeed's configuration; None is what was used.
    """

    stage: int
    world_size: int
    client: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    round_robin: bool = False
    alignment: int = 1
    sub_group: int = 10**9
    scaler: dict[str, Any] = field(default_factory=lambda: {"cur_scale": 1.0, "dynamic": False})
    config: Any = None

    def write(self, path: Path, module: nn.Module, optimizer: Optimizer) -> Path:
        """Write the folder; returns that of the tag."""
        tag = path / "checkpoint"
        tag.mkdir(parents=True)
        (path / "latest").write_text("checkpoint")
        prefix = "bf16_" if self.dtype is torch.bfloat16 else ""
        with _deepspeed():
            for rank in range(self.world_size):
                name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
                torch.save(self.optimizer_file(rank, module, optimizer), tag / name)
            for rank in range(self.world_size if self.stage == 3 else 1):
                name = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
                content = self.model_file(rank, module, optimizer)
                torch.save(content, tag / f"{name}mp_rank_00_model_states.pt")
        return tag

    # -- the model file ----------------------------------------------------------------------------

    def model_file(self, rank: int, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """A rank's model file."""
        frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        stored = frozen if self.stage > 1 else None
        buffers = [n for n in module.state_dict() if n in dict(module.named_buffers())]
        names = {id(p): n for n, p in module.named_parameters()}
        every = module.named_parameters(remove_duplicate=False)
        return {
            "module": self._module(module, buffers),
            "buffer_names": buffers,
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, p.shape) for name, p in flat)
                for flat in self._flats(module, optimizer)
            ],
            "frozen_param_shapes": stored and OrderedDict((n, p.shape) for n, p in stored.items()),
            "shared_params": {n: names[id(p)] for n, p in every if names[id(p)] != n and rank == 0},
            "frozen_param_fragments": stored
            and OrderedDict((n, self._fragment(p, rank)) for n, p in stored.items()),
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": 3,
            "global_samples": 12,
            "dp_world_size": self.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": self._config,
            "ds_version": "0.19.8",
            **self.client,
        }

    def _module(self, module: nn.Module, buffers: list[str]) -> OrderedDict[str, Any]:
        known: dict[int, Tensor] = {}
        state: OrderedDict[str, Any] = OrderedDict()
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor) or name in buffers:
                state[name] = value
            elif self.stage == 3:
                state[name] = torch.empty(0, dtype=self.dtype)
            else:
                state[name] = known.setdefault(id(value), value.detach().to(self.dtype))
        return state

    def _fragment(self, parameter: Tensor, rank: int) -> Tensor:
        value = parameter.detach().to(self.dtype)
        return value if self.stage < 3 else _cut(value, self.world_size)[rank]

    @property
    def _config(self) -> Any:
        zero = {"stage": self.stage, "round_robin_gradients": self.round_robin}
        return {"zero_optimization": zero} if self.config is None else self.config

    # -- the optimizer files -----------------------------------------------------------------------

    def _groups(
        self, module: nn.Module, optimizer: Optimizer
    ) -> list[list[list[tuple[str, nn.Parameter]]]]:
        """The trainable parameters, by param group and by flat vector."""
        names = {id(p): n for n, p in module.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            named = [(names[id(p)], p) for p in group["params"] if p.requires_grad]
            if self.stage == 3:
                size = self.sub_group
                groups.append([named[i : i + size] for i in range(0, len(named), size)])
            else:
                deal = self.world_size if self.round_robin else 1
                groups.append([[item for rank in range(deal) for item in named[rank::deal]]])
        return groups

    def _flats(self, module: nn.Module, optimizer: Optimizer) -> list[list[tuple[str, Any]]]:
        return [flat for flats in self._groups(module, optimizer) for flat in flats]

    def _parts(self, values: list[Tensor]) -> tuple[list[Tensor], list[int]]:
        """The ranks' parts of a flat vector with padding, and how much of each is padding."""
        world = self.world_size
        if self.stage == 3:
            cut = [_cut(value, world) for value in values]
            return [torch.cat([parts[rank] for parts in cut]) for rank in range(world)], [0] * world
        gaps = self._gaps([value.numel() for value in values])
        spaced = [
            torch.cat([value.reshape(-1), value.new_full((gap,), torch.nan)])
            for value, gap in zip(values, gaps, strict=True)
        ]
        flat = torch.cat(spaced)
        numel = len(flat)
        flat = _padded(flat, 2 * world)
        size = len(flat) // world
        paddings = [min(max((rank + 1) * size - numel, 0), size) for rank in range(world)]
        return list(flat.split(size)), paddings

    def _gaps(self, sizes: list[int]) -> list[int]:
        """Padding behind each parameter of a flat vector of stages 1 and 2, but the last."""
        gaps: list[int] = []
        for number in range(len(sizes)):
            stop = sum(sizes[: number + 1]) + sum(gaps)
            gaps.append(-stop % self.alignment if number < len(sizes) - 1 else 0)
        return gaps

    def optimizer_file(self, rank: int, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """A rank's optimizer file."""
        masters, paddings, states, groups = [], [], {}, []
        for group, flats in zip(
            optimizer.param_groups, self._groups(module, optimizer), strict=True
        ):
            ids = []
            for flat in flats:
                ids.append(len(masters))
                parts, padding = self._parts([p.detach().float() for _, p in flat])
                paddings.append(padding[rank])
                masters.append(parts[rank][: len(parts[rank]) - padding[rank]])
                if flat[0][1] in optimizer.state:
                    states[ids[-1]] = self._states(rank, flat, optimizer)
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": ids})
        common = {
            "loss_scaler": DynamicLossScaler(**self.scaler),
            "dynamic_loss_scale": self.scaler["dynamic"],
            "overflow": False,
            "zero_stage": ZeroStageEnum(self.stage),
        }
        base = {"state": states, "param_groups": groups}
        if self.stage == 3:
            content = {
                **common,
                "partition_count": self.world_size,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        else:
            content = {
                **common,
                "clip_grad": 0.0,
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": masters,
                "group_paddings": paddings,
                "param_alignment_paddings": [
                    self._gaps([p.numel() for _, p in flat])
                    for flat in self._flats(module, optimizer)
                ],
                "partition_count": [self.world_size] * len(masters),
                "ds_version": "0.19.8",
                "param_slice_mappings": [OrderedDict(x=fragment_address(1, 0)) for _ in masters],
            }
        return {
            "optimizer_state_dict": content,
            "ds_config": self._config,
            "ds_version": "0.19.8",
        }

    def _states(
        self, rank: int, flat: list[tuple[str, Any]], optimizer: Optimizer
    ) -> dict[str, Any]:
        first = optimizer.state[flat[0][1]]
        states = {}
        for key, value in first.items():
            if isinstance(value, Tensor) and key not in ("step", "mu_product"):
                states[key] = self._parts([optimizer.state[p][key] for _, p in flat])[0][rank]
            else:
                states[key] = value
        return states


def _cut(value: Tensor, world_size: int) -> list[Tensor]:
    """Equal parts, as stage 3 cuts every parameter."""
    flat = _padded(value.reshape(-1), world_size)
    size = len(flat) // world_size
    return [flat[rank * size : (rank + 1) * size].clone() for rank in range(world_size)]


def _padded(flat: Tensor, multiple: int) -> Tensor:
    return torch.cat([flat, flat.new_full((-len(flat) % multiple,), torch.nan)])
