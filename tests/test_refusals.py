"""What is refused, and what the error tells to do instead: one table.

A row is a call and a pattern of its error; add one for each argument, module or use that is given
up. The calls run on one rank, or on two.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging
from lightning.pytorch.plugins.precision import Precision
from pytorch_optimizer import Lookahead
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_zero import ZeROPrecision, ZeROStrategy, estimate, fabric, gathered, join
from lightning_zero.comm import Communicator
from lightning_zero.plan import CURES
from tests.cases import FILES, user
from tests.cases.optimizers import Wrapped, made
from tests.cases.tensor_parallel import SIZES
from tests.cases.tensor_parallel import cut as cut_in_fabric
from tests.oracle.eight_bits import quantize
from tests.oracle.models import GPT, Block
from tests.oracle.projects import WIDTH, ByHand, Regression, make_trainer, rows, wired
from tests.oracle.ranks import Pools

strategy = partial(partial, ZeROStrategy)
in_fabric = partial(partial, fabric.ZeROStrategy)
estimated = partial(partial, estimate, world_size=4)


def fit(
    module: Callable[[], Any] = Regression,
    callbacks: Any = (),
    precision: Any = "32-true",
    **settings: Any,
) -> Callable[[], Any]:
    """A Trainer's run, by default at stage 3."""

    def run() -> None:
        how = {"stage": 3, "units": {Block}, **settings}
        made = [make() for make in callbacks]
        trainer = make_trainer(ZeROStrategy(**how), callbacks=made, precision=precision)
        trainer.fit(module(), rows())

    return run


Odd: Any = type("Odd", (Precision,), {})
OfTorchao: Any = type("AdamW8bit", (Wrapped,), {"__module__": "torchao.optim.subclass"})


def but(change: Any = lambda m: None, **hooks: Callable[[Any], Any]) -> Callable[[], Any]:
    """A class of module that is changed, at once or in hooks."""

    def hook(use: Callable[[Any], Any]) -> Callable[..., None]:
        def call(m: Any, *_: Any) -> None:
            use(m)

        return call

    calls = {name: hook(use) for name, use in hooks.items()}
    return user(Regression, change, **calls)  # type: ignore[no-any-return]


def empty(module: Any) -> None:
    module.net = module.head = nn.Identity()


def unfilled(module: Any) -> None:
    """Has a child on the meta device that nothing initializes."""
    with torch.device("meta"):
        module.scales = nn.ParameterList([torch.ones(WIDTH)])


def convert_in_step(module: Any) -> None:
    module.loss(next(iter(rows())))
    module.net.to(torch.bfloat16)


