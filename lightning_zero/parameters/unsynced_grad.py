"""Stand-ins for a rank's own gradients, between microbatches whose gradients are not sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_zero.parameters.stand_in import ALIASES, OwnPart, StandIn, is_autograd_adding
from lightning_zero.tensors import internals


class UnsyncedGrad(StandIn):
    """The stand-in for the gradient that this rank has accumulated since the last reduction.

    Using it is not a collective, unless an earlier averaged gradient was kept: then the first use
    gathers that.

    Attributes:
        held: The whole gradient, in the buffer from which it will be reduced.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, piece: OwnPart, like: Tensor, held: Tensor) -> UnsyncedGrad:
        """Make the stand-in for ``held``, with the dtype and device of ``like``."""
        made: UnsyncedGrad = internals.make_wrapper(
            cls, held.shape, strides=held.stride(), dtype=like.dtype, device=like.device
        )
        made.piece, made.held = piece, held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Work on the held gradient."""
        kwargs = kwargs or {}
        if func in ALIASES:
            view = UnsyncedGrad(args[0].piece, args[0], args[0].held)
            view.viewed = args[0].original
            return view
        if func.overloadpacket.__name__ in ("add", "add_") and is_autograd_adding(args):
            args[0].piece.gradient.arrival = args[1]
            return args[0]
        target = args[0] if func._schema.is_mutable else None
        args, kwargs = tree_map_only(UnsyncedGrad, UnsyncedGrad.whole, (args, kwargs))
        result = func(*args, **kwargs)
        return target if isinstance(target, UnsyncedGrad) else result

    def whole(self) -> Tensor:
        """Return the gradient as DDP shows it within ``no_sync``; changes to it persist.

        Raises:
            RuntimeError: The parameter shows another gradient by now, or none.
        """
        if self.piece.gradient.shown is not self.original:
            raise RuntimeError(
                "You kept a reference to the unreduced gradient of parameter"
                f" {self.piece.range.slot.name!r}, and its buffer has been reused since. Keep a"
                " copy instead: `p.grad.clone()`"
            )
        self.piece.gradient.add_sharded(self.held)
        return self.held

    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole()[index] = value.whole() if isinstance(value, UnsyncedGrad) else value

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unreduced gradient of this rank, of shape {tuple(self.shape)}, {self.dtype}"
