"""The plans by which models of Transformers say how tensor parallelism cuts them.

A model has its plan as ``model.tp_plan``: by name of a module, with ``*`` for any number, a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from lightning_zero.comm.tensor_parallel import TENSOR, is_dtensor


def _whole_columns() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": _whole_columns,
    "colwise_gather_output": _whole_columns,
    "embedding_colwise": _whole_columns,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""Torch's styles by Transformers' words."""


def cut_by_own_plan(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the models within a module that have a plan; without one, change nothing.

    Args:
        module: The module; tied parameters stay tied.
        mesh: The mesh of all ranks.

    Raises:
        ValueError: A plan has a word that torch has no style for, or cuts tied parameters in
            different ways.
    """
    for model in [*_with_plans(module)]:
        plan = {name: _style(name, word, model) for name, word in model.tp_plan.items()}
        ties: dict[int, list[tuple[nn.Module, str]]] = {}
        for child in model.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    ties.setdefault(id(parameter), []).append((child, name))
        parallelize_module(model, mesh[TENSOR], plan)
        for (first, name), *others in ties.values():
            parameter = first._parameters[name]
            for child, own in others:
                if _form(child._parameters[own]) != _form(parameter):
                    raise ValueError(
                        f"The plan of {type(model).__name__} cuts a tied parameter, {name!r} of"
                        f" {type(first).__name__} and {own!r} of {type(child).__name__}, in"
                        " different ways. Untie them, or change `tp_plan`."
                    )
                child._parameters[own] = parameter


def _with_plans(module: nn.Module) -> Iterator[Any]:
    plan = getattr(module, "tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        yield module
        return
    for child in module.children():
        yield from _with_plans(child)


def _style(name: str, word: str, model: Any) -> ParallelStyle:
    if word not in _STYLES:
        raise ValueError(
            f"The plan of {type(model).__name__} has {name!r}: {word!r}, for which torch has no"
            f" style. Known are {', '.join(map(repr, _STYLES))}. Cut the model in"
            " `configure_model`."
        )
    return _STYLES[word]()


def _form(parameter: Any) -> Any:
    return parameter.placements if is_dtensor(parameter) else None
