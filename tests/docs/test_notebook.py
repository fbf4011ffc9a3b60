"""The `_notebook` launcher where it belongs: in the kernel of a Jupyter notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.oracle.launch import run_script
from tests.oracle.ranks import ROOT

NOTEBOOK = ROOT / "examples/notebook.ipynb"

# Runs a notebook in a kernel that talks through files, and writes down what each cell printed.
EXECUTE = """
import json, sys
from pathlib import Path
import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

source, target = map(Path, sys.argv[1:])
notebook = nbformat.read(source, as_version=4)
manager = AsyncKernelManager(transport="ipc", connection_file=str(target / "kernel.json"))
NotebookClient(notebook, km=manager, timeout=300).execute(cwd=target)
nbformat.write(notebook, target / "executed.ipynb")
"""


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict) -> str:
    """Return what the kernel itself printed; the ranks' own words may come late."""
    texts = [output for output in cell["outputs"] if output.get("name") == "stdout"]
    return "".join("".join(output["text"]) for output in texts)


def numbers(pattern: str, text: str) -> list[float]:
    return [float(value) for value in re.findall(pattern, text)]


@pytest.mark.slow
def test_notebook(tmp_path: Path) -> None:
    """Weights and metrics are back in the kernel."""
    assert all(not cell["outputs"] for cell in code_cells(NOTEBOOK)), "commit it without outputs"
    run_script(EXECUTE, NOTEBOOK, tmp_path, launcher="plain")
    outputs = [printed(cell) for cell in code_cells(tmp_path / "executed.ipynb")]
    _, plans, _, results, use, memory, again = outputs

    metrics = numbers(r"'(?:loss|val_loss)': ([\d.e-]+)", results)
    changes = numbers(r"changed by ([\d.]+)", results)
    assert len(changes) == 4
    assert min(changes) > 0
    assert len(metrics) == 2
    assert max(metrics) < 0.05

    sines = numbers(r"= ([\d.-]+),", use)
    assert numbers(r"says ([\d.-]+)", use) == pytest.approx(sines, abs=0.3)
    assert len(sines) == 3
    (planned,) = numbers(r"zero3 +([\d.]+) kB", plans)
    held = numbers(r"([\d.]+) kB", memory)
    assert len(held) == 3
    assert sum(held) == pytest.approx(planned, abs=0.05)
    assert numbers(r"epochs: ([\d.e-]+)", again)[0] < metrics[1]
