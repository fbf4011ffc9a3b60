"""A watch that reports soon where a rank waits; what it proves does not depend on how soon.

`tests/engine/test_faults.py` waits as long as users do.
"""

from __future__ import annotations

from unittest import mock

from lightning_zero.comm import watchdog

impatient = mock.patch.object(watchdog, "PATIENCE", 0.5)
"""A function's decorator."""
