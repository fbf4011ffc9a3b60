"""The command, the picture and the report page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_zero.memory import (
    EQUAL_STAGES,
    KINDS,
    ModelPlan,
    advise,
    compare,
    estimate_table,
    format_bytes,
    parse_bytes,
    parse_numel,
    plot,
    rest_table,
    write_report,
)
from lightning_zero.plan import Settings
from tests.oracle.command import run
from tests.oracle.models import MODELS
from tests.oracle.ranks import ROOT

GPT = f"{ROOT}/examples/train_gpt.py:GPT"


@pytest.fixture(scope="module")
def subject() -> ModelPlan:
    return subject_of(4)


def subject_of(rows: int) -> ModelPlan:
    case = MODELS["transformer"]
    return ModelPlan(
        case.build(), Settings(units=is_block), batch=case.batch(rows, 0), step=case.loss,
        device=torch.device("cpu"),
    )  # fmt: skip


def is_block(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "TransformerBlock"


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30), ("1e9", 10**9), ("512", 512), ("1.5T", 15e11)],
)
def test_bytes_are_read(text: str, count: float) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (160 * 10**9, "160 GB"), (999_999, "1.00 MB"),
     (1_579_008, "1.58 MB"), (33_800, "33.8 kB"), (999.6e9, "1.00 TB")],
)  # fmt: skip
def test_bytes_are_written(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_numbers_of_parameters_are_read() -> None:
    assert parse_numel("10B") == 10**10
    assert parse_numel("350M") == 350 * 10**6
    with pytest.raises(ValueError, match=r"Expected a number of parameters such as '10B'"):
        parse_numel("ten")
    with pytest.raises(ValueError, match=r"Expected a number of bytes such as '80GB'"):
        parse_bytes("big")


def test_the_page_stands_alone(subject: ModelPlan, tmp_path: Path) -> None:
    stages = compare(subject, (0, 1, 2, 3), [2])
    measured = {"step": dict.fromkeys(KINDS, 1)}
    page = write_report(
        tmp_path / "new" / "folder", measured=measured, predicted=stages[3], stages=stages,
        held=stages[3].resting,
        device_memory=10**6,
    )  # fmt: skip
    text = page.read_text()
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 1
    for picture in pictures:
        xml.etree.ElementTree.fromstring(picture)
    assert not re.search(r"<(script|link|img|iframe)\b", text)
    facts = json.loads((page.parent / "memory.json").read_text())
    assert facts["predicted"]["peak"]["total"] == stages[3].peak.total
    assert [row["strategy"] for row in facts["stages"]] == ["ddp", "zero1", "zero2", "zero3"]
    assert estimate_table(stages) in text
    assert rest_table({"predicted": stages[3].rests, "measured": stages[3].resting}) in text


def test_the_page_without_matplotlib(
    subject: ModelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    page = write_report(tmp_path, predicted=compare(subject, [3], [2])[0])
    assert "lightning-zero[plot]" in page.read_text()
    assert "<svg" not in page.read_text()
    with pytest.raises(ImportError, match="Pictures need matplotlib"):
        plot.timeline(subject.snapshots(3, 2), title="")


def test_the_picture_shows_what_was_estimated(subject: ModelPlan) -> None:
    found = compare(subject, [3], [2])[0]
    step = plot.timeline(found.snapshots, title="")
    highest = step.axes[0].lines[0].get_ydata().max() * 1e3
    assert highest == pytest.approx(found.peak.total)


def test_the_page_explains_itself(subject: ModelPlan, tmp_path: Path) -> None:
    several = {"num_microbatches": 4}
    for name, settings in (("equal", {}), ("other", several)):
        stages = compare(subject, (0, 1, 2, 3), [2], **settings)
        text = write_report(tmp_path / name, subject="<this>", stages=stages).read_text()
        assert "<title>Memory of &lt;this&gt;</title>" in text
        assert "1 GB is 10<sup>9</sup> bytes" in text
        assert all(f"<dt>{kind}</dt>" in text for kind in KINDS)
        assert (EQUAL_STAGES in text) == (name == "equal")
        facts = json.loads((tmp_path / name / "memory.json").read_text())
        assert facts["subject"] == "<this>"


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97, 1.0, 1.02, 1.1, 1.2, 1.3, 2.0])
def test_the_labels_of_a_step_are_off_its_lines(subject: ModelPlan, share: float) -> None:
    found = compare(subject, [3], [2])[0]
    limit = int(share * found.peak.total)
    figure = plot.timeline(found.snapshots, title="", limit=limit)
    (axes,) = figure.axes
    boxes = label_boxes(figure)
    assert len(boxes) == 2
    device, peak = sorted(boxes, key=lambda box: box.height)
    assert not device.overlaps(peak)
    assert max(box.y1 for box in boxes) <= axes.get_window_extent().y1
    scale = 1e3
    for height in (limit, found.peak.total):
        line = axes.transData.transform((0, height / scale))[1]
        assert not peak.y0 < line < peak.y1
    line = axes.transData.transform((0, limit / scale))[1]
    assert line < device.y0


def label_boxes(figure: Any) -> list[Any]:
    """Return where the annotations of a picture are drawn."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    # Of the text alone, without the line from it to the peak.
    return [Text.get_window_extent(text) for text in figure.axes[0].texts]


