"""Room on disks for the files of all ranks."""

from __future__ import annotations

import errno

from lightning_zero.comm.agreement import agreed
from lightning_zero.comm.control import Control
from lightning_zero.tensors import Scratch


def require_room(scratch: Scratch, nbytes: int, control: Control, what: str) -> None:
    """Raise on all ranks unless each disk has room for its ranks' ``nbytes``; a collective.

    Room found by an earlier call counts as taken, even if no file uses it yet. ``what`` names the
    need in the error.

    Raises:
        OSError: There is not enough room, or a folder cannot be written to.
    """
    doing = f"Creating files in offload_path={scratch.folder!r}"
    with agreed(control, doing):
        need = scratch.promise(nbytes)
    needs = [one for one in control.gather_objects(need) if one is not None]
    for disk in dict.fromkeys(one.disk for one in needs):
        ranks = [rank for rank, one in enumerate(needs) if one.disk == disk]
        free = min(needs[rank].free for rank in ranks)
        wanted = sum(needs[rank].nbytes for rank in ranks)
        if wanted > free:
            each = ", ".join(f"{needs[rank].nbytes:,} on rank {rank}" for rank in ranks)
            raise OSError(
                errno.ENOSPC,
                f"{doing} failed: {what} and other files not yet created need {wanted:,} bytes"
                f" ({each}), but {free:,} are free."
                " Free disk space, or set offload_path to a folder on a larger disk.",
            )
