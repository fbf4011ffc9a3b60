"""The user's optimizer on pieces: which one may be cut, and how it is pointed at them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types

from lightning_zero.piece import Piece

FindPiece = Callable[[Parameter], Piece | None]

# On a device torch's optimizers step all tensors at once unless told otherwise, but only those of
# classes in this list. Private, and what torch itself does for DTensor.
_foreach_supported_types.append(Piece)

_CURE = (
    "ZeRO gives each rank a flat part of every parameter, which only an element-wise optimizer"
    " (SGD, Adam, AdamW, Adagrad, RMSprop, ...) can step. Use one of those, or strategy='ddp'."
)


def check_can_be_cut(optimizer: Optimizer) -> None:
    """Raise unless stepping two halves of a tensor is the same as stepping the whole.

    A toy tensor is stepped three times whole and in two flat pieces, each piece by its own
    optimizer as two ranks would, for every set of options among the param groups.

    Raises:
        ValueError: The results differ, or the optimizer cannot step a flat piece.
    """
    name = type(optimizer).__name__
    tried: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options = {
            key: value for key, value in group.items() if key not in ("params", "initial_lr")
        }
        if any(_same_options(options, other) for other in tried):
            continue
        tried.append(options)
        device = _device_of(group)
        whole = torch.linspace(-1, 1, 24, device=device).view(6, 4)
        grads = [
            torch.linspace(1, 2, 24, device=device).sin().view(6, 4) * (step + 1)
            for step in range(3)
        ]
        try:
            expected = _step_toy(optimizer, options, whole, grads)
            flat = [grad.flatten() for grad in grads]
            halves = [
                _step_toy(optimizer, options, whole.flatten()[part], [g[part] for g in flat])
                for part in (slice(0, 9), slice(9, 24))
            ]
        except Exception as error:
            raise ValueError(
                f"{name} cannot step a part of a parameter: {error}. {_CURE}"
            ) from error
        if not torch.allclose(torch.cat(halves), expected.flatten(), rtol=1e-5, atol=1e-7):
            raise ValueError(
                f"{name} steps the parts of a parameter differently from the whole. {_CURE}"
            )


def _device_of(group: Mapping[str, Any]) -> torch.device:
    """Where a toy is stepped: some optimizers have kernels for one kind of device only."""
    devices = (parameter.device for parameter in group["params"])
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _same_options(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(str(one[key]) == str(other[key]) for key in one)


def _step_toy(
    optimizer: Optimizer, options: dict[str, Any], start: Tensor, grads: list[Tensor]
) -> Tensor:
    toy = Parameter(start.clone())
    twin = _twin(optimizer, options, toy)
    for group in twin.param_groups:
        if "lr" in group:
            # A warm-up starts at zero, and with it every optimizer would pass.
            group["lr"] = torch.tensor(0.1) if isinstance(group["lr"], Tensor) else 0.1
    for grad in grads:
        toy.grad = grad.clone()
        twin.step()
    return toy.detach()


def _twin(optimizer: Optimizer, options: dict[str, Any], toy: Parameter) -> Optimizer:
    """An optimizer of the same class and options that owns only ``toy``."""
    cls = optimizer._optimizer if hasattr(optimizer, "_optimizer") else optimizer
    options, defaults = (_without_capture(each) for each in (options, cls.defaults))
    try:
        return type(cls)([{**options, "params": [toy]}], **defaults)
    except TypeError:
        # A constructor with other arguments than its defaults: copy everything but what belongs to
        # the user's parameters.
        twin = copy.copy(cls)
        twin.__dict__ = dict(cls.__dict__)
        twin.state = defaultdict(dict)
        twin.param_groups = [{**options, "params": [toy]}]
        for name, value in cls.__dict__.items():
            if isinstance(value, OrderedDict):
                twin.__dict__[name] = OrderedDict()
        return twin


def _without_capture(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the options for a toy; what a CUDA graph may capture, torch refuses on a host."""
    copied = copy.deepcopy(dict(options))
    if copied.get("capturable"):
        # Neither takes torch a learning rate in a tensor, for several parameters at once.
        copied.update(capturable=False, foreach=False)
    return copied


def point_at_pieces(optimizer: Optimizer, find_piece: FindPiece) -> None:
    """Replace the engine's parameters in ``optimizer`` by their pieces, with their state.

    Parameters of no engine are left alone. Calling it again takes in groups that were added since.

    Raises:
        ValueError: A parameter is in two groups.
    """
    seen = {
        id(p) for group in optimizer.param_groups for p in group["params"] if isinstance(p, Piece)
    }
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            piece = None if isinstance(parameter, Piece) else find_piece(parameter)
            if piece is None:
                continue
            if id(piece) in seen:
                raise ValueError(
                    f"Parameter {piece.slot.name!r} appears in more than one param group of"
                    f" {type(optimizer).__name__}. Put each parameter into one group."
                )
            seen.add(id(piece))
            group["params"][index] = piece
            if parameter in optimizer.state:
                optimizer.state[piece] = owned(cut_state(optimizer.state.pop(parameter), piece))


def cut_state(state: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
    """The part of a whole parameter's optimizer state that belongs to ``piece``.

    Its tensors may share memory with the whole ones.
    """
    return {
        key: piece.part_of(value).to(piece.device) if is_per_element(key, value, piece) else value
        for key, value in state.items()
    }


def owned(state: Any) -> Any:
    """The entries of a state, its tensors in memory of their own: not in a file or a larger one."""
    if not isinstance(state, Mapping):
        return state
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
    }


def is_per_element(key: str, value: Any, piece: Piece) -> bool:
    """Whether an entry of a whole parameter's state has one number per element of it.

    For a 0-d parameter the shape cannot tell ``exp_avg`` from the step count, so the name must.
    """
    return isinstance(value, Tensor) and value.shape == piece.parameter.shape and key != "step"


def state_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateBytes:
    """What the state of a parameter in ``group`` weighs, found by stepping a toy parameter."""
    options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    toy = Parameter(torch.zeros(_TOY_NUMEL, dtype=dtype))
    twin = _twin(optimizer, options, toy)
    toy.grad = torch.ones_like(toy)
    twin.step()
    tensors = [value for value in twin.state[toy].values() if isinstance(value, Tensor)]
    per_element = sum(value.element_size() for value in tensors if value.shape == toy.shape)
    return StateBytes(per_element, sum(v.nbytes for v in tensors if v.shape != toy.shape))


class StateBytes(NamedTuple):
    """Bytes of an optimizer's state: for each element of a parameter, and for the parameter."""

    per_element: int
    per_parameter: int

    def of(self, numel: int) -> int:
        """Bytes for a piece of ``numel`` elements; an empty one is never stepped."""
        return self.per_element * numel + self.per_parameter if numel else 0


_TOY_NUMEL = 24
