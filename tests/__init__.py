"""Tests of `lightning_zero`; README.md in this folder says what is where."""

import pytest

for name in ("by_trainer", "models", "parity"):
    pytest.register_assert_rewrite(f"tests.oracle.{name}")
pytest.register_assert_rewrite("tests.cases")
