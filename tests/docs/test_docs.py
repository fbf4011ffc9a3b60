"""What the documentation says is run: code, configuration, commands and examples."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_zero.commands import main
from tests.oracle.launch import run_here, run_script
from tests.oracle.ranks import ROOT, Pools

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUMBER = r"[\d,]+"


def fenced(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each fenced block of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of the languages."""
    return [code for language, code in fenced(page) if language in languages]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def with_blocks(*languages: str, less: Container[str] = ()) -> list[Any]:
    pages = [page for page in PAGES if blocks(page, *languages) and name_of(page) not in less]
    return [pytest.param(page, id=name_of(page)) for page in pages]


# ---------------------------------------------------------------------------- pages


# By the next two tests.
RUN_ELSEWHERE = ("README.md", "docs/memory.md")
MEMORY = ROOT / "docs" / "memory.md"


def test_the_python_of_the_readme_starts_its_ranks_itself(tmp_path: Path) -> None:
    run_script("\n".join(blocks(ROOT / "README.md", "python")), cwd=tmp_path)


def outputs() -> list[tuple[str, str]]:
    """Return what the page about memory says that its blocks print, and what they print."""
    found: list[tuple[str, str]] = []
    names: dict[str, Any] = {"__name__": "memory"}
    printed = ""
    for language, text in fenced(MEMORY):
        if language == "text":
            found.append((text, printed))
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if language == "python" and "Trainer" not in text:
                exec(compile(text, str(MEMORY), "exec"), names)
            if language == "console":
                command, said = text.split("\n", 1)
                assert main(shlex.split(command.removeprefix("$ "))[1:]) == 0
                found.append((said, out.getvalue()))
        printed = out.getvalue()
    return found


def test_the_page_about_memory_says_what_is_printed(ranks: Pools, tmp_path: Path) -> None:
    pairs = outputs()
    assert len(pairs) == 5
    for said, printed in pairs:
        assert printed.rstrip() == said.rstrip()
    (text,) = [text for text in blocks(MEMORY, "python") if "Trainer" in text]
    ranks(1).run(run_here, text, cwd=tmp_path)
    assert (tmp_path / "memory" / "memory.json").exists()


@pytest.mark.parametrize("page", with_blocks("python", less=RUN_ELSEWHERE))
def test_the_python_of_a_page_runs_as_one_script(ranks: Pools, page: Path, tmp_path: Path) -> None:
    """Blocks follow one another, as in a notebook."""
    ranks(2).run(run_here, "\n".join(blocks(page, "python")), cwd=tmp_path)


@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_the_yaml_of_a_page_makes_a_strategy(page: Path) -> None:
    for block in blocks(page, "yaml"):
        strategy = yaml.safe_load(block)["trainer"]["strategy"]
        module, _, name = strategy["class_path"].rpartition(".")
        assert getattr(importlib.import_module(module), name)(**strategy["init_args"])


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_and_linked_files_exist(page: Path) -> None:
    text = page.read_text()
    commands = "\n".join(blocks(page, "bash", "console", "sh"))
    commands += "\n" + "\n".join(re.findall(r"`([^`\n]+)`", text))
    used = re.findall(r"^(?:\$ )?make ([a-z][\w-]*)", commands, re.MULTILINE)
    assert set(used) <= targets(), page
    links = re.findall(r"\]\(([^)#\s]+)", text)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    scripts = re.findall(r"(?:python|torchrun)[^\n]* ((?:examples|docs)/\S+\.py)", commands)
    assert not missing + [script for script in scripts if not (ROOT / script).exists()]


# ---------------------------------------------------------------------------- examples


Example = Callable[..., str]


@pytest.fixture(params=["ranks", pytest.param("script", marks=pytest.mark.slow)])
def example(request: pytest.FixtureRequest, ranks: Pools, tmp_path: Path) -> Example:
    """An example on two ranks of the pool, or as a script that starts its second process itself."""

    def run(*words: object) -> str:
        if request.param == "script":
            return run_script(*words, cwd=tmp_path).stdout
        return ranks(2).run(run_here, *words, cwd=tmp_path)[0]

    return run


SMALL = {
    "--trainer.max_epochs": 2,
    "--trainer.limit_train_batches": 12,
    "--trainer.limit_val_batches": 2,
    "--trainer.enable_progress_bar": False,
    "--trainer.enable_model_summary": False,
    "--data.context": 64,
    "--model.width": 96,
    "--model.depth": 4,
    "--model.heads": 2,
}


def table_of(output: str) -> dict[str, tuple[int, int]]:
    rows = re.findall(rf"^([a-z ]+?) +({NUMBER}) +({NUMBER}) *$", output, re.MULTILINE)
    return {kind: tuple(int(n.replace(",", "")) for n in numbers) for kind, *numbers in rows}


