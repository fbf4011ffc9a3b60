"""``lightning-zero estimate``: which model it finds, and what it prints."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from lightning_zero.commands import main
from lightning_zero.memory import parse_bytes
from tests.oracle.launch import run_python
from tests.oracle.ranks import ROOT


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["estimate", *words])
    return code, *capsys.readouterr()


GPT = f"{ROOT}/examples/train_gpt.py:GPT"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("10B --device-memory 80GB", 'Trainer(strategy="zero1", devices=8), after'),
        ("10B --device-memory 210GB", 'Trainer(strategy="ddp", devices=8)'),
        ("10B --ranks 2 64 --device-memory 16GB", '"zero3", devices=8, num_nodes=8), after'),
        (
            "10B --set shard=4 reshard_after_forward=False --accumulate-grad-batches 2",
            "Trainer(strategy=ZeROStrategy(3, shard=4, reshard_after_forward=False), devices=8,"
            " accumulate_grad_batches=2), after",
        ),
        (
            "10B --set shard=4 reshard_after_forward=False --device-memory 80GB",
            "ZeROStrategy(3, shard=4, reshard_after_forward=False), devices=8), after",
        ),
    ],
)
def test_the_second_line_is_what_to_write(capsys: Any, words: str, expected: str) -> None:
    code, out, error = run(capsys, *words.split())
    assert (code, error) == (0, "")
    assert expected in out.splitlines()[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "7B --ranks 1 --device-memory 24GB --host-memory 64GB",
            """\
What would fit: Trainer(strategy="zero3_nvme", devices=1), after import lightning_zero
    device: only gathered weights and activations; host: 28.0 GB of 64.0 GB; files: 84.0 GB
or: Trainer(strategy="zero3", devices=8), after import lightning_zero
    at least 14.0 GB of 24.0 GB per rank, before gathered weights and activations
not: zero3_offload on 1 rank
    device: only gathered weights and activations; host: 112 GB (it has 64.0 GB)
Otherwise nothing fits: ddp on 1 rank needs at least 112 GB per rank (a device has 24.0 GB), before\
 gathered weights and activations.""",
        ),
        (
            "7B --ranks 1 --device-memory 24GB --host-memory 128GB",
            """\
What would fit: Trainer(strategy="zero3_offload", devices=1), after import lightning_zero
    device: only gathered weights and activations; host: 112 GB of 128 GB
or: Trainer(strategy="zero3_nvme", devices=1), after""",
        ),
        (
            "70B --ranks 8 --device-memory 80GB",
            """\
What would fit: Trainer(strategy="zero3_offload", devices=8), after import lightning_zero
    device: only gathered weights and activations; host: 1.12 TB for 8 ranks
or: Trainer(strategy="zero3_nvme", devices=8), after import lightning_zero
    device: only gathered weights and activations; host: 280 GB for 8 ranks; files: 840 GB
or: Trainer(strategy="zero3", devices=8, num_nodes=4), after import lightning_zero
    at least 35.0 GB of 80.0 GB per rank, before gathered weights and activations
Otherwise nothing fits: zero3 on 8 ranks needs at least 140 GB per rank (a device has 80.0 GB)""",
        ),
        (
            "1B --ranks 2",
            """\
zero3 on 2 ranks needs least: at least 8.00 GB per rank, before gathered weights and activations.
Trainer(strategy="zero3", devices=2), after import lightning_zero

1,000,000,000 parameters, 32-true, AdamW
Not counted: gathered weights, unreduced gradients, activations.
To count them, pass a model (file.py:Class) and its --batch.
""",
        ),
        (
            "70B --device-memory 1GB --host-memory 1GB",
            "Nothing fits. Use more ranks, larger devices or a smaller micro-batch.\nnot: zero3",
        ),
        (
            f"{GPT} --args width=128 depth=6 --optimizer adamw --ranks 2 --batch int64[2,129]"
            " --device-memory 16MB",
            "What would fit: Trainer(strategy=ZeROStrategy(3, activation_checkpointing=True), ",
        ),
    ],
)
def test_the_first_lines_say_what_to_do(capsys: Any, words: str, expected: str) -> None:
    code, out, error = run(capsys, *words.split())
    assert (code, error) == (0, "")
    assert out.startswith(expected)


SCHEDULED = """
import torch
from lightning.pytorch import LightningModule

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        (x,) = batch
        return self.layer(x).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]