def twice(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    head = {"params": list(module.head.parameters())}
    optimizer.param_groups.append({**optimizer.param_groups[0], **head})
    return optimizer


class Hoarder(torch.optim.SGD):
    """Would step what it has put aside, whatever is in its param groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.aside = [one.data for one in self.param_groups[0]["params"]]


class ChangedByItself(Block):
    """A module that changes its own weight while it runs, in the precision in which it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(1 - 1e-4)
        return super().forward(x)


def changes_itself(module: Any) -> None:
    module.lr, module.optimizer = 0.01, torch.optim.SGD
    module.net.blocks[1] = ChangedByItself(WIDTH)


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


def asks(ask: Callable[[Any], Any], optimizer: Any = torch.optim.Adam) -> Callable[[], Any]:
    """One rank asks for what all have a part of."""
    alone = lambda m: m.global_rank or ask(m.trainer.optimizers[0])  # noqa: E731
    change = lambda m: setattr(m, "optimizer", optimizer)  # noqa: E731
    return fit(but(change, on_train_batch_end=alone), stage=1)


def gathers(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """Rank 1 does something with a weight that is gathered for reading."""

    def hook(module: Any) -> None:
        with gathered(module):
            if module.global_rank:
                use(module.net.blocks[1].linear.weight)

    return fit(but(on_train_batch_end=hook))


def gather_within(module: Any) -> None:
    with gathered(module), gathered(module.head, modify=True):
        pass


def go_backward_in_join(module: Any) -> None:
    with join(module):
        module(torch.ones(2, WIDTH)).sum().backward()


def step_unsent(m: Any, batch: Any, batch_idx: int) -> None:
    """Forgets to send what it steps with."""
    optimizer: Any = m.optimizers()
    with optimizer.toggle_model(sync_grad=False):
        m.manual_backward(m(batch[0]).sum())
    optimizer.step()


def assigns(name: str, data: Any) -> Callable[[], Any]:
    """A gradient is assigned, or its data."""

    def assign(module: Any) -> None:
        weight = module.head.weight
        setattr(weight if name == "grad" else weight.grad, name, data(module))

    return fit(but(on_before_optimizer_step=assign))


def cut(module: Any, size: int = 2, **more: Any) -> Callable[[], Any]:
    make = (lambda: Cut(module)) if isinstance(module, str) else module
    return fit(
        make, units=more.pop("units", "auto"), tensor_parallel_size=size, min_num_params=0, **more
    )


def shards(*sizes: int) -> Callable[[], Any]:
    """A run in which each rank asks for copies of so many ranks."""
    return lambda: fit(shard=sizes[dist.get_rank() % len(sizes)])()


def of_rank_1(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Rank 1 alone changes something amid a run."""
    return lambda m: change(m) if m.global_rank and m.global_step == 2 else None


def freeze_a_child() -> None:
    with wired("point to point"):
        fit(but(on_train_batch_start=of_rank_1(lambda m: m.head.requires_grad_(False))))()


def add_group(module: Any) -> None:
    group = {"params": [*module.head.parameters()], "lr": 0.25 * (1 + module.global_rank)}
    if module.global_step == 2:
        module.trainer.optimizers[0].add_param_group(group)


def by_rank(**options: Any) -> Callable[[], Any]:
    """A Trainer with other options on each rank."""

    def run() -> None:
        own = {name: values[dist.get_rank()] for name, values in options.items()}
        make_trainer(3, **own).fit(Regression(), rows())

    return run


class Plateau(Regression):
    """Follows a metric of which each rank has its own, as ``sync_dist`` was forgotten."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "mine"}}

    def on_train_epoch_end(self) -> None:
        self.log("mine", float(self.current_epoch if self.global_rank else -self.current_epoch))


def follow_a_metric_of_each_rank() -> None:
    trainer = make_trainer(3, max_epochs=5)
    try:
        trainer.fit(Plateau(), rows())
    finally:
        assert trainer.global_step == 8, "no step is made with it"


def left_sharded(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """Use a module that a run has left sharded, without which there is no engine any more."""

    def run() -> None:
        module = Regression()
        make_trainer(ZeROStrategy(3, units={Block}, restore_weights=False)).fit(module, rows())
        module.trainer = None
        gc.collect()
        weight = module.net.blocks[0].linear.weight
        assert (weight.shape, weight.dtype) == ((WIDTH, WIDTH), torch.float32)
        with torch.no_grad():
            use(module)

    return run


def load_ones(module: Any) -> None:
    module.load_state_dict({name: torch.ones(p.shape) for name, p in module.named_parameters()})


def backward_late(part: Callable[[Any], Any], stage: int) -> Callable[[], Any]:
    """Go backward through a graph of a run that has ended; a new graph is that of any module."""

    def run() -> None:
        kept: list[Any] = []
        keep = lambda m: kept.extend([m, part(m)(torch.ones(2, WIDTH)).sum()])  # noqa: E731
        fit(but(on_train_end=keep), stage=stage)()
        module, loss = kept
        module(torch.ones(2, WIDTH)).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        loss.backward()

    return run


def set_up_with_an_optimizer_of_old_parameters() -> None:
    ours: Any = fabric.ZeROStrategy(3, tensor_parallel_size=2, parallelize_fn=cut_in_fabric)
    loop = Fabric(accelerator="cpu", devices=2, strategy=ours)
    loop.launch()
    net = GPT()
    loop.setup(net, torch.optim.AdamW(net.parameters()))


AWAY = {**FILES, "offload_path": tempfile.gettempdir()}


class Plugin(TorchCheckpointIO):
    """A writer of the user's own, which cannot save."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        raise OSError("this plugin is broken")


def saves(path: str, **settings: Any) -> Callable[[], Any]:
    def run() -> None:
        trainer = make_trainer(ZeROStrategy(3, **settings))
        trainer.fit(Regression(), rows(4))
        trainer.save_checkpoint(path)

    return run


# A hook changes weights in use amid a save.
CHANGED = user(
    on_save_checkpoint=lambda m, file: file["state_dict"]["head.bias"].mul_(2),
    on_train_epoch_end=lambda m: m.trainer.save_checkpoint("never.ckpt"),
)


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
    "estimate, a number": (estimated(10**6, ZeROStrategy(tensor_parallel_size=2)), V, "Pass the model to lightning_zero.estimate()"),
    "estimate, activations": (estimated(Regression(), ZeROStrategy(tensor_parallel_size=2), batch=torch.zeros(1)), V, "Activations are not counted with tensor_parallel_size"),
    "bits": (strategy(gather_bits=4), V, "Expected gather_bits to be 8"),
    "bits, twice": (strategy(reduce_bits=8, reduce_dtype="bfloat16"), V, "contradicts"),
    "bits of what is away": (estimated(Regression, ZeROStrategy(gather_bits=8, offload_optimizer="cpu", offload_weights="cpu")), V, "keeps them on an accelerator's host"),
    "rounded and away": (strategy(stochastic_rounding=True, offload_optimizer="nvme", offload_weights="nvme"), V, "offload steps parameters where they rest. Remove one"),
    "estimate, bits": (estimated(Regression, ZeROStrategy(2, gather_bits=8)), V, "gather_bits=8 has no effect"),
    # Modules and optimizers.
    "empty": (fit(but(empty), units="auto"), V, "User has no parameters, so there is nothing to shard"),
    "lazy": (fit(but(lambda m: setattr(m, "head", nn.LazyLinear(6)))), V, "'head.weight' is lazily initialized and has no shape yet"),
    "sparse": (fit(but(lambda m: setattr(m.head, "weight", nn.Parameter(torch.eye(WIDTH).to_sparse())))), V, "'head.weight' is not a dense tensor"),
    "unfilled": (fit(but(unfilled)), V, r"no `reset_parameters\(\)`"),
    "rounded in fp32": (fit(stochastic_rounding=True), V, "no parameter rests in bf16. Use precision='bf16-true'"),
    "rounded, mixing": (fit(lambda: Regression(optimizer=torch.optim.Adafactor), precision="bf16-true", stochastic_rounding=True), V, "Adafactor mixes the elements of a parameter.* and stochastic_rounding"),
    "away, mixing": (fit(lambda: Regression(optimizer=torch.optim.Adafactor), **AWAY), V, "Adafactor mixes the elements of a parameter, but offload .* remove offload_optimizer"),
    "eight bits": (fit(but(lambda m: quantize(m.head, is_frozen=False))), V, "'head.weight' is of class EightBits, .* Freeze it"),
    "eight bits, unfrozen": (fit(but(lambda m: quantize(m.head), on_train_batch_start=lambda m: m.head.weight.requires_grad_(True))), V, "'head.weight' is of class EightBits, .* Freeze it"),
    "wrapped states": (fit(made(lambda m: OfTorchao(m.parameters())), checkpoint="dcp"), V, "AdamW8bit keeps states in tensors that wrap others"),
    "own states": (fit(made(lambda m: Lookahead(torch.optim.AdamW(m.parameters()))), checkpoint="dcp"), V, r"Lookahead.state_dict\(\) has its own format"),
    "directory, plugin": (saves("a", checkpoint="dcp", checkpoint_io=Plugin()), V, "cannot be combined with Plugin"),
    "directory, URL": (saves("memory://a", checkpoint="dcp"), V, "needs a disk that all ranks share, not a URL"),
    "hoarder": (fit(lambda: Regression(optimizer=Hoarder)), V, "Hoarder keeps views of parameters outside of"),
    "twice": (fit(made(twice)), V, r"'?head.weight'? appears in more than one param group of SGD"),
    "recomputed": (fit(activation_checkpointing={nn.LSTM}), V, "activation_checkpointing=LSTM.* no such module"),
    "activations": (fit(activation_offload=True), V, "needs a device other than the host"),
    "units": (fit(units={nn.LSTM}), V, "units=LSTM matches no module of Regression"),
    "units by name": (fit(units="all"), V, "Expected units='auto', classes or a callable, got units='all'"),
    **{f"changed in half precision, stage {n}": (fit(but(changes_itself), stage=n, units={Block, ChangedByItself}, precision="bf16-mixed"), R, r"'net.blocks.1.linear.weight' .*cast_weights='none'") for n in (1, 3)},
    # Uses.
    "parametrized": (fit(but(on_train_batch_start=lambda m: nn.utils.parametrizations.weight_norm(m.head))), R, r"Parametrize the module .* before `fit`"),
    "made parameters": (fit(but(on_train_batch_start=lambda m: nn.Parameter(m.head.weight))), R, r"Parametrize the module .* before `fit`"),
    **{f"converted, stage {n}": (fit(but(**hook), stage=n), R, r"'net.stem.weight' is a view of a flat buffer.*`precision` of the Trainer") for n, hook in ((1, {"on_train_batch_start": nn.Module.half}), (3, {"training_step": convert_in_step}))},
    "backward in join": (fit(but(on_train_batch_end=go_backward_in_join)), R, r"began within `lightning_zero.join`"),
    "a graph between steps": (fit(but(on_train_batch_end=lambda m: torch.stack([p.square().sum() for p in m.parameters()]).sum().backward())), R, r"no longer in memory[.] .* `training_step`"),
    "gathered in gathered": (fit(but(on_train_batch_end=gather_within)), R, "to the outer one"),
    **{f"assigned {name} {number}": (assigns(name, data), R, r"cannot be assigned .* 'head.weight', of") for name in ("grad", "data") for number, data in enumerate((lambda m: torch.zeros(WIDTH), lambda m: torch.zeros(WIDTH, WIDTH, dtype=torch.float64)))},
    "a gradient of another": (assigns("grad", lambda m: m.net.stem.weight.grad), R, "'net.stem.weight' was assigned to parameter 'head.weight"),
    "a gradient's storage": (fit(but(on_before_optimizer_step=lambda m: m.head.weight.grad.untyped_storage().data_ptr())), R, "storage"),
    **{f"left sharded, {number}": (left_sharded(lambda m, use=use: use(m.net.blocks[0].linear.weight)), R, r"'net.blocks.0.linear.weight' .*was left sharded when training ended.*restore_weights=True") for number, use in enumerate((torch.sum, nn.init.ones_, lambda w: setattr(w, "data", torch.ones(WIDTH, WIDTH)), lambda w: w.detach().copy_(torch.ones(WIDTH, WIDTH))))},
    **{f"left sharded, {name}": (left_sharded(use), R, "was left sharded when training ended.*restore_weights=True") for name, use in (("loaded", load_ones), ("trained", lambda m: make_trainer(3).fit(m, rows())))},
    **{f"a late backward, stage {n}, {name}": (backward_late(part, n), R, "ran before the module's training ended.*Run the forward again") for n in (2, 3) for name, part in (("whole", lambda m: m), ("a child of the root", lambda m: m.head))},
    "batch size": (fit(callbacks=[BatchSizeFinder]), E, "not supported with distributed"),
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
    "a plugin that fails": (saves("a.ckpt", checkpoint_io=Plugin()), OSError, "a.ckpt' failed: on rank 0: this plugin is broken"),
    **{f"weights in use are saved changed, {kind}": (fit(CHANGED, checkpoint=kind), R, "'head.bias' .* was changed in place") for kind in ("file", "dcp")},
    **{f"unsent gradients, stage {n}": (fit(user(ByHand, training_step=step_unsent), stage=n, accumulate="local"), R, r"'net.stem.weight' is .* own.*no_backward_sync.*sync_grad=True") for n in (1, 3)},
    "another rate": (fit(but(on_train_batch_start=of_rank_1(lambda m: m.trainer.optimizers[0].param_groups[0].update(lr=0.025)))), R, "rank 1: Group 0 of optimizer 0: lr 0.025"),
    "another group": (fit(but(lambda m: setattr(m, "optimizer", lambda _, lr: torch.optim.SGD(m.net.parameters(), lr)), on_train_batch_start=add_group)), R, "rank 1: Group 1 of optimizer 0: lr 0.5"),
    **{f"frozen alone, {name}": (fit(but(on_train_batch_start=of_rank_1(lambda m, part=part: part(m).requires_grad_(False)))), R, f"rank 1: Parameter '{name}': frozen") for name, part in (("head.bias", lambda m: m.head.bias), ("net.blocks.1.norm.weight", lambda m: m.net.blocks[1]))},
    "frozen alone, a child": (freeze_a_child, R, "rank 1: Parameter 'head.weight': frozen"),
    "gloo on a device": (lambda: Communicator(torch.device("cuda", 0)), V, r"type 'cuda'.*'gloo'.*process_group_backend='nccl'"),
    "other precisions": (by_rank(precision=("32-true", "bf16-mixed")), R, "rank 1: The Trainer: precision 'bf16-mixed'"),
    "other clipping": (by_rank(gradient_clip_val=(None, 2)), R, "rank 0: The Trainer: gradient_clip_val None"),
    "other rates": (follow_a_metric_of_each_rank, R, "rank 1: Group 0 of optimizer 0: lr 0.025"),
    **{f"edited what was gathered, {number}": (gathers(use), R, r"(A parameter on another rank|'net.blocks.1.linear.weight') was changed(?s:.*)modify=True") for number, use in enumerate((lambda w: w.data.mul_(2.0), nn.init.ones_, lambda w: setattr(w, "data", torch.full_like(w, 3.0))))},
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
