"""Scripts in processes of their own: for tests of launchers, commands and examples.

A process begins with everything imported (forks.py) unless it is to be fresh; processes of its
own, as launchers start them, are interpreters, each of which costs seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tests.oracle.forks import ROOT, Process, environment, server

MARK = "LIGHTNING_ZERO_TEST"
REST_SECONDS = 20.0
Started = subprocess.Popen[bytes] | Process
FORGET = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_zero"]:
    del sys.modules[name]
"""
"""Code that a script begins with which is to be the first to import this package."""


class ScriptError(Exception):
    """A script failed or did not end in time; the message holds what it printed."""


class Finished(NamedTuple):
    """The end of a script."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """All that was printed."""
        return self.stdout + self.stderr


def run_script(
    script: str | Path,
    *args: object,
    nproc: int = 2,
    nodes: int = 1,
    restarts: int = 0,
    launcher: Literal["plain", "lightning", "torchrun", "srun"] = "lightning",
    env: Mapping[str, str] | None = None,
    **how: Any,
) -> Finished:
    """Run a Python script to its end.

    Args:
        script: A path (relative to the repository's root), or code: a string with a newline.
        *args: The script's arguments.
        nproc: Processes per node, started by torchrun, or by Lightning inside the script: the
            script finds the number in the variable NPROC. A plain script is told 1.
        nodes: Nodes imitated on this machine, each by its own torchrun.
        restarts: How often torchrun starts all processes again when one of them has failed.
        launcher: "torchrun"; "srun", imitated by SLURM's variables; or who starts the other
            processes: "lightning" or nobody ("plain").
        env: Variables to add.
        **how: As `run_python` takes it.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        words = [str(_path_of(script, folder)), *map(str, args)]
        everybodys = {"NPROC": str(1 if launcher == "plain" else nproc), **(env or {})}
        commands, envs = [words], [everybodys]
        if launcher == "torchrun":
            place = ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
            options = [f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
            options += ["--standalone"] if nodes == 1 else [*place, f"--nnodes={nodes}"]
            run = ["-m", "torch.distributed.run", *options]
            commands = [[*run, f"--node-rank={node}", *words] for node in range(nodes)]
            envs = [everybodys] * nodes
        elif launcher == "srun":
            port = {"MASTER_PORT": str(_free_port())}
            commands = [words] * nproc
            envs = [{**everybodys, **slurm_variables(n, nproc), **port} for n in range(nproc)]
        return run_python(*commands, env=envs, **how)


def run_here(script: str | Path, *args: object, cwd: str | Path) -> str:
    """Run a script as the main program of this process, in a folder; returns what it prints.

    For ranks of the pool: a Trainer of the script joins them, as it joins ranks of torchrun.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as folder, contextlib.ExitStack() as stack:
        path = _path_of(script, folder)
        stack.callback(os.chdir, os.getcwd())
        os.chdir(cwd)
        printed = io.StringIO()
        stack.callback(sys.path.__setitem__, slice(None), sys.path[:])
        stack.callback(setattr, sys, "argv", sys.argv)
        with contextlib.redirect_stdout(printed):
            _be_main([str(path), *map(str, args)])
    return printed.getvalue()


def slurm_variables(task: int, num_tasks: int) -> dict[str, str]:
    """Return what `srun` tells a task of a job on one node."""
    words = "JOB_ID=4242 JOB_NAME=train NNODES=1 NODEID=0 NODELIST=localhost"
    words += f" STEP_NODELIST=localhost NTASKS={num_tasks} NTASKS_PER_NODE={num_tasks}"
    words += f" PROCID={task} LOCALID={task}"
    return {f"SLURM_{name}": value for name, _, value in (w.partition("=") for w in words.split())}


def run_python(
    *commands: Sequence[str],
    timeout: float = 300.0,
    check: bool = True,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    cwd: Path = ROOT,
    fresh: bool = False,
) -> Finished:
    """Run `python <command>` for each command, all at the same time, to the last one's end.

    Interpreters that they have started are given some time to end too.
    With several commands the code is the first that is not 0, and outputs follow one another.

    Args:
        *commands: Command lines.
        timeout: Seconds after which every process is killed.
        check: Whether an exit code other than 0 is an error.
        env: Variables to add, for all commands or for each.
        cwd: The folder to run in.
        fresh: Whether processes begin as interpreters that have imported nothing.

    Raises:
        ScriptError: when time is up, with the stack of every process, or as `check` says.
    """
    mark = uuid.uuid4().hex
    common = environment(PYTHONFAULTHANDLER="1", **{MARK: mark})
    own = env if isinstance(env, Sequence) else [env or {}] * len(commands)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="output-")))
        processes: list[Started] = []
        stack.callback(_kill, mark, processes)
        for number, (command, variables) in enumerate(zip(commands, own, strict=True)):
            out, err = (
                stack.enter_context((folder / f"{number}.{end}").open("wb"))
                for end in ("out", "err")
            )
            start = _interpreter if fresh else _fork
            processes.append(start(command, out, err, {**common, **variables}, cwd))
        in_time = _end(lambda: any(process.poll() is None for process in processes), timeout)
        if not in_time:  # each prints its stack; parents first: they must not end their children
            for pid in sorted(_tree(mark, processes)):
                _signal(pid, signal.SIGABRT)
                time.sleep(0.2)
        _end(lambda: bool(_tree(mark, processes)), REST_SECONDS)
        code = next((code for code in (each.poll() for each in processes) if code), 0)
        stdout, stderr = (
            "".join(path.read_text(errors="replace") for path in sorted(folder.glob(f"*.{end}")))
            for end in ("out", "err")
        )
    finished = Finished(code, stdout, stderr)
    if not in_time or (check and code):
        how = f"with code {code}" if in_time else f"not within {timeout:g} s"
        raise ScriptError(f"`python {' '.join(commands[0])}` ended {how}\n{finished.output}")
    return finished


def _interpreter(
    command: Sequence[str], out: IO[bytes], err: IO[bytes], env: Mapping[str, str], cwd: Path
) -> Started:
    """Start an interpreter with a command line."""
    how: Any = {"stdin": subprocess.DEVNULL, "start_new_session": True, "env": env, "cwd": cwd}
    return subprocess.Popen([sys.executable, *command], stdout=out, stderr=err, **how)


def _fork(
    command: Sequence[str], out: IO[bytes], err: IO[bytes], env: Mapping[str, str], cwd: Path
) -> Started:
    """Start a process that is as such an interpreter but for its imports."""
    here, there = Pipe()
    with here, there:
        what = (_be_python, list(command), err.name, cwd)
        return server(0).start(*what, connection=there, output=out, env=env)


def _be_python(connection: Connection, command: list[str], errors: str, cwd: Path) -> None:
    """Be the interpreter with this command line; it reads nothing from the connection."""
    connection.close()
    with open(errors, "ab") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    os.chdir(cwd)
    code = 0
    try:
        _be_main(command)
    except SystemExit as end:
        if not (end.code is None or isinstance(end.code, int)):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error
        code = 1
    # As an interpreter ends, but for the tests' own threads and memory.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _be_main(command: list[str]) -> None:
    """Run `-c code`, `-m module` or a path as the main program of this process."""
    first, *rest = command
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(rest[0], {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def say(line: str) -> None:
    """Print a line of a script in one go: `print` lets lines of several processes mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _path_of(script: str | Path, folder: str) -> Path:
    """Return the file of a script, which is written into `folder` if it is code."""
    if "\n" not in str(script):
        return ROOT / script
    path = Path(folder) / "script.py"
    path.write_text(str(script))
    return path


def _end(is_running: Callable[[], bool], seconds: float) -> bool:
    """Return whether something ends in time."""
    deadline = time.monotonic() + seconds
    while (runs := is_running()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs


def _kill(mark: str, processes: list[Started]) -> None:
    for pid in _tree(mark, processes):
        _signal(pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # those it has forked bear no mark
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _tree(mark: str, processes: list[Started]) -> set[int]:
    """The processes and all that inherited their mark, sessions of their own included."""
    tree = {process.pid for process in processes if process.poll() is None}
    for path in Path("/proc").glob("[0-9]*/environ"):  # none where there is no /proc
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                tree.add(int(path.parent.name))
    return tree
