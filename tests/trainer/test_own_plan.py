"""Models of Transformers that are split by the plans that they carry, against DDP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeROStrategy, grad_norm
from tests.oracle.by_trainer import Stop, make_trainer
from tests.oracle.ranks import Pools
from tests.oracle.tensor_parallel import assert_like_ddp, weights_of

WORDS = 25  # the tensor-parallel ranks have parts of different sizes
_SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8,
}  # fmt: skip
_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {}),
    "Gemma3": ("Gemma3TextConfig", _WINDOWS),
    "Phi3": ("Phi3Config", {}),
    "Olmo2": ("Olmo2Config", {}),
    "Glm4": ("Glm4Config", {}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": ("Qwen3MoeConfig", {"num_experts": 4, **_EXPERTS}),
    "DeepseekV3": ("DeepseekV3Config", _LATENT),
}


class Model(LightningModule):
    """A model that knows nothing of tensor parallelism."""

    def __init__(self, kind: str, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(0)
        name, own = MODELS[kind]
        sizes = {**_SIZES}
        if kind == "DeepseekV3":
            del sizes["head_dim"]
        config = getattr(transformers, name)(**{**sizes, **own})
        self.net: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
        self.optimizer, self.losses, self.norms = optimizer, list[float](), list[float]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        (text,) = batch
        loss = self.net(input_ids=text, labels=text).loss
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self)))

    def configure_optimizers(self) -> Any:
        if self.optimizer != "SGD":
            return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _fit(
    folder: str, kind: str, strategy: dict[str, Any] | None, path: str | None = None, **more: Any
) -> dict[str, Any]:
    text = torch.randint(3, WORDS, (24, 8), generator=torch.Generator().manual_seed(1))
    model = Model(kind, more.pop("optimizer", "SGD"))
    chosen: Any = "ddp" if strategy is None else ZeROStrategy(**strategy)
    save = more.pop("save", None)
    options = {"max_steps": 3, "use_distributed_sampler": True, "gradient_clip_val": 1.0}
    options["callbacks"] = [Stop(save, 2)] if save else []
    trainer = make_trainer(dist.get_world_size(), chosen, Path(folder), **{**options, **more})
    trainer.fit(model, DataLoader(TensorDataset(text), batch_size=2), ckpt_path=path)
    is_tied = model.net.lm_head.weight is model.net.model.embed_tokens.weight
    assert is_tied == bool(model.net.config.tie_word_embeddings)
    return {"losses": model.losses, "norms": model.norms, "weights": weights_of(model)}


CUT: dict[str, Any] = {"stage": 3, "tensor_parallel_size": 2, "min_num_params": 0}


@pytest.mark.parametrize(
    "kind",
    [k if k in ("Llama", "Qwen3Moe") else pytest.param(k, marks=pytest.mark.slow) for k in MODELS],
)
def test_split_models_have_the_numbers_of_ddp(ranks: Pools, tmp_path: Path, kind: str) -> None:
    """Two by two ranks at stage 3, and one by two at stage 1."""
    for world, stage in ((4, 3), (2, 1)):
        ddp = ranks(world // 2).run(_fit, str(tmp_path), kind, None)
        found = ranks(world).run(_fit, str(tmp_path), kind, {**CUT, "stage": stage})
        assert_like_ddp(found, ddp, 2e-5)
        for rank, one in enumerate(found):
            assert one["norms"] == pytest.approx(ddp[rank // 2]["norms"], rel=2e-5)


def test_an_optimizer_of_whole_matrices_gets_packed_and_unequal_parts(
    ranks: Pools, tmp_path: Path
) -> None:
    """Adafactor looks at rows and columns of whole matrices."""
    more = {"optimizer": "Adafactor"}
    ddp = ranks(2).run(_fit, str(tmp_path), "Qwen3Moe", None, **more)
    found = ranks(4).run(_fit, str(tmp_path), "Qwen3Moe", CUT, **more)
    assert_like_ddp(found, ddp, 1e-4)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Glm4"])
def test_files_of_packed_weights_move_between_layouts(
    ranks: Pools, tmp_path: Path, kind: str
) -> None:
    folder, path, whole = str(tmp_path), str(tmp_path / "cut.ckpt"), str(tmp_path / "ddp.ckpt")
    more = {"optimizer": "AdamW"}
    ranks(4).run(_fit, folder, kind, CUT, save=path, **more)
    ranks(2).run(_fit, folder, kind, None, save=whole, **more)
    ours, theirs = torch.load(path), torch.load(whole)
    for name, value in theirs["state_dict"].items():
        # AdamW amplifies roundings of gradients near zero.
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-3, atol=1e-3)
    for number, state in theirs["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            found = ours["optimizer_states"][0]["state"][number][name]
            torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)
    resumed = ranks(2).run(_fit, folder, kind, None, whole, **more)
    runs = [(path, CUT, 4), (whole, CUT, 4), (path, {"stage": 2}, 2), (path, None, 2)]
    for file, strategy, world in runs:
        found = ranks(world).run(_fit, folder, kind, strategy, file, **more)
        assert_like_ddp(found, resumed, 1e-3)


def _copied(folder: str) -> tuple[float, float, float]:
    """Return a model's loss, that of its copy, and the copy's after a change of the model."""
    model = Model("Qwen3Moe")
    text = torch.arange(16).view(2, 8) + 3
    losses: list[float] = []

    def compare() -> None:
        copied = copy.deepcopy(model.net)
        for net in (model.net, copied):
            losses.append(net(input_ids=text, labels=text).loss.item())
        with torch.no_grad():
            for parameter in model.net.parameters():
                parameter.zero_()
        losses.append(copied(input_ids=text, labels=text).loss.item())

    model.on_train_end = compare  # type: ignore[method-assign]
    data = DataLoader(TensorDataset(torch.arange(16).view(2, 8) + 3), batch_size=2)
    strategy = ZeROStrategy(stage=1, tensor_parallel_size=2)
    make_trainer(2, strategy, Path(folder), max_steps=1).fit(model, data)
    return losses[0], losses[1], losses[2]


def test_a_deep_copy_has_its_own_forward(ranks: Pools, tmp_path: Path) -> None:
    for original, copied, later in ranks(2).run(_copied, str(tmp_path)):
        assert original == copied == later


class _Odd(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.tp_plan = {"net": "colwise"}

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def _refused(folder: str) -> str:
    try:
        trainer = make_trainer(2, ZeROStrategy(tensor_parallel_size=2), folder, max_steps=1)
        trainer.fit(_Odd(), DataLoader(torch.randn(4, 4)))
    except ValueError as error:
        return str(error)
    return ""


def test_a_plan_that_transformers_cannot_resolve_is_refused(ranks: Pools, tmp_path: Path) -> None:
    for told in ranks(2).run(_refused, str(tmp_path)):
        assert "_Odd has a `tp_plan`, but is no model of a Transformers version" in told


class _HeadNorms(LightningModule):
    """Attention whose norms of heads come after the split, with or without a plan for them."""

    def __init__(self, *, with_style: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**_SIZES)
        self.net = transformers.Qwen3ForCausalLM(config)
        if not with_style:
            plan = self.net.tp_plan
            self.net.tp_plan = {k: v for k, v in plan.items() if not k.endswith("_norm")}

    def training_step(self, batch: Any, index: int) -> Tensor:
        (text,) = batch
        return self.net(input_ids=text, labels=text).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def _forgotten(folder: str, stage: int, with_style: bool) -> str:
    data = DataLoader(TensorDataset(torch.arange(32).view(4, 8) % 20 + 3), batch_size=2)
    strategy = ZeROStrategy(stage=stage, tensor_parallel_size=2, min_num_params=0)
    trainer = make_trainer(dist.get_world_size(), strategy, Path(folder), max_steps=2)
    try:
        trainer.fit(_HeadNorms(with_style=with_style), data)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("world", "stage"), [(2, 1), (4, 3)])
def test_norms_that_no_plan_names_are_found_in_the_first_step(
    ranks: Pools, tmp_path: Path, world: int, stage: int
) -> None:
    assert ranks(world).run(_forgotten, str(tmp_path), stage, True) == [""] * world
    for told in ranks(world).run(_forgotten, str(tmp_path), stage, False):
        assert "The gradients of 4 parameters differ between the ranks" in told
        assert "'net.model.layers.0.self_attn.q_norm.weight'" in told
        assert "SequenceParallel" in told
