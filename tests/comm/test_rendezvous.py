"""Ranks that are started again meet in an empty store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from lightning_zero.comm.process_groups import store_of_incarnation

LONG = timedelta(seconds=60)
WORLD = 4


def test_lives_do_not_see_each_other() -> None:
    """All meet; some meet and die before all are there; all meet again."""
    shared = HashStore()

    def live(rank: int, life: int) -> Store:
        store = store_of_incarnation(shared, rank, WORLD, LONG)
        store.set(f"address/{rank}", f"{life}")
        return store

    with ThreadPoolExecutor(WORLD) as ranks:
        for life in (0, 1):
            for store in list(ranks.map(live, range(WORLD), [life] * WORLD)):
                for rank in range(WORLD):
                    store.wait([f"address/{rank}"], LONG)
                    assert store.get(f"address/{rank}") == f"{life}".encode()
            # One that dies while it waits for an answer.
            with pytest.raises(RuntimeError):
                store_of_incarnation(shared, 1, WORLD, timedelta(milliseconds=1))


def test_missing_ranks_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"Expected 4 ranks within .* 3 did not join: 1, 2, 3"):
        store_of_incarnation(HashStore(), 0, WORLD, timedelta(milliseconds=1))
