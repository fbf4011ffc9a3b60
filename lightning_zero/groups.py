"""Groups of all ranks beside the default one: each is made once, and lives as long as that one.

A group has connections, and over NCCL memory on the device. Were one made for every run of a
Trainer, they would pile up in a process that fits, validates and tests by turns.
"""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_groups: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""By default group and purpose; weak, as a group that is referred to outlives its destruction."""

_SECONDS_TO_LET_GO = 0.05


def group_for(purpose: str, *, of_hosts: bool = False) -> Any:
    """The group for a purpose; made when it is first asked for, which is a collective.

    Args:
        purpose: Its name.
        of_hosts: Whether messages travel between the hosts and never touch a device.
    """
    groups = _groups.setdefault(dist.group.WORLD, {})
    if purpose not in groups:
        groups[purpose] = new_group_of_hosts() if of_hosts else _new_group()
    return groups[purpose]


def new_group_of_hosts() -> Any:
    """A group for its maker alone, who ends it with :func:`destroy`; a collective."""
    # Torch's fake backend, which plays all other ranks, can do that as well.
    return _new_group("fake" if dist.get_backend() == "fake" else "gloo")


def destroy(group: Any) -> None:
    """End a group whose messages have all arrived, unless the default group has ended it."""
    if dist.is_initialized():
        _let_go()
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


def end_at_exit() -> None:
    """Leave all groups when the process ends.

    Lightning leaves only NCCL's; gloo's threads, if alive then, now and then abort the process.
    """
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    if dist.is_initialized():
        _let_go()
        dist.destroy_process_group()


def _let_go() -> None:
    """Let gloo's threads free what they have sent, for which they need the interpreter.

    Torch (2.13) joins them without giving it up. A group that ended right behind its last message
    waited for ever once in fifty times.
    """
    time.sleep(_SECONDS_TO_LET_GO)


def give_up() -> None:
    """Make whatever waits in one of the groups raise; they are of no use afterwards.

    A message that nobody sends, waited for so shortly, makes gloo close all connections of its
    group. (Its `abort` does nothing.)
    """
    give_up_devices()
    if not dist.is_initialized():
        return
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    for group in _all_groups():
        if dist.get_backend(group) == "gloo":
            with contextlib.suppress(RuntimeError):
                nobody = dist.irecv(torch.empty(1, device="cpu"), peer, group=group, tag=2**20)
                assert nobody is not None
                nobody.wait(timedelta(milliseconds=1))


def give_up_devices() -> None:
    """End what devices wait for; between the hosts everything goes on."""
    groups = [group for group in _all_groups() if dist.get_backend(group) not in ("gloo", "fake")]
    with _together(groups):
        for group in groups:
            with contextlib.suppress(RuntimeError):
                group.abort()


@contextlib.contextmanager
def _together(groups: list[Any]) -> Iterator[None]:
    """All at once: a communicator that is ended alone may wait for another's (pytorch 119797)."""
    backends = [backend for group in groups if (backend := _nccl_of(group)) is not None][:1]
    for backend in backends:
        backend._group_start()
    try:
        yield
    finally:
        for backend in backends:
            backend._group_end()


def _nccl_of(group: Any) -> Any:
    with contextlib.suppress(RuntimeError):
        backend = group._get_backend(torch.device("cuda"))
        return backend if hasattr(backend, "_group_start") else None
    return None


def _all_groups() -> list[Any]:
    if not dist.is_initialized():
        return []
    return [dist.group.WORLD, *_groups.get(dist.group.WORLD, {}).values()]


def _new_group(backend: str | None = None) -> Any:
    """A new group of all ranks, with the time limit of the default group."""
    # Private, as torch tells it nowhere else, and new groups would have torch's default.
    world = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    options = getattr(world._get_backend(device), "options", None)
    return dist.new_group(backend=backend, timeout=getattr(options, "_timeout", None))
