"""Private names of Lightning stand in one module, and Lightning has them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lightning_zero.trainer import internals
from tests.oracle.ranks import ROOT

OWN = {"self", "cls", "super()"}
OF_TORCH = {"_buffers", "_parameters", "_cdata", "_asdict"}
INHERITED = {
    "_precision_plugin",
    "_layer_sync",
    "_lightning_optimizers",
    "_configure_launcher",
    "_launcher",
    "_timeout",
    "_get_process_group_backend",
}


def private_names(code: str) -> Iterator[str]:
    """Private attributes of other objects, and private names that are imported from Lightning."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in OWN:
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning."):
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))


def test_private_names_of_lightning_stand_in_one_module() -> None:
    for path in sorted((ROOT / "lightning_zero" / "trainer").glob("*.py")):
        found = {name for name in private_names(path.read_text()) if name not in OF_TORCH}
        assert (found == set()) == (path.stem != "internals"), path.name
    assert set(private_names("x._y; from lightning.a import _z; self._w")) == {"_y", "_z"}


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (LightningOptimizer, ["_optimizer"]),
        (DDPStrategy, sorted(INHERITED)),
        (_SignalConnector, [internals.ANSWERS_REQUEUE, internals.ANSWERS_END]),
        (Trainer, ["_signal_connector"]),
        (TensorBoardLogger, ["_log_graph"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_lightning_has_them(owner: type, names: list[str]) -> None:
    sources = "".join(
        inspect.getsource(base) for base in owner.__mro__ if base.__module__.startswith("lightning")
    )
    for name in names:
        assert name in sources


def test_the_names_that_are_inherited_are_told() -> None:
    assert internals.__doc__ is not None
    assert all(f"``{name}``" in internals.__doc__ for name in INHERITED)
