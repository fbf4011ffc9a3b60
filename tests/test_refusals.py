"""What is refused, and what the error tells to do instead: one table.

A row is a call and a pattern of its error; add one for each argument, module or use that is given
up. The calls run on one rank, or on two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_zero import ZeROPrecision, ZeROStrategy, estimate, fabric
from lightning_zero.plan import CURES
from tests.cases.optimizers import Made, Wrapped
from tests.cases.tensor_parallel import SIZES
from tests.cases.tensor_parallel import cut as cut_in_fabric
from tests.oracle.eight_bits import quantize
from tests.oracle.models import Block
from tests.oracle.projects import WIDTH, Regression, make_trainer, rows
from tests.oracle.ranks import Pools
from tests.oracle.tensor_parallel import GPT


def strategy(*args: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: ZeROStrategy(*args, **settings)


def in_fabric(**settings: Any) -> Callable[[], Any]:
    return lambda: fabric.ZeROStrategy(**settings)


def fit(
    module: Callable[[], Any] = Regression,
    verb: str = "fit",
    callbacks: Any = (),
    precision: Any = "32-true",
    **settings: Any,
) -> Callable[[], Any]:
    """A Trainer's run, by default at stage 3."""

    def run() -> None:
        how = {"stage": 3, "units": {Block}, **settings}
        made = [make() for make in callbacks]
        trainer = make_trainer(ZeROStrategy(**how), callbacks=made, precision=precision)
        getattr(trainer, verb)(module(), *([rows()] if BatchSizeFinder not in callbacks else []))

    return run


OfTorchao: Any = type("AdamW8bit", (Wrapped,), {"__module__": "torchao.optim.subclass"})


