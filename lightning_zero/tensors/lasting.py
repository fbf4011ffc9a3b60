"""Ordinary tensors, also within inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def lasting_tensors() -> contextlib.AbstractContextManager[None]:
    """Return a context that makes ordinary tensors without a graph, also within inference mode.

    An inference tensor could never be saved for a later backward.
    """
    # Within a backward pass things are as they should be, and two contexts cost more than a tensor.
    is_so = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return _NOTHING if is_so else _lasting_tensors()


@contextlib.contextmanager
def _lasting_tensors() -> Iterator[None]:
    # In this order: leaving inference mode turns gradients on.
    with torch.inference_mode(False), torch.no_grad():
        yield


_NOTHING = contextlib.nullcontext()
