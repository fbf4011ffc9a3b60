"""The floors of the package: imports go down, and each floor keeps to its own subject."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_zero"

FLOORS = [
    [
        "layout",
        "plan",
        "deepspeed",
        "optimizer_block",
        "config",
        "scaler",
        "tensors",
        "ledger",
        "span",
    ],
    [
        "surface",
        "store",
        "buffer",
        "window",
        "watch",
        "groups",
        "meeting",
        "wires",
        "comm",
        "offload",
    ],
    [
        "resting",
        "piece",
        "gradient",
        "edits",
        "reducer",
        "bundle",
        "unit",
        "wrap",
        "meta",
        "settings",
        "draft",
        "sharded",
    ],
    [
        "schedule",
        "call",
        "join",
        "comparison",
        "optim",
        "adoption",
        "clip",
        "turns",
        "hook",
        "engine",
        "trial",
        "access",
        "activation",
    ],
    ["options", "checkpoint", "memory"],
    [
        "precision",
        "average",
        "callbacks",
        "same_length",
        "signals",
        "graph",
        "saving",
        "strategy",
        "monitor",
        "traffic",
        "mirror",
    ],
    ["cli", "__main__", "__init__"],
]
"""Every room, floor by floor from the ground. A room may import what stands before it."""

DRAWERS = {"wires", "offload", "checkpoint", "memory", "mirror"}
"""Rooms that are folders; others import them, not the files inside."""

FORBIDDEN = {
    "torch.distributed": range(1),
    "lightning": range(5),
    "pytorch_lightning": range(5),
    "lightning_fabric": range(5),
}
"""What must not be imported, and on which floors."""

NOT_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "core", "base"}

ORDER = [room for floor in FLOORS for room in floor]


def faults(package: Path) -> list[str]:
    """Every breach of the rules, one sentence each."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        where = "/".join(parts)
        found += [f"{where}: {part} names no subject" for part in parts if part in NOT_NAMES]
        if parts[0] not in ORDER:
            found.append(f"{where}: not listed in FLOORS")
        elif (len(parts) > 1) != (parts[0] in DRAWERS):
            found.append(f"{where}: a room is a file, a drawer is a folder")
        else:
            found += [f"{where}: {fault}" for fault in _faults_of_file(path, parts, package)]
    return found


def _faults_of_file(path: Path, parts: tuple[str, ...], package: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(), str(path))
    room = parts[0]
    floor = next(number for number, listed in enumerate(FLOORS) if room in listed)
    rooms = set()
    for module, name, alias in _imports(tree, [package.name, *parts]):
        for forbidden, floors in FORBIDDEN.items():
            if floor in floors and _is_inside(f"{module}.{name}", forbidden):
                yield f"imports {forbidden} on floor {floor}"
        if _is_inside(module, package.name):
            target = [*module.split("."), *([name] if name else [])][1:]
            yield from _faults_of_import(room, target, package, is_room=module != package.name)
            if target and target[-1] in ORDER:
                rooms.add(alias)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if floor == 0 and ast.unparse(node) == "torch.distributed":
                yield "uses torch.distributed on floor 0"
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            if owner in rooms and _is_private(node.attr):
                yield f"uses {owner}.{node.attr}, a private name of another room"


def _faults_of_import(
    room: str, target: list[str], package: Path, *, is_room: bool
) -> Iterator[str]:
    if is_room and target[0] not in ORDER:
        yield f"imports {target[0]}, which is not listed in FLOORS"
        return
    other = target[0] if target and target[0] in ORDER else "__init__"
    if other == room and room in DRAWERS:
        return
    if ORDER.index(other) >= ORDER.index(room):
        yield f"imports {other}, which does not stand before {room}"
    if other in DRAWERS and package.joinpath(*target[:2]).with_suffix(".py").exists():
        yield f"imports {'.'.join(target)}, the inside of a drawer"
    if any(_is_private(name) for name in target):
        yield f"imports {'.'.join(target)}, a private name of another room"


