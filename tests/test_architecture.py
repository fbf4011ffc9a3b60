"""The folders of the package are its floors: imports go down, and each keeps to its subject."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "lightning_zero"
ROOTS = PACKAGE, TESTS, TESTS.parent / "examples"
FOLDERS = [
    "tensors",
    "plan",
    "comm",
    "parameters",
    "optimizer",
    "engine",
    "checkpoint",
    "memory",
    "deepspeed",
    "fabric",
    "trainer",
    "commands",
    "mirror",
    "root",
]
"""From the ground up; ``root`` is ``__init__.py`` and ``__main__.py``."""
LIGHTNING = {"fabric", "trainer", "mirror", "root"}
LIGHTNING_NAMES = ("lightning", "pytorch_lightning", "lightning_fabric")
ONE_HOST = "comm/shared_memory"
"""What exists for one host's CPUs only."""
CHOOSE_ONE_HOST = {"comm/communicator"}
"""The only module that names it: others ask a transport whether it ``reads_peers``."""
SUBJECTLESS = {"utils", "util", "common", "helpers", "helper", "misc", "core", "base"}

INNER = {
    "comm.control",
    "comm.process_groups",
    "comm.shared_memory",
    "comm.transport",
    "memory.summary",
    "checkpoint.archive",
    "checkpoint.files",
    "checkpoint.safetensors",
    "comm.watchdog",
    "engine.gradients",
    "engine.schedule",
    "engine.unit",
    "engine.weights",
    "optimizer.known",
    "optimizer.toys",
    "optimizer.watch",
    "optimizer.unit_step",
    "parameters.full_grad",
    "plan.casts",
    "plan.units",
    "trainer.memory_monitor",
}
"""Inner modules of which tests take what their folder does not export; none may be added."""


def faults(package: Path) -> Iterator[str]:
    """Every breach of the rules, one sentence each."""
    for path in sorted(package.rglob("*.py")):
        *folders, name = path.relative_to(package).with_suffix("").parts
        where = "/".join([*folders, name])
        folder = folders[0] if folders else "root"
        if name in SUBJECTLESS:
            yield f"{where}: {name} names no subject"
        if folder not in FOLDERS or (folder == "root" and name not in ("__init__", "__main__")):
            yield f"{where}: belongs in one of the folders"
            continue
        for module, imported in imports(path):
            outer, _, inner = module.partition(".")
            is_dcp = where in ("checkpoint/dcp", "checkpoint/values") and ".checkpoint" in module
            if module.startswith("torch.distributed") and folder != "comm" and not is_dcp:
                yield f"{where}: imports torch.distributed"
            elif outer in LIGHTNING_NAMES and folder not in LIGHTNING:
                yield f"{where}: imports Lightning"
            elif outer == package.name and (target := inner.split(".")[0] or "root") != folder:
                if FOLDERS.index(target) > FOLDERS.index(folder) and target != "root":
                    yield f"{where}: imports {target}, which stands above {folder}"
                if "." in inner and folder != "root":
                    yield f"{where}: imports {module}, the inside of another folder"
            knows = f"{inner}.{imported}.".startswith(f"{ONE_HOST.replace('/', '.')}.")
            if knows and not where.startswith(ONE_HOST) and where not in CHOOSE_ONE_HOST:
                yield f"{where}: knows of {ONE_HOST}"
            if outer == package.name and imported.startswith("_"):
                yield f"{where}: imports {imported}, a private name"


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name taken from it) of every import; ``torch.x`` for ``from torch import x``."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            module = node.module or ""
            for alias in node.names:
                is_inner = module in ("torch", PACKAGE.name)
                yield (f"{module}.{alias.name}" if is_inner else module), alias.name
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed", ""


def circles(package: Path) -> list[set[str]]:
    """Sets of modules that import each other, wherever in a module, also for types only.

    A folder's ``__init__`` is a module like any other, but its inner modules do not import it.
    """
    paths: dict[str, Path] = {}
    for path in package.rglob("*.py"):
        *folders, name = path.relative_to(package.parent).with_suffix("").parts
        paths[".".join(folders if name == "__init__" else [*folders, name])] = path
    imported = {
        module: {
            whole if (whole := f"{outer}.{name}") in paths else outer
            for outer, name in imports(path)
        }
        & paths.keys()
        for module, path in paths.items()
    }

    def above(module: str) -> set[str]:
        found: set[str] = set()
        left = [module]
        while left:
            new = imported[left.pop()] - found
            found |= new
            left += new
        return found

    reached = {module: above(module) for module in imported}
    found = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imported
    }
    return [set(circle) for circle in found if circle]


