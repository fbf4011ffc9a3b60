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


def with_twin(path: Path) -> dict:
    """The notebook, and behind it the same cells, up to the metrics, under DDP."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code[:4]):
        source = "".join(cell["source"]).replace("zero3_notebook", "ddp_notebook")
        source = source.replace('report="memory"', "")
        notebook["cells"].append({**cell, "id": f"twin-{number}", "source": source})
    return notebook


@pytest.mark.slow
def test_notebook(tmp_path: Path) -> None:
    """Weights and metrics are back in the kernel, and are those of `ddp_notebook`."""
    assert all(not cell["outputs"] for cell in code_cells(NOTEBOOK)), "commit it without outputs"
    source = tmp_path / "notebook.ipynb"
    source.write_text(json.dumps(with_twin(NOTEBOOK)))
    run_script(EXECUTE, source, tmp_path, launcher="plain")
    outputs = [printed(cell) for cell in code_cells(tmp_path / "executed.ipynb")]
    _, plans, _, results, use, memory, again, *twins = outputs

    metrics = numbers(r"'(?:loss|val_loss)': ([\d.e-]+)", results)
    changes = numbers(r"changed by ([\d.]+)", results)
    assert len(changes) == 4
    assert min(changes) > 0
    assert len(metrics) == 2
    assert max(metrics) < 0.05
    assert changes + metrics == pytest.approx(
        numbers(r"changed by ([\d.]+)", twins[3])
        + numbers(r"'(?:loss|val_loss)': ([\d.e-]+)", twins[3]),
        rel=1e-3,
        abs=1e-3,
    )

    sines = numbers(r"= ([\d.-]+),", use)
    assert numbers(r"says ([\d.-]+)", use) == pytest.approx(sines, abs=0.3)
    assert len(sines) == 3
    (planned,) = numbers(r"zero3 +([\d.]+) kB", plans)
    held = numbers(r"([\d.]+) kB", memory)
    assert len(held) == 3
    assert sum(held) == pytest.approx(planned, abs=0.05)
    assert numbers(r"epochs: ([\d.e-]+)", again)[0] < metrics[1]
