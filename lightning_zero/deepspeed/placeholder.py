"""Unpickling with inert objects in place of unknown classes, which are never imported.

DeepSpeed's files hold a few objects of its own classes among tensors and plain values. Every global
that torch does not allow is replaced by a class that records its arguments and does nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightning_zero.checkpoint import read_file, unreadable
from lightning_zero.tensors import internals


class Placeholder:
    """A stand-in for an object of another class.

    Attributes:
        origin: The full name of that class.
        arguments: The positional arguments that it was made with.
        state: Its pickled state, a dictionary for ordinary objects.
    """

    origin = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<an object of {self.origin}>"


def read_with_placeholders(path: Path, *, trust: bool = False) -> Any:
    """Return the content of a file by :func:`torch.save`, with memory-mapped tensors.

    With ``trust``, objects of all classes that the file names are made, except DeepSpeed's.
    """
    if trust:
        return _read_trusting(path)
    with torch.serialization.safe_globals([(_class(name), name) for name in _unknown(path)]):
        return read_file(str(path))


def placeholders(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the origin of each placeholder in nested containers."""
    if isinstance(value, Placeholder) or (
        isinstance(value, type) and issubclass(value, Placeholder)
    ):
        yield name, value.origin
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from placeholders(key, name)
            yield from placeholders(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for number, item in enumerate(value):
            yield from placeholders(item, f"{name}/{number}" if name else str(number))


def _class(name: str) -> type[Placeholder]:
    return type("Placeholder", (Placeholder,), {"origin": name})


def _unknown(path: Path) -> list[str]:
    """Return the globals in a file that torch does not allow, without unpickling it."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:
        # A damaged file can fail in any way.
        raise unreadable(path, error) from error


class _TrustingUnpickler(pickle.Unpickler):
    """An unpickler of all classes but DeepSpeed's, which need not be installed."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "deepspeed":
            return _class(f"{module}.{name}")
        return super().find_class(module, name)


def _read_trusting(path: Path) -> Any:
    pickles = SimpleNamespace(__name__="pickle", Unpickler=_TrustingUnpickler, load=pickle.load)
    return internals.load_to_host(path, mmap=True, weights_only=False, pickle_module=pickles)
