"""Types of options for ``argparse``."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def option(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return ``parse`` as a type whose ``ValueError`` argparse shows, instead of its own text."""

    def parsed(text: str) -> _T:
        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error

    return parsed
