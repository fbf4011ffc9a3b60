"""Contexts: ordinary tensors, leaving modes, random numbers, garbage, and profiler ranges."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from lightning_zero.tensors import internals


def lasting_tensors() -> contextlib.AbstractContextManager[None]:
    """Return a context that creates ordinary tensors without a graph, even in inference mode.

    An inference tensor could never be saved for a later backward.
    """
    # Already the case in a backward pass, where entering two contexts costs more than a tensor.
    is_active = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return _NOTHING if is_active else _lasting_tensors()


@contextlib.contextmanager
def _lasting_tensors() -> Iterator[None]:
    # In this order: leaving inference mode turns grad mode on.
    with torch.inference_mode(False), torch.no_grad():
        yield


_NOTHING = contextlib.nullcontext()


_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Leave transforms of ``torch.func``, function modes (a default device) and tracing modes."""
    with contextlib.ExitStack() as left:
        left.enter_context(internals.leave_func_levels())
        while internals.function_modes():
            left.enter_context(internals.leave_function_mode())
        if internals.dispatch_modes() or internals.pre_dispatch_modes():
            for leave in internals.leave_tracing_modes:
                left.enter_context(leave())
        yield


@contextlib.contextmanager
def without_draws() -> Iterator[None]:
    """Enter a context at whose end the random number generators of the host are as before."""
    numpy, states = sys.modules.get("numpy"), random.getstate()
    of_numpy = numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def runs_outside(function: _Function) -> _Function:
    """Decorate a function that user code may call from within any context."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Inlined where events of every unit pass, to save a Python call for each.
        if internals.function_modes() or internals.dispatch_modes() or internals.func_level():
            with outside():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Enter a context in which Python's cyclic garbage collector is off.

    While many objects are created it runs repeatedly, each time over all objects of the process.
    For a model of many small tensors that takes longer than their setup, save or load itself.
    Reference counting frees objects as usual.
    """
    if not gc.isenabled():  # within another such context, or by the user's choice
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_Method = TypeVar("_Method", bound=Callable[..., None])


def unseen() -> contextlib.AbstractContextManager[object]:
    """Return a context in which to start work that may end after a profiler has stopped.

    A torch ``Work`` records the end of its profiler range when it is waited for. If the profiler
    has stopped by then, that writes to freed memory and crashes the process, at once or later. In
    this context works get no range; the range of the verb that starts them remains.
    """
    return _without_ranges() if internals.profiler_is_enabled() else _NOTHING


@contextlib.contextmanager
def _without_ranges() -> Iterator[None]:
    internals.enable_profiler_ranges(False)
    try:
        yield
    finally:
        internals.enable_profiler_ranges(True)


def span(verb: str) -> Callable[[_Method], _Method]:
    """Return a decorator that shows calls of a method as ``zero.<verb> <label>`` in a profile.

    ``label`` is an attribute of the object. A plain ``record_function`` costs 8 µs even when no
    profiler runs, nine times per unit and step.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def spanned(self: Any, /, *args: Any, **kwargs: Any) -> None:
            if not internals.profiler_is_enabled():
                return method(self, *args, **kwargs)
            with record_function(f"zero.{verb} {self.label}"):
                return method(self, *args, **kwargs)

        return spanned  # type: ignore[return-value]

    return decorate
