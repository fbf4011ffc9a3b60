"""Training data that ends at the same batch on all ranks.

The length of an iterable dataset is unknown until it ends, which may be at a different batch on
each rank. A rank without a batch cannot take part in a training step, so the epoch ends for all
ranks when it ends for one; DDP would hang. Where the length is unknown, the ranks therefore
exchange one small message before each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zero.comm import Control, SyncPoint

_OWN = ("_loader", "_control", "_is_training")
_END = object()


class SameLength:
    """A wrapper of a data loader that, in training, ends at the same batch on all ranks.

    In everything else it behaves as the loader does.

    Args:
        loader: Any iterable of batches, of unknown length.
        control: Exchanges decisions between the ranks.
        is_training: Returns whether the training loop is the one that iterates.
    """

    def __init__(self, loader: Any, control: Control, is_training: Callable[[], bool]) -> None:
        self._loader = loader
        self._control = control
        self._is_training = is_training

    @classmethod
    def of(cls, loader: Any, control: Control | None, is_training: Callable[[], bool]) -> Any:
        """Wrap ``loader``, or return it unchanged if it has a length or there is one rank."""
        if control is None or control.world_size == 1 or sized_len(loader) is not None:
            return loader
        return cls(loader, control, is_training)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        if not self._is_training():
            yield from batches
            return
        while True:
            batch = next(batches, _END)
            (has_ended,) = self._control.call(SyncPoint.BATCH, bytes([batch is _END])).wait()
            if has_ended:
                self._warn(has_more=batch is not _END)
                return
            yield batch

    def _warn(self, *, has_more: bool) -> None:
        have_more = self._control.gather_objects(has_more)
        ended = [rank for rank, more in enumerate(have_more) if not more]
        if len(ended) < len(have_more):
            rank_zero_warn(
                f"The training data of ranks {ended} ended before that of the other ranks, so the"
                " epoch ends here for all ranks and the remaining batches are skipped. Give every"
                " rank the same number of batches, or set limit_train_batches."
            )

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)
