"""Projects that import `pytorch_lightning`: same names, same numbers, no needless import."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from tests.launch import run_python
from tests.ranks import ROOT, Pools

NAMES = "from pytorch_lightning.strategies import StrategyRegistry as R; print('zero3' in R)"
LOADED = "import sys; print('pytorch_lightning' in sys.modules, end=' ')"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (f"import lightning_zero; {LOADED}; {NAMES}", "False True"),
        (f"import pytorch_lightning, lightning_zero; {LOADED}; {NAMES}", "True True"),
        (
            "import lightning_zero, pytorch_lightning as pl;"
            "t = pl.Trainer(strategy=lightning_zero.mirror.ZeROStrategy(2), accelerator='cpu',"
            " logger=False, precision='bf16-mixed');"
            "print(isinstance(t.strategy, pl.strategies.DDPStrategy),"
            " isinstance(t.strategy, lightning_zero.ZeROStrategy), t.strategy.settings.stage,"
            " type(t.precision_plugin).__module__, pl.__spec__.loader is pl.__loader__)",
            "True False 2 lightning_zero.mirror.precision True",
        ),
    ],
)
def test_names_are_there_when_the_mirror_is(code: str, printed: str) -> None:
    assert run_python(["-c", code]).stdout.splitlines()[-1] == printed


def train(strategy: str, **options: Any) -> dict[str, torch.Tensor]:
    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel

    import lightning_zero  # noqa: F401  (registers the strategies)

    torch.manual_seed(0)
    module = BoringModel()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module)
    trainer.test(module, verbose=False)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_all(strategies: list[str], options: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    return [train(strategy, **options) for strategy in strategies]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_every_stage_is_ddp_under_the_mirror(ranks: Pools, options: dict[str, Any]) -> None:
    strategies = ["ddp", "zero1", "zero2", "zero3"]
    ddp, *stages = ranks(2).run(train_all, strategies, options, timeout=120)[0]
    for params in stages:
        torch.testing.assert_close(params, ddp, rtol=1e-6, atol=1e-7)


def test_every_room_that_the_strategy_stands_on_has_a_twin() -> None:
    """Rooms that know Lightning, from the strategy downwards."""
    package = ROOT / "lightning_zero"
    rooms, found = ["strategy"], set()
    while rooms:
        room = rooms.pop()
        path = package / f"{room}.py"
        if room in found or not path.exists():
            continue
        imported = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)
        ]
        modules = {node.module or "" for node in imported}
        if any(f"{module}.".startswith("lightning.") for module in modules):
            found.add(room)
            rooms += [m.split(".")[1] for m in modules if m.startswith("lightning_zero.")]
    twins = {path.stem for path in (package / "mirror").glob("*.py")}
    assert twins == found | {"__init__", "source", "arrival"}
