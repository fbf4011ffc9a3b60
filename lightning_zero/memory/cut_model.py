"""A model that is cut over tensor-parallel ranks that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_zero.comm import pretended_mesh
from lightning_zero.parameters import make_local


@contextmanager
def one_rank_of(
    model: nn.Module | Callable[[Any], nn.Module] | int, rank: int, world_size: int, size: int
) -> Iterator[nn.Module]:
    """Enter a context with this rank's part of a model that tensor parallelism cuts.

    Args:
        model: Builds the model from a device mesh; or a module whose ``configure_model`` does.
        rank: The rank.
        world_size: Number of ranks.
        size: Number of ranks of a tensor-parallel group.

    Raises:
        ValueError: The model is not cut, or this process belongs to a process group.
    """
    if isinstance(model, int):
        raise ValueError(
            f"tensor_parallel_size={size} cuts a model that is known. Pass the model instead of a"
            " number of parameters."
        )
    with pretended_mesh(rank, world_size, size) as mesh:
        with torch.device("meta"):
            built = model if isinstance(model, nn.Module) else model(mesh)
            if (configure := getattr(built, "configure_model", None)) is not None:
                # What Lightning's modules return as `device_mesh`; nothing public sets it.
                vars(built)["_device_mesh"] = mesh
                configure()
        make_local(built, mesh, on_meta=True)
        yield built
