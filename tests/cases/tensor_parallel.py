"""Tensor parallelism beside ZeRO: two ranks that share their rows have the numbers of DDP."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import SumMetric

from lightning_zero import ZeROStrategy, gathered, grad_norm
from lightning_zero.fabric import ZeROStrategy as FabricStrategy
from tests.oracle.models import GPT
from tests.oracle.models import TransformerBlock as Block
from tests.oracle.play import Player, case
from tests.oracle.projects import Trace
from tests.oracle.tensor_parallel import Model, loader, parallelize

TWO: dict[str, Any] = {"cut": 2, "worlds": (4,), "data": lambda: (loader(12),), "ulps": 168}
FILES = {"offload_optimizer": "nvme", "offload_weights": "nvme"}


def row(name: str, module: Callable[[], LightningModule], **options: Any) -> None:
    """Declare a case of two by two ranks."""
    case("tensor parallel", module, name, **{**TWO, **options})


def by_sequence(optimizer: str = "AdamW") -> Callable[[], Model]:
    return lambda: Model(by_sequence=True, optimizer=optimizer)


row("cut", by_sequence(), rests=True, accumulate_grad_batches=2, gradient_clip_val=0.3)
row("cut_in_mixed_precision", by_sequence("SGD"), precisions=("bf16-mixed",), gradient_clip_val=0.5)
row("cut_and_saved", Model, stages=(3,), max_epochs=2, save_at=1, readers=("own", "of ddp", "ddp", 3))  # fmt: skip
BESIDE = ({"shard": 1, "async_checkpoint": True}, {"checkpoint": "dcp"}, FILES, {"shard": 1, "offload_optimizer": "nvme"})  # fmt: skip
row("cut_with_other_settings", Model, stages=(1, 3, 3, 2), settings=BESIDE, max_epochs=2, save_at=1,
    readers=("own",), limit_train_batches=2)  # fmt: skip


class Counting(Model):
    """Adds up over ranks what their batches give, in every way; a group counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()
        self.notes: list[Any] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        # Under DDP each of two ranks counts what a group has.
        self.copies = 1 if isinstance(self.trainer.strategy, ZeROStrategy) else 2
        self.seen.update(loss.detach() / self.copies)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        epoch: dict[str, Any] = {"sync_dist": True, "on_step": False, "on_epoch": True}
        self.log("mean", loss, **epoch)
        self.log("sum", loss / self.copies, reduce_fx="sum", **epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of what Lightning calls
            others = self.all_gather(loss, sync_grads=True)[:: self.copies]
        self.notes.append(others.tolist())
        return others.square().sum()

    def on_train_epoch_end(self) -> None:
        decide = self.trainer.strategy.reduce_boolean_decision
        self.notes += [decide(self.global_rank == 0), decide(self.global_rank == 0, all=False)]


@case("tensor parallel", worlds=(4,), cut=2, stages=(3,), ulps=168)
def cut_and_counted(play: Player) -> Trace:
    trace = play.fit(module := Counting(), loader(12))
    assert play.is_ddp or module.seen.dist_sync_fn is None
    return trace


class LossByParts(Model):
    """Prepares the inputs of its head, and takes its loss of cut logits."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        self.net = GPT()
        del self.net.scale
        if (mesh := self.device_mesh) is not None:
            parallelize(self.net, mesh["tensor_parallel"], by_sequence=True, with_head=False)
            for style in (
                PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            ):
                parallelize_module(self.net, mesh["tensor_parallel"], {"head": style})

    def forward(self, text: Tensor) -> Any:
        x = self.net.embed(text) + self.net.places(torch.arange(GPT.length).expand_as(text))
        for block in self.net.blocks:
            x = block(x)
        return self.net.head(self.net.norm(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        (text,) = batch
        logits = self(text[:, :-1])
        assert isinstance(logits, DTensor) == (self.device_mesh is not None)
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.losses.append(whole(loss).item())
        return loss

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        with loss_parallel():
            super().backward(loss)


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


row("cut_logits", LossByParts, stages=(3,))


class Grouped(Model):
    """Gives its optimizer some parameters as attributes of their modules, and some later."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def configure_optimizers(self) -> Any:
        later = ("net.head.weight", "net.blocks.1.up.weight", "net.blocks.1.out.bias")
        rest = [p for name, p in self.named_parameters() if name not in later]
        head = {"params": [self.net.head.weight], "lr": 0.002}
        return torch.optim.AdamW([head, {"params": rest}], lr=0.01)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zero_grad()


class Between(Callback):
    """Reads and changes weights between steps, through the module and through `parameters()`."""

    kept: tuple[Tensor, ...] = ()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in module.parameters()]
        module.notes.append(torch.nn.utils.get_total_norm(grads).item())
        weight = module.net.head.weight
        module.notes += [weight.grad.norm().item(), grad_norm(weight).item()]

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        net, block = module.net, module.net.blocks[0]
        is_ours = isinstance(trainer.strategy, ZeROStrategy)
        if trainer.global_step == 1:
            later = [net.blocks[1].up.weight, net.blocks[1].out.bias]
            trainer.optimizers[0].add_param_group({"params": later, "lr": 0.003})
            block.up.weight.mul_(0.5)
            block.down.bias.add_(0.25)
            for parameter in net.head.parameters():
                parameter.mul_(2)
            block.query.weight.data.mul_(2)
            block.value.weight.t().mul_(0.5)
            block.down.weight.data = block.down.weight.data * 2
            block.out.weight.register_hook(lambda _: module.notes.append("hook"))
            self.kept = block.up.weight, block.up.weight.data
            for is_trained in (False, True):
                net.places.weight.requires_grad = is_trained
                (parameter,) = net.places.parameters()
                module.notes.append(parameter.requires_grad)
        if trainer.global_step == 2:
            with gathered(module, modify=True):
                if not is_ours or trainer.global_rank < 2:  # the first rank of each part
                    net.norm.weight.mul_(1.5)
                    net.head.weight.mul_(0.5)
        if trainer.global_step == 3:
            for kept in self.kept:  # which raises nothing
                kept.sum()
        with gathered(module):
            module.notes.append(whole(net.head.weight).norm().item())


