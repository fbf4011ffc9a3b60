"""Tensor parallelism by the plans that models of Transformers carry.

A model has its plan as ``model.tp_plan``: a style by the name of a module or parameter.
Transformers resolves the plan and implements the styles, on DTensor (``transformers.distributed``).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero.comm.tensor_parallel import TENSOR, is_dtensor, share

_READS_PARTS = "_lightning_zero_reads_parts"


def cut_by_own_plan(module: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the plans of the models within a module; without one, change nothing.

    Args:
        module: The module; tied parameters stay tied.
        mesh: The mesh of all ranks. The first rank of each tensor-parallel group gives the values.

    Raises:
        ValueError: The installed Transformers cannot apply a plan, or a plan splits tied parameters
            in different ways.
    """
    for model in [*_with_plans(module)]:
        styles, plan = _resolved(model, mesh[TENSOR].size())
        ties: dict[int, list[tuple[nn.Module, str]]] = {}
        for child in model.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    ties.setdefault(id(parameter), []).append((child, name))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if not tensor.is_meta:
                    share(tensor.data, mesh)
        _apply(model, mesh[TENSOR], styles, plan)
        for (first, name), *others in ties.values():
            parameter = first._parameters[name]
            for child, own in others:
                if _form(child._parameters[own]) != _form(parameter):
                    raise ValueError(
                        f"The plan of {type(model).__name__} splits a tied parameter, {name!r} of"
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


def _resolved(model: Any, size: int) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return Transformers' styles by name, and a model's plan with a style for each full name."""
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=size))
    except (ImportError, AttributeError):
        raise ValueError(
            f"{type(model).__name__} has a `tp_plan`, but is no model of a Transformers version"
            " that applies plans to DTensors (5.24 does). Update Transformers, or split it in"
            " `configure_model` with torch's parallelize_module."
        ) from None
    return ALL_PARALLEL_STYLES, plan


def _apply(
    model: Any, mesh: DeviceMesh, styles: Mapping[str, Any], plan: Mapping[str, str]
) -> None:
    """Do what ``transformers.distributed.tensor_parallel.apply_tensor_parallelism`` does.

    Forwards are installed so that they survive a deep copy, and read parts during training.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, word in plan.items():
        style = styles[word]
        if name in parameters or name not in modules:
            owner, _, own = name.rpartition(".")
            style.validate_param(modules[owner], own, mesh, parameter_name=name)
            style.shard_param(modules[owner], own, mesh)
        else:
            module = modules[name]
            if word == "mla_kv_a_proj":
                module.config = model.config.get_text_config()
            _StyledForward(style, mesh).install(module)


class _StyledForward:
    """The ``forward`` of a module with one of Transformers' styles.

    The style makes a function that refers to the module, which a deep copy of the module would
    share. This one is made anew for each copy.

    Args:
        style: Transformers' style.
        mesh: The ranks of the tensor-parallel group.
    """

    def __init__(self, style: Any, mesh: DeviceMesh) -> None:
        self._style, self._mesh = style, mesh

    def install(self, module: nn.Module) -> None:
        """Replace the module's ``forward``, now and in its copies."""
        self._make(module)
        vars(module)["forward"] = types.MethodType(self, module)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        owner, forward = vars(module)["_lightning_zero_styled"]
        if owner != id(module):
            before = vars(module).pop("forward")
            forward = self._make(module)
            vars(module)["forward"] = before
        if not self._style.should_use_local_tensors(module):
            return forward(*args, **kwargs)
        with _reading_parts(module):
            return forward(*args, **kwargs)

    def _make(self, module: nn.Module) -> Callable[..., Any]:
        self._style.install_forward(module, self._mesh)
        forward: Callable[..., Any] = vars(module).pop("forward")
        vars(module)["_lightning_zero_styled"] = id(module), forward
        return forward


@contextlib.contextmanager
def _reading_parts(module: nn.Module) -> Iterator[None]:
    """Enter a context in which a module that is trained reads parts instead of DTensors."""
    before = reads_parts(module)
    vars(module)[_READS_PARTS] = True
    try:
        yield
    finally:
        vars(module)[_READS_PARTS] = before


def reads_parts(module: nn.Module) -> bool:
    """Return whether a module's forward reads its parameters as this rank's parts."""
    return bool(vars(module).get(_READS_PARTS, False))


def _form(parameter: Any) -> Any:
    return parameter.placements if is_dtensor(parameter) else None
