"""The base class of the strategies of Fabric and the Trainer: ranks, sharding and names."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from typing_extensions import override

from lightning_zero.comm import (
    Communicator,
    Control,
    data_group,
    default_group,
    device_mesh,
    end_at_exit,
    enter_group,
    process_groups,
    share,
    towards,
)
from lightning_zero.engine import Engine, broadcast_buffers
from lightning_zero.fabric import internals
from lightning_zero.fabric.precision import ShardedPrecision
from lightning_zero.memory import explained_memory
from lightning_zero.parameters import make_local
from lightning_zero.plan import START_METHODS, STRATEGIES, Settings


class Sharding(ABC):
    """The base class, before Lightning's own, of strategies that shard modules over the ranks.

    Attributes:
        settings: The user's settings.
    """

    settings: Settings

    @contextmanager
    def _joining(self: Any) -> Iterator[None]:
        """Enter the context in which Lightning makes the default process group.

        Ranks of torchrun join here, in a store without keys from before a restart.
        """
        environment = self.cluster_environment
        with towards(environment.main_address):
            has_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            is_elastic = has_agents and isinstance(environment, TorchElasticEnvironment)
            if is_elastic and not process_groups.is_initialized():
                enter_group(
                    environment.main_address,
                    environment.main_port,
                    backend=self._get_process_group_backend(),
                    rank=environment.global_rank(),
                    world_size=environment.world_size(),
                    timeout=self._timeout or default_pg_timeout,
                    device=self.root_device,
                )
            yield
        end_at_exit()

    @property
    def device_mesh(self: Any) -> Any:
        """The mesh of all ranks, data-parallel by tensor-parallel; ``None`` without the latter."""
        division = self.settings.division(self.world_size, self.num_processes)
        size = division["tensor_size"]
        return device_mesh(self.root_device.type, size) if size > 1 else None

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        """The arguments of samplers: ranks that have parts of one model see the same batches."""
        if (mesh := self._running_mesh) is None:
            inherited: Any = super()
            return dict(inherited.distributed_sampler_kwargs)
        data = mesh["data_parallel"]
        return {"num_replicas": data.size(), "rank": data.get_local_rank()}

    # Those of Lightning, under the watchdog: a rank whose peer fails says so.

    def barrier(self: Any, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        inherited: Any = super()
        with self._collective("a barrier"):
            inherited.barrier(*args, **kwargs)

    def broadcast(self: Any, obj: Any, src: int = 0) -> Any:
        """Return a rank's object on all ranks."""
        inherited: Any = super()
        with self._collective("a broadcast"):
            return inherited.broadcast(obj, src)

    def all_gather(
        self: Any, tensor: Tensor, group: Any = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather tensors, by default of the data-parallel ranks, as under DDP."""
        inherited: Any = super()
        with self._collective("an all-gather of values", group):
            gathered: Tensor = inherited.all_gather(tensor, group, sync_grads)
        if (mesh := self._mesh_instead_of(group)) is None:
            return gathered
        # Torch's gather of a part of the ranks has no backward with gloo.
        return gathered[mesh.get_coordinate()[-1] :: mesh.shape[-1]]

    def reduce_boolean_decision(self: Any, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks decide so, or any."""
        inherited: Any = super()
        reduce = getattr(inherited, "reduce", None) or inherited.all_reduce  # as Fabric calls it
        number = torch.tensor(int(decision), device=self.root_device)
        with self._collective("a decision"):
            return bool(reduce(number, None, "min" if all else "max"))

    def _reduced(self, reduce: Callable[..., Any], value: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a value, by default over the data-parallel ranks; all ranks get the same."""
        mesh = self._mesh_instead_of(group)
        with self._collective("a reduction of values", group):
            if mesh is None:
                return reduce(value, group, reduce_op)
            return share(reduce(value, data_group(mesh), reduce_op), mesh)

    def _collective(self, place: str, group: Any = None) -> AbstractContextManager[Any]:
        """Return the context in which this rank waits for the others of a group."""
        control = self._control if _has_all(group) else None
        return nullcontext() if control is None else control.watchdog.at(place)

    @property
    @abstractmethod
    def _control(self) -> Control | None:
        """What connects all ranks, once they are connected."""

    def _mesh_instead_of(self, group: Any) -> Any:
        """Return the mesh of the ranks if ``group`` is that of all ranks."""
        return self._running_mesh if _has_all(group) else None

    @property
    def _running_mesh(self) -> Any:
        """The mesh, once there are ranks."""
        is_one = self.settings.tensor_parallel_size == 1
        return None if is_one or default_group() is None else self.device_mesh

    def _connect(self: Any) -> Communicator:
        """Return the ranks; those of one tensor-parallel group draw the same random numbers."""
        division = self.settings.division(self.world_size, self.num_processes)
        comm = Communicator(self.root_device, **division)
        if (axis := comm.mesh.tensor) is not None:
            # They compute one forward together: dropout of replicated activations must be the same.
            module = None if comm.device.type == "cpu" else torch.get_device_module(comm.device)
            own = None if module is None else module.get_rng_state(comm.device)
            states = comm.control.gather_objects((internals.random_states(), own))
            of_host, of_device = states[axis.ranks[0]]
            internals.set_random_states(of_host)
            if module is not None:
                module.set_rng_state(of_device, comm.device)
        return comm

    def _make_local(self, module: nn.Module) -> None:
        """Replace parameters that tensor parallelism has cut by this rank's parts."""
        if (mesh := self.device_mesh) is not None:
            make_local(module, mesh)
            internals.count_once(module, mesh.shape[-1])

    def _sharded(
        self: Any,
        module: nn.Module,
        comm: Communicator,
        precision: ShardedPrecision,
        offload_path: str,
        *,
        syncs_buffers: bool = True,
        **more: Any,
    ) -> Engine:
        """Shard a module; the engine moves its parameters, unit by unit."""
        internals.to_device_but_parameters(module, self.root_device)
        precision.device = self.root_device.type
        settings = dataclasses.replace(
            self.settings,
            recipe=precision.recipe,
            device=self.root_device,
            broadcast_buffers=self.settings.broadcast_buffers and syncs_buffers,
            offload_path=self.settings.offload_path or offload_path,
        )
        engine = Engine(module, settings, comm, **more)
        broadcast_buffers(module, comm, engine.sharded.replicated.values())
        return engine

    @classmethod
    def register_strategies(cls, strategy_registry: internals.StrategyRegistry) -> None:
        """Register the strategies that have names, each also with the name of a launcher."""
        for name, (what, arguments) in STRATEGIES.items():
            for launcher in START_METHODS:
                strategy_registry.register(
                    name if launcher == "subprocess" else f"{name}_{launcher}",
                    cls,
                    description=f"{what}, launcher '{launcher}'",
                    override=True,
                    launcher=launcher,
                    **arguments,
                )


def _has_all(group: Any) -> bool:
    """Return whether a group has all ranks, as Lightning writes it."""
    return group is None or group is default_group()


def init_device(*, is_empty: bool | None) -> AbstractContextManager[Any]:
    """Return the context in which a model is built: the accelerator may be too small for it."""
    return torch.device("meta") if is_empty else nullcontext()


class ShardedModule(nn.Module):
    """A module whose forward is a step of an engine; the counterpart of DDP's wrapper.

    Attributes:
        module: The user's module, whose parameters the engine shards.
        engine: The engine; ``None`` in a copy, whose module is an ordinary one.
    """

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.module = module
        self.engine: Engine | None = engine

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "engine": None}

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; a backward from what it returns finds its weights."""
        return self.run(self.module, torch.is_grad_enabled(), *args, **kwargs)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def run(
        self, function: Callable[..., Any], awaits_backward: bool, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that runs the module within a step."""
        if self.engine is None:
            return function(*args, **kwargs)
        step = self.engine.step(awaits_backward=awaits_backward)
        with step as watch, explained_memory():
            output = function(*args, **kwargs)
            watch(output)
            return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context whose backward passes send no gradients; nothing after a run."""
        engine = self.engine
        return nullcontext() if engine is None or engine.is_closed else engine.no_sync()
