"""The command `lightning-zero estimate` in this process."""

from __future__ import annotations

import pytest

from lightning_zero.commands import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["estimate", *words])
    out, err = capsys.readouterr()
    return code, out, err
