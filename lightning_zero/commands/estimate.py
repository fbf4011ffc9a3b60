"""``lightning-zero estimate``: the memory of a model, or the times of its steps, before it runs."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_zero.commands.model_source import (
    find_model,
    model_of_config,
    parse_arguments,
    parse_batch,
    read_config,
)
from lightning_zero.commands.option import option
from lightning_zero.commands.times import times, times_table
from lightning_zero.memory import (
    EQUAL_STAGES,
    STEP_SETTINGS,
    TERMS,
    Cluster,
    Estimate,
    Limits,
    ModelPlan,
    Offload,
    advise,
    are_equal_stages,
    compare,
    estimate_table,
    format_bytes,
    format_ranks,
    named_offloads,
    parse_bytes,
    write_report,
)
from lightning_zero.plan import CAST_WEIGHTS, MIN_NUMEL, RECIPES, as_dtype

_EXAMPLES = """examples:
  lightning-zero estimate 10B --ranks 8 64 --precision bf16-mixed --device-memory 80GB
  lightning-zero estimate 10B --ranks 8 --offload cpu nvme --device-memory 16GB --host-memory 256GB
  lightning-zero estimate examples/train_gpt.py:GPT --args width=1024 depth=24 \\
      --optimizer adamw --batch "int64[8,129]" --ranks 4
  lightning-zero estimate examples/zero3.yaml --model examples/train_gpt.py:GPT --optimizer adamw
  lightning-zero estimate path/to/hugging_face_model --ranks 8 \\
      --batch "input_ids=int64[1,2048]" "labels=int64[1,2048]"
  lightning-zero estimate examples/train_gpt.py:GPT --args width=1024 depth=24 \\
      --optimizer adamw --batch "int64[8,129]" --cluster "64x8, 400Gb/s, 450GB/s, 400TFLOPS"
"""


_ROWS = """\
Each kind: the most that a rank holds of it within a step; 1 GB is 10^9 bytes.
peak: the largest total at one instant, so it may be less than the sum of all kinds.
saved: how much lower the peak is than that of {first}."""

_CHECKPOINTING, _AWAY = "activation_checkpointing", "activation_offload"

_BY_OPTION = ("shard", "backward_shard", "gather_bits", "reduce_bits")
"""The arguments of the strategy that are options of the command, too."""

_WITHOUT_MEMORY = {
    "stage",
    "checkpoint",
    "broadcast_buffers",
    "offload_path",
    "restore_weights",
    "launcher",
}
"""Arguments of the strategy that do not change a step's memory; all stages are shown anyway."""


def add_estimate_command(commands: Any) -> None:
    """Add ``estimate`` to the commands."""
    parser = commands.add_parser(
        "estimate",
        help="predict a model's bytes per rank, by kind and stage",
        description="Predict a model's bytes per rank, by kind and stage, before it runs.",
        epilog=f"{_EXAMPLES}\nterms of --cluster:\n{textwrap.indent(TERMS, '  ')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        help="a number of parameters (10B), package.module:Class, file.py:Class (file.py alone"
        " lists its LightningModules), a LightningCLI or a Hugging Face configuration",
    )
    parser.add_argument(
        "--args", nargs="*", default=[], help="arguments of the class as name=value"
    )
    parser.add_argument("--model", help="the class, if the configuration does not name it")
    parser.add_argument("--stages", nargs="+", type=int, help="default: 0 (DDP) 1 2 3")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: as in the YAML, else 8")
    parser.add_argument("--shard", type=int, help="number of ranks per copy (default: all)")
    parser.add_argument("--backward-shard", type=int, help="number of ranks per gather in backward")
    parser.add_argument("--gather-bits", type=int, choices=[8], help="as in the strategy")
    parser.add_argument("--reduce-bits", type=int, choices=[4, 8], help="as in the strategy")
    parser.add_argument("--precision", choices=list(RECIPES), help="as in the Trainer")
    parser.add_argument("--cast-weights", choices=CAST_WEIGHTS, help="as in the strategy")
    parser.add_argument("--optimizer", help="a name in torch.optim")
    parser.add_argument("--batch", nargs="*", default=[], help='one rank\'s, e.g. "int64[4,128]"')
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--activation-offload", action="store_true", help="as in the strategy")
    parser.add_argument(
        "--accumulate-grad-batches", type=int, help="default: as in the YAML, else 1"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--offload",
        nargs="+",
        choices=["cpu", "nvme"],
        default=[],
        help="also predict zero2_offload and zero3_offload (cpu), both beside an accelerator, or"
        " zero3_nvme (nvme)",
    )
    parser.add_argument(
        "--offload-ratio", type=float, help="share to offload (default: as in the YAML, else 1)"
    )
    parser.add_argument(
        "--cluster",
        type=option(Cluster.parse),
        metavar="TERMS",
        help='predict step times on a cluster, such as "64x8, 400Gb/s, 450GB/s, 400TFLOPS" (terms'
        " below), instead of bytes",
    )
    parser.add_argument("--device-memory", help="such as 80GB, to see what fits")
    parser.add_argument("--host-memory", help="a node's, such as 512GB, as a second limit")
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        help="default: the devices of a YAML with several nodes, else all ranks, at most 8",
    )
    parser.add_argument("--report", type=Path, help="folder for memory.json and memory.html")
    parser.set_defaults(run=run)


