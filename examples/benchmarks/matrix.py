"""The quick tests with several interpreters, versions of torch and of Lightning: what works.

    python examples/benchmarks/matrix.py
    python examples/benchmarks/matrix.py --python 3.10 --torch 2.8 --lightning 2.5 2.6
    python examples/benchmarks/matrix.py --dry-run

Each combination gets a fresh environment, with the package and what its tests import, in a folder
that is removed at the end. A combination that cannot be had is a row that says why: there is no
such interpreter here, or no release that pip can install. The exit code is 1 if a test has failed.
A row takes minutes, most of them to download torch.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "tests/plan",
    "tests/optimizer",
    "tests/trainer/test_strategy.py",
)
NEEDED = (
    "numpy", "prodigyopt", "pytest", "pytest-mock", "pytest-timeout", "pytorch-optimizer",
    "schedulefree", "transformers",
)  # fmt: skip
"""What the quick tests import beside the package and its requirements."""


def rows(arguments: argparse.Namespace) -> list[tuple[str, str, str]]:
    """The combinations that are asked for; the order of the first occurrences is kept."""
    found = itertools.product(arguments.python, arguments.torch, arguments.lightning)
    return list(dict.fromkeys(found))


def interpreter(version: str) -> str | None:
    """The path of an interpreter that runs, of this version or name, if there is one."""
    names = [version, f"python{version}"]
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        names = [sys.executable]
    for name in names:
        path = shutil.which(name)
        if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            return path
    return None


def install(python: str, folder: Path, torch: str, lightning: str) -> str:
    """Make an environment; return why that is impossible, or an empty text."""
    here = str(folder / "bin" / "python")
    pip = [here, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [python, "-m", "venv", str(folder)],
        # Alone and first, so that the build for this machine is found before others ask for it.
        [*pip, f"torch=={torch}.*"],
        [*pip, f"lightning=={lightning}.*,!=2.6.2,!=2.6.3", *NEEDED, str(ROOT)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return lines[-1].removeprefix("ERROR: ") if lines else f"{command[1:4]} failed"
    return ""


def versions(folder: Path) -> str:
    """The versions that were installed."""
    code = "import torch, lightning; print(torch.__version__, lightning.__version__)"
    return run([str(folder / "bin" / "python"), "-W", "ignore", "-c", code])[1].strip()


def run(command: list[str]) -> tuple[int, str]:
    """Run a command in the repository, where tests find their neighbours; return code and text."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def row(python: str, torch: str, lightning: str, tests: list[str]) -> tuple[str, str]:
    """The installed versions and the result of the tests, or why there is none."""
    path = interpreter(python)
    if path is None:
        return "", f"skipped: no interpreter {python} here"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "environment"
        if reason := install(path, folder, torch, lightning):
            return "", f"skipped: {reason}"
        command = [str(folder / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        code, text = run([*command, *tests])
        last = (text.strip().splitlines() or ["no output"])[-1]
        failed = re.findall(r"^(?:FAILED|ERROR) (.+)$", text, re.MULTILINE)
        result = "passed" if code == 0 else f"failed: {', '.join(failed) or last}"
        return versions(folder), f"{result} ({last.strip('= ')})" if code == 0 else result


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    versions = ["3.10", "3.11", "3.12", "3.13", "3.14"]
    parser.add_argument("--python", nargs="+", default=versions, help="or paths of interpreters")
    parser.add_argument("--torch", nargs="+", default=["2.8", "2.15"], help="oldest, newest")
    parser.add_argument("--lightning", nargs="+", default=["2.5", "2.6"])
    parser.add_argument("--tests", nargs="+", default=list(QUICK))
    parser.add_argument("--dry-run", action="store_true", help="only say what would be tried")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    print("| Python | torch | Lightning | installed | result |\n|---|---|---|---|---|", flush=True)
    has_failed = False
    for combination in rows(arguments):
        if arguments.dry_run:
            is_here = interpreter(combination[0]) is not None
            found = "", "to be tried" if is_here else "skipped: no interpreter"
        else:
            found = row(*combination, arguments.tests)
        has_failed |= found[1].startswith("failed")
        print(f"| {' | '.join((*combination, *found))} |", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
