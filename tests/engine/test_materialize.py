"""Models built on the meta device get memory and values when they are sharded."""

import pytest
import torch
from torch import nn

from tests.oracle.models import MODELS
from tests.oracle.sharded import shard


@pytest.mark.parametrize("name", ["tied", "batchnorm_conv"])
def test_values_come_from_reset_parameters(name: str) -> None:
    case = MODELS[name]
    with torch.device("meta"):
        model = case.module()
    identities = [id(parameter) for parameter in model.parameters()]
    shard(model).close()
    assert [id(parameter) for parameter in model.parameters()] == identities
    for parameter in model.parameters():
        assert parameter.device.type == "cpu"
        assert parameter.isfinite().all()
    assert case.loss(model, case.batch(4, 0)).isfinite()


def test_what_has_no_reset_parameters_is_refused_unless_the_model_initializes_it() -> None:
    class Body(nn.Module):
        """As models of transformers."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 3.0)

    with torch.device("meta"):
        model, refused = Body(), MODELS["transformer"].module()
    shard(model).close()
    assert all(bool((layer.weight == 3.0).all()) for layer in model.layers)
    with pytest.raises(ValueError, match="no `reset_parameters\\(\\)`"):
        shard(refused)
