"""The operands of torch's operations, as a dispatch mode sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """An argument in an operation's schema, kept because torch rebuilds it on every access."""

    name: str
    is_out: bool
    is_written: bool


@cache
def _schema_of(func: Any) -> list[Argument]:
    """Return the arguments of an operation."""
    return [
        Argument(
            argument.name,
            argument.is_out,
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        for argument in func._schema.arguments
    ]


def arguments_of(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Argument, Any]]:
    """Yield each argument passed in a call, with its value."""
    for index, argument in enumerate(_schema_of(func)):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the tensors that ``func`` changes."""
    for argument, value in arguments_of(func, args, kwargs):
        if argument.is_written:
            yield from (value if isinstance(value, list | tuple) else [value])


def read_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the operands whose values are used, not those that are only overwritten."""
    overwrites = func.overloadpacket.__name__ in ("copy_", "fill_", "zero_")
    return list(
        leaves_of(
            value
            for index, (argument, value) in enumerate(arguments_of(func, args, kwargs))
            if not argument.is_out and not (overwrites and index == 0)
        )
    )


def leaves_of(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of an operation's arguments, those in lists one by one."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value
