"""Processes that begin with everything imported, because a server that has imported it forks them.

Importing torch and Lightning costs a process seconds; a fork costs milliseconds. The ranks of a
real job are interpreters of their own, whose strings hash and whose objects lie elsewhere, so that
an order which follows either shows. There are two servers for that: neighbours among the ranks come
from different ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, NoReturn

IMPORTED = (
    "torch.distributed.checkpoint",
    "lightning.pytorch.cli",
    "lightning.pytorch.demos.boring_classes",
    "torchmetrics",
    "pytest",
    "lightning_zero",
)
START_SECONDS = 120.0
LENGTH_BYTES = 4


class Process:
    """A forked process, as `subprocess.Popen` would show it; closing `stdin` ends its lifeline."""

    def __init__(self, pid: int, status: Connection, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self._status = status
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or a signal's negative number, or None while the process runs."""
        if self._code is None and self._status.poll():
            self._receive()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has ended."""
        if self._code is None:
            if not self._status.poll(timeout):
                raise TimeoutError(f"process {self.pid} did not end within {timeout:g} s")
            self._receive()
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _receive(self) -> None:
        try:
            self._code = self._status.recv()
        except (EOFError, OSError):  # the server has gone: nobody knows how its children ended
            self._code = -signal.SIGKILL
        self._status.close()


class Server:
    """A process that has imported everything and forks on demand; it ends with this process."""

    def __init__(self, environment: Mapping[str, str], cwd: Path) -> None:
        self._door, there = socket.socketpair()
        code = "from tests.oracle.forks import main; main()"
        with there:
            subprocess.Popen(
                [sys.executable, "-c", code, str(there.fileno())],
                cwd=cwd,
                env={**environment, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
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
        environment: Mapping[str, str],
    ) -> Process:
        """Run `function(connection, *args)` in a process, and in a session, of its own."""
        request = pickle.dumps((function, args, dict(environment)))
        status, remote = Pipe()
        reading, writing = os.pipe()
        try:
            with remote:
                fds = [reading, output.fileno(), connection.fileno(), remote.fileno()]
                socket.send_fds(self._door, [len(request).to_bytes(LENGTH_BYTES, "big")], fds)
                self._door.sendall(request)
            os.close(reading)
            is_forked = status.poll(START_SECONDS)
            pid = status.recv() if is_forked else 0
        except (EOFError, OSError) as error:
            raise RuntimeError("the server that forks has ended; it said above why") from error
        if not is_forked:
            raise TimeoutError(f"no process was forked within {START_SECONDS:g} s")
        return Process(pid, status, os.fdopen(writing, "wb"))


# ---------------------------------------------------------------------------- the server's side


def main() -> NoReturn:
    """Import everything and fork whenever a request comes, until the test process goes away."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared
    door = socket.socket(fileno=int(sys.argv[1]))
    wakes, woken = socket.socketpair()
    for end in (wakes, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    running: dict[int, Connection] = {}
    while True:
        ready = wait([door, wakes])
        if wakes in ready:
            with contextlib.suppress(BlockingIOError):
                wakes.recv(4096)
            _report_ended(running)
        if door in ready:
            if (received := _receive(door)) is None:
                for pid in running:  # those that are stopped would never see their lifeline end
                    os.kill(pid, signal.SIGCONT)
                os._exit(0)
            request, fds = received
            status = Connection(fds.pop())
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (door, wakes, woken, status, *running.values()):
                    end.close()
                _be(request, *fds)
            for descriptor in fds:
                os.close(descriptor)
            running[pid] = status
            _send(status, pid)


def _receive(door: socket.socket) -> tuple[bytes, list[int]] | None:
    head, fds, _, _ = socket.recv_fds(door, LENGTH_BYTES, 4)
    if not head:
        return None
    return door.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL), fds


def _report_ended(running: dict[int, Connection]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as remote:
                _send(remote, os.waitstatus_to_exitcode(status))


def _send(status: Connection, value: int) -> None:
    with contextlib.suppress(OSError):  # a process that nobody waits for any more
        status.send(value)


def _be(request: bytes, reading: int, output: int, connection: int) -> NoReturn:
    """Be the forked process."""
    os.setsid()
    for descriptor, place in ((reading, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, place)
    os.close(reading)
    os.close(output)
    code = 1
    try:
        function, args, environment = pickle.loads(request)
        os.environ.clear()
        os.environ.update(environment)
        function(Connection(connection), *args)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)
