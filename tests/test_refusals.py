"""What is refused, and what the error tells to do instead: one table.

A row is a call and a pattern of its error; add one for each argument, module or use that is given
up. The calls run on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_zero import ZeROPrecision, ZeROStrategy, fabric
from lightning_zero.plan import CURES
from tests.oracle.eight_bits import quantize
from tests.oracle.models import Block
from tests.oracle.projects import Regression, make_trainer, rows
from tests.oracle.ranks import Pools


def strategy(*args: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: ZeROStrategy(*args, **settings)


def in_fabric(**settings: Any) -> Callable[[], Any]:
    return lambda: fabric.ZeROStrategy(**settings)


def fit(
    module: Callable[[], Any] = Regression, verb: str = "fit", callbacks: Any = (), **settings: Any
) -> Callable[[], Any]:
    """A Trainer's run at stage 3."""

    def run() -> None:
        how = {"units": {Block}, **settings}
        trainer = make_trainer(ZeROStrategy(3, **how), callbacks=[make() for make in callbacks])
        getattr(trainer, verb)(module(), *([rows()] if not callbacks else []))

    return run


class Empty(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.head = nn.Identity()


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(6)


class TrainedInEightBits(Regression):
    def __init__(self) -> None:
        super().__init__()
        quantize(self.head, is_frozen=False)


class UnfrozenInEightBits(Regression):
    def __init__(self) -> None:
        super().__init__()
        quantize(self.head)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.weight.requires_grad_(True)


class Twice(Regression):
    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.parameters())}, {"params": list(self.head.parameters())}]
        optimizer = torch.optim.SGD(groups[:1], lr=0.1)
        optimizer.param_groups.append({**optimizer.param_groups[0], **groups[1]})
        return optimizer


class Hoarder(torch.optim.SGD):
    """Would step what it has put aside, whatever is in its param groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.aside = [one.data for one in self.param_groups[0]["params"]]


class Odd(Precision):
    """A plugin that ZeRO knows nothing of."""


class Parametrized(Regression):
    """Makes parameters of those that are trained, amid the training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        nn.utils.parametrizations.weight_norm(self.head)


class MakesParameters(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        nn.Parameter(self.head.weight)


def read_what_was_left_sharded() -> None:
    module = Regression()
    make_trainer(ZeROStrategy(3, units={Block}, restore_weights=False)).fit(module, rows())
    module.net.blocks[0].linear.weight.sum()


def forget_fabrics_setup() -> None:
    fabric.ZeROStrategy()._backward_sync_control.no_backward_sync(nn.Linear(1, 1), True)


def find_batch_sizes(verb: str) -> Callable[[], Any]:
    return fit(verb=verb, callbacks=[BatchSizeFinder])


V, T, R, E = ValueError, TypeError, RuntimeError, Exception
REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # Arguments.
    "stage": (strategy(4), V, r"Expected stage to be 1, 2 or 3, got 4"),
    "launcher": (strategy(launcher="mpi"), V, r"Expected launcher to be 'subprocess' or .*got 'mpi'"),
    "prefetch": (strategy(prefetch=-1), V, "Expected prefetch to be a number of units >= 0, got -1"),
    "spawn": (strategy(launcher="spawn", restore_weights=False), V, "restore_weights=False prevents"),
    "accumulate": (strategy(1, accumulate="reduce"), V, r"accumulate='reduce' contradicts stage=1.* Use stage=2"),
    "reshard": (strategy(2, reshard_after_forward=False), V, r"reshard_after_forward=False has no effect.*stage=3"),
    "no dtype": (strategy(reduce_dtype="half8"), V, r"Expected reduce_dtype to be a torch dtype .* 'half8'"),
    "integers": (strategy(reduce_dtype="int8"), V, "Expected reduce_dtype to be a floating-point dtype"),
    "unheard of": (strategy(unheard_of=True), T, "unheard_of"),
    "precision": (lambda: ZeROPrecision("int4"), V, r"Expected a precision among '64-true'.* got 'int4'"),
    "scaler": (lambda: ZeROPrecision("32-true", scaler=object()), V, "does not scale the loss"),  # type: ignore[arg-type]
    "plugin": (strategy(precision_plugin=Odd()), T, r"precision plugin Odd. Use Trainer\(precision="),
    "fabric, plugin": (in_fabric(precision=Odd()), T, r"precision plugin Odd. Use Fabric\(precision="),
    "fabric, precision": (in_fabric(mixed_precision=1), T, "use precision='bf16-mixed' of the Trainer, or of Fabric"),
    "fabric, stage": (in_fabric(stage=4), V, "stage"),
    "fabric, unheard of": (in_fabric(unheard_of=1), T, "unheard_of"),
    **{f"fabric, {name}": (in_fabric(**{name: "dcp"}), T, name) for name in ("checkpoint", "restore_weights", "device")},
    **{name: (strategy(**{name: True}), T, f"'{name}': ") for name in CURES},
    **{f"fabric, {name}": (in_fabric(**{name: True}), T, f"'{name}': ") for name in CURES},
    # Modules and optimizers.
    "empty": (fit(Empty, units="auto"), V, "Empty has no parameters, so there is nothing to shard"),
    "lazy": (fit(Lazy), V, "'head.weight' is lazily initialized and has no shape yet"),
    "eight bits": (fit(TrainedInEightBits), V, "'head.weight' is of class EightBits, .* Freeze it"),
    "eight bits, unfrozen": (fit(UnfrozenInEightBits), V, "'head.weight' is of class EightBits, .* Freeze it"),
    "hoarder": (fit(lambda: Regression(optimizer=Hoarder)), V, "Hoarder keeps views of parameters outside of"),
    "twice": (fit(Twice), V, r"'?head.weight'? appears in more than one param group of SGD"),
    "recomputed": (fit(activation_checkpointing={nn.LSTM}), V, "activation_checkpointing=LSTM.* no such module"),
    "activations": (fit(activation_offload=True), V, "needs a device other than the host"),
    "units": (fit(units={nn.LSTM}), V, "units=LSTM matches no module of Regression"),
    "units by name": (fit(units="all"), V, "Expected units='auto', classes or a callable, got units='all'"),
    # Uses.
    "parametrized": (fit(Parametrized), R, r"Parametrize the module .* before `fit`"),
    "made parameters": (fit(MakesParameters), R, r"Parametrize the module .* before `fit`"),
    "left sharded": (read_what_was_left_sharded, R, r"'net.blocks.0.linear.weight'.*restore_weights=True"),
    "no setup": (forget_fabrics_setup, T, "no_backward_sync"),
    **{f"batch size, {v}": (find_batch_sizes(v), E, r"lightning_zero\.estimate") for v in ("fit", "validate", "test", "predict")},
}  # fmt: skip


def refuse(name: str) -> None:
    call, error, pattern = REFUSALS[name]
    with pytest.raises(error, match=pattern):
        call()


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_what_to_do(ranks: Pools, name: str) -> None:
    ranks(1).run(refuse, name)
