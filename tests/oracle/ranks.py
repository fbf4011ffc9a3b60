"""A pool of rank processes per world size, started once and shared by all tests of a session.

A test sends a top-level function; every rank runs it with the same arguments and returns a
picklable value. A rank is forked (forks.py) in a part of a second, a call costs milliseconds.
Between calls the ranks are stopped: threads of gloo wake a hundred times a second, each of them.

    def total(value):                        # top level: the ranks import it by name
        tensor = torch.tensor([value * (dist.get_rank() + 1)])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_total(ranks):
        assert ranks(3).run(total, 2.0) == [12.0, 12.0, 12.0]

What a rank function may count on:

- the default process group (gloo, CPU) exists, torch runs one thread, the rank variables that
  launchers set (RANK, LOCAL_RANK, WORLD_SIZE, ...) are set, so a Lightning Trainer works too;
- every call begins with the same seeds on all ranks, the default dtype, a clean `os.environ` and
  the repository's root as its folder;
- `assert` explains itself and the project's warning filters hold, as in the test process.

What goes wrong on any rank becomes one `RankError` that shows each rank: its traceback, or where
it hangs, and what it printed. The pool is then killed, and the next call starts a fresh one.
After a call that went well all ranks meet in a collective, so that a rank that has sent too much
or too little is the fault of this call and not of the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_zero.comm import watchdog
from tests.oracle.forks import ROOT, environment, server

START_SECONDS = 240.0
MEET_SECONDS = 120.0
GRACE_SECONDS = 30.0
SHOWN_CHARACTERS = 6000


class RankError(Exception):
    """One or more ranks raised, died or did not answer in time."""


class Answer(NamedTuple):
    """What a rank returned, or a complaint in words."""

    result: Any = None
    complaint: str = ""


# ---------------------------------------------------------------------------- the test's side


class Pools:
    """One pool per world size, each started when it is first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}
        atexit.register(self.close)

    def __call__(self, world_size: int) -> Pool:
        """The pool of this world size."""
        return self._pools.setdefault(world_size, Pool(world_size))

    def close(self) -> None:
        """Kill every rank of every pool."""
        for pool in self._pools.values():
            pool.kill()


impatient = mock.patch.object(watchdog, "PATIENCE", 0.5)
"""Decorates what waits for a report of the watchdog; test_faults.py waits as long as users do."""


def errors_of(*calls: tuple[Any, ...], world_size: int = 2, at_once: int = 4) -> list[str]:
    """Return the `RankError` of each call, a function and its arguments, on ranks of its own.

    Calls go on side by side: they wait for most of their time.
    """

    def error_of(call: tuple[Any, ...]) -> str:
        pool = Pool(world_size)
        try:
            pool.run(*call)
        except RankError as error:
            return str(error)
        finally:
            pool.kill()
        return "no error"

    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(error_of, calls))


