"""Precisions on pieces, for Fabric and for the Trainer: casting, autocast and loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_zero.comm import Communicator
from lightning_zero.engine import Engine, engines_of, piece_among
from lightning_zero.optimizer import clip, members, parameter_of
from lightning_zero.parameters import Piece
from lightning_zero.plan import RECIPES, Recipe
from lightning_zero.tensors import internals


class ShardedPrecision(Precision):
    """A precision of a sharded module: what Fabric and the Trainer share.

    ``casters`` makes, by name, Lightning's own plugin that converts modules and inputs; the other
    precisions convert nothing.

    Args:
        precision: A name of Lightning's.
        scaler: The loss scaler of ``16-mixed``; by default torch's with its own defaults.
        device: The device type of autocast, and for code that reads it from the plugin.

    Raises:
        ValueError: The precision is unknown, or a scaler is given to one that does not scale.
    """

    casters: ClassVar[Mapping[str, Callable[[], Precision]]] = {
        "64-true": DoublePrecision,
        "bf16-true": lambda: HalfPrecision("bf16-true"),
        "16-true": lambda: HalfPrecision("16-true"),
    }
    runner: ClassVar[str] = "Fabric"
    plugins: ClassVar[tuple[type[Any], ...]] = ()
    """Lightning's plugins that it can replace, the mixed one last."""

    def __init__(
        self, precision: str = "32-true", scaler: GradScaler | None = None, device: str = "cpu"
    ) -> None:
        if precision not in RECIPES:
            raise ValueError(
                f"Expected a precision among {', '.join(map(repr, RECIPES))}, got {precision!r}."
            )
        if scaler is not None and not RECIPES[precision].loss_scaled:
            raise ValueError(
                f"precision={precision!r} does not scale the loss; only '16-mixed' takes a scaler."
            )
        self.precision = precision  # type: ignore[assignment]
        self.scaler = (scaler or GradScaler("cpu")) if RECIPES[precision].loss_scaled else None
        self.device = device
        self._caster = self.casters.get(precision, Precision)()

    @classmethod
    def of(cls, plugin: Any) -> Self:
        """Return a plugin that does what Lightning's ``plugin`` does under DDP.

        Raises:
            TypeError: There is none.
        """
        if isinstance(plugin, cls):
            return plugin
        if isinstance(plugin, cls.plugins[-1]):
            scaler, module = plugin.scaler, torch.get_device_module(plugin.device)
            # Lightning makes CUDA's for every accelerator, and torch disables it without CUDA.
            is_default = scaler is not None and not (scaler.is_enabled() or module.is_available())
            return cls(plugin.precision, None if is_default else scaler, plugin.device)
        if type(plugin) in cls.plugins:
            return cls(plugin.precision)
        raise TypeError(
            f"ZeROStrategy does not support the precision plugin {type(plugin).__name__}. Use"
            f" {cls.runner}(precision=...) with one of {', '.join(map(repr, RECIPES))}."
        )

    @property
    def recipe(self) -> Recipe:
        """The dtypes of weights, reductions and autocast under this precision."""
        return RECIPES[str(self.precision)]

    @override
    def convert_module(self, module: Module) -> Module:
        return self._caster.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return self._caster.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self._caster.convert_output(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._caster.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._caster.module_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        dtype = self.recipe.autocast
        if dtype is None:
            with self._caster.forward_context():
                yield
        else:
            with torch.autocast(self.device, dtype=dtype, cache_enabled=False):
                yield

    def unscaled(self, optimizer: Optimizer) -> bool:
        """Divide an optimizer's gradients by the loss scale; return whether any is not finite.

        All ranks get the same answer, unless no parameter is sharded.
        """
        assert self.scaler is not None
        pieces, others, comm = grads_of(optimizer)
        return clip.unscale(pieces, comm, self.scaler.get_scale(), others)

    @classmethod
    @override
    def main_params(cls, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        # Parameters, not pieces: a parameter's gradient has the norm over all ranks.
        yield from map(parameter_of, members(optimizer))

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict() if self.scaler is not None else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


class FabricPrecision(ShardedPrecision):
    """The precision plugin of Fabric's ``ZeROStrategy``, built from ``Fabric(precision=...)``.

    Under ``16-mixed``, ``fabric.backward`` scales the loss; steps unscale and may be skipped.
    """

    plugins = Precision, HalfPrecision, DoublePrecision, MixedPrecision
    casters: ClassVar[Mapping[str, Callable[[], Precision]]] = {
        **ShardedPrecision.casters,
        "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
        "16-mixed": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler(enabled=False)),
    }

    def __init__(
        self, precision: str = "32-true", scaler: GradScaler | None = None, device: str = "cpu"
    ) -> None:
        super().__init__(precision, scaler, device)
        # By optimizer that was unscaled since its last step: whether a gradient was not finite.
        self._found_inf: dict[Optimizer, bool] = {}
        if self.scaler is not None:
            # Only now: Fabric refuses `loss.backward()` if a precision has a `backward` of its own.
            self.backward = self._scaled_backward  # type: ignore[method-assign]

    def _scaled_backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        assert self.scaler is not None
        super().backward(tensor * self.scaler.get_scale(), *args, **kwargs)

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, before they are clipped.

        Raises:
            RuntimeError: That was done before, since the optimizer's last step.
        """
        if self.scaler is None:
            return
        if optimizer in self._found_inf:
            raise RuntimeError(
                f"The gradients of {type(optimizer).__name__} were unscaled already since its last"
                " step. Under precision='16-mixed', clip them once before each step."
            )
        self._found_inf[optimizer] = self.unscaled(optimizer)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient on any rank is not finite, and move to the next loss scale."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        if kwargs.get("closure") is not None:
            raise ValueError(
                "precision='16-mixed' decides before a step whether to skip it, so an optimizer"
                " cannot be stepped with a closure. Call the closure first, or use 'bf16-mixed'."
            )
        if optimizer not in self._found_inf:
            self.unscale_gradients(optimizer)
        found_inf = self._found_inf.pop(optimizer)
        internals.update_scale(self.scaler, found_inf=found_inf)
        return None if found_inf else optimizer.step(**kwargs)


def stepped_by(optimizer: Optimizer) -> list[Engine]:
    """Return the engines whose parameters an optimizer steps."""
    return [engine for engine, _ in engines_of(map(parameter_of, members(optimizer)))]


def grads_of(optimizer: Optimizer) -> tuple[list[Piece], list[Tensor], Communicator | None]:
    """Return the pieces that an optimizer steps, gradients of its other parameters, and the ranks.

    There are no ranks if nothing is sharded.
    """
    engines = stepped_by(optimizer)
    held = members(optimizer, piece_among(engines))
    pieces = [one for one in held if isinstance(one, Piece)]
    others = [p.grad for p in held if not isinstance(p, Piece) and p.grad is not None]
    return pieces, others, engines[0].comm if engines else None
