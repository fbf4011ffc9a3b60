"""How far it is from a unit's hook to the collective that gathers its weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lightning_zero
from lightning_zero.comm import Communicator, shared_memory, transport
from lightning_zero.comm.transport import PointToPoint
from lightning_zero.engine import Engine
from lightning_zero.engine.backward import Backward
from lightning_zero.engine.forward import Forward
from lightning_zero.plan import Settings
from tests.oracle.projects import WAYS
from tests.oracle.ranks import Pools

CPU = torch.device("cpu")
BLOCKS = 3
MOST = 5
"""The most calls of the package between a hook and what a transport calls to gather."""
LAST: dict[str, tuple[Any, str]] = {
    "windows": (shared_memory, "copy"),
    "point to point": (PointToPoint, "start"),
    "backend": (transport, "_all_gather"),
}
"""What each transport calls to move weights."""
HOOKS = [
    hook.__code__
    for hook in (Forward.before_unit, Backward._on_outputs_grad, Backward._on_inputs_grad)
]
PACKAGE = lightning_zero.__file__.removesuffix("__init__.py")


def calls(frame: FrameType | None) -> tuple[str, ...]:
    """The package's functions on the stack, from a unit's hook on; none if no hook is there."""
    names: list[str] = []
    while frame is not None:
        if frame.f_code in HOOKS:
            return (frame.f_code.co_name, *reversed(names))
        # The decorator of ranges in a profile does nothing without one.
        is_ours = frame.f_code.co_filename.startswith(PACKAGE)
        if is_ours and frame.f_code.co_name != "spanned":
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return ()


def gathers(way: str) -> set[tuple[str, ...]]:
    """The calls on the stack whenever two steps move weights that a unit's hook asked for."""
    place, name = LAST[way]
    moves: Callable[..., Any] = getattr(place, name)
    seen: set[tuple[str, ...]] = set()

    def noting(*args: Any, **kwargs: Any) -> Any:
        found = calls(sys._getframe(1))
        if "_gather" in found:
            seen.add(found)
        return moves(*args, **kwargs)

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(BLOCKS)])
    engine = Engine(model, Settings(3, units=(nn.Linear,)), Communicator(CPU, **WAYS[way]))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    engine.adopt(optimizer)
    with mock.patch.object(place, name, noting):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    engine.close()
    return seen


@pytest.mark.parametrize("way", list(LAST))
def test_few_calls_lie_between_a_hook_and_the_collective(ranks: Pools, way: str) -> None:
    for seen in ranks(2).run(gathers, way):
        assert {hook for hook, *_ in seen} == {code.co_name for code in HOOKS}
        for _, *between in seen:
            assert len(between) <= MOST, between
