"""Applies the tensor-parallel plan of every model of the installed Transformers, without weights.

Each configuration that has a plan is built on the ``meta`` device with at most four layers, and
split over two ranks that do not exist. Prints a table of the models by the styles of their plans,
and of those refused with the reason. ``docs/tensor_parallel.md`` has that table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import warnings
from collections import defaultdict
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightning_zero.comm import pretended_mesh
from lightning_zero.parameters import make_local


def configurations() -> dict[str, Any]:
    """Return the configurations that have a plan, by the name of their model type."""
    found = {}
    for name in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[name]
        if getattr(config_class, "base_model_tp_plan", None):
            found[name] = config_class
    return found


def built(config_class: Any) -> nn.Module:
    """Return a model with few layers and no weights."""
    config = config_class()
    for owner in (config, getattr(config, "text_config", None)):
        layers = getattr(owner, "num_hidden_layers", None)
        if isinstance(layers, int) and layers > 4 and getattr(owner, "layer_types", None) is None:
            owner.num_hidden_layers = 4
    with torch.device("meta"):
        try:
            return _model(config)
        except TypeError:  # some defaults leave this to the checkpoint
            config.head_dim = config.hidden_size // config.num_attention_heads
            return _model(config)


def _model(config: Any) -> Any:
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        with contextlib.suppress(KeyError):
            return auto._model_mapping[type(config)](config)
    # Parts of larger models have no automatic class.
    path = type(config).__module__.replace(".configuration_", ".modeling_")
    for name, value in vars(importlib.import_module(path)).items():
        own = getattr(value, "config_class", None)
        if own is type(config) and not name.endswith("PreTrainedModel"):
            return value(config)
    raise ValueError("no class has this configuration")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2, help="tensor-parallel ranks")
    size = parser.parse_args().size
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    models: dict[str, list[str]] = defaultdict(list)
    applied: list[str] = []
    refused: dict[str, Exception] = {}
    not_built: dict[str, Exception] = {}
    for name, config_class in configurations().items():
        try:
            model = built(config_class)
        except Exception as error:
            not_built[name] = error
            continue
        try:
            with pretended_mesh(0, size, size) as mesh:
                make_local(model, mesh)
        except Exception as error:
            refused[name] = error
        else:
            applied.append(name)
            for style in set(config_class.base_model_tp_plan.values()):
                models[style].append(name)
    print(f"Transformers {transformers.__version__}, {size} ranks\n")
    print("| style | models | for example |\n|---|---|---|")
    for style, names in sorted(models.items(), key=lambda pair: -len(pair[1])):
        print(f"| `{style}` | {len(names)} | {', '.join(sorted(names, key=len)[:4])} |")
    print(f"\n{len(applied)} plans applied, {len(refused)} refused")
    for name, error in refused.items():
        print(f"- {name}: {error!r}")
    print(f"{len(not_built)} models cannot be built from their default configuration")
    for name, error in not_built.items():
        print(f"- {name}: {error!r}")


if __name__ == "__main__":
    main()