row("cut_and_changed_between_steps", Grouped, stages=(2, 3), callbacks=lambda: [Between()])


# -- optimizers that look at whole parameters, and compiled blocks ---------------------------------


class Optimized(Model):
    """Steps by an optimizer of `make`, and notes a state between steps, which is whole."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__(by_sequence=True)
        self.make, self.notes = make, list[Any]()

    def configure_optimizers(self) -> Any:
        return self.make(self)

    def on_train_batch_end(self, *args: Any) -> None:
        state = self.trainer.optimizers[0].state.get(
            dict(self.named_parameters())["net.blocks.0.down.weight"], {}
        )
        self.notes = [{name: torch.as_tensor(value).clone() for name, value in state.items()
                       if isinstance(value, (Tensor, float, int))}]  # fmt: skip


def muon(model: Any) -> Any:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)


def adafactor(model: Any) -> Any:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def lbfgs(model: Any) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=3)


MIXING: dict[str, Any] = {
    "max_epochs": 2,
    "limit_train_batches": 1,
    "save_at": 1,
    "readers": ("own", "ddp"),
    "is_slow": True,
}
# Muon multiplies in bf16: one rounding of its update there is 2**14 ulps of a weight in fp32.
row("cut_under_muon", lambda: Optimized(muon), stages=(3,), **{**MIXING, "ulps": 2**15})
row("cut_under_adafactor", lambda: Optimized(adafactor), stages=(1, 3), settings=({"shard": 1}, {}), **MIXING)  # fmt: skip
row("cut_under_lbfgs", lambda: Optimized(lbfgs), stages=(2,), is_slow=True)


class Compiled(Model):
    """Compiles its blocks, one by one or with all that is around them."""

    def __init__(self, way: str) -> None:
        super().__init__(by_sequence=way == "in place")
        self.way = way

    def configure_model(self) -> None:
        if self.net is not None:
            return
        super().configure_model()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for index, block in enumerate(self.net.blocks):
            if self.way == "in place":
                block.compile(backend="aot_eager", fullgraph=True)
            elif self.way == "submodules":
                self.net.blocks[index] = torch.compile(block, backend="aot_eager")
        if self.way == "body":
            self.net = torch.compile(self.net, backend="aot_eager")

    def on_train_end(self) -> None:
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["calls_captured"] > 40, "something was compiled"
        if self.way != "body":
            assert counters["stats"]["unique_graphs"] == 1, "one for both blocks"
            assert not counters["graph_break"]


# To compile costs seconds on each rank: at one stage there are also data-parallel ranks.
for way, stage, world in (("in place", 1, 2), ("submodules", 3, 4), ("body", 2, 2)):
    row(f"cut_and_compiled_{way.replace(' ', '_')}", lambda w=way: Compiled(w), stages=(stage,), worlds=(world,),
        max_steps=2, settings=({"units": {Block}},), is_slow=True)  # fmt: skip


# -- loops of Fabric -------------------------------------------------------------------------------


def cut(net: Any, mesh: Any) -> Any:
    parallelize(net, mesh["tensor_parallel"], by_sequence=True)
    return net


def in_fabric(by_hand: bool, play: Player) -> Trace:
    """Train a GPT that is cut by hand or by the strategy; go on from its file, also under DDP."""
    path = play.folder / "cut.ckpt"

    def run(fabric: Any, first: int = 0) -> list[float]:
        is_ours = isinstance(fabric.strategy, FabricStrategy)
        torch.manual_seed(0)
        net: Any = GPT()
        if by_hand and is_ours:
            cut(net, fabric.strategy.device_mesh)
        net = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), 0.01))
        state, data, losses = {"net": net, "optimizer": optimizer}, loader(), []
        if first:
            fabric.load(path, state)
        if not is_ours:
            sampler = DistributedSampler(data.dataset, 2, play.rank // 2, shuffle=False)  # type: ignore[arg-type]
            data = DataLoader(data.dataset, data.batch_size, sampler=sampler)
        batches = fabric.setup_dataloaders(data, use_distributed_sampler=is_ours)
        for step, (text,) in zip(range(4), batches, strict=False):
            if step < first:
                continue
            with fabric.no_backward_sync(net, enabled=step % 2 == 0):
                loss = F.cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
                fabric.backward(loss / 2)
            losses += [loss.item(), float(fabric.all_reduce(loss.detach()))]
            if step % 2:
                losses.append(float(fabric.clip_gradients(net, optimizer, max_norm=0.3)))
                optimizer.step()
                optimizer.zero_grad()
            if step == 1 and not first:
                fabric.save(path, state)
        return losses

    how: dict[str, Any] = {"tensor_parallel_size": 2, "min_num_params": 0, "units": "auto"}
    how["parallelize_fn"] = None if by_hand else cut
    losses, is_exact = run(play.fabric(**how)), play.way.precision == "32-true"
    ddp: dict[str, Any] = {"accelerator": "cpu", "devices": 4, "strategy": "ddp"}
    for other in (
        () if play.is_ddp else (play.fabric(**how), Fabric(**ddp, precision=play.way.precision))
    ):  # type: ignore[arg-type]
        other.launch()
        assert run(other, first=2) == pytest.approx(losses[-5:], rel=5e-5 if is_exact else 0.03)
    return Trace({}, losses=losses, saved=torch.load(path) if is_exact else None)


for by_hand in (False, True):
    case("tensor parallel", name=f"cut_in_fabric_{by_hand}", loop=partial(in_fabric, by_hand), worlds=(4,), cut=2,
         stages=(2 if by_hand else 3,), precisions=("32-true",) if by_hand else ("32-true", "bf16-mixed"))  # fmt: skip


# -- models of Transformers that are split by the plans that they carry ----------------------------

WORDS = 25  # the tensor-parallel ranks have parts of different sizes
SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {}),
    "Gemma3": (
        "Gemma3TextConfig",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
    ),
    "Phi3": ("Phi3Config", {}),
    "Olmo2": ("Olmo2Config", {}),
    "Glm4": ("Glm4Config", {}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": ("Qwen3MoeConfig", {"num_experts": 4, **EXPERTS}),
    "DeepseekV3": ("DeepseekV3Config", LATENT),
}


class Planned(LightningModule):
    """A model that knows nothing of tensor parallelism."""

    def __init__(self, kind: str, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(0)
        name, own = MODELS[kind]
        sizes = {
            key: value for key, value in SIZES.items() if (kind, key) != ("DeepseekV3", "head_dim")
        }
        config = getattr(transformers, name)(**{**sizes, **own})
        self.net: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
        self.optimizer = optimizer
        self.losses: list[float] = []
        self.notes: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        (text,) = batch
        loss = self.net(input_ids=text, labels=text).loss
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(float(grad_norm(self)))

    def configure_optimizers(self) -> Any:
        if self.optimizer != "SGD":
            # A small eps would make steps of the roundings of gradients near zero.
            eps = (None, 1e-3) if self.optimizer == "Adafactor" else 1e-3
            return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01, eps=eps)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def text() -> Any:
    tokens = torch.randint(3, WORDS, (12, 8), generator=torch.Generator().manual_seed(1))
    return (DataLoader(TensorDataset(tokens), batch_size=2),)


def copied(model: Any) -> list[float]:
    """The losses of a model, of its deep copy, and of that when the model has changed."""
    given = {name: torch.arange(16).view(2, 8) + 3 for name in ("input_ids", "labels")}
    net = copy.deepcopy(model.net)
    losses = [each(**given).loss.item() for each in (model.net, net)]
    with torch.no_grad():
        for parameter in model.net.parameters():
            parameter.zero_()
    return [*losses, net(**given).loss.item()]


PLANNED: dict[str, Any] = {"data": text, "gradient_clip_val": 1.0}
row("planned_and_copied", lambda: Planned("Qwen3Moe"), **PLANNED, worlds=(2,), stages=(1,), max_steps=1,
    moments={"on_train_end": copied})  # fmt: skip
for kind in MODELS:
    row(f"planned_{kind}", lambda k=kind: Planned(k), **PLANNED, stages=(1, 3),
        is_slow=kind not in ("Llama", "Qwen3Moe"))  # fmt: skip
row("planned_whole_matrices", lambda: Planned("Qwen3Moe", "Adafactor"), **PLANNED, stages=(3,), ulps=512)  # fmt: skip
for kind in ("Qwen3Moe", "Glm4"):
    row(f"planned_files_{kind}", lambda k=kind: Planned(k, "AdamW"), **PLANNED, stages=(3,), max_epochs=2, ulps=512,
        limit_train_batches=2, save_at=1, readers=("own", "of ddp", "ddp", 2), is_slow=kind == "Glm4")  # fmt: skip
