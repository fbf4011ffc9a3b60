"""Processes that begin with everything imported, because a server that has imported it forks them.

Importing torch and Lightning costs a process seconds; a fork costs milliseconds. The standard
library's fork server would lose two properties:

- **Two seeds.** The ranks of a real job are interpreters of their own, whose strings hash and whose
  objects lie elsewhere, so that an order which follows either shows. So there are two servers, and
  neighbours among the ranks come from different ones. A process has one of the library's, publicly.
- **No orphans.** Ranks that no test uses are stopped (ranks.py), and would not see that a test
  process was killed. A server wakes those that it has forked for it.
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
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
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


def server(number: int) -> Server:
    """Return the server of this number, 0 or 1, which now begins to import if it is new."""
    with _making:
        return _server(number)


_making = threading.Lock()


@functools.cache
def _server(number: int) -> Server:
    return Server()


def without_pytest(environment: Iterable[str]) -> dict[str, str]:
    """The environment of this process less what pytest put into it."""
    return {name: os.environ[name] for name in environment if not name.startswith("PYTEST")}


class Server:
    """A process that has imported everything and forks on demand; it ends with its user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # it takes one request after another
        self._door, there = socket.socketpair()
        code = "from tests.oracle.forks import main; main()"
        own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with there:
            subprocess.Popen(
                [sys.executable, "-c", code, str(there.fileno())],
                cwd=ROOT,
                env={**without_pytest(os.environ), **own},
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
            with remote, self._lock:
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
    """Import everything and fork whenever a request comes, until the test process is gone."""
    gc.disable()  # a fifth of the time of imports goes into a search for garbage that is not there
    # Every Trainer asks, which takes as long as a step of training; no test installs a package.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared
    gc.enable()
    door = socket.socket(fileno=int(sys.argv[1]))
    wakes, woken = socket.socketpair()
    for end in (wakes, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    running: dict[int, Connection] = {}
    while True:
        ready = wait([wakes, door])
        if wakes in ready:
            with contextlib.suppress(BlockingIOError):
                wakes.recv(4096)
            _report_ended(running)
        if door not in ready:
            continue
        head, fds, _, _ = socket.recv_fds(door, LENGTH_BYTES, 4)
        if not head:
            for pid in running:  # stopped ones would never see their lifeline end
                os.kill(pid, signal.SIGCONT)
            os._exit(0)
        request = door.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
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