def test_train_gpt(example: Example) -> None:
    config = ROOT / "examples" / "zero3.yaml"
    small = [word for pair in SMALL.items() for word in pair]
    output = example("examples/train_gpt.py", "fit", "--config", config, *small)

    losses = [float(value) for value in re.findall(r"val_loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[0] > 5.0
    assert losses[-1] < 3.6

    block = 12 * 96 * 96 + 13 * 96
    root = 256 * 96 + 64 * 96 + 2 * 96
    numel, num_tensors = 4 * block + root, 4 * 12 + 4
    bytes_of = table_of(output)
    held, ddp_held = bytes_of["weights"]
    assert ddp_held == 4 * numel
    # Each tensor begins at a multiple of 64 elements.
    assert 2 * numel <= held <= 2 * (numel + 64 * num_tensors)
    total, ddp_total = bytes_of["at any moment"]
    assert ddp_total == 16 * numel + 4 * num_tensors
    assert total < ddp_total


@pytest.mark.slow
def test_train_gpt_with_layers_that_are_cut(example: Example) -> None:
    """Two tensor-parallel ranks share every batch, so the numbers are those of one rank."""
    config = ROOT / "examples" / "zero3.yaml"
    smaller = {"--trainer.max_epochs": 1, "--trainer.limit_train_batches": 10}
    smaller |= {"--data.context": 32, "--model.depth": 1}
    small = [word for pair in {**SMALL, **smaller}.items() for word in pair]
    option = "--trainer.strategy.init_args.tensor_parallel_size"
    output = example("examples/train_gpt.py", "fit", "--config", config, *small, option, 2)
    losses = [float(value) for value in re.findall(r"val_loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[0] > 5.0
    assert losses[-1] < 4.0


def test_fabric_gpt(example: Example, tmp_path: Path) -> None:
    """What one strategy has saved, the other goes on from."""
    path = tmp_path / "gpt.ckpt"
    small = ("--context", 64, "--width", 64, "--depth", 2, "--batches", 24, "--accelerator", "cpu")
    first = example("examples/fabric_gpt.py", *small, "--epochs", 2, "--save", path)
    losses = [float(value) for value in re.findall(r"val_loss ([\d.]+)", first)]
    assert len(losses) == 3
    assert losses[0] > 5.0
    assert losses[-1] < 3.6
    ddp = ("--strategy", "ddp", "--epochs", 1, "--resume", path)
    steps = re.findall(
        r"step +(\d+)   val_loss ([\d.]+)", example("examples/fabric_gpt.py", *small, *ddp)
    )
    assert [int(step) for step, _ in steps] == [24, 36]
    assert float(steps[0][1]) == losses[-1]
    assert float(steps[1][1]) < losses[-1]


@pytest.mark.slow
def test_gan(example: Example) -> None:
    output = example("examples/gan.py", "--epochs", 2)
    distances = [float(value) for value in re.findall(r"from the circle ([\d.]+)", output)]
    assert len(distances) == 3  # before training and after each epoch
    assert distances[-1] < 0.5 * distances[0]


@pytest.mark.slow
def test_training_beyond_memory(tmp_path: Path) -> None:
    """Its limit of memory is a process's; tests/engine/test_offload.py shows that it is one."""
    words = ("examples/beyond_memory.py", "train")
    output = run_script(*words, cwd=tmp_path, fresh=True).stdout
    assert "67 million parameters, 1.07 GB of weights" in output
    assert "trained; the last loss is 0." in output


@pytest.mark.slow
def test_predicting_beyond_memory(tmp_path: Path) -> None:
    """The limit has no room for the weights; they are the same as those that were written."""
    words = ("examples/beyond_memory.py", "predict", "--depth", 8)
    output = run_script(*words, cwd=tmp_path).stdout
    assert "0.60 GB of weights; memory is limited to 0.38 GB" in output
    assert "predicted 2 batches" in output
    assert list(tmp_path.glob("tmp*")) == []


@pytest.mark.slow
def test_finetune_hf(example: Example, tmp_path: Path) -> None:
    """From a folder of weights, all of them or adapters: gradients and states are theirs."""
    small = ("--epochs", 1, "--windows", 768, "--folder", tmp_path / "pretrained")
    layer, others = 4 * 128 * 128 + 3 * 128 * 256 + 2 * 128, 2 * 256 * 128 + 128
    whole = 4 * layer + others
    adapters = 4 * 8 * (4 * 256 + 3 * (128 + 256))  # four layers, rank 8, seven matrices each
    for words, trained in (((), whole), (("--lora",), adapters)):
        output = example("examples/finetune_hf.py", *small, *words)
        base_start, base_end, start, end = map(float, re.findall(r"loss ([\d.]+)", output))
        assert base_end < 0.7 * base_start
        assert start < 0.7 * base_start  # what was saved has been read
        assert end < start
        gradients = [int(n.replace(",", "")) for n in re.findall(rf"gradients +({NUMBER})", output)]
        states = [int(n.replace(",", "")) for n in re.findall(rf"states +({NUMBER})", output)]
        assert gradients == [2 * whole, 2 * trained]
        assert 2 * gradients[1] < states[1] <= 2 * gradients[1] + 4 * 4 * 7 * 2
