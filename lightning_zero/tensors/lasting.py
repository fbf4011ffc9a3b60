"""Ordinary tensors, even when created in inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def lasting_tensors() -> contextlib.AbstractContextManager[None]:
    """Return a context that creates ordinary tensors without a graph, even in inference mode.

    An inference tensor could never be saved for a later backward.
    """
    # Already the case in a backward pass, where entering two contexts costs more than a tensor.
    is_so = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return _NOTHING if is_so else _lasting_tensors()


@contextlib.contextmanager
def _lasting_tensors() -> Iterator[None]:
    # In this order: leaving inference mode turns grad mode on.
    with torch.inference_mode(False), torch.no_grad():
        yield


_NOTHING = contextlib.nullcontext()
