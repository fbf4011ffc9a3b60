"""The hosts of the ranks: the network interface between them, and connections that end with one.

A host that loses its power or its network sends nothing, so connections to it do not break, unless
its kernel is asked for a sign of life: it answers even while its processes compute, load data or
are stopped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

_IDLE, _BETWEEN, _PROBES = 10, 5, 5
LOST_SECONDS = _IDLE + _PROBES * _BETWEEN
"""Seconds without an answer after which a host counts as lost."""
SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of a connection to such a host."""

_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE,
    "TCP_KEEPINTVL": _BETWEEN,
    "TCP_KEEPCNT": _PROBES,
    "TCP_USER_TIMEOUT": 1000 * LOST_SECONDS,
}
_INTERFACE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def end_when_silent(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other host is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def own_address(other: str) -> str:
    """Return this host's address on the route to another; empty if there is none."""
    try:
        family, *_, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """Return the name of the interface with an address (IPv4), empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


@contextlib.contextmanager
def towards(master: str) -> Iterator[None]:
    """Enter a context in which gloo connects ranks by the interface that leads to ``master``.

    Its own choice is the one that the host's name resolves to. ``GLOO_SOCKET_IFNAME`` has
    precedence, and loopback is left to gloo.

    Raises:
        RuntimeError: Gloo could not connect the ranks.
    """
    name = ""
    if master and _INTERFACE not in os.environ:
        address = own_address(master)
        name = "" if address.startswith("127.") else interface_of(address)
    if not name:
        yield
        return
    os.environ[_INTERFACE] = name
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        raise RuntimeError(
            f"Gloo could not connect the ranks by {name!r}, the interface that leads to {master}."
            f" Set {_INTERFACE} to the interface between the hosts. ({error})"
        ) from error
    finally:
        os.environ.pop(_INTERFACE, None)
