"""Facts about the machine for the benchmarks: a description, and counters of its kernel."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
import struct
from pathlib import Path

import torch


def description() -> str:
    """Return torch's version, the processor, the number of cores, and the GPUs."""
    chip = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        chip = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join([f"torch {torch.__version__}", chip, f"{os.cpu_count()} cores", *gpus])


def page_faults() -> int:
    """Return the minor page faults of this process: pages touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def socket_bytes() -> int | None:
    """Return the bytes sent by this process's TCP connections, or ``None`` if not available."""
    total = 0
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    total += _sent_on(int(name))
    except (OSError, AttributeError, struct.error):
        return None
    return total


def _sent_on(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
        if not is_internet or connection.type != socket.SOCK_STREAM:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    # tcpi_bytes_sent and tcpi_bytes_retrans of Linux's struct tcp_info.
    sent, again = struct.unpack_from("=QQ", info, 200)
    return int(sent - again)
