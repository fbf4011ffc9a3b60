"""What works on a model that tensor parallelism has cut as on any other, with DDP's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.ranks import Pools
from tests.oracle.tensor_parallel import Block, Model, assert_like_ddp, fit

CUT: dict[str, Any] = {"tensor_parallel_size": 2, "min_num_params": 0}


# -- torch.compile ---------------------------------------------------------------------------------


class _Compiled(Model):
    """Compiles its blocks, one by one or with all that is around them."""

    way = ""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        super().configure_model()
        for index, block in enumerate(self.net.blocks):
            if self.way == "in place":
                block.compile(backend="aot_eager", fullgraph=True)
            elif self.way == "submodules":
                self.net.blocks[index] = torch.compile(block, backend="aot_eager")
        if self.way == "body":
            self.net = torch.compile(self.net, backend="aot_eager")


def _compiled(folder: str, strategy: dict[str, Any] | None, way: str, **more: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = _Compiled(by_sequence=more.pop("by_sequence", False))
    model.way = way
    found = fit(folder, strategy, model=model, **more)
    found["weights"] = {k.replace("_orig_mod.", ""): v for k, v in found["weights"].items()}
    counters = torch._dynamo.utils.counters
    return {
        **found,
        "graphs": counters["stats"]["unique_graphs"],
        "captured": counters["stats"]["calls_captured"],
        "breaks": dict(counters["graph_break"]),
    }


@pytest.mark.parametrize(
    ("stage", "way", "by_sequence"),
    [(1, "in place", True), (3, "submodules", False), (2, "body", False)],
)
def test_compiled_modules(
    ranks: Pools, tmp_path: Path, stage: int, way: str, by_sequence: bool
) -> None:
    ddp = ranks(2).run(fit, str(tmp_path), None, accumulate_grad_batches=2)
    cut = {"stage": stage, "units": {Block}, **CUT}
    options = {"accumulate_grad_batches": 2, "by_sequence": by_sequence}
    found = ranks(4).run(_compiled, str(tmp_path), cut, way, **options)
    assert_like_ddp(found, ddp, 2e-5)
    for one in found:
        if way != "body":
            assert (one["graphs"], one["breaks"]) == (1, {}), "one for both blocks"
        assert one["captured"] > 40, "something was compiled"
