"""The command ``lightning-zero``. Each of its commands lives in the room that does the work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning_zero.memory import add_estimate

COMMANDS: list[Callable[[Any], None]] = [add_estimate]
"""Functions that add one command each: a parser whose ``run`` default takes the options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. A user's mistake is one line, without a traceback."""
    parser = argparse.ArgumentParser(
        prog="lightning-zero", description="ZeRO for PyTorch Lightning: tools around a run."
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in COMMANDS:
        add(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError) as error:
        print(f"lightning-zero: {error}", file=sys.stderr)
        return 2
    return 0
