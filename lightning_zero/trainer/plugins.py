"""Checkpoint plugins that wrap others, the last of which gets other methods for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins import CheckpointIO


def plugins_of(plugin: CheckpointIO) -> list[CheckpointIO]:
    """Return a plugin and those that it wraps; the last is Lightning's own by default."""
    plugins = [plugin]
    while isinstance(inner := getattr(plugins[-1], "checkpoint_io", None), CheckpointIO):
        plugins.append(inner)
    return plugins


@contextmanager
def replaced(plugin: CheckpointIO, **methods: Callable[..., Any]) -> Iterator[None]:
    """Give a plugin other methods for a while."""
    before = {name: vars(plugin)[name] for name in methods if name in vars(plugin)}
    vars(plugin).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(plugin)[name]
        vars(plugin).update(before)
