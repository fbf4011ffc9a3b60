"""Units that are stepped on a device's host amid a backward pass, by a thread of their own.

Devices are played by painted memories, whose copies land late (`tests/oracle/painted.py`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_zero.engine import early_step
from lightning_zero.optimizer import SteppingThread, UnitStep, require_whole_steps, staging
from lightning_zero.plan import Offload
from tests.oracle.in_closures import Run, assert_equal, counted
from tests.oracle.painted import beside_the_host, late_landings
from tests.oracle.ranks import ROOT, Pools

THREAD = "lightning_zero.step"


@contextlib.contextmanager
def threads_of_steps() -> Iterator[Counter[str]]:
    """Yield how many batches were stepped ahead, by the threads that did."""
    found: Counter[str] = Counter()
    step_ahead = UnitStep._step_ahead

    def note(*args: Any) -> None:
        found[threading.current_thread().name] += 1
        step_ahead(*args)

    with patch.object(UnitStep, "_step_ahead", note):
        yield found


def compare(folder: str, case: str, stage: int, medium: str, ratio: float, **how: Any) -> None:
    offload = Offload.of_stage(stage, medium, ratio=ratio)
    results = []
    with patch.object(staging, "_BATCH_BYTES", 1), threads_of_steps() as found:
        for is_early in (False, True):
            assert not found
            with beside_the_host(), late_landings() as stream:
                run = Run(case, folder, is_early=is_early, stage=stage, offload=offload, **how)
                results.append(run.result())
            assert (THREAD in stream.waiting) == is_early
    assert_equal(*results)
    assert [*found] == [THREAD]
    assert found[THREAD] >= 3 * 3  # units in each step


def compare_some(folder: str) -> None:
    compare(folder, "recomputed", 2, "nvme", 0.3, accumulate=2)
    compare(folder, "recomputed", 3, "cpu", 1.0)


def compare_all(folder: str) -> None:
    for stage, medium, ratio in itertools.product((1, 2, 3), ("cpu", "nvme"), (1.0, 0.3)):
        compare(folder, "recomputed", stage, medium, ratio)
        compare(folder, "transformer", stage, medium, ratio, accumulate=3, name="sgd")
    compare(folder, "transformer", 3, "cpu", 1.0, precision="bf16-mixed", accumulate=2)
    compare(folder, "wide", 3, "nvme", 1.0)
    compare(folder, "tied_blocks", 3, "nvme", 1.0, name="adagrad")


@pytest.mark.parametrize("world", [1, 2])
def test_the_bits_are_those_of_a_step_behind_the_pass(
    ranks: Pools, tmp_path: Path, world: int
) -> None:
    ranks(world).run(compare_some, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_so_are_those_of_all_homes(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks(world).run(compare_all, str(tmp_path), timeout=500)


def run_beside(folder: str, stage: int = 3, medium: str = "cpu", **how: Any) -> Run:
    offload = Offload.of_stage(stage, medium)
    return Run("recomputed", folder, is_early=True, stage=stage, offload=offload, **how)


def weight(run: Run, block: int) -> Tensor:
    return run.model.blocks[block][0].weight  # type: ignore[index, union-attr, return-value]


def test_backward_waits_for_no_landing_and_sees_whole_groups(tmp_path: Path) -> None:
    """Let none land before the pass comes to the first block, and read groups meanwhile."""
    with beside_the_host(painted=False), late_landings() as stream, threads_of_steps() as found:
        run = run_beside(str(tmp_path))
        [group] = run.optimizer.param_groups
        members, seen = [*group["params"]], []

        def look(_: Tensor) -> None:
            seen.append(group["params"] == members and group["fused"] is None)

        def look_and_open(_: Tensor) -> None:
            assert not found
            stream.gate.set()
            for _ in range(500):
                time.sleep(0.01)
                if found:
                    break
            seen.append(bool(found))
            look(_)

        for block in (3, 2, 1):
            weight(run, block).register_hook(look)
        weight(run, 0).register_hook(look_and_open)
        stream.gate.clear()
        run.step(0)
        run.engine.close(restore=False)
    assert seen == [True] * 5


def fail(*_: Any) -> None:
    raise ArithmeticError("no number")


def test_what_the_thread_raises_is_raised_by_the_call_and_tears_the_step(tmp_path: Path) -> None:
    with beside_the_host(painted=False), late_landings():
        run = run_beside(str(tmp_path))
        run.step(0)
        ends = list[int]()
        run.between = lambda _: ends.append(1)
        step = UnitStep._step_batch
        with patch.object(UnitStep, "_step_batch", fail), pytest.raises(ArithmeticError):
            run.step(1)
        assert ends  # the pass had ended
        assert UnitStep._step_batch is step
        with pytest.raises(RuntimeError, match="ended half-way"):
            require_whole_steps([run.optimizer])
        run.engine.reset()
        run.engine.close(restore=False)


def interrupted(folder: str, medium: str) -> None:
    """Interrupt a backward pass of which no gradient has landed, or may have."""
    for is_open in (False, True):
        with beside_the_host(painted=False), late_landings() as stream:
            run = run_beside(folder, medium=medium)
            run.step(0)
            if not is_open:
                stream.gate.clear()

            def interrupt(_: Tensor) -> None:
                raise KeyboardInterrupt

            weight(run, 0).register_hook(interrupt)
            with threads_of_steps() as found, pytest.raises(KeyboardInterrupt):
                run.step(1)
            run.engine.reset()
            masters = [piece.part.clone() for piece in run.engine.sharded.pieces]
            num_steps = found[THREAD]
            with pytest.raises(RuntimeError, match="ended half-way"):
                require_whole_steps([run.optimizer])
            thread = next(one for one in threading.enumerate() if one.name == THREAD)
            run.engine.close(restore=False)
            stream.gate.set()
            thread.join(10)
            assert not thread.is_alive()
            # Nothing is stepped when the others land.
            assert found[THREAD] == num_steps
            pairs = zip(masters, run.engine.sharded.pieces, strict=True)
            assert all(torch.equal(before, piece.part) for before, piece in pairs)


@pytest.mark.parametrize("medium", ["cpu", "nvme"])
def test_an_interrupt_amid_the_pass_ends_the_thread(
    ranks: Pools, tmp_path: Path, medium: str
) -> None:
    ranks(1).run(interrupted, str(tmp_path), medium)


def halve(run: Run) -> None:
    for piece in run.engine.sharded.pieces:
        piece.reduced.mul_(0.5)  # type: ignore[union-attr]


def go_again(run: Run) -> None:
    run.backward(0, 0)


@pytest.mark.parametrize("between", [halve, go_again])
def test_what_changes_gradients_is_found_though_the_thread_is_late(
    tmp_path: Path, between: Callable[[Run], None]
) -> None:
    """Let a second pass wait for the thread, so that nothing changes beneath it."""
    land, done, seen = early_step._land, list[int](), list[bool]()

    def late(*args: Any) -> None:
        time.sleep(0.1)
        land(*args)
        done.append(1)

    late_steps = patch.object(early_step, "_land", late)
    with beside_the_host(painted=False), late_landings(), late_steps, counted() as given:
        run = run_beside(str(tmp_path), stage=2)

        def look(_: Any = None) -> None:
            seen.append(len(done) == len(given))

        def look_and(run: Run) -> None:
            look()
            weight(run, 3).register_hook(look)
            between(run)

        run.between = look_and
        with pytest.raises(RuntimeError, match="the gradient of"):
            run.step(0)
        run.engine.reset()
        run.engine.close(restore=False)
    assert seen == ([False, True] if between is go_again else [False])


def test_who_reads_a_gradient_amid_the_pass_waits_until_it_has_landed(tmp_path: Path) -> None:
    """Read it whole and in part, and change it, which is found."""
    with beside_the_host(painted=False), late_landings() as stream:
        run = run_beside(str(tmp_path))
        found = dict[str, Tensor]()

        def read(where: str) -> None:
            piece = run.engine.sharded.piece(weight(run, 3))
            assert piece is not None
            assert piece.reduced is not None
            found[where] = piece.reduced.clone()
            whole = run.engine.sharded.full_grad(weight(run, 3))
            assert whole is not None
            assert torch.equal(whole.flatten(), found[where])
            piece.reduced.mul_(0.5)

        def read_early(_: Tensor) -> None:
            timer = threading.Timer(0.1, stream.gate.set)
            timer.start()
            read("early")
            timer.join()

        handle = weight(run, 0).register_hook(read_early)
        stream.gate.clear()
        with pytest.raises(RuntimeError, match="the gradient of"):
            run.step(0)
        handle.remove()
        run.engine.reset()
        run.engine.close(restore=False)

        run = run_beside(str(tmp_path))
        run.is_early, run.between = False, lambda _: read("behind")
        run.step(0)
        run.engine.close(restore=False)
    assert torch.equal(found["early"], found["behind"])


def test_nothing_is_stepped_while_something_compiles(tmp_path: Path) -> None:
    """Torch's optimizers compute otherwise then."""
    seen, step_batch = list[bool](), UnitStep._step_batch

    def note(*args: Any) -> None:
        seen.append(torch.compiler.is_compiling())
        step_batch(*args)

    noted = patch.object(UnitStep, "_step_batch", note)
    with beside_the_host(painted=False), late_landings() as stream, noted:
        run = run_beside(str(tmp_path))

        def compile_slowly(graph: Any, _: Any) -> Any:
            stream.gate.set()
            time.sleep(0.2)
            assert not seen
            return graph

        compiled = torch.compile(lambda x: x + 1, backend=compile_slowly)

        def compile_amid(_: Tensor) -> None:
            compiled(torch.zeros(1))

        weight(run, 0).register_hook(compile_amid)
        stream.gate.clear()
        run.step(0)
        run.engine.close(restore=False)
        torch.compiler.reset()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("name", ["wait", "stop"])
