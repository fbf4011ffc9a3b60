"""The user's optimizer while it steps pieces, and what must happen before it changes them."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_zero import optim
from lightning_zero.piece import Piece


class Adoption:
    """Holds an optimizer's groups to the pieces, and announces its steps.

    Args:
        optimizer: The user's.
        find_piece: This rank's piece of a parameter, ``None`` of a stranger.
        before: Called before the masters change, when the closure, if any, has run.
        after: Called with the pieces that were stepped.

    Attributes:
        handles: Remove them to end it.

    Raises:
        ValueError: The optimizer is not element-wise, or a parameter is in two of its groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        find_piece: optim.FindPiece,
        *,
        before: Callable[[], None],
        after: Callable[[list[Piece]], None],
    ) -> None:
        optim.check_can_be_cut(optimizer)
        self._find_piece = find_piece
        self._before = before
        self._members: list[Parameter] = []
        self._pieces: list[Piece] = []
        self._point(optimizer)
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: after(self._pieces)),
        ]

    def _point(self, optimizer: Optimizer) -> None:
        """Take in groups and parameters that were added since last time."""
        members = _members(optimizer)
        if len(members) == len(self._members) and all(map(is_, members, self._members)):
            return
        optim.point_at_pieces(optimizer, self._find_piece)
        self._members = _members(optimizer)
        self._pieces = [member for member in self._members if isinstance(member, Piece)]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take in new groups, and let the closure run before masters may change."""
        self._point(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin(optimizer)
            return args, kwargs

        def closure_and_begin() -> Any:
            result = closure()
            self._point(optimizer)
            self._begin(optimizer)
            return result

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], *args[2:]), {**rest, "closure": closure_and_begin}

    def _begin(self, optimizer: Optimizer) -> None:
        for piece in self._pieces:
            if piece.local is not None and piece.grad is piece.local:
                raise RuntimeError(
                    f"The gradient of parameter {piece.slot.name!r} is this rank's own: its last"
                    " backward pass was told not to send gradients. Let the last one before"
                    f" {type(optimizer).__name__}.step() send them (`sync_grad=True`)."
                )
        self._before()


def _members(optimizer: Optimizer) -> list[Parameter]:
    return [member for group in optimizer.param_groups for member in group["params"]]