def test_imports_go_down() -> None:
    assert list(faults(PACKAGE)) == []


def test_no_modules_import_each_other() -> None:
    assert circles(PACKAGE) == []


@pytest.mark.parametrize(
    "code",
    [
        "from lightning_zero.plan.units import x",
        "from lightning_zero.plan import units",
        "import lightning_zero.plan.units",
        "def f():\n    from lightning_zero.plan.units import x",
        "if TYPE_CHECKING:\n    from lightning_zero.plan.units import x",
        "from lightning_zero.plan import x",
    ],
)
def test_circle_is_found(tmp_path: Path, code: str) -> None:
    """Modules that import each other, at once or by a third, or a module and its own folder."""
    folder = tmp_path / "lightning_zero" / "plan"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from lightning_zero.plan.layout import x")
    (folder / "layout.py").write_text(code)
    (folder / "units.py").write_text("from lightning_zero.plan.casts import x")
    (folder / "casts.py").write_text("import lightning_zero.plan.layout")
    assert len(circles(tmp_path / "lightning_zero")) == 1


def test_no_assert_does_work() -> None:
    """So that ``python -O`` changes nothing."""
    for path in sorted(PACKAGE.rglob("*.py")):
        checks = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
        for node in (node for check in checks for node in ast.walk(check)):
            assert not isinstance(node, ast.NamedExpr | ast.Await | ast.Yield), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                assert called in ("isinstance", "len", "numel"), f"{path}: {called}"


def test_tests_import_folders() -> None:
    """A module that moves within its folder breaks no test, but for those that test it alone."""
    inner = set()
    for path in sorted(TESTS.rglob("*.py")):
        for module, name in imports(path):
            outer, *within = module.split(".")
            if outer == PACKAGE.name and len(within) > 1:
                exported = {name for _, name in imports(PACKAGE / within[0] / "__init__.py")}
                assert name not in exported, f"{path}: take {name} from {outer}.{within[0]}"
                inner.add(".".join(within))
    assert inner == INNER


def test_what_a_folder_exports_is_used_elsewhere() -> None:
    """By another folder, or else by a test or an example."""
    used = set()
    for path in (path for root in ROOTS for path in root.rglob("*.py")):
        for module, name in imports(path):
            if not path.is_relative_to(PACKAGE / module.removeprefix(f"{PACKAGE.name}.")):
                used.add((module, name))
    for folder in {*FOLDERS} - LIGHTNING - {"commands"}:
        own = f"{PACKAGE.name}.{folder}"
        exports = imports(PACKAGE / folder / "__init__.py")
        names = {name for module, name in exports if module.startswith(f"{own}.")}
        assert not [name for name in sorted(names) if (own, name) not in used], folder


@pytest.mark.parametrize(
    ("file", "code", "fault"),
    [
        ("plan/layout.py", "from torch import distributed", "imports torch.distributed"),
        ("plan/layout.py", "import torch; torch.distributed.barrier()", "torch.distributed"),
        ("engine/engine.py", "def f():\n    import pytorch_lightning", "imports Lightning"),
        ("engine/unit.py", "from lightning_zero.memory import estimate", "stands above engine"),
        ("engine/unit.py", "from lightning_zero.plan.layout import Slot", "the inside of another"),
        ("engine/unit.py", "from lightning_zero.engine.engine import _x", "_x, a private name"),
        (
            "comm/__init__.py",
            "from lightning_zero.comm.shared_memory import x",
            "knows of comm/shared_memory",
        ),
        ("comm/transport.py", "from lightning_zero.comm import shared_memory", "knows of comm"),
        ("engine/utils.py", "", "utils names no subject"),
        ("surprise.py", "", "belongs in one of the folders"),
        ("surprise/file.py", "", "belongs in one of the folders"),
    ],
)
def test_breach_is_found(tmp_path: Path, file: str, code: str, fault: str) -> None:
    path = tmp_path / "lightning_zero" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert fault in " | ".join(faults(tmp_path / "lightning_zero"))
