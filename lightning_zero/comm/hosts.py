"""The hosts of the ranks: the network interface between them, and the detection of lost ones.

A host that loses its power or its network sends nothing, so connections to it do not break. Its
kernel, which answers even while its processes compute, load data or are stopped, gets keepalive
probes on connections that carry no messages of training::

    every rank   its own connection to the store ends if the host of the store is lost
    rank 0       has an idle connection to one rank of each other host, which ends if that is lost
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

_IDLE, _BETWEEN, _PROBES = 10, 5, 5
LOST_SECONDS = _IDLE + _PROBES * _BETWEEN
"""Seconds without an answer after which a host counts as lost."""

_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE,
    "TCP_KEEPINTVL": _BETWEEN,
    "TCP_KEEPCNT": _PROBES,
    "TCP_USER_TIMEOUT": 1000 * LOST_SECONDS,
}
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_INTERFACE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def _end_when_silent(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other host is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@contextlib.contextmanager
def ending_when_silent() -> Iterator[None]:
    """Enter a context whose new connections, of torch's store, end when their host is lost."""
    before = _sockets()
    yield
    for number, _ in _sockets() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            _end_when_silent(connection)


def _sockets() -> set[tuple[int, str]]:
    """Return the descriptors of this process's sockets, where the system lists them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if (link := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    found.add((int(name), link))
    return found


def _own_address(other: str) -> str:
    """Return this host's address on the route to another; empty if there is none."""
    try:
        family, *_, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_of(address: str) -> str:
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
        address = _own_address(master)
        name = "" if address.startswith("127.") else _interface_of(address)
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


class Lifelines:
    """Idle connections between rank 0 and the first rank of each other host.

    Args:
        rank: This process's number.
        store: The process group's store.

    Attributes:
        offer: What :meth:`open` needs of every rank: this host's address, and a port of rank 0.
    """

    def __init__(self, rank: int, store: Any) -> None:
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._rank, self._master = rank, getattr(store, "host", "")
        self._ranks: dict[str, list[int]] = {}
        self._connections: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None
        address, port = _own_address(self._master) if self._master else "", 0
        if address and rank == 0:
            self._listener = socket.create_server(("", 0), backlog=512)
            self._listener.setblocking(False)
            port = self._listener.getsockname()[1]
        self.offer = address, port

    def open(self, offers: Sequence[tuple[str, int]]) -> None:
        """Connect the hosts, if there are several; ranks that cannot be reached so are skipped."""
        for rank, (address, _) in enumerate(offers):
            self._ranks.setdefault(address, []).append(rank)
        (first, port), (own, _) = offers[0], self.offer
        if len(self._ranks) == 1 or "" in self._ranks:
            self.close()
        elif own != first and self._ranks[own][0] == self._rank:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((self._master, port), 5)
                self._connections[0] = connection
                _end_when_silent(connection)
                connection.sendall(self._rank.to_bytes(4, "big"))

    def lost(self) -> str:
        """Return the error for a host that is lost, if there is one."""
        with contextlib.suppress(OSError):
            while self._listener is not None:
                connection, _ = self._listener.accept()
                _end_when_silent(connection)
                connection.settimeout(1.0)
                self._connections[int.from_bytes(connection.recv(4), "big")] = connection
        for rank, connection in [*self._connections.items()]:
            try:
                connection.settimeout(0.0)
                connection.recv(1)  # nothing is sent: it has closed the connection
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in _SILENT:
                    self._connections.pop(rank).close()
                    return self.lost_with(rank)
            self._connections.pop(rank).close()
        return ""

    def lost_with(self, rank: int) -> str:
        """Return the error for the loss of a rank's host."""
        ranks = next((ranks for ranks in self._ranks.values() if rank in ranks), [rank])
        return (
            f"The host of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} is lost: it has"
            f" not answered for {LOST_SECONDS} s. Its power or its network has failed."
        )

    def close(self) -> None:
        """Close all connections."""
        for connection in [*self._connections.values(), *filter(None, [self._listener])]:
            connection.close()
        self._connections, self._listener = {}, None
