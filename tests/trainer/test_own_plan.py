"""Models of Transformers that are cut by plans of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeROStrategy
from tests.oracle.by_trainer import make_trainer
from tests.oracle.ranks import Pools
from tests.oracle.tensor_parallel import weights_of

_OF_BERT = {
    **{f"encoder.layer.*.attention.self.{one}": "colwise" for one in ("query", "key", "value")},
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
_OF_T5 = {
    **{f"encoder.block.*.layer.0.SelfAttention.{one}": "colwise" for one in ("q", "k", "v")},
    "encoder.block.*.layer.0.SelfAttention.o": "rowwise",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "colwise",  # by heads
    "encoder.block.*.layer.1.DenseReluDense.wi": "colwise",
    "encoder.block.*.layer.1.DenseReluDense.wo": "rowwise",
}


class _Model(LightningModule):
    """A model that knows nothing of tensor parallelism."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }  # fmt: skip
        self.kind, self.losses = kind, list[float]()
        if kind == "Llama":
            config = transformers.LlamaConfig(
                **sizes, num_key_value_heads=2, tie_word_embeddings=True
            )
            self.net = transformers.LlamaForCausalLM(config)
        elif kind == "T5":
            config = transformers.T5Config(
                vocab_size=24, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
                dropout_rate=0.0,
            )  # fmt: skip
            self.net = transformers.T5EncoderModel(config)
            self.net.tp_plan = _OF_T5
        else:
            still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            config = transformers.BertConfig(**sizes, **still)
            self.net = transformers.BertModel(config, add_pooling_layer=False)
            self.net.tp_plan = _OF_BERT

    def training_step(self, batch: Any, index: int) -> Tensor:
        (text,) = batch
        if self.kind == "Llama":
            loss = self.net(input_ids=text, labels=text).loss
        else:
            loss = self.net(input_ids=text).last_hidden_state.abs().pow(3).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def _fit(folder: str, kind: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    text = torch.randint(24, (24, 8), generator=torch.Generator().manual_seed(1))
    model = _Model(kind)
    chosen: Any = "ddp" if strategy is None else ZeROStrategy(**strategy)
    trainer = make_trainer(
        dist.get_world_size(), chosen, folder, max_steps=3, use_distributed_sampler=True
    )
    trainer.fit(model, DataLoader(TensorDataset(text), batch_size=2))
    net: Any = model.net
    return {
        "losses": model.losses,
        "weights": weights_of(model),
        "cut": [n for n, p in model.named_parameters() if isinstance(p, DTensor)],
        "tied": _are_tied(kind, net),
    }


def _are_tied(kind: str, net: Any) -> bool:
    if kind == "T5":
        return net.shared.weight is net.encoder.embed_tokens.weight
    return kind != "Llama" or net.lm_head.weight is net.model.embed_tokens.weight


_BLOCK = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("kind", "strategy", "num_cut"),
    [
        ("Llama", {"stage": 3, "tensor_parallel_size": 2, "min_num_params": 0}, 15),
        ("Llama", {"config": _BLOCK}, 15),
        ("Bert", {"stage": 3, "tensor_parallel_size": 2, "min_num_params": 0}, 24),
        ("T5", {"stage": 3, "tensor_parallel_size": 2, "min_num_params": 0}, 13),
    ],
)
def test_two_by_two_ranks_have_the_numbers_of_ddp(
    ranks: Pools, tmp_path: Path, kind: str, strategy: dict[str, Any], num_cut: int
) -> None:
    ddp = ranks(2).run(_fit, str(tmp_path), kind, None)
    for rank, one in enumerate(ranks(4).run(_fit, str(tmp_path), kind, strategy)):
        assert one["losses"] == pytest.approx(ddp[rank // 2]["losses"], rel=2e-5)
        assert one["tied"]
        assert len(one["cut"]) == num_cut
        for name, value in one["weights"].items():
            torch.testing.assert_close(
                value, ddp[0]["weights"][name], rtol=2e-5, atol=2e-5, msg=name
            )


class _Odd(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.tp_plan = {"net": "moe_tp_experts"}

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


def test_a_word_without_a_style_is_refused(ranks: Pools, tmp_path: Path) -> None:
    for told in ranks(2).run(_refused, str(tmp_path)):
        assert "The plan of _Odd has 'net': 'moe_tp_experts', for which torch has no style" in told
