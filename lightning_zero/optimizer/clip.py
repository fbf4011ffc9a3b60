"""Gradient norms, clipping and unscaling over pieces, exact over all ranks.

Every element of a gradient lies in exactly one piece of one rank, so padding, empty pieces, frozen
and unused parameters need no special care: the sum over pieces and ranks is the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from lightning_zero.comm import Communicator
from lightning_zero.parameters import Piece, norms_of, settle


def _lists_of(pieces: Sequence[Piece], others: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return all that is changed with the gradients of ``pieces``, one list for each memory."""
    seen = settle(pieces)
    found: dict[bool, list[Tensor]] = {}
    for piece in pieces:
        if piece.grad is not None:
            found.setdefault(piece.plan.stays, []).append(piece.grad)
    return [*found.values(), *([one] for one in (*seen, *others))]


@torch.no_grad()
def total_norm(pieces: Sequence[Piece], comm: Communicator, norm_type: float = 2.0) -> Tensor:
    """Return the norm of the gradients of the parameters of ``pieces``, over all ranks.

    Args:
        pieces: This rank's pieces, of the same parameters on every rank.
        comm: The ranks.
        norm_type: The order of the norm; ``inf`` for the largest magnitude. Anything that torch's
            ``clip_grad_norm_`` takes.

    Returns:
        A 0-d tensor, fp32 (fp64 if any gradient is), the same on every rank.
    """
    settle(pieces)
    pieces = [piece for piece in pieces if piece.gradients.averaged[piece.place]]
    if not pieces:
        return torch.zeros((), device=comm.device)
    parts = [piece.detach().new_empty(0) if piece.grad is None else piece.grad for piece in pieces]
    norms = norms_of(parts, pieces, float(norm_type), comm)
    norm: Tensor = torch.linalg.vector_norm(norms, float(norm_type))
    return norm


@torch.no_grad()
def clip_by_norm(
    pieces: Sequence[Piece],
    comm: Communicator,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    others: Sequence[Tensor] = (),
) -> Tensor:
    """Scale the gradients to a total norm of at most ``max_norm``; return the norm before.

    ``others`` are gradients of parameters of no module, which all ranks have whole.

    Raises:
        RuntimeError: The norm is not finite, on all ranks, if ``error_if_nonfinite``.
    """
    norm = total_norm(pieces, comm, norm_type)
    if others:
        norm = torch.linalg.vector_norm(
            torch.stack([norm, _norm_of(others, norm_type, norm)]), float(norm_type)
        )
        # Ranks that scaled by different factors would mix parts of different gradients.
        comm.control.max(norm)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is not finite, so they cannot be"
            " clipped. To scale them by it anyway, set `error_if_nonfinite=False`."
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grads in _lists_of(pieces, others):
        torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm


def _norm_of(grads: Sequence[Tensor], norm_type: float, like: Tensor) -> Tensor:
    return torch.nn.utils.get_total_norm(grads, float(norm_type)).to(like.device, like.dtype)


@torch.no_grad()
def clip_by_value(
    pieces: Sequence[Piece], clip_value: float, others: Sequence[Tensor] = ()
) -> None:
    """Clamp every element of the gradients to ``[-clip_value, clip_value]``."""
    for grads in _lists_of(pieces, others):
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)


@torch.no_grad()
def unscale(
    pieces: Sequence[Piece],
    comm: Communicator | None,
    scale: float,
    others: Sequence[Tensor] = (),
) -> bool:
    """Divide the gradients by the loss scale; return whether one on any rank is then not finite.

    All ranks get the same answer, including those whose own pieces are finite or empty. ``others``
    are gradients of parameters of no module; without ranks there are only these.
    """
    for grads in _lists_of(pieces, others):
        torch._foreach_mul_(grads, 1.0 / scale)
    largest = torch.zeros(()) if comm is None else total_norm(pieces, comm, inf)
    if others:
        largest = largest + _norm_of(others, inf, largest)
        if comm is not None:
            comm.control.max(largest)
    return not bool(torch.isfinite(largest))