class _Asked(NamedTuple):
    """A model, its settings as in ``ModelPlan.snapshots``, and the other content of a YAML."""

    subject: ModelPlan
    settings: dict[str, Any]
    chosen: dict[str, Any]
    trainer: dict[str, Any]


def _asked(options: argparse.Namespace) -> _Asked:
    arguments, source = parse_arguments(options.args), options.source
    config: dict[str, Any] = {}
    if Path(source).suffix in (".yaml", ".yml"):
        config = read_config(Path(source))
        source, named = model_of_config(config, options.model)
        arguments = {**named, **arguments}
    trainer = config.get("trainer") or {}
    chosen = _options_of(trainer)
    subject = ModelPlan(
        find_model(source, arguments),
        precision=options.precision or str(trainer.get("precision") or "32-true"),
        optimizer=options.optimizer,
        batch=parse_batch(options.batch),
        checkpointing=options.activation_checkpointing or chosen.pop(_CHECKPOINTING, None) is True,
        activation_offload=options.activation_offload or chosen.pop(_AWAY, None) is True,
        cast_weights=options.cast_weights or chosen.pop("cast_weights", "autocast"),
        min_num_params=chosen.pop("min_num_params", MIN_NUMEL),
        device=torch.device(options.device),
    )
    microbatches = options.accumulate_grad_batches or trainer.get("accumulate_grad_batches") or 1
    settings = {
        "num_microbatches": microbatches,
        **{name: chosen.pop(name) for name in STEP_SETTINGS if name in chosen},
    }
    if "reduce_dtype" in settings:
        settings["reduce_dtype"] = as_dtype(settings["reduce_dtype"])
    for name in _BY_OPTION:
        if (value := getattr(options, name)) is not None:
            settings[name] = value
    return _Asked(subject, settings, chosen, trainer)


