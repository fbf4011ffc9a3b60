"""The pool of rank processes: results, failures of every kind, and a fresh start after them."""

import os
import re
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.oracle.forks import SHARED
from tests.oracle.launch import ScriptError, is_running, run_script
from tests.oracle.ranks import Pool, Pools, RankError


@pytest.fixture
def pool(ranks: Pools):
    """The shared pool of two ranks with a grace period that suits a test."""
    pool = ranks(2)
    grace, pool.grace = pool.grace, 1.0
    yield pool
    pool.grace = grace


def add_over_ranks(value: float, *, times: int = 1) -> torch.Tensor:
    total = torch.tensor([value * (dist.get_rank() + 1) * times])
    dist.all_reduce(total)
    return total


def draw() -> tuple[int, float]:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    return os.getpid(), torch.rand(1).item()


def surroundings() -> dict[str, object]:
    return {
        "rank": os.environ["RANK"],
        "world": os.environ["WORLD_SIZE"],
        "left behind": os.environ.get("LEFT_BEHIND"),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "backend": dist.get_backend(),
    }


def fail_differently() -> None:
    print(f"rank {dist.get_rank()} was here")
    raise ValueError(f"complaint of rank {dist.get_rank()}")


def fail_alone() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("only rank one")
    dist.barrier()


def assert_wrong_sum() -> None:
    assert sum([1, 2]) == dist.get_world_size() + 5


def warn_of_the_future() -> str:
    try:
        warnings.warn("soon", FutureWarning, stacklevel=1)
    except FutureWarning:
        return "error"
    return "no error"


def sleep_alone(seconds: float) -> None:
    if dist.get_rank() == 0:
        time.sleep(seconds)


def leave() -> None:
    raise SystemExit(3)


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fall_out_of_step() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def return_something_local() -> object:
    return lambda: None


def fit(max_steps: int) -> tuple[int, int, float]:
    from lightning.pytorch.demos.boring_classes import BoringModel

    from tests.oracle.projects import make_trainer

    model = BoringModel()
    trainer = make_trainer("ddp", max_steps=max_steps, limit_val_batches=0)
    trainer.fit(model)
    return trainer.global_rank, trainer.world_size, model.layer.weight.sum().item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_rank_returns_its_value(ranks: Pools, world_size: int) -> None:
    expected = 2.0 * world_size * (world_size + 1) / 2
    assert ranks(world_size).run(add_over_ranks, 2.0) == [torch.tensor([expected])] * world_size


def test_processes_stay_and_calls_begin_alike(pool: Pool) -> None:
    first, second = pool.run(draw), pool.run(draw)
    assert first == second
    assert first[0][0] != first[1][0]
    assert first[0][1] == first[1][1]


def test_surroundings_are_those_of_a_launched_rank(pool: Pool) -> None:
    pool.run(draw)
    assert pool.run(surroundings) == [
        {
            "rank": str(rank),
            "world": "2",
            "left behind": None,
            "threads": 1,
            "dtype": "torch.float32",
            "backend": "gloo",
        }
        for rank in range(2)
    ]


def test_failures_of_all_ranks_are_one_error(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fail_differently)
    message = str(caught.value)
    for rank in range(2):
        assert f"ValueError: complaint of rank {rank}" in message
        assert f"rank {rank} was here" in message
    assert "fail_differently: ranks 0, 1 of 2 failed" in message
    assert "in _answer" not in message


def test_assertions_explain_themselves(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"assert 3 == \(2 \+ 5\)"):
        pool.run(assert_wrong_sum)


def test_failure_of_one_rank_frees_the_ones_that_wait_for_it(pool: Pool) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(fail_alone)
    assert time.monotonic() - begin < 120
    message = str(caught.value)
    assert "--- rank 1 raised" in message
    assert "only rank one" in message
    assert "--- rank 0 hangs: no answer within 1 s of the first failure" in message
    assert "in barrier" in message
    assert "in fail_alone" in message
    assert "pytest" not in message


def test_time_limit_names_the_hanging_ranks_and_where(pool: Pool) -> None:
    for seconds in (1, 30):  # the longer limit if the other rank was starved
        with pytest.raises(RankError) as caught:
            pool.run(sleep_alone, 600.0, timeout=float(seconds))
        message = str(caught.value)
        if "rank 0 of 2 failed" in message and "in sleep_alone" in message:
            break
    assert "rank 0 of 2 failed" in message
    assert f"--- rank 0 hangs: no answer within {seconds} s" in message
    assert "in sleep_alone" in message
    assert "rank 1" not in message


def test_death_is_an_answer(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 1 died with SIGKILL"):
        pool.run(die)


def test_a_collective_too_many_is_the_fault_of_its_own_call(pool: Pool) -> None:
    with pytest.raises(RankError, match="fall_out_of_step returned, but the ranks are out of step"):
        pool.run(fall_out_of_step)


def test_pool_is_fresh_after_a_failure(pool: Pool) -> None:
    before = pool.run(draw)
    with pytest.raises(RankError):
        pool.run(fail_alone)
    after = pool.run(draw)
    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after)
    for pid, _ in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [value for _, value in before] == [value for _, value in after]


def test_ranks_do_not_outlive_the_test_process() -> None:
    code = "\n".join(
        [
            "import os, signal, threading, time",
            "from tests.oracle.launch import MARK",
            "from tests.oracle.ranks import Pool",
            "del os.environ[MARK]  # by which they would be found and killed",
            "pool, idle = Pool(1), Pool(1)",
            "print('ranks', pool.run(os.getpid)[0], idle.run(os.getpid)[0], flush=True)",
            "threading.Thread(target=pool.run, args=(time.sleep, 60.0), daemon=True).start()",
            "time.sleep(0.3)",
            "os.kill(os.getpid(), signal.SIGKILL)",
        ]
    )
    # The servers that this process shares, if it does, or new ones would import everything.
    env = {name: os.environ[name] for name in [SHARED] if name in os.environ}
    with pytest.raises(ScriptError, match="ended with code -9") as caught:
        run_script(code, env=env)
    ((busy, idle),) = re.findall(r"^ranks (\d+) (\d+)$", str(caught.value), re.MULTILINE)
    deadline = time.monotonic() + 120.0
    while is_running(int(busy)) or is_running(int(idle)):
        assert time.monotonic() < deadline, "a rank outlived the process that started it"
        time.sleep(0.05)
