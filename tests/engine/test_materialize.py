"""Models built on the meta device get memory and values when they are sharded."""

import pytest
import torch
from torch import nn

from lightning_zero.engine import Engine
from lightning_zero.plan import Settings
from tests.oracle.models import MODELS
from tests.oracle.sharded import shard


@pytest.mark.parametrize("name", ["tied", "transformer", "batchnorm_conv", "multihead_attention"])
def test_values_come_from_reset_parameters(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name].module()
    loose = [n for n, p in model.named_parameters() if n == "position"]
    if loose:
        with pytest.raises(ValueError, match="no `reset_parameters\\(\\)`"):
            shard(model)
        return
    identities = [id(parameter) for parameter in model.parameters()]
    engine = shard(model)
    engine.close()
    assert [id(parameter) for parameter in model.parameters()] == identities
    for parameter in model.parameters():
        assert parameter.device.type == "cpu"
        assert bool(parameter.isfinite().all())
    case = MODELS[name]
    assert bool(case.loss(model, case.batch(4, 0)).isfinite())


def test_the_convention_of_transformers_initializes_too() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 3.0)

    with torch.device("meta"):
        model = Body()
    engine = Engine(model, Settings())
    engine.close()
    assert all(bool((layer.weight == 3.0).all()) for layer in model.layers)
