"""Optimizers under ZeRO beside DDP: how they are stepped, bytes of state, differences.

    python examples/benchmarks/optimizers.py [name ...]

Two processes train a small model for 40 steps, first under DDP, then at stage 3. The script prints
the table of docs/optimizers.md, without optimizers whose package is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.engine import Engine
from lightning_zero.optimizer import kept_states, stepper_of
from lightning_zero.plan import Settings

STEPS, WORLD = 40, 2


class Entry(NamedTuple):
    """An optimizer of the table: its package, its name in it, and its arguments."""

    package: str
    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        """Its name in the table."""
        return f"`{self.package}.{self.name}`"

    def build(self, model: nn.Module) -> Optimizer:
        """Return the optimizer over the parameters of ``model``."""
        cls = getattr(importlib.import_module(self.package), self.name)
        if self.name == "Lookahead":
            return cls(torch.optim.AdamW(model.parameters(), lr=0.01))  # type: ignore[no-any-return]
        parameters = [p for p in model.parameters() if self.name != "Muon" or p.ndim == 2]
        return cls(parameters, **self.options)  # type: ignore[no-any-return]


_TORCH = "SGD AdamW NAdam RMSprop Adagrad Muon Adafactor LBFGS"
_PYTORCH_OPTIMIZER = (
    "Lion AdaBelief Adan Tiger Lookahead NovoGrad AdamP SGDP CAME ScalableShampoo SOAP StableAdamW"
    " Lamb LARS"
)
ENTRIES = [
    *(Entry("torch.optim", name, {"lr": 0.01}) for name in _TORCH.split()),
    *(Entry("pytorch_optimizer", name, {"lr": 0.01}) for name in _PYTORCH_OPTIMIZER.split()),
    Entry("schedulefree", "AdamWScheduleFree", {"lr": 0.01}),
    Entry("prodigyopt", "Prodigy", {}),
    Entry("transformers", "Adafactor", {}),
]


class Model(nn.Module):
    """A model with matrices of several shapes, vectors, and a 0-dimensional scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(48, 80), nn.Linear(80, 48)])
        self.head = nn.Linear(48, 20, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[n, 20]`` outputs of ``[n, 48]`` rows."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) * self.scale


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: int) -> None:
    """Train a model that averages gradients over the ranks."""
    getattr(optimizer, "train", lambda: None)()
    rows = torch.Generator().manual_seed(rank)
    teacher = torch.randn(48, 20, generator=torch.Generator().manual_seed(99)) / 7

    for _ in range(steps):
        x = torch.randn(16, 48, generator=rows)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():  # which some optimizers forget
                loss = (model(x) - x @ teacher).square().mean()
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total / WORLD

        optimizer.step(closure)  # type: ignore[arg-type]
    getattr(optimizer, "eval", lambda: None)()


def measure(entry: Entry, rank: int, steps: int) -> dict[str, Any]:
    """Train with an optimizer under DDP and ZeRO, and return its row of the table."""
    plain = Model()
    under_ddp = entry.build(plain)
    train(DistributedDataParallel(plain), under_ddp, rank, steps)
    whole = _state_bytes(under_ddp)
    model = Model()
    engine = Engine(model, Settings(stage=3))
    with engine.sharded.gathered():
        optimizer = entry.build(model)
    engine.adopt(optimizer)
    train(model, optimizer, rank, steps)
    own = _state_bytes(optimizer)
    engine.close()
    numel = sum(parameter.numel() for parameter in plain.parameters())
    most = torch.tensor(own)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {
        "label": entry.label,
        "way": stepper_of(optimizer).way.value,
        "ddp": whole / numel,
        "rank": int(most) / numel,
        "difference": max(
            float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs
        ),
    }


def _state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes that this rank keeps of an optimizer's states, and of any that it wraps."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    states = [state for _, state in kept_states((optimizer, *inner))]
    return sum(leaf.nbytes for leaf in tree_leaves(states) if isinstance(leaf, Tensor))


def _worker(rank: int, folder: str, entries: Sequence[Entry], steps: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    rows = []
    for entry in entries:
        rows.append(measure(entry, rank, steps))
        if rank == 0:
            print(rows[-1]["label"], file=sys.stderr)
            Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured(entries: Sequence[Entry], steps: int = STEPS) -> list[dict[str, Any]]:
    """Measure optimizers in two fresh processes, and return the rows of the table."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, (folder, entries, steps), nprocs=WORLD, start_method="fork")
        return json.loads(Path(folder, "rows.json").read_text())  # type: ignore[no-any-return]


def installed() -> list[Entry]:
    """Return the entries whose package is installed."""

    def has(package: str) -> bool:
        return importlib.util.find_spec(package.split(".")[0]) is not None

    return [entry for entry in ENTRIES if has(entry.package)]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| optimizer | stepped | state per element, DDP | each of two ranks | difference |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(
        rows, key=lambda row: ("element" not in row["way"], "param" not in row["way"])
    ):
        far = f"{row['difference']:.0e}" if row["difference"] else "0"
        lines.append(
            f"| {row['label']} | {row['way']} | {row['ddp']:.2f} | {row['rank']:.2f} | {far} |"
        )
    return lines


def main() -> None:
    """Print the table."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    chosen = [e for e in installed() if len(sys.argv) == 1 or e.name in sys.argv[1:]]
    print("\n".join(table(measured(chosen))))


if __name__ == "__main__":
    main()
