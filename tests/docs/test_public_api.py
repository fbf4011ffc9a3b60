"""What a user may rely on: names, arguments and registered strategies."""

import inspect

from lightning.pytorch.strategies import StrategyRegistry

import lightning_zero

NAMES = [
    "MemoryMonitor",
    "ZeROPrecision",
    "ZeROStrategy",
    "estimate",
    "full_grad",
    "gathered",
    "grad_norm",
    "join",
    "load_weights",
]

STRATEGIES = {
    f"zero{name}{suffix}": (int(name[0]), launcher)
    for name in ("1", "2", "3", "2_offload", "3_offload", "3_nvme")
    for suffix, launcher in (
        ("", "subprocess"),
        ("_spawn", "spawn"),
        ("_fork", "fork"),
        ("_notebook", "notebook"),
    )
}


def test_names_are_frozen() -> None:
    assert sorted(lightning_zero.__all__) == NAMES
    assert all(inspect.getdoc(getattr(lightning_zero, name)) for name in NAMES)


def test_arguments_are_frozen() -> None:
    parameters = inspect.signature(lightning_zero.ZeROStrategy).parameters.values()
    assert [p.name for p in parameters] == [
        "stage",
        "units",
        "min_num_params",
        "prefetch",
        "reshard_after_forward",
        "reduce_dtype",
        "cast_weights",
        "accumulate",
        "activation_checkpointing",
        "activation_offload",
        "broadcast_buffers",
        "shard",
        "tensor_parallel_size",
        "gather_bits",
        "reduce_bits",
        "optimizer_step",
        "stochastic_rounding",
        "offload_optimizer",
        "offload_weights",
        "offload_path",
        "restore_weights",
        "checkpoint",
        "async_checkpoint",
        "launcher",
        "config",
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
        "timeout",
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.name != "stage")


def test_strategies_are_registered() -> None:
    ours = {name for name in StrategyRegistry if name.startswith("zero")}
    assert ours == set(STRATEGIES)
    for name, (stage, launcher) in STRATEGIES.items():
        strategy = StrategyRegistry.get(name)
        assert isinstance(strategy, lightning_zero.ZeROStrategy)
        assert strategy.settings.stage == stage
        expected = {"subprocess": "popen", "notebook": "fork"}.get(launcher, launcher)
        assert strategy._start_method == expected
