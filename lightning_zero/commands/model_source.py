"""Lookup of a model by number, import path, LightningCLI or Hugging Face configuration."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.memory import parse_numel

Model = int | Callable[[], nn.Module]


def find_model(text: str, arguments: Mapping[str, Any]) -> Model:
    """Return the number of parameters that ``text`` names, or a function that builds the model.

    ``text`` is ``10B``, ``package.module:Class``, ``file.py:Class``, or a folder or ``.json`` file
    with a Hugging Face configuration.
    """
    if re.fullmatch(r"[\d.]+(e\d+)?\s*[KMBT]?", text, re.IGNORECASE):
        return parse_numel(text)
    path = Path(text)
    if path.suffix == ".json" or (path / "config.json").exists():
        return _hugging_face(path if path.suffix == ".json" else path / "config.json")
    if path.suffix == ".py":
        raise ValueError(f"Expected a class of {text}: {_choices(path)}.")
    if ":" in text or "." in text:
        cls = find_class(text)
        return lambda: cls(**arguments)
    raise ValueError(
        "Expected a number of parameters (10B), a class (package.module:Class or file.py:Class), a"
        " LightningCLI or Hugging Face configuration, or a folder with config.json, for example"
        f" examples/train_gpt.py:GPT, got {text!r}."
    )


def find_class(text: str) -> Callable[..., nn.Module]:
    """Return the class of ``package.module:Class``, ``package.module.Class``, ``file.py:Class``."""
    place, _, name = text.rpartition(":" if ":" in text else ".")
    if (folder := os.getcwd()) not in sys.path:
        # As `python -m` does: a console script has its own folder there instead.
        sys.path.insert(0, folder)
    try:
        module = (
            _module_in(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except (ImportError, OSError) as error:
        raise ValueError(f"Expected a module that can be imported in {text!r}: {error}.") from error
    if not hasattr(module, name):
        choices = f" Expected {_choices(Path(place))}." if place.endswith(".py") else ""
        raise ValueError(f"Expected a class of {place} in {text!r}; it has no {name!r}.{choices}")
    return getattr(module, name)  # type: ignore[no-any-return]


def read_config(path: Path) -> dict[str, Any]:
    """Read a LightningCLI configuration."""
    import yaml

    if not path.exists():
        raise ValueError(f"Expected a configuration file, found nothing at {path}.")
    config = yaml.safe_load(path.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"Expected a LightningCLI configuration in {path}, got {config!r}.")
    return config


def model_of_config(config: Mapping[str, Any], model: str | None) -> tuple[str, dict[str, Any]]:
    """Return the model's class and arguments from a LightningCLI configuration."""
    section = dict(config.get("model") or {})
    name = section.pop("class_path", None) or model
    if name is None:
        raise ValueError(
            "The configuration has no `model.class_path`. Pass --model, for example"
            " --model examples/train_gpt.py:GPT."
        )
    return name, section.pop("init_args", section) or {}


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse arguments such as ``width=128``; values are Python literals, else text."""
    found = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise ValueError(
                f"Expected arguments as name=value, for example width=128, got {pair!r}."
            )
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def parse_batch(specs: Sequence[str]) -> Any:
    """Make a batch without data from ``int64[4,128]`` or ``x=float32[4,3,32,32] y=int64[4]``.

    ``[int64[4,128]]`` is a list of one tensor, as `TensorDataset` yields.
    """
    if not specs:
        return None
    if len(specs) == 1 and (only := re.fullmatch(r"\[(.+)\]", specs[0])) is not None:
        return [parse_batch([only[1]])]
    named: dict[str, Tensor] = {}
    for place, spec in enumerate(specs):
        match = re.fullmatch(r"(?:(\w+)=)?(\w+)\[([\d, ]*)\]", spec)
        dtype = getattr(torch, match.group(2), None) if match else None
        if match is None or not isinstance(dtype, torch.dtype):
            raise ValueError(
                "Expected a batch such as int64[4,128], x=float32[4,8] or [int64[4,128]], a list of"
                f" one tensor, got {spec!r}."
            )
        shape = [int(size) for size in match.group(3).split(",") if size.strip()]
        named[match.group(1) or str(place)] = torch.empty(shape, dtype=dtype, device="meta")
    if all(name.isdigit() for name in named):
        tensors = list(named.values())
        return tensors[0] if len(tensors) == 1 else tensors
    return named


def _choices(path: Path) -> str:
    """List the LightningModules of a file, or its modules if it has none, as ``file.py:Class``."""
    try:
        module = _module_in(path)
    except (ImportError, OSError) as error:
        raise ValueError(f"Expected a Python file that can be run at {path}: {error}.") from error
    own = [
        (name, cls)
        for name, cls in vars(module).items()
        if isinstance(cls, type)
        and issubclass(cls, nn.Module)
        and cls.__module__ == module.__name__
    ]
    lightning = [name for name, cls in own if hasattr(cls, "training_step")]
    found = lightning or [name for name, _ in own]
    return " or ".join(f"{path}:{name}" for name in found) or "it defines no module"


def _module_in(path: Path) -> Any:
    if not path.exists():
        raise OSError(f"there is no file {path}")
    file = path.resolve()
    for name in (path.stem, str(file)):  # another module may have the same stem
        if (known := sys.modules.get(name)) is None:
            break
        if Path(getattr(known, "__file__", None) or "").resolve() == file:
            return known
    if (folder := str(file.parent)) not in sys.path:
        sys.path.insert(0, folder)  # where its siblings are, as for a script
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(file)
    try:
        exec(compile(file.read_text(), file, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _hugging_face(path: Path) -> Callable[[], nn.Module]:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{path} is a Hugging Face configuration, which needs `pip install transformers`."
        ) from error
    if not path.exists():
        raise ValueError(f"Expected a Hugging Face configuration, found nothing at {path}.")
    names: list[str] = []
    try:
        names = json.loads(path.read_text()).get("architectures") or []
        config = transformers.AutoConfig.from_pretrained(path)
    except (AttributeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Expected a configuration of transformers in {path}: {reason}") from error
    # Many files have only `model_type`.
    has_default = not names and type(config) in transformers.MODEL_MAPPING
    cls = getattr(transformers, names[0], None) if names else None
    if cls is None and not has_default:
        raise ValueError(
            f"transformers has no model for `architectures` {names!r} and `model_type`"
            f" {config.model_type!r} of {path}. Pass the model's class, as package.module:Class."
        )
    make: Callable[..., nn.Module] = cls or transformers.AutoModel.from_config
    return lambda: make(config)
