"""Processes that begin with everything imported, because a server that has imported it forks them.

Importing torch and Lightning costs a process seconds; a fork costs milliseconds. There are two
servers, and neighbours among the ranks come from different ones: the ranks of a real job are
interpreters of their own, whose strings hash and whose objects lie elsewhere, so that an order
which follows either shows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, NoReturn

IMPORTED = (
    "functorch.compile",
    "torch.distributed.checkpoint",
    "lightning.pytorch.cli",
    "lightning.pytorch.demos.boring_classes",
    "torchmetrics",
    "pytest",
    "lightning_zero",
)
ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0
LENGTH_BYTES = 4


class Process:
    """A forked process, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int, status: Connection) -> None:
        self.pid = pid
        self._status = status
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or a signal's negative number, or None while the process runs."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the same when the process or the time has ended."""
        if self._code is None and self._status.poll(timeout):
            try:
                self._code = self._status.recv()
            except (EOFError, OSError):  # who waits for it was killed
                self._code = -signal.SIGKILL
            self._status.close()
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def environment(**more: str) -> dict[str, str]:
    """What processes of tests find in theirs: all but what pytest put into this one's, and more."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **own, "GLOO_SOCKET_IFNAME": loopback(), **more}


def loopback() -> str:
    """The network interface that needs no network."""
    return "lo0" if sys.platform == "darwin" else "lo"


class Server:
    """A process that has imported everything and forks on demand; it ends with its user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # it takes one request after another
        self._door, there = socket.socketpair()
        code = "from tests.oracle.forks import main; main()"
        with there:
            subprocess.Popen(
                [sys.executable, "-c", code, str(there.fileno())],
                cwd=ROOT,
                env=environment(),
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        connection: Connection,
        output: IO[bytes],
        env: Mapping[str, str],
    ) -> Process:
        """Run `function(connection, *args)` in a process, and in a session, of its own."""
        request = pickle.dumps((function, args, dict(env)))
        status, remote = Pipe()
        with remote, self._lock:
            fds = [output.fileno(), connection.fileno(), remote.fileno()]
            socket.send_fds(self._door, [len(request).to_bytes(LENGTH_BYTES, "big")], fds)
            self._door.sendall(request)
        if not status.poll(START_SECONDS):
            raise TimeoutError(f"no process was forked within {START_SECONDS:g} s")
        return Process(status.recv(), status)


_servers = functools.cache(lambda number: Server())
_making = threading.Lock()


def server(number: int) -> Server:
    """Return the server of this number, 0 or 1, which now begins to import if it is new."""
    with _making:
        return _servers(number)


# ---------------------------------------------------------------------------- the server's side


def main() -> NoReturn:
    """Import everything and fork whenever a request comes, until the test process is gone."""
    gc.disable()  # a fifth of the time of imports goes into a search for garbage that is not there
    # Every Trainer asks, which takes as long as a step of training; no test installs a package.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    door = socket.socket(fileno=int(sys.argv[1]))
    while True:
        head, fds, _, _ = socket.recv_fds(door, LENGTH_BYTES, 3)
        if not head:
            os._exit(0)
        request = door.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        if os.fork() == 0:
            door.close()
            _keep(request, *fds)
        for descriptor in fds:
            os.close(descriptor)


def _keep(request: bytes, output: int, connection: int, status: int) -> NoReturn:
    """Fork a process, tell its id, wait for its end and tell how it ended."""
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(BrokenPipeError), Connection(status) as told:
        if (pid := os.fork()) == 0:
            told.close()
            _be(request, output, connection)
        os.close(output)
        os.close(connection)
        told.send(pid)
        told.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _be(request: bytes, output: int, connection: int) -> NoReturn:
    """Be the forked process."""
    _end_with_parent()
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    code = 1
    try:
        function, args, env = pickle.loads(request)
        os.environ.clear()
        os.environ.update(env)
        function(Connection(connection), *args)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _end_with_parent() -> None:
    """Leave no orphan, stopped or not, of a test process that was killed; on Linux."""
    from torch.multiprocessing import _prctl_pr_set_pdeathsig

    _prctl_pr_set_pdeathsig(signal.SIGKILL)
