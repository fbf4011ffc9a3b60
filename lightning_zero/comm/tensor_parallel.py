"""Tensor parallelism by torch's DTensor: the mesh that users get, and parameters in both forms.

Users cut a model by ``torch.distributed.tensor.parallel.parallelize_module``, which makes its
parameters DTensors. While a model is trained, a parameter is this rank's part, an ordinary tensor
that is sharded over the data-parallel ranks; where a forward reads it, it is wrapped as the DTensor
that it was. Autograd adds up its gradient over the tensor-parallel ranks where DTensor says so.

Models of Transformers carry plans: ``model.tp_plan`` has a style by the name of a module or
parameter. Transformers resolves the plan and implements the styles, on DTensor.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_zero.comm.process_groups import kept
from lightning_zero.plan import Cut
from lightning_zero.tensors import internals, tensors_in

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""The names of the dimensions, as under Lightning's ``ModelParallelStrategy``."""


def device_mesh(device_type: str, tensor_size: int) -> DeviceMesh:
    """Return the mesh of all ranks, data-parallel by tensor-parallel; the first call makes it."""
    sizes = dist.get_world_size() // tensor_size, tensor_size

    def make() -> DeviceMesh:
        return init_device_mesh(device_type, sizes, mesh_dim_names=(DATA, TENSOR))

    made = kept(f"device mesh {device_type} {sizes}", make)
    assert isinstance(made, DeviceMesh)
    return made


def data_group(mesh: DeviceMesh) -> Any:
    """Return the process group of this rank and those that see other batches."""
    return mesh[DATA].get_group()


def share(value: Any, mesh: DeviceMesh) -> Any:
    """Return ``value``; a tensor is overwritten with the tensor-parallel group's first rank's."""
    if isinstance(value, Tensor):
        group = mesh[TENSOR].get_group()
        dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
    return value


