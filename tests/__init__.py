"""Tests of `lightning_zero`; README.md in this folder says which file holds what."""

import pytest

pytest.register_assert_rewrite("tests.models", "tests.parity")
