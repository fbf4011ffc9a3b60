"""The troublesome models are what their table says, in plain torch and without ranks."""

import time

import pytest
import torch

from tests.oracle.models import MODELS
from tests.oracle.parity import share

every_model = pytest.mark.parametrize("name", MODELS)


def grads(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@every_model
def test_build_and_batch_repeat_themselves(name: str) -> None:
    case = MODELS[name]
    state = torch.random.get_rng_state()
    one, two, other = case.build(), case.build(), case.build(seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = list(zip(one.parameters(), two.parameters(), strict=True))
    assert all(torch.equal(p, q) for p, q in pairs)
    assert all(p.stride() == q.stride() for p, q in pairs)
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    assert any(not torch.equal(p, q) for p, q in pairs)
    for key, rows in case.batch(8, 3).items():
        assert len(rows) == 8
        assert torch.equal(rows, case.batch(8, 3)[key])


@every_model
def test_only_the_unused_have_no_gradient(name: str) -> None:
    case = MODELS[name]
    model = case.build()
    for seed in range(2):
        case.loss(model, case.batch(8, seed)).backward()
    assert tuple(key for key, grad in grads(model).items() if grad is None) == case.unused


@every_model
def test_loss_of_a_batch_is_the_mean_over_its_parts(name: str) -> None:
    case = MODELS[name]
    whole, parts = case.build(dtype=torch.float64), case.build(dtype=torch.float64)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in case.batch(24, 1).items()}
    expected = case.loss(whole, batch)
    expected.backward()
    total = torch.zeros(())
    for rank in range(3):
        for micro in range(2):
            loss = case.loss(parts, share(batch, rank, 3, micro, 2)) / 6
            loss.backward()
            total = total + loss.detach()
    is_linear = torch.isclose(total, expected.detach(), rtol=1e-12)
    assert is_linear == (not case.per_rank_statistics)
    if is_linear:
        torch.testing.assert_close(grads(parts), grads(whole), rtol=1e-10, atol=1e-14)


@every_model
def test_a_step_takes_milliseconds(name: str) -> None:
    case = MODELS[name]
    model, seconds = case.build(), []
    for seed in range(5):
        begin = time.process_time()
        case.loss(model, case.batch(8, seed)).backward()
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.05


def test_models_are_the_trouble_they_claim_to_be() -> None:
    assert {p.numel() for p in MODELS["odd_widths"].build().parameters()} >= {1, 5, 7 * 13}
    assert any(p.dim() == 0 for p in MODELS["odd_widths"].build().parameters())
    assert any(p.numel() == 0 for p in MODELS["zero_sized"].build().parameters())
    assert any(not p.is_contiguous() for p in MODELS["channels_last"].build().parameters())
    for name in ("tied", "tied_blocks"):
        model = MODELS[name].build()
        assert len(list(model.named_parameters())) < len(
            list(model.named_parameters(remove_duplicate=False))
        )
    frozen = [p.requires_grad for p in MODELS["frozen"].build().parameters()]
    assert frozen[0] is False
    assert True in frozen[: len(frozen) - 1 - frozen[::-1].index(False)]
    assert [bool(MODELS["branch_by_step"].batch(4, s)["branch"].any()) for s in (0, 1)] == [0, 1]
    for world in (2, 3, 4):
        batch = MODELS["experts"].batch(4 * world, 0)
        used = [set(share(batch, rank, world)["expert"].tolist()) for rank in range(world)]
        assert set.union(*used) == {0, 1, 2}
        assert any(len(experts) < 3 for experts in used)
