"""The folders of the package are its floors: imports go down, and each keeps to its subject."""

import ast
from collections.abc import Iterator
from pathlib import Path

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


def test_no_assert_does_work() -> None:
    """So that ``python -O`` changes nothing."""
    for path in sorted(PACKAGE.rglob("*.py")):
        checks = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
        for node in (node for check in checks for node in ast.walk(check)):
            assert not isinstance(node, ast.NamedExpr | ast.Await | ast.Yield), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                assert called in ("isinstance", "len", "numel"), f"{path}: {called}"


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
