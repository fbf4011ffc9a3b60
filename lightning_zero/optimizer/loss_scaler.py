"""Dynamic loss scaling as a plain state machine.

(Micikevicius et al., *Mixed Precision Training*, 2018, section 3.2.) The loss is multiplied by the
scale, which backs off when a gradient on any rank was not finite, and grows after
``growth_interval`` steps in a row without one. The scaler holds no tensors and does not
communicate: the caller says what all ranks have found.
"""

from __future__ import annotations

from typing import Any


class LossScaler:
    """Scale, growth and back-off; its state dict is that of ``torch.amp.GradScaler``."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = init_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.num_good_steps = 0

    def get_scale(self) -> float:
        """Return the scale, as the method of this name in ``torch.amp.GradScaler`` does."""
        return self.scale

    def update(self, *, found_inf: bool) -> None:
        """Move to the next step's scale."""
        if found_inf:
            self.scale *= self.backoff_factor
            self.num_good_steps = 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.num_good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the names that ``torch.amp.GradScaler`` uses."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.num_good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state written by this class or by ``torch.amp.GradScaler``."""
        self.scale = state["scale"]
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
        self.num_good_steps = state["_growth_tracker"]
