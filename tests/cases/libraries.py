"""Models of Transformers, and PEFT's adapters.

Models of random weights and few units, each with something of its own: two towers and a
temperature, weight norm as a parametrization, one layer that is called many times, a scan, experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchmetrics
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.oracle.play import UNUSED, Player, case, widen
from tests.oracle.projects import Regression, Trace

NUM_ROWS, WORD = 12, 16
TEXT = {"vocab_size": WORD, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL: dict[str, Any] = {"min_num_params": 1000, "units": "auto"}
"""Settings in which every block is a unit."""


def words(length: int = 6) -> Tensor:
    return torch.randint(3, WORD, (length,))


def text() -> dict[str, Tensor]:
    tokens = words()
    return {"input_ids": tokens, "labels": tokens}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 16, 16), "labels": torch.randint(4, ())}


def build(name: str, config: dict[str, Any]) -> Any:
    family = name.split("For")[0].removesuffix("Model").removesuffix("LMHead")
    return getattr(transformers, name)(getattr(transformers, f"{family}Config")(**config))


class Wrapped(Regression):
    """A model of another package, with a metric."""

    def __init__(self, make: Callable[[], Any], generates: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head = make(), nn.Identity()
        self.mean, self.generates = torchmetrics.MeanMetric(), generates

    def loss(self, batch: Any) -> Tensor:
        more = {"return_loss": True} if "CLIP" in type(self.net).__name__ else {}
        return self.net(**batch, **more).loss

    def configure_optimizers(self) -> Any:
        # The gradient of a key's bias is zero but for rounding; a small eps would make it a step.
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean(self.loss(batch))
        self.log("val", self.mean)
        if self.generates:
            how = {"do_sample": False, "min_length": self.generates, "max_length": self.generates}
            self.notes.append(self.net.generate(batch["input_ids"][:, :4], **how).tolist())


def loaders(row: Callable[[], dict[str, Tensor]]) -> Any:
    torch.manual_seed(0)
    rows: Any = [row() for _ in range(NUM_ROWS)]
    return DataLoader(rows, batch_size=2), DataLoader(rows[:4], batch_size=2)


USUAL: dict[str, Any] = {"ddp": UNUSED, "num_sanity_val_steps": 0, "settings": (SMALL,), "ulps": 256, "gradient_clip_val": 1.0}  # fmt: skip


def train(name: str, make: Any, row: Any = text, generates: int = 0, **more: Any) -> None:
    """Declare a case; losses and weights agree to a small part of a step."""
    case("libraries", partial(Wrapped, make, generates), name, data=lambda: loaders(row), **{**USUAL, **more})  # fmt: skip


DECODER = {**TEXT, **HEADS, "num_key_value_heads": 2, "max_position_embeddings": 32, "intermediate_size": 64}  # fmt: skip
EXPERTS = {**DECODER, "output_router_logits": True, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gpt2": ("GPT2LMHeadModel", {**TEXT, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}, text),
    "llama": ("LlamaForCausalLM", DECODER, text),
    "bert": ("BertForMaskedLM", {**TEXT, **HEADS, "intermediate_size": 64, "max_position_embeddings": 32}, text),
    "t5": ("T5ForConditionalGeneration", {**TEXT, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
                                          "decoder_start_token_id": 0}, text),
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}, text),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48,
                                          "shared_expert_intermediate_size": 32}, text),
    "vit": ("ViTForImageClassification", {**HEADS, "intermediate_size": 64, "image_size": 16, "patch_size": 8,
                                          "num_labels": 4}, image),
}  # fmt: skip
INNER: dict[str, list[str]] = {
    "gpt2": ["Conv1D"], "llama": ["LlamaMLP", "LlamaAttention", "Linear"], "t5": ["T5Attention", "T5DenseActDense"],
    "mixtral": ["MixtralExperts", "MixtralTopKRouter"],
}  # fmt: skip
"""Units that are smaller than blocks, or within them."""


def checkpointed(use_reentrant: bool, model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


for number, (name, (kind, config, row)) in enumerate(FAMILIES.items()):
    make = partial(build, kind, config)
    generates = 10 if name in ("gpt2", "llama", "t5", "mixtral") else 0
    train(name, make, row, generates=generates, precisions=("32-true", "32-true", "bf16-mixed"), stages=(3, 1 + number % 2, 3 - number % 3))  # fmt: skip
    if name in INNER:
        units = lambda module, names=INNER[name]: type(module).__name__ in names  # noqa: E731
        train(f"{name}_in_small_units", make, row, settings=({"units": units},), accumulate_grad_batches=2,
              stages=(3,))  # fmt: skip
        again = name in ("gpt2", "mixtral")
        train(f"{name}_checkpointed_{again}", lambda m=make, a=again: checkpointed(a, m()), row, stages=(3,), ddp="ddp")  # fmt: skip

# -- adapters on a frozen base ---------------------------------------------------------------------


def adapted(dtype: torch.dtype = torch.float32, *, checkpointing: bool = False) -> Any:
    how = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    model = get_peft_model(build("LlamaForCausalLM", DECODER).to(dtype), LoraConfig(task_type="CAUSAL_LM", **how))  # fmt: skip
    if checkpointing:
        model.enable_input_require_grads()
    return checkpointed(True, model) if checkpointing else model


train("lora", adapted, stages=(1, 2, 3), rests=True)
train("lora_checkpointed", lambda: adapted(checkpointing=True), ddp="ddp")
train("lora_on_bf16", lambda: adapted(torch.bfloat16), dtype=torch.bfloat16)

# -- built on meta ---------------------------------------------------------------------------------


def build_on_meta(make: Callable[[], Any], m: Any) -> None:
    """Build in `configure_model`, without memory or values."""
    if m.net is None:
        with m.trainer.init_module(empty_init=True):
            m.net = make()


def on_meta(kind: str, config: dict[str, Any], row: Any, play: Player) -> Trace:
    """Every tensor has the distribution that `_init_weights` gives it; constants are equal."""
    make = partial(build, kind, config)
    module: Any = Wrapped(make if play.is_ddp else lambda: None)
    if not play.is_ddp:
        module.configure_model = partial(build_on_meta, make, module)
    play.fit(module, *loaders(row), strategy=play.strategy(**SMALL), max_steps=0)
    tensors = [*module.net.named_parameters(), *module.net.named_buffers()]
    return Trace({}, notes=[(name, statistics_of(value.detach())) for name, value in tensors])


def statistics_of(value: Tensor) -> Any:
    """Return what values that are drawn alike have in common: coarse, where they are drawn."""
    if not value.is_floating_point() or value.unique().numel() < 20:
        return value.clone()
    # The spread of a few numbers is chance.
    steps = 2 if value.numel() >= 256 else 0.5
    value, zero_rows = value.double(), (value == 0).all(-1).tolist()
    spread = float(value.std())
    return [zero_rows, round(math.log2(spread) * steps), float(value.mean().abs()) < spread]


for name in ("gpt2", "llama", "mixtral", "vit"):
    case("libraries", name=f"{name}_on_meta", loop=partial(on_meta, *FAMILIES[name]), stages=(1, 3), ddp="ddp")  # fmt: skip

# -- a row for each project ------------------------------------------------------------------------


BERT = {**TEXT, **HEADS, "intermediate_size": 64, "max_position_embeddings": 16}
VISION = {**HEADS, "intermediate_size": 64, "image_size": 16, "patch_size": 8, "projection_dim": 16}
WAV2VEC2 = {
    **TEXT, **HEADS, "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 8, "apply_spec_augment": False, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
    "num_feat_extract_layers": 2,
}  # fmt: skip
PROJECTS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "clip": ("CLIPModel", {"text_config": {**BERT, "projection_dim": 16}, "vision_config": VISION, "projection_dim": 16},
             lambda: {"input_ids": words(), "pixel_values": torch.randn(3, 16, 16)}),
    "mamba": ("MambaForCausalLM", {**TEXT, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}, text),
    "wav2vec2": ("Wav2Vec2ForCTC", WAV2VEC2, lambda: {"input_values": torch.randn(400), "labels": words(3)}),
    "albert": ("AlbertForMaskedLM", {**BERT, "embedding_size": 16, "num_hidden_layers": 3, "inner_group_num": 1}, text),
}  # fmt: skip
for name, (kind, config, row) in PROJECTS.items():
    train(name, partial(build, kind, config), row, stages=(1, 3), ulps=4096, is_slow=True)

widen("gpt2", worlds=(1, 2))