class Empty(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = self.head = nn.Identity()


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(6)


class Unfilled(Regression):
    """A child on the meta device that nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.scales = nn.ParameterList([torch.ones(WIDTH)])


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


class Converted(Regression):
    """Converts its weights, at rest or in a step."""

    def __init__(self, convert: Callable[[Any], Any], *, in_step: bool) -> None:
        super().__init__()
        self.convert, self.in_step = convert, in_step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.in_step:
            self.convert(self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.convert(self)
        return loss


class ChangedByItself(Block):
    """A module that changes its own weight while it runs, in the precision in which it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(1 - 1e-4)
        return super().forward(x)


class Forbidden(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01, optimizer=torch.optim.SGD)
        self.net.blocks[1] = ChangedByItself(WIDTH)


def in_half_precision(stage: int) -> Callable[[], Any]:
    return fit(Forbidden, stage=stage, units={Block, ChangedByItself}, precision="bf16-mixed")


class Initializing(nn.Module):
    """Initializes the parameters of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def _init_weights(self, module: Any) -> None:
        nn.init.ones_(self.first.weight)


class Cut(Regression):
    """Models that tensor parallelism cannot cut, each for its own reason."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        tensor_parallel, self.head = mesh["tensor_parallel"], nn.Linear(WIDTH, WIDTH)
        if self.kind == "initializer":
            with torch.device("meta"):
                self.head = Initializing()
            parallelize_module(self.head.first, tensor_parallel, ColwiseParallel())
        elif self.kind == "plan":
            self.head.tp_plan = {"head": "colwise"}
        elif self.kind != "whole":
            axis = mesh["data_parallel"] if self.kind == "other ranks" else tensor_parallel
            parallelize_module(self.head, axis, ColwiseParallel())
        if self.kind == "hooks":
            self.head.weight.register_hook(lambda grad: None)


class HeadNorms(LightningModule):
    """Attention with norms of heads behind the split, of which the plan says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
        plan = self.net.tp_plan
        self.net.tp_plan = {k: v for k, v in plan.items() if not k.endswith("_norm")}

    def training_step(self, batch: Any, index: int) -> Tensor:
        text = (batch[0].abs() * 4).long() % 20 + 3
        return self.net(input_ids=text, labels=text).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class AsksAlone(Regression):
    """One rank asks for what all have a part of."""

    def __init__(self, ask: Callable[[Any], Any], optimizer: Any = torch.optim.Adam) -> None:
        super().__init__(optimizer=optimizer)
        self.ask = ask

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0:
            self.ask(self.trainer.optimizers[0])


def asks(ask: Callable[[Any], Any], **optimizer: Any) -> Callable[[], Any]:
    return fit(lambda: AsksAlone(ask, **optimizer), stage=1)


def cut(module: Any, size: int = 2, **more: Any) -> Callable[[], Any]:
    make = (lambda: Cut(module)) if isinstance(module, str) else module
    return fit(
        make, units=more.pop("units", "auto"), tensor_parallel_size=size, min_num_params=0, **more
    )


def estimated(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: estimate(*args, world_size=4, **options)


def shards(*sizes: int) -> Callable[[], Any]:
    """A run in which each rank asks for copies of so many ranks."""
    return lambda: fit(shard=sizes[dist.get_rank() % len(sizes)])()


def read_what_was_left_sharded() -> None:
    module = Regression()
    make_trainer(ZeROStrategy(3, units={Block}, restore_weights=False)).fit(module, rows())
    module.net.blocks[0].linear.weight.sum()


def forget_fabrics_setup() -> None:
    fabric.ZeROStrategy()._backward_sync_control.no_backward_sync(nn.Linear(1, 1), True)


def find_batch_sizes(verb: str) -> Callable[[], Any]:
    return fit(verb=verb, callbacks=[BatchSizeFinder])


def set_up_with_an_optimizer_of_old_parameters() -> None:
    ours: Any = fabric.ZeROStrategy(3, tensor_parallel_size=2, parallelize_fn=cut_in_fabric)
    loop = Fabric(accelerator="cpu", devices=2, strategy=ours)
    loop.launch()
    net = GPT()
    loop.setup(net, torch.optim.AdamW(net.parameters()))


V, T, R, E = ValueError, TypeError, RuntimeError, Exception
REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # Arguments.
    "stage": (strategy(4), V, r"Expected stage to be 1, 2 or 3, got 4"),
    "launcher": (strategy(launcher="mpi"), V, r"Expected launcher to be 'subprocess', 'spawn', .*got 'mpi'"),
    "prefetch": (strategy(prefetch=-1), V, "Expected prefetch to be a number of units >= 0, got -1"),
    "spawn": (strategy(launcher="spawn", restore_weights=False), V, "restore_weights=False prevents"),
    "accumulate": (strategy(1, accumulate="reduce"), V, r"accumulate='reduce' contradicts stage=1.* Use stage=2"),
    "reshard": (strategy(2, reshard_after_forward=False), V, r"reshard_after_forward=False has no effect.*stage=3"),
    "no dtype": (strategy(reduce_dtype="half8"), V, r"Expected reduce_dtype to be a floating-point dtype .* 'half8'"),
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
    **{f"{size!r} shards": (strategy(shard=size), V, "Expected shard to be 'all', 'node' or a") for size in (0, True, 1.5, "host")},
    **{f"cut by {size}": (strategy(tensor_parallel_size=size), V, "Expected tensor_parallel_size to be 1, 'node' or a") for size in (0, 1.5, "all")},
    "cut, forked": (strategy(tensor_parallel_size=2, launcher="fork"), V, "over which tensor_parallel_size=2 cuts"),
    "cut by nobody": (in_fabric(parallelize_fn=lambda module, mesh: module), V, "parallelize_fn needs tensor_parallel_size > 1"),
    "estimate, a number": (estimated(10**6, ZeROStrategy(tensor_parallel_size=2)), V, "Pass the model instead of a number"),
    "estimate, activations": (estimated(Regression(), ZeROStrategy(tensor_parallel_size=2), batch=torch.zeros(1)), V, "Activations are not counted with tensor_parallel_size"),
    "bits": (strategy(gather_bits=4), V, "Expected gather_bits to be 8"),
    "bits, twice": (strategy(reduce_bits=8, reduce_dtype="bfloat16"), V, "contradicts"),
    "bits of what is away": (estimated(Regression, ZeROStrategy(gather_bits=8, offload_optimizer="cpu", offload_weights="cpu")), V, "keeps them on an accelerator's host"),
    "rounded and away": (strategy(stochastic_rounding=True, offload_optimizer="nvme", offload_weights="nvme"), V, "offload steps parameters where they rest. Remove one"),
    "estimate, bits": (estimated(Regression, ZeROStrategy(2, gather_bits=8)), V, "gather_bits=8 has no effect"),
    # Modules and optimizers.
    "empty": (fit(Empty, units="auto"), V, "Empty has no parameters, so there is nothing to shard"),
    "lazy": (fit(Lazy), V, "'head.weight' is lazily initialized and has no shape yet"),
    "unfilled": (fit(Unfilled), V, r"no `reset_parameters\(\)`"),
    "rounded in fp32": (fit(stochastic_rounding=True), V, "no parameter rests in bf16. Use precision='bf16-true'"),
    "rounded, mixing": (fit(lambda: Regression(optimizer=torch.optim.Adafactor), precision="bf16-true", stochastic_rounding=True), V, "Adafactor mixes the elements of a parameter.* and stochastic_rounding"),
    "eight bits": (fit(TrainedInEightBits), V, "'head.weight' is of class EightBits, .* Freeze it"),
    "eight bits, unfrozen": (fit(UnfrozenInEightBits), V, "'head.weight' is of class EightBits, .* Freeze it"),
    "wrapped states": (fit(lambda: Made(lambda m: OfTorchao(m.parameters())), checkpoint="dcp"), V, "AdamW8bit keeps states in tensors that wrap others"),
    "hoarder": (fit(lambda: Regression(optimizer=Hoarder)), V, "Hoarder keeps views of parameters outside of"),
    "twice": (fit(Twice), V, r"'?head.weight'? appears in more than one param group of SGD"),
    "recomputed": (fit(activation_checkpointing={nn.LSTM}), V, "activation_checkpointing=LSTM.* no such module"),
    "activations": (fit(activation_offload=True), V, "needs a device other than the host"),
    "units": (fit(units={nn.LSTM}), V, "units=LSTM matches no module of Regression"),
    "units by name": (fit(units="all"), V, "Expected units='auto', classes or a callable, got units='all'"),
    **{f"changed in half precision, stage {n}": (in_half_precision(n), R, r"'net.blocks.1.linear.weight' .*cast_weights='none'") for n in (1, 3)},
    # Uses.
    "parametrized": (fit(Parametrized), R, r"Parametrize the module .* before `fit`"),
    "made parameters": (fit(MakesParameters), R, r"Parametrize the module .* before `fit`"),
    **{f"converted, stage {n}, {w}": (fit(partial(Converted, c, in_step=w), stage=n), R, r"'net.stem.weight' is a view of a flat buffer.*`precision` of the Trainer") for n, w, c in ((1, False, nn.Module.half), (3, True, lambda m: m.net.to(torch.bfloat16)))},
    "left sharded": (read_what_was_left_sharded, R, r"'net.blocks.0.linear.weight'.*restore_weights=True"),
    "no setup": (forget_fabrics_setup, T, "no_backward_sync"),
    **{f"batch size, {v}": (find_batch_sizes(v), E, r"lightning_zero\.estimate") for v in ("fit", "validate", "test", "predict")},
}  # fmt: skip
OF_TWO: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shards of three": (shards(3), V, "shard=3 makes groups of 3 ranks, but 2 ranks cannot be divided"),
    "shards of some": (shards(1, 2), V, r"the same number of shards on all ranks, got {1, 2}"),
    "cut by three": (cut("hooks", 3), V, "tensor_parallel_size=3 makes groups of 3 ranks, but 2 ranks cannot be divided"),
    "cut nowhere": (cut("whole"), V, "no parameter of Cut is cut over tensor-parallel ranks"),
    "cut over others": (cut("other ranks"), V, "the strategy shards over the data-parallel ranks itself"),
    "cut, hooks": (cut("hooks"), V, "'head.weight' has hooks"),
    "cut, initializer": (cut("initializer", units={nn.Linear}), V, "Initializing initializes parameters of several units, which tensor"),
    "cut, averages": (cut("cut", callbacks=[EMAWeightAveraging]), V, "EMAWeightAveraging averages whole weights, which no rank has"),
    "cut, a plan": (cut("plan"), V, "has a `tp_plan`, but is no model of a Transformers version"),
    "cut, no plan for norms": (cut(HeadNorms, stage=1), R, r"The gradients of 4 parameters differ between the ranks(?s:.*)'net.model.layers.0.self_attn.q_norm.weight'(?s:.*)SequenceParallel"),
    "parameters that were replaced": (set_up_with_an_optimizer_of_old_parameters, V, "AdamW has parameters of no module that was set up. Create it after"),
    "all states of one rank": (asks(lambda o: o.state_dict(), optimizer=torch.optim.Adafactor), E, "the whole states of an optimizer of Adafactor"),
    "a state of one rank": (asks(lambda o: o.state[o.param_groups[0]["params"][0]]), E, "the whole states of an optimizer of Adam"),
    "the number of one rank": (asks(lambda o: len(o.state)), E, "the whole states of an optimizer of Adam"),
}  # fmt: skip
"""What two ranks refuse."""


def refuse(name: str) -> None:
    call, error, pattern = {**REFUSALS, **OF_TWO}[name]
    with pytest.raises(error, match=pattern):
        call()


@pytest.mark.parametrize("name", [*REFUSALS, *OF_TWO])
def test_refused_with_what_to_do(ranks: Pools, name: str) -> None:
    ranks(1 + (name in OF_TWO)).run(refuse, name)
