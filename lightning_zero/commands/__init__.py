"""The command ``lightning-zero``: its options, and the modules of its subcommands.

- ``checkpoints``: conversion between formats; what a checkpoint holds, and whether it is intact
- ``estimate``: memory of a model before it runs
- ``model_source``: lookup of the model that a command line names

Modules are imported when a subcommand runs, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Memory estimates and checkpoint tools for lightning_zero, which trains PyTorch Lightning
modules with weights, gradients and optimizer states sharded over the ranks (ZeRO)."""
_EXAMPLES = """\
examples:
  lightning-zero estimate 10B --ranks 8 --device-memory 80GB    find a stage that fits
  lightning-zero inspect last.ckpt                              show what a checkpoint holds
  lightning-zero convert last.ckpt weights.safetensors          export its weights
  lightning-zero estimate --help                                all options of a command"""
_ESTIMATE_EXAMPLES = """examples:
  lightning-zero estimate 10B --ranks 8 64 --precision bf16-mixed --device-memory 80GB
  lightning-zero estimate 7B --ranks 1 --device-memory 24GB --host-memory 128GB
  lightning-zero estimate 10B --ranks 8 --offload cpu nvme --device-memory 16GB
  lightning-zero estimate examples/train_gpt.py:GPT --args width=1024 depth=24 \\
      --optimizer adamw --batch "int64[8,129]" --ranks 4
  lightning-zero estimate examples/zero3.yaml --model examples/train_gpt.py:GPT --optimizer adamw
  lightning-zero estimate path/to/hugging_face_model --ranks 8 \\
      --batch "input_ids=int64[1,2048]" "labels=int64[1,2048]"
"""
_PRECISIONS = ("64-true", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    subparsers = parser.add_subparsers(metavar="command", dest="command")
    for add in (_add_estimate, _add_inspect, _add_convert):
        add(subparsers)
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        name = "estimate" if arguments.command == "estimate" else "checkpoints"
        module = importlib.import_module(f"lightning_zero.commands.{name}")
        code = int(getattr(module, f"run_{arguments.command}")(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `lightning-zero inspect file | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"lightning-zero: {error}", file=sys.stderr)
        return 1


def _versions() -> str:
    names = ("lightning-zero", "torch", "lightning")
    return ", ".join(f"{name} {version(name)}" for name in names)


def _add_estimate(commands: Any) -> None:
    parser = commands.add_parser(
        "estimate",
        help="predict a model's bytes per rank, by kind and stage",
        description="Predict a model's bytes per rank, by kind and stage, before it runs.",
        epilog=_ESTIMATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        help="a number of parameters (10B), package.module:Class, file.py:Class (file.py alone"
        " lists its LightningModules), a LightningCLI or a Hugging Face configuration",
    )
    parser.add_argument(
        "--args", nargs="*", default=[], help="arguments of the class as name=value"
    )
    parser.add_argument("--model", help="the class, if the configuration does not name it")
    parser.add_argument("--stages", nargs="+", type=int, help="default: 0 (DDP) 1 2 3")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: as in the YAML, else 8")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of ZeROStrategy, such as shard=8 activation_checkpointing=True",
    )
    parser.add_argument("--precision", choices=_PRECISIONS, help="as in the Trainer")
    parser.add_argument("--optimizer", help="a name in torch.optim")
    parser.add_argument(
        "--batch",
        nargs="*",
        default=[],
        help='of one rank: "int64[4,128]", several tensors, or "[int64[4,128]]" for a list of one',
    )
    parser.add_argument(
        "--accumulate-grad-batches", type=int, help="default: as in the YAML, else 1"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda", "xpu"],
        help="default: cpu; an accelerator with --device-memory",
    )
    parser.add_argument(
        "--offload",
        nargs="+",
        choices=["cpu", "nvme"],
        default=[],
        help="also predict zero2_offload and zero3_offload (cpu), both beside an accelerator, or"
        " zero3_nvme (nvme)",
    )
    parser.add_argument("--device-memory", help="of each accelerator, such as 80GB: what fits?")
    parser.add_argument(
        "--host-memory", help="of each host, which up to 8 ranks share unless a YAML says otherwise"
    )
    parser.add_argument("--report", type=Path, help="folder for memory.json and memory.svg")


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint to another format",
        description="Convert between checkpoint files (.ckpt, .pt), directories of"
        " torch.distributed.checkpoint and safetensors. The suffix of DST determines its format:"
        " .ckpt, .pt, .dcp (a directory) or .safetensors; without a suffix, or with a slash at its"
        " end, it is a folder of safetensors files.",
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("target", metavar="DST")
    parser.add_argument("--weights-only", action="store_true", help="keep only the weights")
    parser.add_argument("--dtype", help="cast floating-point weights: bf16, fp16, fp32, ...")
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="maximum size of one file in a safetensors folder (default: 5GB)",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also unpickle objects of other classes in SRC, which can run its writer's code",
    )


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Show the names, shapes, dtypes and bytes of the tensors in a checkpoint, and"
        " what wrote it. Only tensors and plain values are unpickled.",
    )
    parser.add_argument(
        "file",
        type=Path,
        help="a .ckpt or .pt file, a safetensors file or folder, or a directory of"
        " torch.distributed.checkpoint",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read everything and verify the checksums"
    )