def test_a_thread_never_waits_for_itself(name: str) -> None:
    thread = SteppingThread(torch.device("cpu"))
    thread.give(lambda: None, [getattr(thread, name)])
    with pytest.raises(RuntimeError, match="waits for such steps to end"):
        thread.wait()
    thread.close()


def test_a_thread_ends_with_what_gave_it_work() -> None:
    """End it also if nobody closes that."""
    device = torch.device("cpu")
    thread = SteppingThread(device)
    done = list[int]()
    thread.give(lambda: done.append(0), [lambda: done.append(1)] * 2)
    thread.wait()
    assert done == [0, 1, 1]
    own = next(one for one in threading.enumerate() if one.name == THREAD)
    left = weakref.ref(thread)
    del thread
    gc.collect()
    own.join(10)
    assert left() is None
    assert not own.is_alive()


def test_a_thread_is_closed_while_gradients_do_not_land() -> None:
    thread, done = SteppingThread(torch.device("cpu")), list[int]()
    waits, gate = threading.Event(), threading.Event()

    def land() -> None:
        waits.set()
        gate.wait(20)

    thread.give(land, [lambda: done.append(1)])
    own = next(one for one in threading.enumerate() if one.name == THREAD)
    assert waits.wait(20)
    thread.close()
    assert own.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        thread.give(land, [])
    gate.set()
    own.join(10)
    assert not own.is_alive()
    assert not done


