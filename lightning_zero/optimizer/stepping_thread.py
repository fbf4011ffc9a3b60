"""A thread that steps on the host while another one goes backward, or sends a device through it.

It waits until a unit's gradients have landed, and steps its batches, one unit after the other::

    backward    unit 3 | unit 2 | unit 1 | unit 0 |
    down                 unit 3   unit 2   unit 1 ...
    step                            unit 3   unit 2   unit 1    the rest, by the optimizer's call

The interpreter's lock is free for others while it waits, and in torch's own operations. What is
process-wide in torch and would change a step, that something is compiled, is kept from it by the
compiler's own lock; what is a thread's own, autocast and the default device, it takes over.
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
"""How long the end of a thread is waited for, which may take one more step."""


class SteppingThread:
    """One thread, for as long as the optimizer is stepped by it.

    1. :meth:`follow` the thread that steps otherwise.
    2. :meth:`give` what is stepped next.
    3. :meth:`wait` before the optimizer is stepped by others, or :meth:`stop`.
    4. :meth:`close`.

    The interpreter does not wait for it at its end if gradients do not land any more.

    Args:
        device: The one that computes, be it the host itself.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device
        self._work = _Work()
        self._around = _Around(device)
        self._given: list[Future[None]] = []
        # Of what was given and not stopped since.
        self._is_over = threading.Event()
        # Made with the first call; ends with this object, or before the interpreter.
        self._end: weakref.finalize[..., SteppingThread] | None = None

    def follow(self) -> None:
        """Let steps be taken under the autocast and the default device of the calling thread."""
        self._around = _Around(self._device)

    def give(self, landed: Call, steps: Sequence[Call]) -> None:
        """Let the thread wait until gradients have ``landed``, and take steps then.

        If one raises, those behind it are left out.

        Raises:
            RuntimeError: It is closed.
        """
        work = self._work
        if work.is_closed.is_set():
            raise RuntimeError("A thread that is closed steps nothing more.")
        if self._end is None:
            name = "lightning_zero.step"
            thread = threading.Thread(target=work.run, args=(self._device,), name=name, daemon=True)
            thread.start()
            self._end = weakref.finalize(self, _end, thread, work)
        future = Future[None]()
        self._given.append(future)
        work.calls.put(_Given(future, self._is_over, landed, steps, self._around))

    def wait(self) -> None:
        """Return when all steps are taken that were given; raises what one of them has raised."""
        _require_other()
        for future in self._given:
            future.result()
        self._given = []

    def stop(self) -> None:
        """Return when the step under way is taken, if there is one; the others are left out.

        Gradients that have not landed are not waited for: they may come from ranks that are gone.
        """
        _require_other()
        self._is_over.set()
        with self._work.stepping:
            self._is_over = threading.Event()
        self._given = []

    def close(self) -> None:
        """Stop, and end the thread; one that waits for gradients ends when they land, if ever."""
        self.stop()
        self._work.is_closed.set()
        if self._end is not None:
            self._end()


_here = threading.local()
"""Of a thread that steps: that it does."""


def _require_other() -> None:
    """Raise in a thread that steps, which would wait for itself."""
    if hasattr(_here, "steps"):
        raise RuntimeError(
            "An optimizer's step of a unit amid the backward pass (step_in_backward=True) asks for"
            " the end of such steps, as its own step(), train() and eval() do. Leave"
            " step_in_backward out, or what the step calls."
        )


class _Around:
    """The settings of torch that are a thread's own and change what operations do."""

    def __init__(self, device: torch.device) -> None:
        kinds = {"cpu", device.type}
        on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in on]
        self._default = torch.get_default_device()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter it in another thread."""
        with contextlib.ExitStack() as stack:
            if self._default.type != "cpu":  # that of each thread to begin with
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
    """The work of the thread, by which its owner is not kept alive.

    Attributes:
        calls: What was given; ``None`` ends the thread.
        stepping: Is held while a step is taken.
        is_closed: Nothing is stepped from now on.
        is_landing: Gradients are waited for.
    """

    def __init__(self) -> None:
        self.calls = SimpleQueue[_Given | None]()
        self.stepping = threading.Lock()
        self.is_closed = threading.Event()
        self.is_landing = False

    def run(self, device: torch.device) -> None:
        """Take what is given, until the end."""
        _here.steps = True
        if device.type != "cpu":  # optimizers ask for its stream; each thread has the first one
            torch.accelerator.set_device_index(device)
        while (given := self.calls.get()) is not None:
            try:
                self._take(given)
            except BaseException as error:
                given.is_over.set()
                given.future.set_exception(error)
            else:
                given.future.set_result(None)
            del given  # else what it holds would live until the next comes

    def _take(self, given: _Given) -> None:
        def is_over() -> bool:
            return given.is_over.is_set() or self.is_closed.is_set()

        self.is_landing = True  # before the look: whoever ends this thread looks the other way
        try:
            if not is_over():
                given.landed()
        finally:
            self.is_landing = False
        for step in given.steps:
            # The compiler's first, as whoever compiles holds it when he comes to stop this.
            with internals.compile_lock(), self.stepping:
                if is_over():
                    return
                with given.around.entered():
                    step()


def _end(thread: threading.Thread, work: _Work) -> None:
    """End a thread; it is waited for unless it waits itself, for gradients that may never come."""
    work.is_closed.set()
    work.calls.put(None)
    if thread is threading.current_thread():  # which held the last reference to what has ended
        return
    until = time.monotonic() + _END_SECONDS
    while thread.is_alive() and not work.is_landing and time.monotonic() < until:
        thread.join(0.01)
