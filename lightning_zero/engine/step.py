"""The step that all ranks go through together: its phases.

::

                 begin                  leave, gradients can come
         IDLE ──────────> FORWARD ──────────────────────────────────> AWAITS_BACKWARD
          ^ ^              │   │ ^                                     │       ^
          │ └─── leave ────┘   │ │ end_backward, within a forward      │       │ end_backward,
          │                    v │                                     v       │ create_graph
          └───────────────── BACKWARD <────────────────────────────────┘───────┘
             end_backward

A backward pass begins within a forward (manual optimization), after it, or in IDLE: again over a
graph whose step has ended. ``begin`` in AWAITS_BACKWARD begins the next step. When a step ends, all
units are resharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch

from lightning_zero.engine.unit import Unit
from lightning_zero.tensors import internals


class Phase(Enum):
    """A rank's place in a step."""

    IDLE = "idle"
    """Between steps: ranks may run different code."""
    FORWARD = "forward"
    """Within a step, before its backward pass or between two passes."""
    AWAITS_BACKWARD = "awaits backward"
    """The forward has ended and left a graph; the root's weights stay whole."""
    BACKWARD = "backward"
    """Autograd is running."""


class Step:
    """The state of a step, which releases what ends with it.

    Args:
        reset: Drops a step that an exception ended.

    Attributes:
        phase: Where in a step this rank is.
        is_interrupted: Whether an exception ended the last step on this rank, perhaps here only.
        is_closed: Whether the run has ended; the parameters may still rest.
        keeps_graph: Whether a backward pass with ``create_graph`` saved weights for a later one.
        is_torn: Whether a load of values ended half-way, and not all were loaded since.
        is_inside: Whether a forward or the step's own context is running: a flag beside the depth,
            as torch's compiler would recompile for every depth that it reads.
    """

    def __init__(self, units: Sequence[Unit], reset: Callable[[], None]) -> None:
        self.phase = Phase.IDLE
        self.is_interrupted = self.is_closed = False
        self.keeps_graph = False
        self.is_torn = False
        self.is_inside = False
        self._depth = 0
        self._units = units
        self._reset = reset

    def enter(self) -> bool:
        """Enter a forward; return whether a step begins with it."""
        if self.is_torn:
            self.require_whole()
        if self.phase is Phase.BACKWARD and not internals.in_backward():
            # An exception ended the backward pass, for which autograd has no event.
            self._reset()
        self._depth += 1
        self.is_inside = True
        if self._depth > 1 or self.phase is Phase.BACKWARD:
            return False
        self.is_interrupted = False
        return True

    def require_whole(self) -> None:
        """Raise a ``RuntimeError`` if the module's values are partly old and partly new."""
        if self.is_torn:
            raise RuntimeError(
                "A load of weights or optimizer states has failed half-way, so the module mixes old"
                " and new values. Load a checkpoint that is intact before you train, predict or"
                " save."
            )

    def leave(self) -> bool:
        """Leave a forward; return whether it was a step's outermost."""
        self._depth = max(self._depth - 1, 0)
        self.is_inside = self._depth > 0
        return not self.is_inside and self.phase is not Phase.BACKWARD

    def begin_backward(self) -> None:
        """Note that autograd has started."""
        if self.phase is Phase.BACKWARD:
            # An exception ended the last backward pass, and no forward came since.
            self._reset()
            self.is_interrupted = False
        self.phase = Phase.BACKWARD
        self.keeps_graph = torch.is_grad_enabled()

    def end_backward(self) -> bool:
        """Note that autograd has ended; return whether the step ends with it."""
        self.phase = Phase.FORWARD if self.is_inside else Phase.AWAITS_BACKWARD
        return not self.is_inside

    def begin(self) -> None:
        """Begin a step, once the one before has ended."""
        if self.phase is not Phase.IDLE and not self.keeps_graph:
            self.end_units()
        self.phase = Phase.FORWARD

    def close(self) -> None:
        """End the step, if one is under way that no graph needs any more."""
        if self.phase is Phase.IDLE:
            return
        if not self.is_inside:
            self.phase = Phase.AWAITS_BACKWARD if self.keeps_graph else Phase.IDLE
        if not self.keeps_graph:
            self.end_units()

    def end_units(self) -> None:
        """Reshard what the step held."""
        for unit in self._units:
            unit.weights.end_step()

    def interrupt(self) -> None:
        """Leave all forwards and backward passes after an exception."""
        self._depth = 0
        self.is_inside = self.keeps_graph = False
        self.phase = Phase.IDLE
        self.is_interrupted = True
