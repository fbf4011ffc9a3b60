"""The search for a model's units, and their parameters and plans before they have memory.

``"auto"`` takes, from the outside in,

1. the blocks that a Transformers model says must not be split (``_no_split_modules``),
2. the elements of every ``ModuleList``, ``ModuleDict`` and ``Sequential`` that hold no more than a
   third of the model (larger ones are searched inside),
3. any other module that itself holds a large parameter (an embedding, a head),
4. a ``Sequential`` whose elements are too small one by one.

A module with fewer than ``min_num_params`` elements is not worth a collective and stays with the
unit around it; parameters that no unit took belong to the root, which is whole for the entire step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from lightning_zero.plan.layout import Layout
from lightning_zero.plan.plan import Plan
from lightning_zero.plan.settings import MIN_NUMEL, Settings, UnitPolicy
from lightning_zero.tensors import is_wrapper

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Modules whose forward reads the parameters of children that it never calls.
_CLOSED = (nn.MultiheadAttention,)
_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_units(
    root: nn.Module, policy: UnitPolicy = "auto", min_num_params: int = MIN_NUMEL
) -> dict[str, nn.Module]:
    """Return the modules below ``root`` that become units, by name.

    The policy is ``"auto"``, module classes, or a callable that returns whether a module is a unit.
    Under ``"auto"`` a unit has at least ``min_num_params`` elements.
    """
    if policy == "auto":
        return dict(_automatic(root, min_num_params))
    if isinstance(policy, str):
        raise ValueError(f"Expected units='auto', classes or a callable, got units={policy!r}.")
    if callable(policy) and not isinstance(policy, type):
        return _called_modules(root, policy)
    classes = (policy,) if isinstance(policy, type) else tuple(policy)
    if not all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        raise TypeError(f"Expected units to be module classes, got units={policy!r}.")
    found = _called_modules(root, lambda module: isinstance(module, classes))
    if not found:
        names = ", ".join(cls.__name__ for cls in classes)
        raise ValueError(f"units={names} matches no module of {type(root).__name__}.")
    return found


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(module)``, or the module itself."""
    inner = module._orig_mod if isinstance(module, OptimizedModule) else module
    assert isinstance(inner, nn.Module)
    return inner


def _called_modules(
    root: nn.Module, is_wanted: Callable[[nn.Module], bool]
) -> dict[str, nn.Module]:
    """Return the wanted modules with parameters that are called; of a compiled one, the outer."""
    compiled = {id(m._orig_mod) for m in root.modules() if isinstance(m, OptimizedModule)}
    sizes = _sizes(root)
    return {
        name: module
        for name, module in root.named_modules()
        if name and sizes[module] and id(module) not in compiled
        if not isinstance(module, _NOT_CALLED) and is_wanted(unwrap_compiled(module))
    }


