"""Tensor parallelism beside ZeRO: two ranks that share their rows have the numbers of DDP."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.fabric import Fabric
from lightning.pytorch import Callback
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
from tests.cases import FILES, SAVED, STATES, all_gather, user
from tests.cases.modules import in_place, submodules
from tests.cases.optimizers import made, muon, of
from tests.oracle.models import GPT
from tests.oracle.models import TransformerBlock as Block
from tests.oracle.play import Player, case
from tests.oracle.projects import Trace
from tests.oracle.tensor_parallel import Model, loader, parallelize

TWO: dict[str, Any] = {"cut": 2, "worlds": (4,), "data": lambda: (loader(12),), "ulps": 168}


def row(name: str, module: Any, **options: Any) -> None:
    """Declare a case of two by two ranks."""
    case("tensor parallel", module, name, **{**TWO, **options})


by_sequence = partial(Model, by_sequence=True)
row("cut", by_sequence, rests=True, accumulate_grad_batches=2, gradient_clip_val=0.3)
row("cut_in_mixed_precision", partial(by_sequence, optimizer="SGD"), precisions=("bf16-mixed",), gradient_clip_val=0.5)  # fmt: skip
row("cut_and_saved", Model, stages=(3,), max_epochs=2, save_at=1, readers=("of ddp", "ddp", 3))  # fmt: skip
BESIDE = ({"shard": 1, **STATES}, {"checkpoint": "dcp", "async_checkpoint": True}, FILES)  # fmt: skip
row("cut_with_other_settings", Model, stages=(2, 3, 3), settings=BESIDE, max_epochs=2, save_at=1,
    readers=("own",), limit_train_batches=1)  # fmt: skip


class Counting(Model):
    """Adds up over ranks what their batches give, in every way; a group counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SumMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        # Under DDP each of two ranks counts what a group has.
        self.copies = 1 if isinstance(self.trainer.strategy, ZeROStrategy) else 2
        self.seen.update(loss.detach() / self.copies)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        epoch: dict[str, Any] = {"sync_dist": True, "on_step": False, "on_epoch": True}
        self.log("mean", loss, **epoch)
        self.log("sum", loss / self.copies, reduce_fx="sum", **epoch)
        others = all_gather(self, loss, sync_grads=True)[:: self.copies]
        self.notes.append(others.tolist())
        return others.square().sum()

    def on_train_epoch_end(self) -> None:
        decide = self.trainer.strategy.reduce_boolean_decision
        self.notes += [decide(self.global_rank == 0), decide(self.global_rank == 0, all=False)]


row("cut_and_counted", Counting, stages=(3,))


