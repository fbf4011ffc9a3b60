"""The command ``lightning-zero``, one module for each subcommand.

- ``convert``: conversion of checkpoints between formats
- ``estimate``: memory of a model before it runs
- ``inspect``: what a checkpoint holds, and whether it is intact
- ``model_source``: lookup of the model that a command line names
- ``option``: what ``argparse`` says of an option that cannot be parsed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from lightning_zero.commands.convert import add_convert_command, convert
from lightning_zero.commands.estimate import add_estimate_command
from lightning_zero.commands.inspect import add_inspect_command, damage, describe

__all__ = ["COMMANDS", "convert", "damage", "describe", "main"]

COMMANDS = (add_estimate_command, add_inspect_command, add_convert_command)
"""Functions that add a subcommand, whose ``run`` returns the exit code, to the parser."""

_DESCRIPTION = """\
Memory estimates and checkpoint tools for lightning_zero, which trains PyTorch Lightning
modules with weights, gradients and optimizer states sharded over the ranks (ZeRO)."""
_EXAMPLES = """\
examples:
  lightning-zero estimate 10B --ranks 8 --device-memory 80GB    find a stage that fits
  lightning-zero inspect last.ckpt                              show what a checkpoint holds
  lightning-zero convert last.ckpt weights.safetensors          export its weights
  lightning-zero estimate --help                                all options of a command"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for add in COMMANDS:
        add(subparsers)
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"lightning-zero: {error}", file=sys.stderr)
        return 1


def _versions() -> str:
    names = ("lightning-zero", "torch", "lightning")
    return ", ".join(f"{name} {version(name)}" for name in names)
