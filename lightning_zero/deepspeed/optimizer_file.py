"""The content of a rank's optimizer file of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_zero.deepspeed.placeholder import Placeholder, read_with_placeholders


@dataclass(frozen=True)
class OptimizerFile:
    """An optimizer file, and all that it holds."""

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, *, trust: bool) -> OptimizerFile:
        """Read a file."""
        found = read_with_placeholders(path, trust=trust)
        content = found.get("optimizer_state_dict") if isinstance(found, dict) else None
        if not isinstance(content, dict):
            raise ValueError(f"{str(path)!r} is no optimizer file of ZeRO.")
        return cls(path, content)

    def entry(self, key: str) -> Any:
        """Return one of the things it holds."""
        if key not in self.content:
            raise ValueError(
                f"{str(self.path)!r} has no {key!r}: it is damaged, or of a version of DeepSpeed"
                " whose files cannot be read."
            )
        return self.content[key]

    @property
    def stage(self) -> int:
        """DeepSpeed's stage."""
        if "zero_stage" not in self.content and "single_partition_of_fp32_groups" in self.content:
            return 1  # its BF16OptimizerFile, which does not say
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
        return [part.detach().reshape(-1) for part in found]

    @property
    def base(self) -> Mapping[str, Any]:
        """The state dict of the optimizer that steps the flat masters."""
        found = self.entry("optimizer_state_dict" if self.stage == 3 else "base_optimizer_state")
        if not isinstance(found, dict) or not isinstance(found.get("param_groups"), list):
            raise NotImplementedError(
                f"{str(self.path)!r} is an 'elastic' checkpoint, which lacks the optimizer's"
                " hyperparameters. The weights can be converted alone, with --weights-only."
            )
        return found

    def states(self) -> list[Mapping[str, Any]]:
        """Return the optimizer's states of each flat vector."""
        ids = [number for group in self.base["param_groups"] for number in group["params"]]
        return [self.base["state"].get(number, {}) for number in ids]
