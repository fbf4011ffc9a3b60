"""What only a device shows: parameters and states that move between it and the host.

On a device that torch has no name of its own for, ``.data`` of a tensor of the host takes no tensor
of the device.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from lightning_zero.tensors import internals, properties
from tests.oracle.models import MODELS
from tests.oracle.sharded import adamw, adopted, whole


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> list[torch.UntypedStorage]:
    """Stand-ins for host memory: tensors there take no data from elsewhere."""
    host: list[torch.UntypedStorage] = []
    assign = properties.SET_DATA

    def is_on_host(tensor: Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == one.data_ptr() for one in host)

    def assigned(tensor: Tensor, data: Tensor) -> None:
        assert is_on_host(tensor) is is_on_host(data), "incompatible tensor type"
        assign(tensor, data)

    monkeypatch.setattr(properties, "SET_DATA", assigned)
    monkeypatch.setattr(internals, "may_hold", lambda tensor, other: False)
    return host


def test_parameters_stay_the_same_objects(refusing: list[torch.UntypedStorage]) -> None:
    """From host to device and back: those that a graph or a weak reference knows, with hooks."""
    case, calls = MODELS["nested"], list[str]()
    model = case.build()
    named = dict(model.named_parameters())
    known = [weakref.ref(parameter) for parameter in named.values()]
    refusing += [parameter.untyped_storage() for parameter in named.values()]
    engine, optimizer = adopted(model, adamw, units="leaves")
    with engine.step() as watch:
        loss = case.loss(model, case.batch(4, 0))
        watch(loss)
    loss.backward()
    optimizer.step()
    expected = whole(engine)
    on_device = {name: parameter._cdata for name, parameter in named.items()}
    for name, parameter in named.items():
        parameter.register_hook(lambda _, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    engine.close()
    assert all(found() is p for found, p in zip(known, model.parameters(), strict=True))
    assert all(named[name] is p for name, p in model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter._cdata != on_device[name]
        assert torch.equal(parameter, expected[name])
    case.loss(model, case.batch(4, 0)).backward()
    assert sorted(calls) == sorted([*named, *named])
