"""DeepSpeed's NVMe offload and accelerate's ``disk_offload``, in an interpreter that has them.

``offload.py`` starts this script through :class:`Contender`, once per package, and requests one
measurement after the other: a line in, a line with the seconds out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Measurements = dict[str, Callable[[], float]]


class Contender:
    """A process that measures another package.

    Args:
        python: The interpreter of an environment that has the package.
        name: The package.
        folder: A folder on the disk to measure.
    """

    def __init__(self, python: str, name: str, folder: str, width: int, depth: int) -> None:
        command = [python, "-W", "ignore", __file__, name, folder, str(width), str(depth)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        except OSError as error:
            raise SystemExit(f"Cannot run the interpreter {python!r}: {error}") from error
        self._name = name
        self._answer()

    def measure(self, what: str) -> float:
        """Return the seconds that a measurement took there."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} exited with code {self._process.wait()}; see above.")
        return line

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# -- in the other interpreter ----------------------------------------------------------------------


def _model(width: int, depth: int) -> object:
    import torch
    from torch import nn

    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    for layer in layers:
        layer.weight.data = torch.randn(width, width) / width**0.5
    return nn.Sequential(*layers)


def _timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _deepspeed(folder: str, width: int, depth: int) -> Measurements:
    os.environ.update(
        {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    )
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    deepspeed.init_distributed(dist_backend="gloo")
    model = _model(width, depth)
    largest = width * width
    states = {
        "device": "nvme",
        "nvme_path": folder,
        "buffer_count": 16,
        "pipeline_read": True,
        "pipeline_write": True,
        "fast_init": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=DeepSpeedCPUAdam(model.parameters(), 1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": states,
                "sub_group_size": largest,
                "reduce_bucket_size": largest,
                "stage3_prefetch_bucket_size": largest,
            },
            "aio": {"block_size": 4 * 2**20, "queue_depth": 8, "intra_op_parallelism": 2}
            | {"single_submit": False, "overlap_events": True},
            "zero_allow_untested_optimizer": True,
        },
    )

    def compute() -> None:
        engine.backward(engine(torch.ones(1, width)).sum())

    def step() -> float:
        compute()
        return _timed(engine.step)

    def train() -> None:
        compute()
        engine.step()

    return {"step": step, "train": lambda: _timed(train)}


def _accelerate(folder: str, width: int, depth: int) -> Measurements:
    import torch
    from accelerate import disk_offload

    place = Path(folder) / "accelerate"
    model = disk_offload(_model(width, depth), str(place), execution_device=torch.device("cpu"))

    @torch.no_grad()
    def forward(tokens: int) -> float:
        for path in place.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        rows = torch.randn(tokens, width)
        return _timed(lambda: model(rows))

    return {str(2**n): lambda n=n: forward(2**n) for n in range(12)}


_MEASUREMENTS = {"deepspeed": _deepspeed, "accelerate": _accelerate}


def main() -> None:
    name, folder, width, depth = sys.argv[1:]
    # Keep what the packages print out of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        __import__("torch").set_num_threads(1)
        __import__(name)
    except ImportError as error:
        cure = f"Install {name} there, or remove --{name}"
        raise SystemExit(f"{sys.executable} cannot import {name}: {error}. {cure}.") from error
    measurements = _MEASUREMENTS[name](folder, int(width), int(depth))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(measurements[line.strip()](), file=answers, flush=True)


if __name__ == "__main__":
    main()