def _print_times(options: argparse.Namespace, asked: _Asked) -> int:
    """Print the times of a step on ``--cluster``; return the exit code."""
    names = ("offload", "offload_ratio", "host_memory", "ranks", "report")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    given += [_AWAY] if asked.subject.microbatch.offloading else []
    given += [name for name in ("offload_optimizer", "offload_weights") if asked.chosen.get(name)]
    if given:
        raise ValueError(
            "--cluster predicts step times on its own ranks, without offload, so it cannot be"
            f" combined with {given[0]}. Remove one of them."
        )
    cluster = options.cluster
    sizes = {"node": cluster.ranks_per_node}
    settings = {
        name: sizes.get(value, value) if isinstance(value, str) else value
        for name, value in asked.settings.items()
    }
    limit = parse_bytes(options.device_memory) if options.device_memory else None
    found = times(asked.subject, cluster, limit, options.stages, **settings)
    print(f"{asked.subject.describe()}\n\n{times_table(found, cluster)}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Print the estimate that ``options`` ask for; return the exit code."""
    asked = subject, settings, chosen, trainer = _asked(options)
    if options.cluster is not None:
        return _print_times(options, asked)
    offloads = _offloads(options, chosen)
    device, host = (
        parse_bytes(text) if text else None for text in (options.device_memory, options.host_memory)
    )
    if host is not None and device is None:
        raise ValueError("--host-memory shows what fits only with --device-memory. Pass both.")
    ranks_per_node = options.ranks_per_node
    if ranks_per_node is None and (trainer.get("num_nodes") or 1) > 1:
        ranks_per_node = _devices_of(trainer)
    limits = Limits(device or 0, host, ranks_per_node)
    ranks = options.ranks or [_ranks_of(trainer) or 8]
    stages = (0, 1, 2, 3) if options.stages is None else options.stages
    found = compare(subject, stages, ranks, offloads=offloads, **settings)
    print("\n\n".join(_texts(subject, found)))
    print("\n" + "\n".join(_beside_the_device(found, limits)))
    if unread := sorted(set(chosen) - _WITHOUT_MEMORY):
        print(f"\nIgnored init_args of the strategy: {', '.join(unread)}.")
    if device is not None:
        print(f"\n{advise(subject, found, limits, **settings)}")
    if options.report is not None:
        print(f"\n{_report(options.report, subject, found, device)}")
    return 0


def _offloads(options: argparse.Namespace, chosen: dict[str, Any]) -> list[tuple[int, Offload]]:
    """Return the offloads of the options and of the configuration, with their stages."""
    ratio, of_config = options.offload_ratio, chosen.pop("offload_ratio", 1.0)
    offloads = named_offloads(
        *dict.fromkeys(options.offload), ratio=1.0 if ratio is None else ratio
    )
    media = [chosen.pop(name, None) for name in ("offload_optimizer", "offload_weights")]
    if any(media):
        offload = Offload(media[0], media[1], of_config if ratio is None else ratio)
        own = (chosen.get("stage", 3), offload)
        offloads += [own] if own not in offloads else []
    if ratio is not None and not offloads:
        raise ValueError(
            f"--offload-ratio {ratio} has no effect without offload. Remove it, or pass --offload."
        )
    return offloads


def _beside_the_device(found: list[Estimate], limits: Limits) -> Iterator[str]:
    """Yield lines about host memory and files."""
    whole = format_bytes(found[0].whole)
    yield f"Host memory before setup: {whole} per rank, unless the model is built on meta; the same"
    yield "after fit, unless restore_weights=False. In a step without offload: none besides the"
    yield "device's, which on a CPU is the host's."
    for offloaded in (one for one in found if one.leaves_device):
        num = limits.on_node(offloaded.world_size)
        disk = num * sum(offloaded.disk.values())
        files = f" and {format_bytes(disk)} in files" if disk else ""
        yield (
            f"{offloaded.name}, {format_ranks(offloaded.world_size)}: {num} per node, which need"
            f" {format_bytes(num * offloaded.host_peak)} of host memory in a step{files}."
        )
        least, most = offloaded.shares_away
        if least < most:
            yield f"Its ranks offload {least:.1%} to {most:.1%} of masters and states; the figures"
            yield "are those of rank 0."


def _texts(subject: ModelPlan, found: list[Estimate]) -> list[str]:
    missing = [] if found[0].has_units else ["gathered and unreduced units"]
    missing += [] if subject.has_activations else ["activations"]
    head = subject.describe() + (f" (not counted: {', '.join(missing)})" if missing else "")
    columns = [
        [estimate for estimate in found if estimate.world_size == world_size]
        for world_size in dict.fromkeys(estimate.world_size for estimate in found)
    ]
    notes = [_ROWS.format(first=found[0].name)]
    if all(map(are_equal_stages, columns)):
        notes.append(textwrap.fill(EQUAL_STAGES, 92, break_on_hyphens=False))
    return [head, *map(estimate_table, columns), "\n".join(notes)]


def _report(folder: Path, subject: ModelPlan, found: list[Estimate], limit: int | None) -> Path:
    largest = max(estimate.world_size for estimate in found)
    own = [estimate for estimate in found if estimate.world_size == largest]
    return write_report(
        folder,
        subject=subject.describe(),
        predicted=max(own, key=lambda estimate: estimate.stage),
        stages=own,
        device_memory=limit,
    )


def _options_of(trainer: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a configuration gives the strategy."""
    strategy = trainer.get("strategy")
    return dict(strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}


def _ranks_of(trainer: dict[str, Any]) -> int | None:
    devices = _devices_of(trainer)
    return None if devices is None else devices * (trainer.get("num_nodes") or 1)


def _devices_of(trainer: dict[str, Any]) -> int | None:
    devices = trainer.get("devices")
    return devices if isinstance(devices, int) and devices > 0 else None