"""


def test_a_schedule_of_the_steps_and_a_batch_of_one_tensor(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SCHEDULED)
    code, out, error = run(capsys, f"{tmp_path}/net.py:Net", "--batch", "[float32[4,8]]")
    assert (code, error) == (0, "")
    assert "SGD" in out
    assert "Not counted" not in out
    asking = SCHEDULED.replace("estimated_stepping_batches", "datamodule.steps")
    (tmp_path / "asking.py").write_text(asking)
    code, _, error = run(capsys, f"{tmp_path}/asking.py:Net")
    assert code == 1
    assert "does not run without a Trainer" in error
    assert "--optimizer" in error


def test_without_words_the_commands_are_listed(capsys: Any) -> None:
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in ("estimate", "inspect", "convert"))


def test_command_on_a_class_with_a_batch(capsys: Any, tmp_path: Path) -> None:
    code, out, _ = run(
        capsys, GPT, "--args", "width=64", "depth=2", "--optimizer", "adamw", "--ranks", "1", "2",
        "--batch", "int64[2,129]", "--stages", "0", "3", "--report", str(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert "activations" in out
    assert "zero3, 2 ranks" in out
    assert "zero1" not in out
    assert "GPT, 124,672 parameters, 32-true, AdamW, batch int64[2,129]" in out
    assert (tmp_path / "memory.json").exists()
    assert (tmp_path / "memory.svg").exists()


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
    config.write_text(
        "trainer: {devices: 2, strategy: zero3_nvme, precision: bf16}\n"
        f"model: {{class_path: '{GPT}', init_args: }}\n"
    )
    code, out, _ = run(capsys, str(config), "--optimizer", "sgd", "--stages", "3")
    assert code == 0
    assert out.startswith("zero3_nvme on 2 ranks needs device: ")
    assert "zero3_nvme, 2 ranks" in out
    code, out, _ = run(
        capsys, str(config), "--optimizer", "sgd", "--set", "stage=2", "prefetch=3",
        "offload_optimizer=None", "offload_weights=None", "--device-memory", "1TB",
    )  # fmt: skip
    assert out.startswith("zero2 on 2 ranks: ")
    assert out.splitlines()[1].startswith('Trainer(strategy="zero2", devices=2')


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
    assert f"\n{head}\n" in out


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"model_type": "llama"}, "LlamaModel"),
        ({"model_type": "bert", "architectures": None}, "BertModel"),
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
    assert f"\n{name}, {numel:,} parameters" in out


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
        (["nonsense"], "for example examples/train_gpt.py:GPT, got 'nonsense'"),
        (["no.such:Model"], "Expected a module that can be imported in 'no.such:Model'"),
        (["torch.nn:Nothing"], "Expected a class of torch.nn in 'torch.nn:Nothing'"),
        (["gone.py:Model"], "there is no file gone.py"),
        (["gone.yaml"], "found nothing at gone.yaml"),
        ([f"{ROOT}/examples/zero3.yaml"], "has no `model.class_path`"),
        (["10B", "--batch", "int64[2]"], "A number of parameters has no activations"),
        (["10B", "--batch", "int65[2]"], "Expected a batch such as int64[4,128]"),
        (["10B", "--device-memory", "big"], "Expected a number of bytes such as '80GB'"),
        (
            ["10B", "--set", "shards=2"],
            "ZeROStrategy has no argument 'shards'. Did you mean 'shard'?",
        ),
        (["10B", "--set", "prefetch=-1"], "Expected prefetch to be a number of units >= 0, got"),
        (
            [GPT, "--args", "width"],
            "Expected arguments as name=value, for example width=128, got 'width'.",
        ),
    ],
)
def test_command_names_a_mistake(capsys: Any, words: list[str], message: str) -> None:
    code, _, err = run(capsys, *words)
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1


def test_command_predicts_offload(capsys: Any) -> None:
    code, out, _ = run(
        capsys, "10B", "--precision", "bf16-mixed", "--offload", "cpu", "nvme", "--stages", "3",
        "--device-memory", "6GB", "--device", "cuda",
    )  # fmt: skip
    assert code == 0
    assert "zero2_offload, 8 ranks  zero3_offload, 8 ranks  zero3_nvme, 8 ranks" in out
    assert out.startswith('What would fit: Trainer(strategy="zero3_offload", devices=8')
    assert re.search(r"^host peak .* 5.00 GB$", out, re.MULTILINE)


# -- as a command of its own -----------------------------------------------------------------------

PROJECT = {
    "package/__init__.py": "",
    "package/sizes.py": "SIZE = 3",
    "package/module.py": """
from torch import nn
from package.sizes import SIZE
class Net(nn.Linear):
    def __init__(self):
        super().__init__(SIZE, SIZE)
""",
    "one/sibling.py": "SIZE = 4",
    "one/model.py": "from torch import nn\nfrom sibling import SIZE\n"
    "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(SIZE, SIZE)\n",
    "one/json.py": "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n"
    "        super().__init__(5, 5)\n",
    "config.yaml": "model: {class_path: package.module.Net}\ntrainer: {devices: 2}\n",
}
COMMAND = (
    "import sys; sys.path[0] = {bin!r}; from lightning_zero.commands import main;"
    " sys.exit(main(sys.argv[1:]))"
)
"""As a console script: its own folder comes first on the path, not the working directory."""


@pytest.mark.parametrize(
    ("source", "numel"),
    [
        ("package.module:Net", 12),
        ("config.yaml", 12),
        ("one/model.py:Net", 20),
        ("one/json.py:Net", 30),
    ],
)
def test_a_project_that_is_not_installed_is_found(tmp_path: Path, source: str, numel: int) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    script = COMMAND.format(bin=str(Path(sys.executable).parent))
    words = ["-c", script, "estimate", source, "--optimizer", "sgd", "--ranks", "2"]
    out = run_python(words, cwd=tmp_path, fresh=True, env={"PYTHONPATH": str(ROOT)}).stdout
    assert f"\nNet, {numel} parameters" in out
