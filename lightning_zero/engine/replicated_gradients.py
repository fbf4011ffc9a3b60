"""A check of the gradients of parameters that tensor parallelism has not split."""

from __future__ import annotations

from collections import defaultdict

import torch

from lightning_zero.comm import Communicator
from lightning_zero.parameters import Piece
from lightning_zero.plan import cut_of

_TOLERANCE = 0.02
"""Of a gradient's norm: more than rounding in half precision, less than a missing summand."""


def require_equal_gradients(pieces: list[Piece], comm: Communicator) -> None:
    """Raise unless all ranks of a tensor-parallel group have the same gradients; a collective.

    Every rank updates its own copy of a parameter that is not split. If the gradient of each is
    only its own heads' summand, or if batches or dropout differ, the copies drift apart. Ranks
    compare two projections of each gradient on fixed directions, in one message.

    Args:
        pieces: This rank's pieces of the parameters, after a backward pass that sent gradients.
        comm: The ranks, with a tensor axis.

    Raises:
        RuntimeError: Gradients differ; raised on all ranks.
    """
    found = comm.control.gather_objects(
        {
            piece.range.slot.name: _projections(piece)
            for piece in pieces
            if cut_of(piece.parameter) is None and piece.grad is not None
        }
    )
    assert comm.mesh.tensor is not None
    size = comm.mesh.tensor.size
    # By parameter and number in the tensor-parallel group, summed over the shards.
    sums: dict[str, list[list[float]]] = defaultdict(lambda: [[0.0] * 3 for _ in range(size)])
    for rank in comm.mesh.model.ranks:
        for name, values in found[rank].items():
            own = sums[name][rank % size]
            own[:] = [a + b for a, b in zip(own, values, strict=True)]
    differing = []
    for name, group in sums.items():
        squares, *projections = zip(*group, strict=True)
        limit = _TOLERANCE * max(squares) ** 0.5
        if any(max(values) - min(values) > limit for values in projections):
            differing.append(name)
    if differing:
        some = ", ".join(map(repr, differing[:5])) + (", ..." if len(differing) > 5 else "")
        raise RuntimeError(
            f"The gradients of {len(differing)} parameters differ between the ranks of a"
            f" tensor-parallel group, which hold them whole: {some}. If a module sees only this"
            " rank's heads or tokens, give it a style that sums its gradients: torch's"
            " SequenceParallel, or 'replicated_with_grad_allreduce' in a Transformers plan."
            " Otherwise make batches and random numbers equal within the group."
        )


@torch.no_grad()
def _projections(piece: Piece) -> list[float]:
    """Return the squared norm of this rank's part of a gradient, and its two projections."""
    grad = piece.grad
    assert grad is not None
    if grad.is_complex():
        grad = torch.view_as_real(grad).sum(-1)
    values = grad.detach().flatten().double().cpu()
    places = torch.arange(piece.range.start, piece.range.start + len(values)).double() + 1
    parts = values.square(), values * places.sin(), values * (2.7 * places).sin()
    return torch.stack([part.sum() for part in parts]).tolist()
