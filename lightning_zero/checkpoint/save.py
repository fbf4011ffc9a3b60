"""Writing one checkpoint from all ranks at once, in any format.

1. **Agree**: every rank takes its checkpoint apart; rank 0 decides what is written, and every rank
   must have its parts of it.
2. **Write**: rank 0 creates a file or folder under a temporary name; if all ranks see it, each
   writes its parts to their places and syncs them to the disk.
3. **Seal**: places and checksums go to rank 0, which writes what lies around the parts.
4. **Rename**: rank 0 gives the file or folder its final name.

If a process dies in between, an earlier checkpoint of the same name stays whole
(``file/atomic.py``). Nothing is gathered, and a rank copies no more than a buffer at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.file.atomic import Temporary
from lightning_zero.checkpoint.file.format import Provenance
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.comm import Control, Outcome, agreed


class Save(ABC):
    """One save of one checkpoint; all ranks construct and :meth:`run` it together.

    A format implements, in call order, :meth:`_take`, :meth:`_layout` (on rank 0), :meth:`_create`
    (on rank 0), and :meth:`_write` and :meth:`_seal` (on rank 0), or :meth:`_stream` if some rank
    does not see what rank 0 created.

    Sharded values are taken from every rank, the rest of ``checkpoint`` from rank 0. ``on_written``
    is called with the number of bytes that this rank has written since the last call.
    """

    def __init__(
        self,
        checkpoint: Any,
        path: str,
        control: Control,
        provenance: Provenance,
        on_written: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.path = path
        self.control = control
        self.provenance = provenance
        self.on_written = on_written
        with agreed(control, self.doing):
            self._take(checkpoint)

    @property
    def doing(self) -> str:
        """What errors on all ranks say that they were doing."""
        return f"Saving {self.path!r}"

    def agree(self, outcome: Outcome) -> None:
        """Raise on all ranks if ``outcome`` is a failure on any."""
        outcome.agree(self.control, self.doing)

    @property
    @abstractmethod
    def values(self) -> Mapping[str, ShardedValue]:
        """The sharded values of this rank's checkpoint, by key."""

    def detach(self, control: Control) -> None:
        """Copy this rank's values to host memory, so that :meth:`run` may run in another thread."""
        self._copy_to_host()
        self.control = control

    def run(self) -> None:
        """Write the checkpoint; if any rank fails, all raise, and an earlier one is unchanged."""
        layout = self._agreed_layout()
        outside = self._write_together(layout)
        if outside:
            self._stream(layout, outside)

    def _agreed_layout(self) -> Any:
        """Return rank 0's layout; raise on all ranks unless each has its parts of it."""
        mine: dict[str, Any] = {}
        known: dict[Any, Any] = {}
        for key, value in self.values.items():
            if not value.is_whole:
                shape, _, dtype = value.facts
                # Of equal ones the same object, which an exchange carries once.
                mine[key] = known.setdefault((shape, dtype), (shape, dtype))
        needed, layout = self.control.broadcast_object(
            (mine, self._layout()) if self.control.rank == 0 else None
        )
        with agreed(self.control, self.doing):
            for key, (shape, dtype) in needed.items():
                if mine.get(key) != (shape, dtype):
                    found = "no" if key not in mine else "a different"
                    raise ValueError(
                        f"this rank's checkpoint has {found} {key!r}, but rank 0's has one of shape"
                        f" {shape}, {dtype}. A hook that edits the checkpoint must make the same"
                        " edits on every rank."
                    )
        return layout

    def _write_together(self, layout: Any) -> list[int]:
        """Write from all ranks; if some do not see the place, write nothing and return those."""
        outcome = Outcome()
        temporary: Temporary | None = None
        try:
            if self.control.rank == 0:
                with outcome.attempt():
                    temporary = self._create(layout)
            self.agree(outcome)
            place: Path | None = self.control.broadcast_object(temporary and temporary.path)
            sees = self.control.gather_objects(place is not None and place.exists())
            if place is None or not all(sees):
                return [rank for rank, it_sees in enumerate(sees) if not it_sees]
            shares: Sequence[Any] = ()
            with outcome.attempt():
                shares = self._write(layout, place)
            self.agree(outcome)
            shares_of_ranks = self.control.gather_objects(shares)
            if temporary is not None:
                with outcome.attempt():
                    every = [share for of_rank in shares_of_ranks for share in of_rank]
                    self._seal(layout, temporary, every)
                    temporary.keep()
            self.agree(outcome)
            return []
        finally:
            if temporary is not None:
                temporary.close()

    # -- what a format does ------------------------------------------------------------------------

    @abstractmethod
    def _take(self, checkpoint: Any) -> None:
        """Take a checkpoint apart; its tensors stay where they are."""

    @abstractmethod
    def _copy_to_host(self) -> None:
        """Replace this rank's values by host copies that nothing else changes."""

    @abstractmethod
    def _layout(self) -> Any:
        """Return what every rank needs to know to write its parts."""

    @abstractmethod
    def _create(self, layout: Any) -> Temporary | None:
        """Create the temporary file or folder; ``None`` if the target, such as a URL, has none."""

    @abstractmethod
    def _write(self, layout: Any, place: Path) -> Sequence[Any]:
        """Write and sync this rank's parts; return what rank 0 needs to know about each."""

    @abstractmethod
    def _seal(self, layout: Any, temporary: Temporary, shares: Sequence[Any]) -> None:
        """Write what lies around the parts."""

    @abstractmethod
    def _stream(self, layout: Any, outside: Sequence[int]) -> None:
        """Write through rank 0, whose disk the ranks ``outside`` do not see, or raise."""
