"""A place outside of the contexts of torch that user code may have entered.

Whatever of ours runs within one (a hook in a module's forward, an event in a backward pass, a touch
of a resting weight) works on memory and sends it, and must not be traced, transformed, faked or put
on another device. Modes that only watch operations stay.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lightning_zero.tensors import internals

_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Step out of transforms of ``torch.func``, function modes (a default device) and fakes."""
    levels, functions, fakes = [], [], []
    try:
        while internals.func_level() is not None:
            levels.append(internals.leave_func_level())
        while internals.function_modes():
            functions.append(internals.leave_function_mode())
        fakes = internals.leave_tracing_modes()
        yield
    finally:
        for enter, mode in reversed(fakes):
            enter(mode)
        for mode in reversed(functions):
            internals.enter_function_mode(mode)
        for level in reversed(levels):
            internals.enter_func_level(level)


def runs_outside(function: _Function) -> _Function:
    """Decorate a function that user code may call from within any context."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Written out where events of every unit pass, too: a call of Python saved for each.
        if internals.function_modes() or internals.dispatch_modes() or internals.func_level():
            with outside():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]