def _imports(tree: ast.Module, here: list[str]) -> Iterator[tuple[str, str, str]]:
    """(module, name taken from it or "", the name it gets) of every import, relative or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level]) + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            for alias in node.names:
                yield module, alias.name, alias.asname or alias.name


def _is_inside(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_the_package_keeps_its_floors() -> None:
    assert faults(PACKAGE) == []


def test_every_room_is_listed_once() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert set(ORDER) >= DRAWERS


@pytest.mark.parametrize(
    ("file", "code", "fault"),
    [
        ("layout.py", "import torch.distributed as dist", "imports torch.distributed on floor 0"),
        ("layout.py", "from torch import distributed", "imports torch.distributed on floor 0"),
        ("layout.py", "import torch; torch.distributed.barrier()", "uses torch.distributed"),
        ("engine.py", "from lightning.pytorch import Trainer", "imports lightning on floor 3"),
        ("engine.py", "def f():\n    import pytorch_lightning", "imports pytorch_lightning"),
        ("unit.py", "from lightning_zero.engine import Engine", "engine, which does not stand"),
        ("unit.py", "from .engine import Engine", "imports engine, which does not stand"),
        ("unit.py", "from . import engine", "imports engine, which does not stand"),
        ("unit.py", "import lightning_zero.engine", "imports engine, which does not stand"),
        ("resting.py", "from lightning_zero.unit import Unit", "unit, which does not stand"),
        ("unit.py", "from lightning_zero import ZeROStrategy", "imports __init__, which"),
        ("unit.py", "from lightning_zero.buffer import _view", "a private name of another"),
        ("unit.py", "from lightning_zero import buffer\nbuffer._view()", "uses buffer._view"),
        ("unit.py", "from lightning_zero import buffer as b\nb._view()", "uses b._view"),
        ("utils.py", "", "utils names no subject"),
        ("checkpoint/helpers.py", "", "helpers names no subject"),
        ("surprise.py", "", "surprise: not listed in FLOORS"),
        ("engine.py", "from lightning_zero.surprise import x", "imports surprise, which is not"),
        ("unit/inner.py", "", "a room is a file, a drawer is a folder"),
    ],
)
def test_breach_is_found(tmp_path: Path, file: str, code: str, fault: str) -> None:
    path = tmp_path / "lightning_zero" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert fault in " | ".join(faults(tmp_path / "lightning_zero"))


def test_inside_of_a_drawer_is_found(tmp_path: Path) -> None:
    package = tmp_path / "lightning_zero"
    (package / "checkpoint").mkdir(parents=True)
    (package / "checkpoint" / "io.py").touch()
    (package / "strategy.py").write_text("from lightning_zero.checkpoint.io import save")
    assert faults(package) == ["strategy: imports checkpoint.io.save, the inside of a drawer"]
    (package / "strategy.py").write_text("from lightning_zero.checkpoint import io")
    assert faults(package) == ["strategy: imports checkpoint.io, the inside of a drawer"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("comm.py", "import torch.distributed as dist\nfrom lightning_zero.plan import Placement"),
        ("engine.py", "from lightning_zero import resting, unit\nfrom .unit import Unit"),
        ("engine.py", "class A:\n    def f(self, unit):\n        return self._x, unit._label"),
        ("checkpoint/__init__.py", "from lightning_zero.checkpoint.io import save, _late"),
        ("checkpoint/io.py", "from .piece import Piece\nfrom ..engine import Engine"),
        ("strategy.py", "import lightning\nfrom lightning_zero.checkpoint import save"),
        ("strategy.py", "import lightning_utilities\nfrom lightning_zero import memory"),
        ("__init__.py", "from lightning_zero.strategy import ZeROStrategy"),
        ("engine.py", "import torch_utils, lightning_zero_extras, lightning_whatever"),
    ],
)
def test_good_manners_are_not_breaches(tmp_path: Path, file: str, code: str) -> None:
    path = tmp_path / "lightning_zero" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert faults(tmp_path / "lightning_zero") == []
