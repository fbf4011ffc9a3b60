"""Process groups besides the default one, each made once and kept until that one ends.

A group holds connections and, with NCCL, device memory. Groups made for each run of a Trainer would
pile up in a process that alternately fits, validates and tests.

torchrun restarts all ranks when one has died. Its agent keeps one store for all these
**incarnations** (pytorch issue 135712), so a rank may read the address that another had in an
earlier one, and connect to a process that is gone: the group is never made, under any strategy. So
the ranks first agree on a name for their incarnation, and use keys that begin with it. A counter
would not do, as each node's agent would have its own. Any key may be left over from an earlier
incarnation, except those with a random name of this one:

1. Every rank asks under its number, giving a random name.
2. Rank 0 answers under that name with the random name of the incarnation; it may answer dead ranks.
3. The rank confirms under the name of the incarnation. Rank 0 keeps answering until all have.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from lightning_zero.comm.hosts import towards

_groups: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Groups, and meshes of them, by default group and purpose; weak, as a group that is referenced
outlives its destruction."""

last_works: list[Any] = []
"""The works of the last message, which keep its group's connections open."""

_LAZY = "TORCH_GLOO_LAZY_INIT"
_SECONDS_TO_LET_GO = 0.05
_TAG_OF_NOBODY = 2**31 - 1
_MOST_CONNECTED = 128
"""Most ranks that a group of hosts connects all with all: each connection is an open file, of which
many systems allow 1,024 to a process."""


def master() -> str:
    """Return the host of the default group's store, which is rank 0's; empty if it names none."""
    # Private, as torch gives no public access to it.
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def is_initialized() -> bool:
    """Return whether this process belongs to a default group."""
    return dist.is_available() and dist.is_initialized()


def default_group() -> Any:
    """Return the group of all ranks, ``None`` without one."""
    return dist.group.WORLD if is_initialized() else None


def default_world_size() -> int:
    """Return the number of ranks in the default group, 1 without one."""
    return dist.get_world_size() if is_initialized() else 1


def group_for(purpose: str, *, along: Sequence[Sequence[int]] = (), is_urgent: bool = False) -> Any:
    """Return the group for a purpose; the first call makes it, which is a collective.

    Args:
        purpose: Its name.
        along: All ranks in groups, of which this rank gets its own; by default one of all ranks.
        is_urgent: Whether a device gives its messages precedence over computation.
    """
    if len(along) > 1:
        purpose = f"{purpose} along {along}"

    def make() -> Any:
        if len(along) > 1:
            made = [_new_group(ranks=list(ranks), is_urgent=is_urgent) for ranks in along]
            return next(g for g, r in zip(made, along, strict=True) if dist.get_rank() in r)
        return _new_group(is_urgent=is_urgent)

    return kept(purpose, make)


def kept(purpose: str, make: Callable[[], Any]) -> Any:
    """Return what ``make`` has made for a purpose; call it once."""
    groups = _groups.setdefault(dist.group.WORLD, {})
    if purpose not in groups:
        groups[purpose] = make()
    return groups[purpose]


def backend_for(device: str, group: Any = None) -> str:
    """Return the backend of a group, by default of the default one, for a type of device.

    A group may have several (``cpu:gloo,cuda:nccl``).
    """
    backend = dist.get_backend(group)
    if ":" not in backend:
        return backend
    return dict(one.split(":") for one in backend.split(",")).get(device, "")


def new_group_of_hosts() -> Any:
    """Make a group of all ranks on their CPUs; a collective.

    Many ranks are connected only with those that they exchange messages with.
    """
    # Torch's fake backend, which stands in for all other ranks, works on CPUs too.
    backend = "fake" if dist.get_backend() == "fake" else "gloo"
    # Lightning binds the default group to the rank's device. Torch then connects the device's
    # backend of each new group, and fails for one of hosts, which has none, unless it is CUDA's.
    default, before = _default_group(), os.environ.get(_LAZY)
    device, default.bound_device_id = default.bound_device_id, None
    if dist.get_world_size() > _MOST_CONNECTED:
        # Torch passes no options on to gloo, which reads this one whenever it makes a group.
        os.environ[_LAZY] = "1"
    try:
        return _new_group(backend)
    finally:
        default.bound_device_id = device
        os.environ.pop(_LAZY, None) if before is None else os.environ.update({_LAZY: before})


def time_limit() -> timedelta | None:
    """Return the timeout of the default group's collectives, if it has one."""
    # Private, as torch exposes it nowhere else.
    options = [getattr(one, "options", None) for one in _backends_of(_default_group())]
    limits = [limit for one in options if (limit := getattr(one, "_timeout", None)) is not None]
    return limits[0] if limits else None


def _default_group() -> Any:
    return dist.distributed_c10d._get_default_group()


def _backends_of(group: Any) -> Iterator[Any]:
    """Yield a group's backend for each type of device that it serves."""
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            yield group._get_backend(device)


def end(*, after_error: bool) -> None:
    """Destroy all groups, before the process exits."""
    if dist.is_initialized():
        if after_error:
            # What the devices of this rank still send may never be received.
            give_up_devices()
        # Gloo's threads need the GIL to free what they have sent, and torch (2.13) joins them
        # without releasing it: a group destroyed right after its last message hung once in fifty.
        last_works.clear()
        sleep(_SECONDS_TO_LET_GO)
        dist.destroy_process_group()


