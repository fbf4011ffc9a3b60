"""The files of a DeepSpeed checkpoint: finding one of each rank, and reading them.

:mod:`~lightning_zero.deepspeed.checkpoint` shows their names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint import LazyTensor
from lightning_zero.deepspeed.placeholder import Placeholder, read_with_placeholders

MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
OPTIMIZER = re.compile(
    r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_CUT_OTHERWISE = re.compile(r"(layer_\d+.*|expp_rank_.*|expert_.*)_states\.pt")


class CannotConvert(ValueError):
    """Raised for a DeepSpeed checkpoint, or part of one, without a plain form; says what to do."""


def is_deepspeed_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder that DeepSpeed wrote, or the tag's folder in one."""
    return path.is_dir() and (_is_tag(path) or _tag_inside(path) is not None)


def _is_tag(folder: Path) -> bool:
    return any(MODEL.fullmatch(file.name) for file in folder.glob("*_model_states.pt"))


def _tag_inside(folder: Path) -> Path | None:
    """Return the tag that the file ``latest`` names, else the only one, if any."""
    latest = folder / "latest"
    if latest.is_file() and latest.stat().st_size < 1000:
        return folder / latest.read_text(errors="replace").strip()
    tags = [child for child in folder.iterdir() if child.is_dir() and _is_tag(child)]
    return tags[0] if len(tags) == 1 else None


def tag_of(path: Path) -> Path:
    """Return the folder with the files: ``path`` or a folder in it."""
    tag = path if _is_tag(path) else _tag_inside(path)
    if tag is None or not tag.is_dir() or (tag != path and tag.parent != path):
        named = f"; its file 'latest' names {str(tag)!r}" if tag is not None else ""
        raise FileNotFoundError(
            f"{str(path)!r} is not a DeepSpeed checkpoint: it has no folder with *_model_states.pt"
            f" files{named}"
        )
    return tag


def files_by_rank(tag: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the files that match ``pattern``, ``MODEL`` or ``OPTIMIZER``, by rank."""
    found: dict[int, Path] = {}
    for file in sorted(tag.iterdir()):
        if _CUT_OTHERWISE.fullmatch(file.name):
            raise CannotConvert(
                f"{str(file)!r} belongs to a model with pipeline stages or experts, which cannot"
                " be converted. Merge them with DeepSpeed's own tools first."
            )
        match = pattern.fullmatch(file.name)
        if match is None:
            continue
        if int(match["mp"]):
            raise CannotConvert(
                f"{str(file)!r} belongs to a tensor-parallel model, which cannot be converted."
                " Merge its parts with DeepSpeed's own tools first."
            )
        rank = int(match["rank"] or 0)
        if rank in found:
            raise ValueError(
                f"{str(tag)!r} has two files of rank {rank}, {found[rank].name!r} and"
                f" {file.name!r}: one is left over from an earlier save. Remove it."
            )
        found[rank] = file
    return found


def files_of(path: Path) -> list[Path]:
    """Return all files of a checkpoint that DeepSpeed wrote."""
    tag = tag_of(path)
    return [*files_by_rank(tag, MODEL).values(), *files_by_rank(tag, OPTIMIZER).values()]


def check_ranks(files: Mapping[int, Path], world_size: int) -> None:
    """Raise unless there is exactly one file of every rank."""
    example = next(iter(files.values()))
    # A damaged file may claim any world size, so list only the first missing ranks.
    missing = list(itertools.islice((n for n in range(world_size) if n not in files), 9))
    if missing:
        names = [
            repr(re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", example.name))
            for rank in missing[:8]
        ]
        more = " and more" if len(missing) > len(names) else ""
        raise FileNotFoundError(
            f"{str(example.parent)!r} is incomplete: {world_size} ranks wrote it, but it lacks"
            f" {', '.join(names)}{more}. Each node writes the files of its own ranks; copy all of"
            " them into one folder."
        )
    if len(files) > world_size:
        raise ValueError(
            f"{str(example.parent)!r} has files of {len(files)} ranks, but {world_size} ranks wrote"
            f" {example.name!r}: the others are left over from an earlier save. Remove them."
        )


def one_dimensional(value: Tensor) -> Tensor:
    """Return the same elements in one dimension; a lazy tensor as it is, which stays unread."""
    return value if isinstance(value, LazyTensor) else value.detach().reshape(-1)


def read_model(path: Path, *, trust: bool) -> Mapping[str, Any]:
    """Return the content of a model file."""
    found = read_with_placeholders(path, trust=trust)
    keys = ("module", "buffer_names", "param_shapes")
    if not isinstance(found, dict) or any(found.get(key) is None for key in keys):
        raise ValueError(f"{str(path)!r} is not a ZeRO model file: it lacks one of {keys}.")
    return found


@dataclass(frozen=True)
class OptimizerFile:
    """An optimizer file and its content."""

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, *, trust: bool) -> OptimizerFile:
        """Read an optimizer file."""
        found = read_with_placeholders(path, trust=trust)
        content = found.get("optimizer_state_dict") if isinstance(found, dict) else None
        if not isinstance(content, dict):
            raise ValueError(f"{str(path)!r} is not a ZeRO optimizer file.")
        return cls(path, content)

    def entry(self, key: str) -> Any:
        """Return an entry of the content, or raise a ``ValueError``."""
        if key not in self.content:
            raise ValueError(
                f"{str(self.path)!r} has no {key!r}: it is damaged, or was written by an"
                " unsupported version of DeepSpeed."
            )
        return self.content[key]

    @property
    def stage(self) -> int:
        """DeepSpeed's stage."""
        if "zero_stage" not in self.content and "single_partition_of_fp32_groups" in self.content:
            return 1  # by DeepSpeed's BF16_Optimizer, which does not store the stage
        stage = self.entry("zero_stage")
        return int(stage.arguments[0]) if isinstance(stage, Placeholder) else int(stage)

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the checkpoint."""
        count = self.entry("partition_count")
        return max(count) if isinstance(count, list) else int(count)

    @property
    def masters(self) -> list[Tensor]:
        """This rank's parts of the flat masters."""
        stage3 = self.stage == 3
        found = self.entry("fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups")
        if not all(isinstance(part, Tensor) for part in found):
            raise ValueError(f"{str(self.path)!r} does not hold the masters of all parameters.")
        return [one_dimensional(part) for part in found]

    @property
    def base(self) -> Mapping[str, Any]:
        """The state dict of the optimizer that steps the flat masters."""
        found = self.entry("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if not isinstance(found, dict) or not isinstance(found.get("param_groups"), list):
            raise CannotConvert(
                f"{str(self.path)!r} is an 'elastic' checkpoint, which lacks the optimizer's"
                " hyperparameters. Convert only the weights with --weights-only."
            )
        return found

    def states(self) -> list[Mapping[str, Any]]:
        """Return the optimizer's state of each flat vector."""
        ids = [number for group in self.base["param_groups"] for number in group["params"]]
        return [self.base["state"].get(number, {}) for number in ids]