def _automatic(root: nn.Module, least: int) -> Iterator[tuple[str, nn.Module]]:
    kinds = (getattr(module, "_no_split_modules", None) or () for module in root.modules())
    unsplit = {cls for classes in kinds for cls in classes}
    sizes, least = _sizes(root), max(least, 1)
    limit = sizes[root] // 3

    def search(parent: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            numel, inner, child_path = sizes[child], unwrap_compiled(child), path + name
            if numel < least:
                continue
            may_be_called = not isinstance(child, _NOT_CALLED)
            is_element = isinstance(parent, _CONTAINERS) and numel <= limit
            is_block = is_element or type(inner).__name__ in unsplit or isinstance(inner, _CLOSED)
            if may_be_called and is_block:
                yield child_path, child
                continue
            held = inner.parameters(recurse=False)
            own = sum(p.numel() for p in held if not stays_whole(p))
            inside = list(search(child, f"{child_path}."))
            # A Sequential's elements run one after the other, so small ones share a collective.
            is_shared = isinstance(inner, nn.Sequential) and not inside and numel <= limit
            if may_be_called and (own >= least or is_shared):
                yield child_path, child
            yield from inside

    yield from search(root, "")


def _sizes(root: nn.Module) -> dict[nn.Module, int]:
    """Return the elements of the parameters in each module, in which each counts once."""
    numels = {p: 0 if is_lazy(p) or stays_whole(p) else p.numel() for p in root.parameters()}
    return {module: sum(numels[p] for p in module.parameters()) for module in root.modules()}


def assign_parameters(
    root: nn.Module, units: dict[str, nn.Module]
) -> dict[str, list[tuple[str, Parameter]]]:
    """Return every parameter once, under the unit that takes it; ``""`` is the root.

    A parameter that several units use belongs to their lowest common ancestor.
    """
    unit_names = {id(module): (name,) for name, module in units.items()}
    uses: dict[int, tuple[str, Parameter, list[tuple[str, ...]]]] = {}
    # The units around each module, once for each of its names.
    around: dict[str, tuple[str, ...]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        parent = around[path.rpartition(".")[0]] if path else ("",)
        around[path] = chain = parent + unit_names.get(id(module), ())
        for name, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{path}.{name}" if path else name
                uses.setdefault(id(parameter), (name, parameter, []))[2].append(chain)
    assigned: dict[str, list[tuple[str, Parameter]]] = {name: [] for name in ["", *units]}
    for name, parameter, chains in uses.values():
        check_parameter(name, parameter)
        if not stays_whole(parameter):
            assigned[_common_owner(chains)].append((name, parameter))
    return assigned


def _common_owner(chains: list[tuple[str, ...]]) -> str:
    """Return the innermost unit that encloses all uses of a parameter."""
    if len({chain[-1] for chain in chains}) == 1:
        return chains[0][-1]
    owner = ""
    for names in zip(*chains, strict=False):
        if len(set(names)) > 1:
            break
        owner = names[0]
    return owner


def stays_whole(parameter: Tensor) -> bool:
    """Return whether a parameter is a wrapper of tensors, such as torchao's 8-bit weights.

    A flat buffer cannot hold it: if it is frozen, every rank keeps all of it, like a buffer.
    """
    return is_wrapper(parameter) and type(parameter.data).__name__ != "DTensor"


def whole_tensors(module: nn.Module) -> list[Tensor]:
    """Return what every rank keeps whole: the buffers, and parameters that wrap tensors."""
    return [*module.buffers(), *filter(stays_whole, module.parameters())]


def check_parameter(name: str, parameter: Any) -> None:
    """Raise a ``ValueError`` if ``parameter`` cannot lie in a flat buffer."""
    reason = None
    if is_lazy(parameter):
        reason = "is lazily initialized and has no shape yet; run one batch through the model first"
    elif parameter.is_sparse or parameter.is_quantized or parameter.is_nested:
        reason = "is not a dense tensor; register it as a buffer, or make it dense"
    elif type(parameter.data).__name__ == "DTensor":
        reason = "is a DTensor, already cut; pass the plain module, or set tensor_parallel_size"
    elif stays_whole(parameter) and parameter.requires_grad:
        reason = (
            f"is of class {type(parameter).__name__}, which wraps other tensors: it can be used,"
            " not trained. Freeze it (`requires_grad_(False)`), or build the module with plain"
            " weights (for Float8Linear, `enable_fsdp_float8_all_gather=False`)"
        )
    if reason is not None:
        raise ValueError(f"Parameter {name!r} {reason}.")


class FlatSpec(NamedTuple):
    """Parameters that will share flat buffers, and their plan."""

    named: list[tuple[str, Parameter]]
    plan: Plan

    @property
    def trainable(self) -> bool:
        """Return whether the parameters want gradients."""
        return self.named[0][1].requires_grad

    def layout(self, num_shards: int, num_copies: int) -> Layout:
        """Return where the parameters will lie."""
        slots = [(name, tuple(p.shape), _dense_stride(p)) for name, p in self.named]
        return Layout.build(slots, num_shards, num_copies)


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's stride if it is dense, else a contiguous one."""
    if parameter.is_contiguous():
        return tuple(parameter.stride())
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format)
    return tuple(dense.stride())


class UnitSpec(NamedTuple):
    """A unit before it has memory; its module may be on ``meta``."""

    name: str
    module: nn.Module
    flat_parameters: list[FlatSpec]


def specify_units(module: nn.Module, settings: Settings) -> list[UnitSpec]:
    """Cut ``module`` into units as ``settings`` say; the root comes last."""
    modules = find_units(module, settings.units, settings.min_num_params)
    assigned = assign_parameters(module, modules)
    root_parameters = assigned.pop("")
    uncast = uncast_parameters(module, settings.cast_weights) if settings.recipe.weight else set()
    for named in assigned.values():
        full = [(name, p) for name, p in named if id(p) in uncast]
        # A second dtype would double the unit's collectives for a handful of elements.
        if len(full) < len(named) and sum(p.numel() for _, p in full) < MIN_NUMEL:
            root_parameters += full
            named[:] = [(name, p) for name, p in named if id(p) not in uncast]
    # Last, so that a tied parameter is loaded when every module that uses it has its values.
    assigned[""], modules[""] = root_parameters, module
    specs = [
        UnitSpec(name, modules[name], _specify_flat_parameters(named, settings, uncast))
        for name, named in assigned.items()
        if named or not name
    ]
    plans = [flat.plan for spec in specs for flat in spec.flat_parameters]
    if settings.gather_bits is not None and not any(plan.gather_bits for plan in plans):
        raise ValueError(
            f"gather_bits={settings.gather_bits} has no effect: at stage={settings.stage} without"
            " mixed precision the whole weights are the masters, which are never encoded. Use"
            " stage=3 or precision='bf16-mixed', or remove gather_bits."
        )
    if settings.stochastic_rounding and not any(plan.stochastic_rounding for plan in plans):
        raise ValueError(
            "stochastic_rounding=True has no effect: no parameter rests in bf16. Use"
            " precision='bf16-true', or remove stochastic_rounding."
        )
    return specs


def _specify_flat_parameters(
    named: list[tuple[str, Parameter]], settings: Settings, uncast: set[int]
) -> list[FlatSpec]:
    kinds: dict[tuple[torch.dtype, bool, bool], list[tuple[str, Parameter]]] = {}
    for name, p in named:
        kind = p.dtype, id(p) not in uncast, p.requires_grad
        kinds.setdefault(kind, []).append((name, p))
    return [
        FlatSpec(members, settings.plan(dtype, is_cast=is_cast, trainable=trainable))
        for (dtype, is_cast, trainable), members in kinds.items()
    ]


# -- casts -----------------------------------------------------------------------------------------

_AUTOCAST = {
    "torch.nn.modules.linear.Linear": ("weight", "bias"),
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear": ("weight", "bias"),
    **{
        f"torch.nn.modules.conv.Conv{kind}{dims}d": ("weight", "bias")
        for kind in ("", "Transpose")
        for dims in (1, 2, 3)
    },
    "torch.nn.modules.activation.MultiheadAttention": (
        "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",
    ),
    "transformers.pytorch_utils.Conv1D": ("weight", "bias"),
}  # fmt: skip
"""Parameters that autocast casts, by exact class: a subclass may have another forward."""

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def uncast_parameters(root: nn.Module, choice: str = "autocast") -> set[int]:
    """Return the ids of the parameters that mixed precision leaves in fp32.

    Autocast casts the inputs of its operations at every call. A parameter whose only use is one
    such operation may as well arrive in half precision: no number changes. One with two names is
    used twice: autocast casts it twice, and adds its gradients in fp32. So are the weights of a
    recurrent layer, once per element of a sequence.

    Args:
        root: The model.
        choice: ``"autocast"`` casts the parameters that autocast is known to cast, ``"all"`` those
            that torch accepts in half precision, ``"none"`` none.
    """
    if choice == "all":
        # Torch's normalizations reject weights of less precision than input or statistics.
        norms = (m for m in root.modules() if isinstance(m, _NORMS))
        return {id(p) for norm in norms for p in norm.parameters(recurse=False)}
    full = {id(p) for p in root.parameters() if p.dtype is torch.float32}
    uses = Counter(id(p) for _, p in root.named_parameters(remove_duplicate=False))
    for module in root.modules() if choice == "autocast" else ():
        cls = type(module)
        if "forward" not in vars(module):
            for name in _AUTOCAST.get(f"{cls.__module__}.{cls.__name__}", ()):
                if uses[key := id(module._parameters.get(name))] == 1:
                    full.discard(key)
    return full
