"""Write the small checkpoints of this folder with DeepSpeed itself, on two ranks' CPUs.

    torchrun --nproc_per_node 2 -m tests.deepspeed.write_files

needs ``deepspeed`` (0.19.8 wrote them) beside torch and a gloo backend. Beside every checkpoint
stands ``whole.pt``: the weights in fp32 that DeepSpeed's own ``zero_to_fp32`` reads from it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, RANKS = 3, 2
FILES = Path(__file__).parent / "files"
CASES = {
    f"stage{stage}-{precision}": (stage, precision)
    for stage in (1, 2, 3)
    for precision in ("fp32", "bf16", "fp16")
}


class Model(nn.Module):
    """A tied weight, a frozen one, a buffer, and sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 5)
        self.outer.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("scale", torch.full((5,), 0.5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, rows: Tensor) -> Tensor:
        x = self.outer(torch.relu(self.inner(self.embedding(rows)))).flatten(0, 1)
        return self.head(self.norm(x) * self.scale.to(x))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "lr": 0.02},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]


def config(stage: int, precision: str) -> dict[str, Any]:
    halves = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    if precision == "fp16":
        halves = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **halves,
    }


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=0.01)


def rows_of(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randint(0, 11, (4, 3), generator=generator)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows).float(), rows.flatten())


def write(deepspeed: Any, folder: Path, stage: int, precision: str) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(stage, precision)
    )
    for seed in range(STEPS):
        rows = rows_of(seed, dist.get_rank())
        loss = loss_of(engine, rows)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag="step3", client_state={"epoch": 1, "global_step": 3})
    dist.barrier()
    if dist.get_rank() == 0:
        whole = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
            str(folder), tag="step3"
        )
        torch.save({name: value.clone() for name, value in whole.items()}, folder / "whole.pt")
        for script in folder.glob("*.py"):
            script.unlink()
    dist.barrier()


def main() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed
    import deepspeed.utils.zero_to_fp32

    # Torch computes in fp16 on every CPU, though slowly on most, which DeepSpeed therefore refuses.
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    # DeepSpeed would compile its exchange through shared memory, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for name, (stage, precision) in CASES.items():
        if dist.get_rank() == 0:
            shutil.rmtree(FILES / name, ignore_errors=True)
        dist.barrier()
        write(deepspeed, FILES / name, stage, precision)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