def test_advice_names_the_least_sharding() -> None:
    subject = subject_of(64)
    stages = compare(subject, (0, 1, 2, 3), [2])
    roomy = advise(subject, stages, stages[0].peak.total)
    assert roomy.startswith("On 2 ranks, ddp fits: ")
    tight = advise(subject, stages, stages[1].peak.total)
    assert tight.startswith("On 2 ranks, zero1 fits: ")
    never = advise(subject, stages, 10**4)
    assert "nothing fits: " in never
    assert "Activation checkpointing lowers zero3 to " in never


def test_advice_finds_enough_ranks() -> None:
    subject = ModelPlan(10**10, precision="bf16-mixed", device=torch.device("cpu"))
    text = advise(subject, compare(subject, (0, 1, 2, 3), [2]), 24 * 10**9)
    expected = "zero3 needs 80.0 GB, but a device has 24.0 GB. zero3 fits on 8 ranks."
    assert f"nothing fits: {expected}" in text
    assert "Activations are not counted" in text


def test_command_on_a_number(capsys: Any) -> None:
    code, out, _ = run(capsys, "10B", "--ranks", "8", "--precision", "bf16-mixed",
                       "--device-memory", "80GB")  # fmt: skip
    assert code == 0
    row = next(line for line in out.splitlines() if line.startswith("model states"))
    assert re.findall(r"[\d.]+ GB", row) == ["160 GB", "40.0 GB", "40.0 GB", "20.0 GB"]
    assert "On 8 ranks, zero1 fits" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("10B --device-memory 80GB", 'Trainer(strategy="zero1", devices=8), after'),
        ("10B --device-memory 200GB", 'Trainer(strategy="ddp", devices=8).'),
        ("10B --ranks 2 64 --device-memory 16GB", '"zero3", devices=8, num_nodes=8), after'),
        (
            "10B --device cuda --device-memory 16GB --precision bf16-mixed",
            'Trainer(strategy="zero3_offload", devices=8, precision="bf16-mixed"), after',
        ),
        (
            "10B --set shard=4 reshard_after_forward=False --accumulate-grad-batches 2",
            "Trainer(strategy=ZeROStrategy(3, shard=4, reshard_after_forward=False), devices=8,"
            " accumulate_grad_batches=2), after",
        ),
        (
            "10B --set shard=4 reshard_after_forward=False --device-memory 80GB",
            "ZeROStrategy(1, shard=4), devices=8), after",
        ),
    ],
)
def test_the_last_line_is_what_to_write(capsys: Any, words: str, expected: str) -> None:
    code, out, error = run(capsys, *words.split())
    assert (code, error) == (0, "")
    last = out.splitlines()[-1]
    assert last.startswith("To train with ")
    assert expected in last


def test_nothing_is_to_be_written_if_nothing_fits(capsys: Any) -> None:
    _, out, _ = run(capsys, "10B", "--device-memory", "1GB", "--host-memory", "1GB")
    assert "To train" not in out


