"""The command ``lightning-zero``; each subcommand lives in the room of its subject."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_zero.checkpoint import add_convert_command, add_inspect_command

COMMANDS = (add_convert_command, add_inspect_command)
"""What adds a subcommand to the parser; each sets ``run``, which returns the exit code."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lightning-zero", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for add in COMMANDS:
        add(subparsers)
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"lightning-zero: {error}", file=sys.stderr)
        return 1
