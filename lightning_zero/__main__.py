"""``python -m lightning_zero``: the command ``lightning-zero``."""

import sys

from lightning_zero.commands import main

if __name__ == "__main__":
    sys.exit(main())
