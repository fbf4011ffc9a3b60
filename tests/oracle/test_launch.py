"""Scripts run by every launcher, end in time, and leave no process behind."""

import time

import pytest

from tests.oracle.launch import ScriptError, is_running, run_python, run_script

REPORT = """
import os, sys
names = ["RANK", "WORLD_SIZE", "NPROC", "OMP_NUM_THREADS"]
sys.stdout.write(" ".join(str(os.environ.get(name)) for name in names) + " " + sys.argv[1] + "\\n")
import tests  # the repository is on the path
"""

SLEEP_IN_A_SESSION_OF_ITS_OWN = """
import subprocess, sys, time
code = "import time\\ndef sleeping():\\n    time.sleep(600)\\nsleeping()"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print("child", child.pid)
time.sleep(600)
"""


def test_plain_script_gets_its_arguments_and_returns_its_output() -> None:
    assert run_script(REPORT, "hello", launcher="plain").stdout == "None None 1 1 hello\n"
    assert run_script(REPORT, 5, nproc=3).stdout == "None None 3 1 5\n"


def test_nodes_need_torchrun() -> None:
    with pytest.raises(ValueError, match="torchrun"):
        run_script(REPORT, nodes=2)


def test_exit_code_is_an_error_unless_asked_for() -> None:
    code = "import sys; print('before'); sys.exit(3)"
    with pytest.raises(ScriptError, match=r"ended with code 3\nbefore"):
        run_python(["-c", code])
    finished = run_python(["-c", code], check=False)
    assert (finished.code, finished.output) == (3, "before\n")


def test_time_limit_shows_where_and_kills_the_whole_tree() -> None:
    for seconds in (1, 5, 60):  # the shortest in which the child comes to sleep
        with pytest.raises(ScriptError, match=f"did not end within {seconds} s") as caught:
            run_script(SLEEP_IN_A_SESSION_OF_ITS_OWN, launcher="plain", timeout=float(seconds))
        message = str(caught.value)
        if "in sleeping" in message:
            break
    assert "in sleeping" in message
    child = int(message.split("child ")[1].split()[0])
    deadline = time.monotonic() + 120.0
    while is_running(child):
        assert time.monotonic() < deadline, "the child outlived its script"
        time.sleep(0.05)