def is_of_connection(error: BaseException) -> bool:
    """Return whether ``error`` says that a broken connection or a timeout ended a collective."""
    # Gloo has no class of its own for that, but names its source file, or one fixed reason.
    text = str(error) if isinstance(error, RuntimeError) else ""
    is_gloos = "/gloo/transport/" in text or text == "Application timeout caused pair closure"
    return is_gloos or isinstance(error, dist.DistError)


def give_up() -> None:
    """Make all waits in the groups raise; the groups cannot be used afterwards.

    A short wait for a message that nobody sends makes gloo close all connections of the group. (Its
    `abort` does nothing.)
    """
    give_up_devices()
    if not dist.is_initialized():
        return
    for group in _all_groups():
        if backend_for("cpu", group) != "gloo":
            continue
        # Of all peers, as the connection to one that has exited breaks without closing the others.
        for peer in {*dist.get_process_group_ranks(group)} - {dist.get_rank()}:
            with contextlib.suppress(RuntimeError):
                unsent = dist.irecv(
                    torch.empty(1, device="cpu"), peer, group=group, tag=_TAG_OF_NOBODY
                )
                assert unsent is not None
                unsent.wait(timedelta(milliseconds=1))


def failure_on_device() -> str:
    """Return what the backend of a device's groups says has failed; empty if nothing has.

    NCCL's thread notices a peer whose sockets close, while this rank may be blocked by its device,
    or by that very thread: from then on it lets no message begin, and a minute later ends the
    process. The query does not touch the device.
    """
    with contextlib.suppress(ValueError):  # they end meanwhile
        for backend in itertools.chain.from_iterable(map(_backends_of, _device_groups())):
            # Other backends, and torch before 2.7, have no such thing, or do not answer.
            with contextlib.suppress(RuntimeError, AttributeError):
                if (error := backend.get_error().name) != "SUCCESS":
                    return f"{type(backend).__name__} reports {error}"
    return ""


def _device_groups() -> list[Any]:
    return [group for group in _all_groups() if dist.get_backend(group) not in ("gloo", "fake")]


def give_up_devices() -> None:
    """Abort the groups of devices; those between hosts go on."""
    groups = _device_groups()
    every = (backend for group in groups for backend in _backends_of(group))
    # All together: one aborted alone may wait for another (pytorch 119797).
    backends = [backend for backend in every if hasattr(backend, "_group_start")][:1]
    for backend in backends:
        backend._group_start()
    for group in groups:
        with contextlib.suppress(RuntimeError):
            group.abort()
    for backend in backends:
        backend._group_end()


def _all_groups() -> list[Any]:
    if not dist.is_initialized():
        return []
    groups = [dist.group.WORLD]
    for one in _groups.get(dist.group.WORLD, {}).values():
        groups += one.get_all_groups() if isinstance(one, DeviceMesh) else [one]
    return list(dict.fromkeys(groups))  # a dimension of a mesh may have the default group


def _new_group(
    backend: str | None = None, ranks: list[int] | None = None, *, is_urgent: bool = False
) -> Any:
    """Make a group, of all ranks by default, with the time limit of the default group."""
    # A new group would otherwise get torch's default.
    limit, options = time_limit(), None
    if is_urgent and backend_for("cuda") == "nccl":
        # A kernel of NCCL would otherwise wait until the kernels of computation leave it room.
        backend = "nccl"
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if limit is not None:
            options._timeout = limit
    with towards(os.environ.get("MASTER_ADDR", "")):
        return dist.new_group(ranks, backend=backend, timeout=limit, pg_options=options)


_SECONDS_BETWEEN_LOOKS = 0.01


def store_of_incarnation(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a part of ``store`` that is still empty when all ``world_size`` ranks have come.

    Raises:
        RuntimeError: Ranks did not come within ``timeout``.
    """
    store = PrefixStore("lightning_zero", store)
    incarnation = _ask(store, rank, timeout) if rank else _answer(store, world_size, timeout)
    return PrefixStore(f"incarnation/{incarnation}", store)


def enter_group(
    address: str,
    port: int,
    *,
    backend: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    device: torch.device,
) -> None:
    """Make the default group of this incarnation's ranks through the store of torchrun's agent."""
    agents = dist.TCPStore(address, port, world_size, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        backend,
        store=store_of_incarnation(agents, rank, world_size, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )


def _ask(store: Store, rank: int, timeout: timedelta) -> str:
    name = uuid4().hex
    store.set(f"asked/{rank}", name)
    store.wait([f"answered/{name}"], timeout)
    incarnation = store.get(f"answered/{name}").decode()
    store.set(f"confirmed/{incarnation}/{rank}", "")
    return incarnation


def _answer(store: Store, world_size: int, timeout: timedelta) -> str:
    incarnation = uuid4().hex
    deadline = monotonic() + timeout.total_seconds()
    missing = list(range(1, world_size))
    while True:
        for rank in missing:
            if store.check([f"asked/{rank}"]):
                name = store.get(f"asked/{rank}").decode()
                store.set(f"answered/{name}", incarnation)
        missing = [rank for rank in missing if not store.check([f"confirmed/{incarnation}/{rank}"])]
        if not missing:
            return incarnation
        if monotonic() > deadline:
            raise RuntimeError(
                f"Expected {world_size} ranks within {timeout}, but {len(missing)} did not join:"
                f" {', '.join(map(str, missing))}. Check their output, or increase the strategy's"
                " `timeout`."
            )
        sleep(_SECONDS_BETWEEN_LOOKS)