class Pool:
    """`world_size` processes that wait for functions to run."""

    def __init__(self, world_size: int, *, grace: float = GRACE_SECONDS) -> None:
        self.world_size = world_size
        self.grace = grace
        self._ranks: list[Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._num_calls = 0

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on every rank and return the results in rank order.

        Raises:
            RankError: when a rank raised, died or did not answer within `timeout` seconds.
            TypeError: when the ranks cannot import the function by its name.
        """
        function_ = getattr(function, "func", function)  # of a functools.partial
        name = f"{function_.__module__}.{function_.__qualname__}"
        if "<" in name:
            raise TypeError(f"{name} is not at the top level of a module: ranks cannot import it")
        try:
            self._start()
            self._num_calls += 1
            results = self._results(name, timeout, function, *args, **kwargs)
            self._meet(f"{name} returned, but the ranks are out of step after it", MEET_SECONDS)
            for rank in self._ranks:
                rank.process.send_signal(signal.SIGSTOP)
        except BaseException:  # an interrupt too leaves ranks in the middle of something
            self.kill()
            raise
        return results

    def answers(
        self, function: Callable[..., Any], *args: Any, timeout: float, but: int = -1
    ) -> dict[int, Answer]:
        """Return how the function ends on each rank, and end all; nobody waits for rank `but`."""
        try:
            self._start()
            return self._ask(pickle.dumps((function, args, {})), timeout, but)
        finally:
            self.kill()

    def kill(self) -> None:
        """End all processes at once; the next `run` starts fresh ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if self._ranks:
            return
        self._folder = tempfile.TemporaryDirectory(prefix=f"ranks-{self.world_size}-")
        for number in (0, 1):
            server(number)  # they import side by side
        for index in range(self.world_size):
            self._ranks.append(Rank(index, self.world_size, Path(self._folder.name)))
        self._meet("the ranks could not be started", START_SECONDS)

    def _meet(self, complaint: str, timeout: float) -> None:
        self._results(complaint, timeout, _meet, self._num_calls + 1)

    def _results(
        self, name: str, timeout: float, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Any]:
        answers = self._ask(pickle.dumps((function, args, kwargs)), timeout)
        failed = {index: a.complaint for index, a in sorted(answers.items()) if a.complaint}
        if not failed:
            return [answers[index].result for index in range(self.world_size)]
        lines = [f"{name}: {_these(failed)} of {self.world_size} failed"]
        for text in dict.fromkeys(failed.values()):
            lines += [f"--- {_these(i for i in failed if failed[i] == text)} {text.rstrip()}"]
        for rank in self._ranks:
            if output := rank.output():
                lines += [f"--- rank {rank.index} printed\n{output.rstrip()}"]
        raise RankError("\n".join(lines))

    def _ask(self, request: bytes, timeout: float, but: int = -1) -> dict[int, Answer]:
        for rank in self._ranks:
            rank.send(request)
        answers: dict[int, Answer] = {}
        waiting = {rank.connection: rank for rank in self._ranks if rank.index != but}
        deadline = time.monotonic() + timeout
        reason = f"no answer within {timeout:g} s"
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait([*waiting], left):
                rank = waiting.pop(ready)  # type: ignore[arg-type]
                answers[rank.index] = rank.answer()
                failed_at = time.monotonic() + self.grace
                if answers[rank.index].complaint and failed_at < deadline:
                    deadline = failed_at
                    reason = f"no answer within {self.grace:g} s of the first failure"
        for rank in waiting.values():
            told = f"hangs: {reason}. It is here:\n{rank.stack()}"
            answers[rank.index] = Answer(complaint=told)
        return answers


class Rank:
    """The test's end of one rank process, whose first answer comes when it has joined the others.

    Neighbours come from different servers (forks.py says why).
    """

    def __init__(self, index: int, world_size: int, folder: Path) -> None:
        self.index = index
        self._log, self._stacks = folder / f"rank{index}.log", folder / f"rank{index}.stacks"
        self._log_start = 0
        self._stacks.touch()
        self.connection, there = Pipe()
        env = environment(
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
            RANK=str(index),
            LOCAL_RANK=str(index),
            NODE_RANK="0",
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",  # never used: the default group exists already
        )
        with self._log.open("wb") as output, there:
            self.process = server(index % 2).start(
                be_rank,
                *(index, world_size, folder, self._stacks),
                connection=there,
                output=output,
                env=env,
            )

    def send(self, request: bytes) -> None:
        """Hand over a pickled (function, args, kwargs)."""
        self._log_start = self._log.stat().st_size
        with contextlib.suppress(OSError):  # a dead rank is reported by `answer`
            self.process.send_signal(signal.SIGCONT)
            self.connection.send_bytes(request)

    def answer(self) -> Answer:
        """The answer, or how the process died."""
        try:
            return Answer(*self.connection.recv())
        except (EOFError, OSError):
            code = self.process.wait(timeout=GRACE_SECONDS) or 0
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Answer(complaint=f"died with {ending}")

    def stack(self) -> str:
        """Return where the process is right now, innermost call first."""
        before = self._stacks.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        text, deadline = "", time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = self._stacks.read_text()[before:]
            if now and now == text:
                break
            text = now
        # below this frame lies the pool itself, the same for every test
        threads = text.split("\n\n")
        return "\n\n".join(re.sub(r"\n.* in _answer\n(.|\n)*", "", t) for t in threads)

    def output(self) -> str:
        """Return what the process printed since the last request."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")[-SHOWN_CHARACTERS:]

    def kill(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def _these(indices: Iterable[int]) -> str:
    listed = list(indices)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


# ---------------------------------------------------------------------------- the rank's side


def be_rank(
    connection: Connection, index: int, world_size: int, folder: Path, stacks: Path
) -> NoReturn:
    """Be a rank until the test process goes away."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    # The pool's own time limits come first and say more.
    how: Any = {"rank": index, "world_size": world_size, "timeout": timedelta(hours=1)}
    dist.init_process_group("gloo", store=store, **how)
    # pytest around the loop gives its assertion messages and the project's warning filters
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-s"]
    options += ["-o", "addopts=", "--noconftest"]
    pytest.main(options, plugins=[_Serve(connection)])
    os._exit(1)


class _Serve:
    """A pytest plugin that answers requests where pytest would collect tests."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.environment = dict(os.environ)

    def pytest_collection(self) -> NoReturn:
        while True:
            try:
                request = self.connection.recv_bytes()
            except EOFError:
                os._exit(0)
            os.chdir(ROOT)
            os.environ.clear()
            os.environ.update(self.environment)
            self.connection.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(request)
        random.seed(0)
        # For other devices torch keeps the stack of each call, as text, until they are first used.
        torch.default_generator.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        answer = pickle.dumps((function(*args, **kwargs), ""))
    except BaseException as error:  # SystemExit and pytest's outcomes are answers too
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        answer = pickle.dumps((None, f"raised\n{text}"))
    sys.stdout.flush()
    sys.stderr.flush()
    return answer


def _meet(number: int) -> None:
    """Fail or hang unless the next collective of every rank is this one."""
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    if total.item() != number * dist.get_world_size():
        raise RuntimeError("this rank's collective met another collective of the other ranks")