@contextmanager
def pretended_mesh(rank: int, world_size: int, tensor_size: int) -> Iterator[DeviceMesh]:
    """Enter a context with the mesh of ranks that do not exist, of which this process is one.

    Raises:
        ValueError: This process already belongs to a process group.
    """
    if dist.is_initialized():
        raise ValueError(
            "A cut model cannot be estimated in a process that belongs to a process group."
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
    try:
        yield device_mesh("cpu", tensor_size)
    finally:
        dist.destroy_process_group()


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return isinstance(value, DTensor)


def whole(value: Any) -> Any:
    """Return the whole tensor that a DTensor stands for, a collective, or any other value."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class _LentDTensor(DTensor):
    """A DTensor on the memory of a parameter, which is released after the step.

    Attributes:
        parameter: The parameter: this rank's part.
        is_view: Whether it is a view of what a module has returned, which stands for the parameter.
    """

    parameter: Any
    is_view: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse reads of released memory, and note changes; views are lent too.

        Access to attributes and hooks of what stands for a parameter is forwarded to it.
        """
        if func in _OF_PARAMETERS and isinstance(args[0], cls) and not args[0].is_view:
            own = [_local(one, args[0]) for one in args[1:]]
            return _OF_PARAMETERS[func](args[0].parameter, *own, **(kwargs or {}))
        with internals.as_plain_tensors():
            used = [
                one
                for one in tensors_in([args, kwargs], within_objects=False)
                if isinstance(one, _LentDTensor)
            ]
            for one in used:
                if one.numel() and not one._local_tensor.untyped_storage().nbytes():
                    raise _released(one)
            before = [_version_of(one) for one in used]
            result = func(*args, **(kwargs or {}))
            for one, version in zip(used, before, strict=True):
                # DTensor changes its part beneath autograd, so that its version stays the same.
                if version != _version_of(one) or (version < 0 and _is_in_place(func)):
                    torch.autograd.graph.increment_version(one.parameter)
            _lend_views(result, used)
            return result


_OF_PARAMETERS: dict[Any, Callable[..., Any]] = {
    **{getattr(Tensor, name).__get__: operator.attrgetter(name) for name in ("grad", "is_leaf")},
    **{
        getattr(Tensor, name).__set__: lambda parameter, value, name=name: setattr(
            parameter, name, value
        )
        for name in ("grad", "requires_grad", "data")
    },
    **{
        getattr(Tensor, name): lambda parameter, *args, name=name, **kwargs: getattr(
            parameter, name
        )(*args, **kwargs)
        for name in ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook")
    },
}


def parameter_behind(value: Any) -> Any:
    """Return the parameter that was read from its module as ``value``, or ``value``."""
    return value.parameter if isinstance(value, _LentDTensor) and not value.is_view else value


def _local(value: Any, like: DTensor) -> Any:
    """Return this rank's part of a DTensor, cut as another, or any other value."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(like.device_mesh, like.placements).to_local()


def _lend_views(result: Any, used: Sequence[_LentDTensor]) -> None:
    """Make those DTensors in a result lent that lie in the memory of one that is."""
    for made in tensors_in(result, within_objects=False) if used else ():
        if type(made) is DTensor:
            key = internals.storage_key(made._local_tensor)
            for one in used:
                if key == internals.storage_key(one._local_tensor):
                    _lend(made, one.parameter, is_view=True)
                    break


def _lend(made: Any, parameter: Tensor, *, is_view: bool) -> None:
    made.__class__ = _LentDTensor  # not by a call, which would add a node to the graph
    made.parameter, made.is_view = parameter, is_view


def _version_of(value: Tensor) -> int:
    return -1 if value.is_inference() else internals.version_of(value)


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _released(value: Tensor) -> RuntimeError:
    return RuntimeError(
        f"A parameter of shape {tuple(value.shape)} was read after the training step in which its"
        " module handed it out, and its memory has been released. Read it from the module again,"
        " or keep a copy: `weight.detach().clone()`"
    )


@dataclass(frozen=True)
class DTensorForm:
    """The form of a DTensor, without its values.

    Attributes:
        mesh: The ranks of one tensor-parallel group.
        placement: How the values lie on them.
        shape: The shape of the whole.
        stride: The stride of the whole.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, value: Any, mesh: DeviceMesh) -> DTensorForm:
        """Return the form of ``value``, which must be cut over the tensor-parallel ranks alone.

        Raises:
            ValueError: It lies on other ranks, or is neither split nor replicated.
        """
        own = mesh[TENSOR]
        if value.device_mesh != own:
            raise ValueError(
                f"Parameter {name!r} is a DTensor on {value.device_mesh}, but the strategy shards"
                " over the data-parallel ranks itself. Cut it with parallelize_module over"
                ' self.device_mesh["tensor_parallel"], and call no `fully_shard`.'
            )
        (placement,) = value.placements
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise ValueError(
                f"Parameter {name!r} is placed as {placement}. Expected Shard(dim) or Replicate()."
            )
        return cls(own, placement, value.shape, value.stride())

    @property
    def cut(self) -> Cut | None:
        """How the values are cut; ``None`` if each rank has all of them."""
        if isinstance(self.placement, Replicate):
            return None
        place: Any = self.placement
        dim = place.dim % len(self.shape)
        blocks = int(getattr(place, "split_factor", 1))
        return Cut(dim, self.mesh.get_local_rank(), self.mesh.size(), self.shape[dim], blocks)

    def local(self, value: Any) -> Tensor:
        """Return this rank's part of ``value``, an ordinary tensor in memory of its own."""
        part: Tensor = value.detach().to_local()
        return part.contiguous()

    def part_of(self, value: Any) -> Any:
        """Return this rank's part of a loaded value; one of another shape as it is."""
        if isinstance(value, DTensor):
            return value.redistribute(self.mesh, (self.placement,)).to_local()
        is_whole = isinstance(value, Tensor) and value.shape == self.shape
        return self.cut.part_of(value) if is_whole and self.cut is not None else value

    def wrap(self, part: Tensor) -> Tensor:
        """Return the DTensor whose part on this rank is ``part``; autograd sees through it."""
        return DTensor.from_local(
            part,
            self.mesh,
            (self.placement,),
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def read(self, part: Tensor) -> Tensor:
        """Return the same for code that may keep it longer than ``part`` has memory."""
        whole = self.wrap(part)
        if torch.compiler.is_compiling():
            return whole  # compiled code keeps nothing
        if part.shape == self.shape and self.cut is not None:
            return part  # an optimizer that steps all at once has the whole here
        _lend(whole, part, is_view=False)
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensorForm:
        return self


_READS_PARTS, _STYLED = "_lightning_zero_reads_parts", "_lightning_zero_styled"


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
        ties: dict[int, list[tuple[nn.Module, str]]] = {}
        for child in model.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    ties.setdefault(id(parameter), []).append((child, name))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if not tensor.is_meta:
                    share(tensor.data, mesh)
        _apply_plan(model, mesh[TENSOR])
        for (first, name), *others in ties.values():
            parameter = first._parameters[name]
            for child, own in others:
                both: list[Any] = [parameter, child._parameters[own]]
                if len({getattr(one, "placements", None) for one in both}) > 1:
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


def _apply_plan(model: Any, mesh: DeviceMesh) -> None:
    """Do what Transformers' ``apply_tensor_parallelism`` does, with forwards for training."""
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    except (ImportError, AttributeError):
        raise ValueError(
            f"{type(model).__name__} has a `tp_plan`, but is no model of a Transformers version"
            " that applies plans to DTensors (5.24 does). Update Transformers, or split it in"
            " `configure_model` with torch's parallelize_module."
        ) from None
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, word in plan.items():
        style = ALL_PARALLEL_STYLES[word]
        if name in parameters or name not in modules:
            owner, _, own = name.rpartition(".")
            style.validate_param(modules[owner], own, mesh, parameter_name=name)
            style.shard_param(modules[owner], own, mesh)
            continue
        if word == "mla_kv_a_proj":
            modules[name].config = model.config.get_text_config()
        _install_forward(style, modules[name], mesh)


def _install_forward(style: Any, module: nn.Module, mesh: DeviceMesh) -> None:
    """Give a module, and its copies, the ``forward`` of one of Transformers' styles.

    The style makes a function that refers to the module, which a deep copy of the module would
    share. So each copy makes its own.
    """

    def make(module: nn.Module) -> None:
        style.install_forward(module, mesh)
        vars(module)[_STYLED] = id(module), vars(module).pop("forward")

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if vars(module)[_STYLED][0] != id(module):
            own = vars(module).pop("forward")
            make(module)
            vars(module)["forward"] = own
        before = reads_parts(module)
        vars(module)[_READS_PARTS] = before or style.should_use_local_tensors(module)
        try:
            return vars(module)[_STYLED][1](*args, **kwargs)
        finally:
            vars(module)[_READS_PARTS] = before

    make(module)
    vars(module)["forward"] = types.MethodType(forward, module)


def reads_parts(module: nn.Module) -> bool:
    """Return whether a module's forward reads its parameters as this rank's parts."""
    return bool(vars(module).get(_READS_PARTS, False))
