"""Models of Transformers, PEFT's adapters, optimizers of other packages, Lightning's own examples.

Models of random weights and few units, each with something of its own: two towers and a
temperature, weight norm as a parametrization, one layer that is called many times, a scan, experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_optimizer
import schedulefree
import torch
import torchmetrics
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.oracle.play import UNUSED, Player, case, widen
from tests.oracle.projects import Trace

NUM_ROWS, WORD = 12, 16
TEXT = {"vocab_size": WORD, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL: dict[str, Any] = {"min_num_params": 1000, "units": "auto"}
"""Settings in which every block is a unit."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # The gradient of a key's bias is zero but for rounding; a small eps would make it a step.
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-3)


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


class Wrapped(LightningModule):
    """An ordinary LightningModule, with a metric and an optimizer that may have modes."""

    def __init__(
        self, make: Callable[[], Any], optimizer: Callable[[Any], Any] = adamw, generates: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make()
        self.optimizer, self.generates = optimizer, generates
        self.mean = torchmetrics.MeanMetric()
        self.losses: list[float] = []
        self.notes: list[Any] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        more = {"return_loss": True} if "CLIP" in type(self.model).__name__ else {}
        return self.model(**batch, **more).loss

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.mean(self.loss(batch))
        self.log("val", self.mean)
        if self.generates:
            how = {"do_sample": False, "min_length": self.generates, "max_length": self.generates}
            self.notes.append(self.model.generate(batch["input_ids"][:, :4], **how).tolist())

    def _set_mode(self, name: str) -> None:
        change = getattr(self.optimizers(use_pl_optimizer=False), name, None)
        if change is not None:
            change()

    def on_train_epoch_start(self) -> None:
        self._set_mode("train")

    def on_validation_start(self) -> None:
        self._set_mode("eval")

    def on_validation_end(self) -> None:
        self._set_mode("train")

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return self.optimizer(trained)


def loaders(row: Callable[[], dict[str, Tensor]]) -> Any:
    torch.manual_seed(0)
    rows: Any = [row() for _ in range(NUM_ROWS)]
    return DataLoader(rows, batch_size=2), DataLoader(rows[:4], batch_size=2)


def train(
    name: str,
    make: Callable[[], Any],
    row: Any = text,
    optimizer: Any = adamw,
    generates: int = 0,
    **more: Any,
) -> None:
    """Declare a case; losses and weights agree to a small part of a step."""
    how = {
        "ddp": UNUSED,
        "num_sanity_val_steps": 0,
        "settings": (SMALL,),
        "ulps": 256,
        "gradient_clip_val": 1.0,
    }
    case("libraries", lambda: Wrapped(make, optimizer, generates), name, data=lambda: loaders(row),
         **{**how, **more})  # fmt: skip


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


def checkpointed(make: Callable[[], Any], *, use_reentrant: bool) -> Callable[[], Any]:
    def built() -> Any:
        model = make()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model

    return built


for number, (name, (kind, config, row)) in enumerate(FAMILIES.items()):
    make = lambda k=kind, c=config: build(k, c)  # noqa: E731
    generates = 10 if name in ("gpt2", "llama", "t5", "mixtral") else 0
    train(name, make, row, generates=generates)
    train(f"{name}_mixed", make, row, precisions=("bf16-mixed",), stages=(3 - number % 3,))
    if name in INNER:
        units = lambda module, names=INNER[name]: type(module).__name__ in names  # noqa: E731
        train(f"{name}_in_small_units", make, row, settings=({"units": units},), accumulate_grad_batches=2,
              stages=(3,))  # fmt: skip
        again = name in ("gpt2", "mixtral")
        model = checkpointed(make, use_reentrant=again)
        train(f"{name}_checkpointed_{again}", model, row, stages=(3,), ddp="ddp")

# -- adapters on a frozen base ---------------------------------------------------------------------


def adapted(dtype: torch.dtype = torch.float32, *, checkpointing: bool = False) -> Any:
    base = build("LlamaForCausalLM", DECODER).to(dtype)
    targets = ["q_proj", "v_proj"]
    model = get_peft_model(
        base, LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")
    )
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


train("lora", adapted, stages=(1, 2, 3), rests=True)
train("lora_checkpointed", lambda: adapted(checkpointing=True), ddp="ddp")
train("lora_on_bf16", lambda: adapted(torch.bfloat16), dtype=torch.bfloat16)

# -- built on meta ---------------------------------------------------------------------------------


class OnMeta(Wrapped):
    """Built in `configure_model`, without memory or values."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(lambda: None)
        self.make = make

    def configure_model(self) -> None:
        if self.model is None:
            with self.trainer.init_module(empty_init=True):
                self.model = self.make()


def on_meta(kind: str, config: dict[str, Any], row: Any) -> Callable[[Player], Trace]:
    """Every tensor has the distribution that `_init_weights` gives it; constants are equal."""

    def loop(play: Player) -> Trace:
        make = lambda: build(kind, config)  # noqa: E731
        module = Wrapped(make) if play.is_ddp else OnMeta(make)
        play.fit(module, *loaders(row), strategy=play.strategy(**SMALL), max_steps=0)
        tensors = [*module.model.named_parameters(), *module.model.named_buffers()]
        return Trace({}, notes=[(name, statistics_of(value.detach())) for name, value in tensors])

    return loop


def statistics_of(value: Tensor) -> Any:
    """Return what values that are drawn alike have in common: coarse, where they are drawn."""
    if not value.is_floating_point() or value.unique().numel() < 20:
        return value.clone()
    # The spread of a few numbers is chance.
    steps = 2 if value.numel() >= 256 else 0.5
    value = value.double()
    zero_rows = (value == 0).all(-1).tolist()
    return [
        zero_rows,
        round(float(value.std().log2()) * steps),
        float(value.mean().abs()) < float(value.std()),
    ]


for name in ("gpt2", "llama", "mixtral", "vit"):
    case(
        "libraries", name=f"{name}_on_meta", loop=on_meta(*FAMILIES[name]), stages=(1, 3), ddp="ddp"
    )

# -- a row for each project ------------------------------------------------------------------------


BERT = {**TEXT, **HEADS, "intermediate_size": 64, "max_position_embeddings": 16}
VISION = {**HEADS, "intermediate_size": 64, "image_size": 16, "patch_size": 8, "projection_dim": 16}
WAV2VEC2 = {
    **TEXT, **HEADS, "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 8, "apply_spec_augment": False, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0,
    "num_feat_extract_layers": 2,
}  # fmt: skip
PROJECTS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "clip": ("CLIPModel", {"text_config": {**BERT, "projection_dim": 16}, "vision_config": VISION, "projection_dim": 16},
             lambda: {"input_ids": words(), "pixel_values": torch.randn(3, 16, 16)}, adamw),
    "mamba": ("MambaForCausalLM", {**TEXT, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}, text, adamw),
    "wav2vec2": ("Wav2Vec2ForCTC", WAV2VEC2, lambda: {"input_values": torch.randn(400), "labels": words(3)}, adamw),
    "albert": ("AlbertForMaskedLM", {**BERT, "embedding_size": 16, "num_hidden_layers": 3, "inner_group_num": 1}, text, adamw),
    "bert_schedule_free": ("BertForMaskedLM", BERT, text,
                           lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-2, eps=1e-3, warmup_steps=2)),
    "gpt2_lookahead_of_adafactor": ("GPT2LMHeadModel", {**TEXT, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}, text,
                                    lambda p: pytorch_optimizer.Lookahead(torch.optim.Adafactor(p, lr=1e-2), k=2)),
}  # fmt: skip
for name, (kind, config, row, optimizer) in PROJECTS.items():
    train(
        name,
        lambda k=kind, c=config: build(k, c),
        row,
        optimizer,
        stages=(1, 3),
        ulps=4096,
        is_slow=True,
    )

# -- Lightning's own -------------------------------------------------------------------------------


class Boring(BoringModel):
    """Notes its losses."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.losses: list[float] = []

    def step(self, batch: Any) -> Tensor:
        loss = super().step(batch)
        self.losses.append(loss.item())
        return loss


class ByHand(Boring, ManualOptimBoringModel):
    """The same by manual optimization."""


@case("libraries", settings=({"units": {nn.Linear}},))
def boring_models(play: Player) -> Trace:
    """Fit, validate, test and predict."""
    notes = []
    for module in (Boring(), ByHand()):
        trainer = play.trainer(max_epochs=2)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
        notes.append([module.losses, trainer.predict(module), play.trace(module).params])
    return Trace({}, notes=notes)


widen("gpt2", worlds=(1, 2))
