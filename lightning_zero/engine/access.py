"""Whole weights and averaged gradients for hooks, loggers and users, at every stage.

All functions are collectives: every rank must call them. For a module that no engine shards, they
do what plain torch would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_zero.comm import parameter_behind
from lightning_zero.engine.engine import engine_of, engines_of
from lightning_zero.optimizer import clip


@contextmanager
def gathered(
    module_or_params: nn.Module | Parameter | Iterable[Parameter], *, modify: bool = False
) -> Iterator[None]:
    """Enter a context in which parameters are whole, in the precision of the optimizer's steps.

    Args:
        module_or_params: A module, a parameter or several; the units they are in are gathered.
        modify: Keep rank 0's changes, on all ranks. Without it, parameters must not be changed.

    Raises:
        RuntimeError: A parameter was changed without ``modify``. Raised on all ranks.
    """
    with ExitStack() as contexts:
        for engine, parameters in engines_of(_parameters(module_or_params)):
            contexts.enter_context(engine.sharded.gathered(parameters, modify=modify))
        yield


@contextmanager
def join(module: nn.Module) -> Iterator[None]:
    """Enter a context in which ranks may run different parts of ``module`` any number of times.

    For forwards without gradients whose length depends on the data, such as ``generate``. All ranks
    must enter it; a rank that reaches the end helps the others until all have, as in
    ``torch.distributed.algorithms.Join``.

    Args:
        module: Any module whose parameters are sharded by the same engines as those that are run.

    Raises:
        RuntimeError: A backward pass begins within.
    """
    with ExitStack() as contexts:
        for engine, _ in engines_of(module.parameters()):
            contexts.enter_context(engine.join())
        yield


def full_grad(parameter: Parameter) -> Tensor | None:
    """Return the whole gradient of ``parameter``, averaged over the ranks; ``None`` without one."""
    engine = engine_of([parameter])
    return engine.sharded.full_grad(parameter) if engine else parameter.grad


def grad_norm(
    module_or_params: nn.Module | Parameter | Iterable[Parameter], norm_type: float = 2.0
) -> Tensor:
    """Return the total norm of the averaged gradients, a 0-d tensor."""
    left = _parameters(module_or_params)
    norms = []
    for engine, own in engines_of(left):
        pieces = [piece for piece in map(engine.sharded.piece, own) if piece is not None]
        norms.append(clip.total_norm(pieces, engine.comm, norm_type))
        taken = set(map(id, own))
        left = [parameter for parameter in left if id(parameter) not in taken]
    grads = [parameter.grad for parameter in left if parameter.grad is not None]
    if grads or not norms:
        norms.append(torch.nn.utils.get_total_norm(grads, norm_type))
    if len(norms) == 1:
        return norms[0]
    return torch.nn.utils.get_total_norm(norms, norm_type)


def _parameters(value: nn.Module | Parameter | Iterable[Parameter]) -> list[Parameter]:
    if isinstance(value, nn.Module):
        return list(value.parameters())
    behind = parameter_behind(value)
    return [behind] if isinstance(behind, Parameter) else list(behind)