EXIT = """
import sys, threading, time, torch, types

# Without what else the package imports, which takes seconds.
package = types.ModuleType("lightning_zero")
package.__path__ = ["lightning_zero"]
sys.modules["lightning_zero"] = package
from lightning_zero.optimizer import SteppingThread

def step(began):
    began.set()
    time.sleep(0.3)
    print("stepped", flush=True)

threads = [SteppingThread(torch.device("cpu")) for _ in range(2)]
began = threading.Event()
threads[0].give(threading.Event().wait, [])
threads[1].give(lambda: None, [lambda: step(began)] * 2)
began.wait()
"""


def test_the_interpreter_ends_behind_the_step_under_way_and_waits_for_no_landing() -> None:
    command = [sys.executable, "-c", EXIT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stepped\n"), done.stderr


def test_a_thread_steps_under_what_it_follows() -> None:
    thread, seen = SteppingThread(torch.device("cpu")), list[Any]()

    def look() -> None:
        how = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        seen.append((*how, torch.get_default_device().type))

    with torch.autocast("cpu", torch.float16), torch.device("meta"):
        thread.follow()
    thread.give(lambda: None, [look])
    thread.follow()
    thread.give(lambda: None, [look])
    thread.wait()
    thread.close()
    assert seen == [(True, torch.float16, "meta"), (False, torch.bfloat16, "cpu")]
