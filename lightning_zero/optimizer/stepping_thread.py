"""A thread that steps on the host while another one goes backward, or sends a device through it.

It waits until a unit's gradients have landed, and steps its batches, one unit after the other::

    backward    unit 3 | unit 2 | unit 1 | unit 0 |
    down                 unit 3   unit 2   unit 1 ...
    step                            unit 3   unit 2   unit 1    the rest, by the optimizer's call

The interpreter's lock is free for others while it waits, and in torch's own operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Call = Callable[[], None]


class SteppingThread:
    """One thread, for as long as the optimizer is stepped by it.

    1. :meth:`give` what is stepped next.
    2. :meth:`wait` before the optimizer is stepped by others, or :meth:`stop`.
    3. :meth:`close`.

    Args:
        device: The one that computes, be it the host itself.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        # It is made with the first call, and ends with this object or the interpreter.
        self._threads = ThreadPoolExecutor(1, "lightning_zero.step", _take, (device,))
        self._lock = threading.Lock()
        self._given: list[Future[None]] = []
        # Of what was given and not stopped since.
        self._is_over = threading.Event()

    def give(self, landed: Call, steps: Sequence[Call]) -> None:
        """Let the thread wait until gradients have ``landed``, and take steps then.

        If one raises, those behind it are left out.
        """
        self._given.append(self._threads.submit(self._run, self._is_over, landed, steps))

    def _run(self, is_over: threading.Event, landed: Call, steps: Sequence[Call]) -> None:
        try:
            if not is_over.is_set():
                landed()
            for step in steps:
                with self._lock:
                    if is_over.is_set():
                        return
                    step()
        except BaseException:
            is_over.set()
            raise

    def wait(self) -> None:
        """Return when all steps are taken that were given; raises what one of them has raised."""
        for future in self._given:
            future.result()
        self._given = []

    def stop(self) -> None:
        """Return when the step under way is taken, if there is one; the others are left out.

        Gradients that have not landed are not waited for: they may come from ranks that are gone.
        """
        self._is_over.set()
        with self._lock:
            self._is_over = threading.Event()
        self._given = []

    def close(self) -> None:
        """Stop, and let the thread end."""
        self.stop()
        self._threads.shutdown(wait=False)


def _take(device: torch.device) -> None:
    """Let a device be that of this thread, which optimizers ask for its stream."""
    if device.type != "cpu":  # else each thread has the first one
        torch.accelerator.set_device_index(device)