def test_command_on_a_class_with_a_batch(capsys: Any, tmp_path: Path) -> None:
    code, out, _ = run(
        capsys, GPT, "--args", "width=64", "depth=2", "--optimizer", "adamw", "--ranks", "1", "2",
        "--batch", "int64[2,129]", "--stages", "0", "3", "--report", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert "activations" in out
    assert "zero3, 2 ranks" in out
    assert "zero1" not in out
    page = (tmp_path / "memory.html").read_text()
    assert page.count("<svg") == 1
    subject = "GPT, 124,672 parameters, 32-true, AdamW, batch int64[2,129]"
    assert f"<title>Memory of {subject}</title>" in page
    assert f"<h1>Memory of {subject}</h1>" in page


def test_command_counts_activation_checkpointing(capsys: Any) -> None:
    words = [GPT, "--args", "width=128", "depth=6", "--optimizer", "adamw", "--ranks", "2",
             "--batch", "int64[2,129]", "--stages", "3"]  # fmt: skip
    found = []
    for more in ([], ["--set", "activation_checkpointing=True"]):
        code, out, _ = run(capsys, *words, *more)
        assert code == 0
        row = next(line for line in out.splitlines() if line.startswith("activations"))
        found.append(parse_bytes(row.removeprefix("activations").strip()))
    assert 0 < found[1] < 0.8 * found[0]


def test_command_on_a_configuration(capsys: Any) -> None:
    code, out, _ = run(capsys, f"{ROOT}/examples/zero3.yaml", "--model", GPT, "--optimizer", "sgd")
    assert code == 0
    assert "zero3, 2 ranks" in out
    assert "842,496 parameters, 32-true" in out


def test_command_reads_what_a_configuration_gives_the_strategy(capsys: Any, tmp_path: Path) -> None:
    def unreduced(more: str, *words: str) -> int:
        config = tmp_path / "config.yaml"
        config.write_text(
            "trainer:\n  devices: 2\n  accumulate_grad_batches: 4\n  strategy:\n"
            f"    class_path: lightning_zero.ZeROStrategy\n    init_args: {{stage: 3{more}}}\n"
        )
        code, out, _ = run(
            capsys, str(config), "--model", GPT, "--optimizer", "sgd", "--stages", "3", *words
        )
        assert code == 0
        row = next(line for line in out.splitlines() if line.startswith("unreduced"))
        return parse_bytes(row.removeprefix("unreduced").strip())

    # All units' gradients wait for the last microbatch.
    least, most = unreduced(""), unreduced(", accumulate: local")
    assert most > 1.2 * least
    assert unreduced("", "--set", "accumulate=local") == most
    assert unreduced(", units: [torch.nn.Linear]") < least
    config = tmp_path / "deepspeed.yaml"
    config.write_text(
        "trainer: {devices: 2, strategy: {class_path: lightning_zero.ZeROStrategy, init_args:"
        " {config: {zero_optimization: {stage: 3, mics_shard_size: 2}}}}}\n"
    )
    code, _, err = run(capsys, str(config), "--model", GPT, "--set", "shard=1")
    assert code == 1
    assert "shard=1 contradicts the DeepSpeed configuration, which sets 2" in err
    config.write_text(
        "trainer: {strategy: {class_path: My, init_args: {accumulate: local}}}\nmodel: {}\n"
    )
    code, out, _ = run(capsys, str(config), "--model", GPT, "--optimizer", "sgd")
    assert code == 0
    assert "Ignored the arguments of My." in out
    config.write_text("trainer: {devices: 2, strategy: zero3_nvme}\n")
    code, out, _ = run(capsys, str(config), "--model", GPT, "--optimizer", "sgd", "--stages", "3")
    assert code == 0
    assert "zero3_nvme, 2 ranks" in out


def test_command_on_a_hugging_face_configuration(capsys: Any, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    numel = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    code, out, _ = run(capsys, str(tmp_path), "--batch", "input_ids=int64[2,16]",
                       "labels=int64[2,16]")  # fmt: skip
    assert code == 0
    head = f"LlamaForCausalLM, {numel:,} parameters, 32-true, AdamW, batch int64[2,16] int64[2,16]"
    assert out.startswith(f"{head}\n")


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"model_type": "llama"}, "LlamaModel"),
        ({"model_type": "bert", "architectures": None}, "BertModel"),
        ({"model_type": "gpt2", "architectures": [], "n_embd": 32, "n_layer": 1}, "GPT2Model"),
        ({"model_type": "vit"}, "ViTModel"),
    ],
)
def test_command_on_a_configuration_without_architectures(
    capsys: Any, tmp_path: Path, facts: dict[str, Any], name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **facts}))
    code, out, _ = run(capsys, str(tmp_path))
    assert code == 0
    model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(tmp_path))
    numel = sum(p.numel() for p in model.parameters())
    assert out.startswith(f"{name}, {numel:,} parameters")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "nothing"}', "model type `nothing`"),
        ("{}", "Should have a `model_type` key"),
        ("[1]", "no attribute 'get'"),
        ("{", "Expecting property name"),
        ('{"model_type": "gpt2", "architectures": ["Mine"]}', "`architectures` ['Mine']"),
    ],
)
def test_command_names_what_a_configuration_lacks(
    capsys: Any, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1
    assert words in err
    assert f"{tmp_path}/config.json" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "Expected a number of parameters (10B), an import path"),
        (["no.such:Model"], "Expected a module that can be imported in 'no.such:Model'"),
        (["torch.nn:Nothing"], "Expected a class of torch.nn in 'torch.nn:Nothing'"),
        (["gone.py:Model"], "there is no file gone.py"),
        (["gone.yaml"], "found nothing at gone.yaml"),
        ([f"{ROOT}/examples/zero3.yaml"], "has no `model.class_path`"),
        ([GPT], "configure_optimizers does not run without a Trainer"),
        (["10B", "--optimizer", "adamm"], "Expected an optimizer of torch.optim"),
        (["10B", "--ranks", "0"], "Expected world_size >= 1, got 0."),
        (["10B", "--batch", "int64[2]"], "A number of parameters has no activations"),
        (["10B", "--batch", "int65[2]"], "Expected a batch such as int64[4,128]"),
        (["10B", "--device-memory", "big"], "Expected a number of bytes such as '80GB'"),
        (["10B", "--set", "shards=2"], "ZeROStrategy has no argument 'shards'."),
        (["10B", "--set", "prefetch=-1"], "Expected prefetch to be a number of units >= 0, got"),
        ([GPT, "--args", "width"], "Expected arguments as name=value, got 'width'."),
    ],
)
def test_command_names_a_mistake(capsys: Any, words: list[str], message: str) -> None:
    code, _, err = run(capsys, *words)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1