class LossByParts(Model):
    """Prepares the inputs of its head, and takes its loss of cut logits."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        self.net = GPT()
        del self.net.scale
        self.net.scale = 1.0  # which a cut tensor may be multiplied by
        if (mesh := self.device_mesh) is not None:
            parallelize(self.net, mesh["tensor_parallel"], by_sequence=True, with_head=False)
            for style in (
                PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            ):
                parallelize_module(self.net, mesh["tensor_parallel"], {"head": style})

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


def in_groups(m: Any) -> Any:
    """Give an optimizer some parameters as attributes of their modules, and some later."""
    later = ("net.head.weight", "net.blocks.1.up.weight", "net.blocks.1.out.bias")
    rest = [p for name, p in m.named_parameters() if name not in later]
    head = {"params": [m.net.head.weight], "lr": 0.002}
    return torch.optim.AdamW([head, {"params": rest}], lr=0.01)


class Between(Callback):
    """Reads and changes weights between steps, through the module and through `parameters()`."""

    kept: tuple[Tensor, ...] = ()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in module.parameters()]
        weight = module.net.head.weight
        norms = torch.nn.utils.get_total_norm(grads), weight.grad.norm(), grad_norm(weight)
        module.notes += [float(norm) for norm in norms]

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


row("cut_and_changed_between_steps", user(Model, configure_optimizers=in_groups, on_before_zero_grad=lambda m, _: m.zero_grad()),
    stages=(2, 3), callbacks=lambda: [Between()])  # fmt: skip


# -- optimizers that look at whole parameters, and compiled blocks ---------------------------------


def state_of_one(m: Any, *_: Any) -> Any:
    weight = dict(m.named_parameters())["net.blocks.0.down.weight"]
    state = m.trainer.optimizers[0].state.get(weight, {}).items()
    return {k: torch.as_tensor(v).clone() for k, v in state if isinstance(v, (Tensor, float, int))}


# A state is read between steps, where it is whole.
RESUMED: dict[str, Any] = {**SAVED, "limit_train_batches": 1, "readers": ("own", "ddp"), "moments": {"on_train_batch_end": state_of_one}}  # fmt: skip
# Muon multiplies in bf16: one rounding of its update there is 2**14 ulps of a weight in fp32, and
# sums over tensor-parallel ranks shift a few of them.
MIXING: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (muon, {**RESUMED, "stages": (3,), "ulps": 2**16}),
    "adafactor": (of(torch.optim.Adafactor), {**RESUMED, "stages": (1, 3), "settings": ({"shard": 1}, {})}),
    "lbfgs": (of(torch.optim.LBFGS, 0.1, max_iter=2, history_size=3), {"stages": (2,)}),
}  # fmt: skip
for name, (make, how) in MIXING.items():
    row(f"cut_under_{name}", partial(made(make, Model), by_sequence=True), is_slow=True, **how)


class Compiled(Model):
    """Compiles its blocks; torch cannot trace a vocabulary that is cut, as the embedding's is."""

    def __init__(self, compiles: Any) -> None:
        super().__init__(by_sequence=compiles is in_place)
        self.compiles = compiles

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            self.compiles(self)

    def on_train_end(self) -> None:
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["calls_captured"] >= 20, "something was compiled"
        assert counters["stats"]["unique_graphs"] == 1, "one for both blocks"
        assert not counters["graph_break"]


# To compile costs seconds on each rank: at one stage there are also data-parallel ranks.
for way, stage, world in ((in_place, 1, 2), (submodules, 3, 4)):
    row(f"cut_and_compiled_{way.__name__}", partial(Compiled, way), stages=(stage,), worlds=(world,),
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
    # In half precision DDP's numbers would show little.
    others = [] if play.is_ddp else [play.fabric(**how), *([Fabric(**ddp)] * is_exact)]
    for other in others:
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
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Gemma3": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
    "Phi3": {},
    "Olmo2": {},
    "Glm4": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, **EXPERTS},
    "DeepseekV3": LATENT,
}


class Planned(Model):
    """A model that knows nothing of tensor parallelism."""

    def __init__(self, kind: str, optimizer: str = "SGD") -> None:
        super().__init__(optimizer=optimizer)
        torch.manual_seed(0)
        sizes = {key: size for key, size in SIZES.items() if (kind, key) != ("DeepseekV3", "head_dim")}  # fmt: skip
        name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
        config = getattr(transformers, name)(**{**sizes, **MODELS[kind]})
        self.net: Any = getattr(transformers, f"{kind}ForCausalLM")(config)

    def training_step(self, batch: Any, index: int) -> Tensor:
        (text,) = batch
        loss = self.net(input_ids=text, labels=text).loss
        self.losses.append(loss.item())
        return loss

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


PLANNED: dict[str, Any] = {"data": text, "gradient_clip_val": 1.0, "moments": {"on_before_optimizer_step": lambda m, _: float(grad_norm(m))}}  # fmt: skip
row("planned_and_copied", partial(Planned, "Qwen3Moe"), **{**PLANNED, "moments": {"on_train_end": copied}}, worlds=(2,), stages=(1,),
    max_steps=1)  # fmt: skip
for kind in MODELS:
    row(f"planned_{kind}", partial(Planned, kind), **PLANNED, stages=(1, 3),
        is_slow=kind not in ("Llama", "Qwen3Moe"))  # fmt: skip
row("planned_whole_matrices", partial(Planned, "Qwen3Moe", "Adafactor"), **PLANNED, stages=(3,), ulps=512)  # fmt: skip
for kind in ("Qwen3Moe", "Glm4"):
    row(f"planned_files_{kind}", partial(Planned, kind, "AdamW"), **PLANNED, stages=(3,), max_epochs=2, ulps=512,
        limit_train_batches=2, save_at=1, readers=("own", "of ddp", "ddp", 2), is_slow=kind == "Glm4")  # fmt: skip
