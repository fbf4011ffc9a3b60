"""A thread that steps on the host while another runs a backward pass there or on a device.

It waits until a unit's gradients have landed and steps the unit's batches, one unit at a time::

    backward    unit 3 | unit 2 | unit 1 | unit 0 |
    down                 unit 3   unit 2   unit 1 ...
    step                            unit 3   unit 2   unit 1    the rest, by the optimizer's call

The interpreter's lock is free while it waits, and within torch's operations. Torch's process-wide
flag that something is being compiled would change a step, so the thread steps under the compiler's
own lock. It takes over the thread-local settings: autocast and the default device.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lightning_zero.tensors import internals

Call = Callable[[], None]

_END_SECONDS = 10.0
"""How long to wait for a thread to end, which may take one more step."""


class SteppingThread:
    """One thread for all steps ahead of an optimizer.

    1. :meth:`follow` the thread that takes all other steps.
    2. :meth:`give` what is stepped next.
    3. :meth:`wait` before the optimizer is stepped by another thread, or :meth:`stop`.
    4. :meth:`close`.

    A thread whose gradients never land does not keep the interpreter from exiting.

    Args:
        device: The device that computes, which may be the host itself.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device
        self._work = _Work()
        self._around = _Around(device)
        self._given: list[Future[None]] = []
        # Cancels what was given since the last stop.
        self._is_over = threading.Event()
        # Made with the thread; ends it with this object, or before the interpreter exits.
        self._end: weakref.finalize[..., SteppingThread] | None = None

    def follow(self) -> None:
        """Take steps under the autocast and the default device of the calling thread."""
        self._around = _Around(self._device)

    def give(self, landed: Call, steps: Sequence[Call]) -> None:
        """Let the thread wait until gradients have ``landed``, and then take steps.

        If one raises, all later ones are left out.

        Raises:
            RuntimeError: The thread is closed.
        """
        work = self._work
        if work.is_closed.is_set():
            raise RuntimeError("The stepping thread is closed.")
        if self._end is None:
            name = "lightning_zero.step"
            thread = threading.Thread(target=work.run, args=(self._device,), name=name, daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _end, thread, work)
        future = Future[None]()
        self._given.append(future)
        work.calls.put(_Given(future, self._is_over, landed, steps, self._around))

    def wait(self) -> None:
        """Wait until all given steps are taken; raise what one of them has raised."""
        _require_other()
        for future in self._given:
            future.result()
        self._given = []

    def stop(self) -> None:
        """Wait for the step under way, if there is one, and leave the others out.

        Does not wait for gradients to land: they may come from ranks that are gone.
        """
        _require_other()
        self._is_over.set()
        with self._work.stepping:
            self._is_over = threading.Event()
        self._given = []

    def close(self) -> None:
        """Stop, and end the thread. If it waits for gradients, it ends when they land, if ever."""
        self.stop()
        self._work.is_closed.set()
        if self._end is not None:
            self._end()


_here = threading.local()
"""Has the attribute ``steps`` in stepping threads."""


def _require_other() -> None:
    """Raise in a stepping thread, which would wait for itself."""
    if hasattr(_here, "steps"):
        raise RuntimeError(
            "An optimizer's step of a unit during the backward pass (step_in_backward=True) waits"
            " for such steps to end, as the optimizer's step(), train() and eval() do. Remove that"
            " call, or remove step_in_backward."
        )


class _Around:
    """The thread-local settings of torch that change what operations do."""

    def __init__(self, device: torch.device) -> None:
        kinds = {"cpu", device.type}
        on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in on]
        self._default = torch.get_default_device()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter a context with these settings in another thread."""
        with contextlib.ExitStack() as stack:
            if self._default.type != "cpu":  # with which each thread begins
                stack.enter_context(self._default)
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield


class _Given(NamedTuple):
    """Steps of one unit, and what they wait for."""

    future: Future[None]
    is_over: threading.Event
    landed: Call
    steps: Sequence[Call]
    around: _Around


class _Work:
    """The thread's work, apart from its owner so that the thread does not keep the owner alive.

    Attributes:
        calls: What was given; ``None`` ends the thread.
        stepping: Held while a step is taken.
        is_closed: Set when nothing may be stepped any more.
        is_landing: Whether the thread waits for gradients.
    """

    def __init__(self) -> None:
        self.calls = SimpleQueue[_Given | None]()
        self.stepping = threading.Lock()
        self.is_closed = threading.Event()
        self.is_landing = False

    def run(self, device: torch.device) -> None:
        """Take what is given until ``None`` comes."""
        _here.steps = True
        if device.type != "cpu":  # optimizers ask for its stream; threads begin with device 0
            torch.accelerator.set_device_index(device)
        while (given := self.calls.get()) is not None:
            try:
                self._take(given)
            except BaseException as error:
                given.is_over.set()
                given.future.set_exception(error)
            else:
                given.future.set_result(None)
            del given  # or it would stay alive until the next one comes

    def _take(self, given: _Given) -> None:
        def is_over() -> bool:
            return given.is_over.is_set() or self.is_closed.is_set()

        self.is_landing = True  # before the check: `_end` sets and reads in the other order
        try:
            if not is_over():
                given.landed()
        finally:
            self.is_landing = False
        for step in given.steps:
            # The compiler's lock first: a thread that compiles holds it when it calls `stop`.
            with internals.compile_lock, self.stepping:
                if is_over():
                    return
                with given.around.entered():
                    step()


def _end(thread: threading.Thread, work: _Work) -> None:
    """End a thread and join it, unless it waits for gradients, which may never land."""
    work.is_closed.set()
    work.calls.put(None)
    if thread is threading.current_thread():  # which held the last reference to the owner
        return
    until = time.monotonic() + _END_SECONDS
    while thread.is_alive() and not work.is_landing and time.monotonic() < until:
        thread.join(0.01)
