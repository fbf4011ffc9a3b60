"""The base class of the strategy that enters and leaves the group and names its collectives."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_zero.comm import end_at_exit, enter_group, process_groups
from lightning_zero.fabric import Sharding
from lightning_zero.trainer.run import Run

_T = TypeVar("_T")


class RankStrategy(Sharding, DDPStrategy):
    """The ranks of a run: their rendezvous, and Lightning's collectives with names.

    The watchdog tells a rank that waits which collectives the others are in, so each of Lightning's
    has a name in the log.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._run: Run | None = None

    @property
    def _current(self) -> Run:
        assert self._run is not None, "the environment is set up before anything else"
        return self._run

    @override
    def setup_distributed(self) -> None:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._enter_group()
        super().setup_distributed()
        end_at_exit()

    def _enter_group(self) -> None:
        """Make the group before Lightning does, in a store without keys from before a restart."""
        if process_groups.is_initialized() or not isinstance(
            self.cluster_environment, TorchElasticEnvironment
        ):
            return
        self.set_world_ranks()
        enter_group(
            self.cluster_environment.main_address,
            self.cluster_environment.main_port,
            backend=self._get_process_group_backend(),
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout or default_pg_timeout,
            device=self.root_device,
        )

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._collective("a barrier"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        with self._collective("a broadcast"):
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        with self._collective("a reduction of values"):
            return self._counted_once(super().reduce, tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        with self._collective("a decision"):
            return super().reduce_boolean_decision(decision, all)

    @override
    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._collective("an all-gather of values"):
            return super().all_gather(tensor, *args, **kwargs)

    def _collective(self, place: str) -> AbstractContextManager[Any]:
        return nullcontext() if self._run is None else self._run.comm.control.log.at(place)

    def _leave_ranks(self) -> None:
        if self._run is not None:
            self._run.comm.control.leave()
