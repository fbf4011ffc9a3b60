"""The user's optimizer while it steps pieces, and what must happen before it changes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        after: Called with the optimizer when they have changed.

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
        after: Callable[[Optimizer], None],
    ) -> None:
        optim.check_can_be_cut(optimizer)
        self._find_piece = find_piece
        self._before = before
        optim.point_at_pieces(optimizer, find_piece)
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda opt, args, kwargs: after(opt)),
        ]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take in new groups, and let the closure run before masters may change."""
        optim.point_at_pieces(optimizer, self._find_piece)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin(optimizer)
            return args, kwargs

        def closure_and_begin() -> Any:
            result = closure()
            optim.point_at_pieces(optimizer, self._find_piece)
            self._begin(optimizer)
            return result

        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], *args[2:]), {**rest, "closure": closure_and_begin}

    def _begin(self, optimizer: Optimizer) -> None:
        _check_is_reduced(optimizer)
        self._before()


def _check_is_reduced(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for piece in group["params"]:
            local = piece.local if isinstance(piece, Piece) else None
            if local is not None and piece.grad is local:
                raise RuntimeError(
                    f"The gradient of parameter {piece.slot.name!r} is this rank's own: its last"
                    " backward pass was told not to send gradients. Let the last one before"
                    f" {type(optimizer).__name__}.step() send them (`sync_grad=True`)."
                )
