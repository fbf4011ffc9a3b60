"""Projects on third-party libraries train under stages 1 and 3 as under DDP; a row for each.

Models of random weights and few units, each with something of its own: two towers and a
temperature, weight norm as a parametrization, one layer that is called many times, a scan, batch
norms, optimizers with modes. What stands in `test_transformers.py` is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import torch
import torchmetrics
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeROStrategy
from tests.oracle.projects import Run, make_trainer
from tests.oracle.ranks import Pools

pytestmark = pytest.mark.slow

NUM_ROWS, WORD = 12, 16
TEXT = {"vocab_size": WORD, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class Project(NamedTuple):
    """A model of Transformers, a row of its data, and an optimizer."""

    name: str
    config: dict[str, Any]
    row: Callable[[], dict[str, Tensor]]
    optimizer: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3)

    def build(self) -> nn.Module:
        family = self.name.split("For")[0].removesuffix("Model").removesuffix("LMHead")
        config = getattr(transformers, f"{family}Config")
        return getattr(transformers, self.name)(config(**self.config))


def words(length: int = 6) -> Tensor:
    return torch.randint(3, WORD, (length,))


def text() -> dict[str, Tensor]:
    tokens = words()
    return {"input_ids": tokens, "labels": tokens}


BERT = {**TEXT, **HEADS, "intermediate_size": 64, "max_position_embeddings": 16}
PROJECTS = {
    "whisper": Project(
        "WhisperForConditionalGeneration",
        {
            **TEXT, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 16,
            "max_target_positions": 16, "decoder_start_token_id": 1,
        },
        lambda: {"input_features": torch.randn(8, 32), "labels": words()},
    ),
    "clip": Project(
        "CLIPModel",
        {
            "text_config": {**BERT, "projection_dim": 16},
            "vision_config": {
                **HEADS, "intermediate_size": 64, "image_size": 16, "patch_size": 8,
                "projection_dim": 16,
            },
            "projection_dim": 16,
        },
        lambda: {"input_ids": words(), "pixel_values": torch.randn(3, 16, 16)},
    ),
    "mamba": Project(
        "MambaForCausalLM",
        {**TEXT, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2},
        text,
    ),
    "wav2vec2": Project(
        "Wav2Vec2ForCTC",
        {
            **TEXT, **HEADS, "intermediate_size": 64, "conv_dim": (16, 16), "conv_stride": (4, 4),
            "conv_kernel": (8, 4), "num_conv_pos_embeddings": 8, "apply_spec_augment": False,
            "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "num_feat_extract_layers": 2,
        },
        lambda: {"input_values": torch.randn(400), "labels": words(3)},
    ),
    "albert": Project(
        "AlbertForMaskedLM",
        {**BERT, "embedding_size": 16, "num_hidden_layers": 3, "inner_group_num": 1},
        text,
    ),
    "segformer": Project(
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "strides": [4, 2],
            "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 4,
        },
        lambda: {
            "pixel_values": torch.randn(3, 32, 32), "labels": torch.randint(4, (32, 32)),
        },
    ),
    "patchtst": Project(
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2, "context_length": 16, "prediction_length": 4,
            "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2, "d_model": 16,
            "num_attention_heads": 2, "ffn_dim": 32,
        },
        lambda: {"past_values": torch.randn(16, 2), "future_values": torch.randn(4, 2)},
    ),
    "bert, schedule-free": Project(
        "BertForMaskedLM", BERT, text,
        lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-2, eps=1e-3, warmup_steps=2),
    ),
    "bert, prodigy": Project("BertForMaskedLM", BERT, text, prodigyopt.Prodigy),
    "gpt2, lookahead of adafactor": Project(
        "GPT2LMHeadModel",
        {**TEXT, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2},
        text,
        lambda p: pytorch_optimizer.Lookahead(torch.optim.Adafactor(p, lr=1e-2), k=2),
    ),
}  # fmt: skip


class Wrapped(LightningModule):
    """An ordinary LightningModule, with a metric and an optimizer that may have modes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.project = PROJECTS[name]
        self.model = self.project.build()
        self.mean = torchmetrics.MeanMetric()
        self.losses: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        more = {"return_loss": True} if "CLIP" in self.project.name else {}
        return self.model(**batch, **more).loss

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.mean(self.loss(batch))
        self.log("val", self.mean)

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
        return self.project.optimizer(self.parameters())


def fit(name: str, strategy: str | int) -> Run:
    torch.manual_seed(0)
    module = Wrapped(name)
    rows = [PROJECTS[name].row() for _ in range(NUM_ROWS)]
    chosen = strategy if isinstance(strategy, str) else ZeROStrategy(strategy, min_num_params=1000)
    trainer = make_trainer(chosen, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(rows, batch_size=2), DataLoader(rows[:4], batch_size=2))
    return Run.of(module, trainer)


def fit_each(name: str) -> list[Run]:
    # Some models have parameters that their loss does not use, which plain "ddp" refuses.
    oracle = "ddp_find_unused_parameters_true"
    return [fit(name, strategy) for strategy in (oracle, 1, 3)]


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_trains_as_under_ddp(ranks: Pools, name: str) -> None:
    for expected, *runs in ranks(2).run(fit_each, name):
        assert len(expected.losses) == NUM_ROWS // 4
        for run in runs:
            assert run.losses == pytest.approx(expected.losses, rel=1e-5)
            torch.testing.assert_close(run.metrics, expected.metrics, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(run.params, expected.params, rtol=1e-4, atol=1e-5)
