"""Rendezvous of the ranks in a store that an earlier incarnation of the run has used.

torchrun restarts all ranks when one has died. Its agent keeps one store for all these
**incarnations** (pytorch issue 135712), so a rank may read the address that another had in an
earlier one, and connect to a process that is gone: the group is never made, under any strategy. So
the ranks first agree on a name for their incarnation, and use keys that begin with it. A counter
would not do, as each node's agent would have its own.

Any key may be left over from an earlier incarnation, except those with a random name of this one:

1. Every rank asks under its number, giving a random name.
2. Rank 0 answers under that name with the random name of the incarnation; it may answer dead ranks.
3. The rank confirms under the name of the incarnation. Rank 0 keeps answering until all have.
"""

from __future__ import annotations

from datetime import timedelta
from time import monotonic, sleep
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

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
