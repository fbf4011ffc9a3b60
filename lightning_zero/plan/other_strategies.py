"""Arguments of other strategies and of earlier versions, which a project may still pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

_SENDS_LESS = "use reduce_bits=8 or reduce_dtype='bfloat16' to send less"
CURES = {
    "find_unused_parameters": "remove it: a step may leave out any parameters",
    "gradient_as_bucket_view": "remove it: no gradient is copied to a bucket",
    "static_graph": "remove it: the order of modules is learned, and may change",
    "bucket_cap_mb": "gradients are reduced unit by unit; min_num_params sets the least unit",
    "ddp_comm_hook": _SENDS_LESS,
    "ddp_comm_state": _SENDS_LESS,
    "ddp_comm_wrapper": _SENDS_LESS,
    "model_averaging_period": "remove it: every step averages gradients",
    "start_method": "use launcher='spawn', 'fork' or 'notebook'",
    "sharding_strategy": "use stage=3 for FULL_SHARD; with reshard_after_forward=False it is"
    " SHARD_GRAD_OP, with shard='node' HYBRID_SHARD",
    "auto_wrap_policy": "remove it, or name the classes in units={...}",
    "activation_checkpointing_policy": "use activation_checkpointing=True, or {...} of classes",
    "cpu_offload": "use offload_optimizer='cpu' and offload_weights='cpu'",
    "mixed_precision": "use Trainer(precision='bf16-mixed')",
    "state_dict_type": "use checkpoint='file' or checkpoint='dcp'",
    "backward_shard": "use shard='node' (hybrid sharding), which gathers within a node",
    "verify_checkpoint": "remove it: every load verifies the checksums of the whole file",
    "use_orig_params": "remove it: parameters keep their shapes",
}
"""What to do instead of each argument."""

Init = TypeVar("Init", bound=Callable[..., None])


def refuse(names: Iterable[str]) -> None:
    """Raise a ``TypeError`` that says what to do if one of the arguments is none of ours."""
    for name in names:
        if name in CURES:
            raise TypeError(f"ZeROStrategy has no argument {name!r}: {CURES[name]}.")


def refuses_others(init: Init) -> Init:
    """Return a constructor with the same signature that refuses arguments of other strategies."""

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        refuse(kwargs)
        init(*args, **kwargs)

    return cast(Init, checked)
