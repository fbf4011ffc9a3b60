"""Stage, precision and accumulation as data: homes, what follows from them, and their bytes."""

import pytest
import torch

from lightning_zero.plan import RECIPES, Placement, Settings

R, P, S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize(
    ("stage", "homes", "reshards", "every"),
    [(1, (R, P, S), False, False), (2, (R, S, S), False, True), (3, (S, S, S), True, True)],
)
def test_stages_are_rows(
    stage: int, homes: tuple[Placement, ...], reshards: bool, every: bool
) -> None:
    plan = Settings(stage).plan(F32)
    assert (plan.weight.placement, plan.grad.placement, plan.master.placement) == homes
    assert plan.reshards is reshards
    assert plan.reduces_every_microbatch is every
    assert Settings(stage, accumulate="local").plan(F32).reduces_every_microbatch is False


@pytest.mark.parametrize(
    ("precision", "own", "dtypes"),
    [
        ("32-true", F32, (F32, F32, F32)),
        ("64-true", F64, (F64, F64, F64)),
        ("bf16-mixed", F32, (BF16, F32, F32)),
        ("16-mixed", F32, (F16, F32, F32)),
        ("bf16-true", BF16, (BF16, BF16, BF16)),
        ("16-true", F16, (F16, F16, F16)),
        # Only fp32 parameters follow a mixed recipe.
        ("bf16-mixed", F64, (F64, F64, F64)),
        ("bf16-mixed", F16, (F16, F16, F16)),
        ("bf16-mixed", torch.int64, (torch.int64,) * 3),
    ],
)
def test_precisions_are_rows(
    precision: str, own: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> None:
    plan = Settings(3, RECIPES[precision]).plan(own)
    assert (plan.weight.dtype, plan.grad.dtype, plan.master.dtype) == dtypes
    assert plan.has_master is (dtypes[0] != dtypes[2])


def test_reduce_dtype_is_the_grads() -> None:
    settings = Settings(2, RECIPES["bf16-mixed"], reduce_dtype=BF16)
    plan = settings.plan(F32)
    assert (plan.weight.dtype, plan.grad.dtype, plan.master.dtype) == (BF16, BF16, F32)
    assert settings.plan(torch.int64).grad.dtype is torch.int64


@pytest.mark.parametrize(
    ("stage", "precision", "terms"),
    [
        (1, "32-true", (4 * 1200, 4 * 300, 0)),
        (2, "32-true", (4 * 1200, 4 * 300, 0)),
        (3, "32-true", (4 * 300, 4 * 300, 0)),
        (1, "bf16-mixed", (2 * 1200, 4 * 300, 4 * 300)),
        (3, "bf16-mixed", (0, 4 * 300, 4 * 300)),
    ],
)
def test_resting_bytes(stage: int, precision: str, terms: tuple[int, int, int]) -> None:
    plan = Settings(stage, RECIPES[precision]).plan(F32)
    expected = dict(zip(("weights", "gradients", "master"), terms, strict=True))
    assert plan.resting_bytes(1200, 4) == expected
    assert plan.resting_bytes(1200, 4, trainable=False) == {**expected, "gradients": 0}
