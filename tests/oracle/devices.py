"""Ranks on a device: over NCCL on however many GPUs there are, or rehearsed on the CPU.

One GPU is enough. NCCL refuses two ranks of one host on one GPU, so ranks that share one take each
other for ranks of other hosts and talk through sockets: slow, but by the same kernels, streams and
order as on GPUs of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.oracle.forks import loopback

NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="runs on a GPU that torch can use: `make gpu` runs it on a machine with one",
)
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


def _makes_hosts() -> bool:
    found = shutil.which("ip"), shutil.which("unshare")
    return all(found) and not subprocess.run(["unshare", "--net", "true"], check=False).returncode


NO_HOSTS = pytest.mark.skipif(
    not _makes_hosts(),
    reason="plays hosts as network namespaces: run the tests as root on Linux with iproute2",
)


def join(kind: str, *, rank: int, world_size: int, **group: Any) -> torch.device:
    """Make the default group of ranks on a kind of device; return this rank's device."""
    if kind == "cpu":
        dist.init_process_group("gloo", rank=rank, world_size=world_size, **group)
        return torch.device("cpu")
    node, index = divmod(rank, torch.cuda.device_count())
    os.environ.update(NCCL_HOSTID=f"host{node}", NCCL_SOCKET_IFNAME=loopback())
    os.environ.update(LOCAL_RANK=str(index), NODE_RANK=str(node))
    device = torch.device(kind, index)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, **group)
    return device


@contextlib.contextmanager
def joined(kind: str, folder: str) -> Iterator[torch.device]:
    """Enter a context in which ranks of a pool belong to a group on a kind of device."""
    if kind == "cpu":
        yield torch.device("cpu")
        return
    me = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    leave()
    yield join(kind, store=dist.FileStore(f"{folder}/device", me["world_size"]), **me)
    leave()
    join("cpu", store=dist.FileStore(f"{folder}/host", me["world_size"]), **me)


def leave() -> None:
    """Leave the default group."""
    dist.barrier()
    time.sleep(0.05)  # gloo's threads let go of what they have sent
    dist.destroy_process_group()


def trainer_options(device: torch.device) -> dict[str, Any]:
    """The arguments of a Trainer over all ranks."""
    if device.type == "cpu":
        return {"accelerator": "cpu", "devices": dist.get_world_size()}
    num_gpus = min(torch.cuda.device_count(), dist.get_world_size())
    nodes = dist.get_world_size() // num_gpus
    return {"accelerator": "gpu", "devices": num_gpus, "num_nodes": nodes}
