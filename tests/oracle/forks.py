"""Processes that begin with everything imported, because a server that has imported it forks them.

Importing torch and Lightning costs a process seconds; a fork costs milliseconds. The standard
library's fork server would lose three properties:

- **Two seeds.** The ranks of a real job are interpreters of their own, whose strings hash and whose
  objects lie elsewhere, so that an order which follows either shows. So there are two servers, and
  neighbours among the ranks come from different ones. A process has one of the library's, publicly.
- **Two imports in all.** Where several processes run tests, all are served by the two servers that
  the process which starts them has started. The library's serves one process.
- **No orphans.** Ranks that no test uses are stopped (ranks.py), and would not see that a test
  process was killed. A server wakes those that it has forked for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib.metadata
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

IMPORTED = (
    "functorch.compile",
    "torch.distributed.checkpoint",
    "lightning.pytorch.cli",
    "lightning.pytorch.demos.boring_classes",
    "torchmetrics",
    "pytest",
    "lightning_zero",
)
SHARED = "PYTEST_SERVERS"
"""The variable that tells the folder that is shared, with the servers' addresses."""
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
    return Server(f"{session_folder()}/{number}", is_new=SHARED not in os.environ)


def session_folder() -> Path:
    """Return the folder that all processes of a session share."""
    return Path(os.environ.get(SHARED) or _new_folder())


def share_servers() -> None:
    """Start both servers for the processes that this one starts, whose servers they become."""
    for number in (0, 1):
        server(number)
    os.environ[SHARED] = _new_folder()


@functools.cache
def _new_folder() -> str:
    """Make a folder for the addresses of servers that this process starts."""
    folder = tempfile.mkdtemp(prefix="servers-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def without_pytest(environment: Iterable[str]) -> dict[str, str]:
    """The environment of this process less what pytest put into it."""
    return {name: os.environ[name] for name in environment if not name.startswith("PYTEST")}


class Server:
    """A process that has imported everything and forks on demand; it ends with its last user.

    Args:
        address: A path by which it is reached.
        is_new: Whether it is to be started.
    """

    def __init__(self, address: str, *, is_new: bool) -> None:
        if is_new:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                self._start(listener)
        self._lock = threading.Lock()  # it takes one request after another
        self._door = socket.socket(socket.AF_UNIX)
        self._door.connect(address)

    def _start(self, listener: socket.socket) -> None:
        code = "from tests.oracle.forks import main; main()"
        own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        subprocess.Popen(
            [sys.executable, "-c", code, str(listener.fileno())],
            cwd=ROOT,
            env={**without_pytest(os.environ), **own},
            pass_fds=[listener.fileno()],
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
    """Import everything and fork whenever a request comes, until all test processes are gone."""
    gc.disable()  # a fifth of the time of imports goes into a search for garbage that is not there
    # Every Trainer asks, which takes as long as a step of training; no test installs a package.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared
    gc.enable()
    listener = socket.socket(fileno=int(sys.argv[1]))
    doors = [listener.accept()[0]]
    wakes, woken = socket.socketpair()
    for end in (wakes, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    running: dict[int, Running] = {}
    while doors:
        ready = wait([listener, wakes, *doors])
        if wakes in ready:
            with contextlib.suppress(BlockingIOError):
                wakes.recv(4096)
            _report_ended(running)
        for door in [door for door in doors if door in ready]:
            if (received := _receive(door)) is None:
                doors.remove(door)
                for pid, (_, asked_by) in running.items():
                    if asked_by is door:  # stopped ones would never see their lifeline end
                        os.kill(pid, signal.SIGCONT)
                door.close()
                continue
            request, fds = received
            status = Connection(fds.pop())
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                statuses = [status, *(each.status for each in running.values())]
                for end in (listener, *doors, wakes, woken, *statuses):
                    end.close()
                _be(request, *fds)
            for descriptor in fds:
                os.close(descriptor)
            running[pid] = Running(status, door)
            _send(status, pid)
        if listener in ready:
            doors.append(listener.accept()[0])
    os._exit(0)


def _receive(door: socket.socket) -> tuple[bytes, list[int]] | None:
    head, fds, _, _ = socket.recv_fds(door, LENGTH_BYTES, 4)
    if not head:
        return None
    return door.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL), fds


class Running(NamedTuple):
    """A process that was forked: where its end is told, and who asked for it."""

    status: Connection
    door: socket.socket


def _report_ended(running: dict[int, Running]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid).status as remote:
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
