"""``lightning-zero estimate``: the memory of a model before it runs."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_zero.commands.model_source import (
    find_class,
    find_model,
    model_of_config,
    parse_arguments,
    parse_batch,
    read_config,
)
from lightning_zero.deepspeed import Config
from lightning_zero.memory import (
    OF_STAGE_3,
    Estimate,
    ModelPlan,
    Offload,
    advise,
    compare,
    estimate_table,
    format_bytes,
    named_offloads,
    parse_bytes,
    write_report,
)
from lightning_zero.plan import RECIPES, STRATEGIES, Settings, strategy_arguments

_EXAMPLES = """examples:
  lightning-zero estimate 10B --ranks 8 64 --precision bf16-mixed --device-memory 80GB
  lightning-zero estimate 10B --ranks 8 --offload cpu nvme --device-memory 16GB
  lightning-zero estimate examples/train_gpt.py:GPT --args width=1024 depth=24 \\
      --optimizer adamw --batch "int64[8,129]" --ranks 4
  lightning-zero estimate examples/zero3.yaml --model examples/train_gpt.py:GPT --optimizer adamw
  lightning-zero estimate path/to/hugging_face_model --ranks 8 \\
      --batch "input_ids=int64[1,2048]" "labels=int64[1,2048]"
"""


_ROWS = """\
Each kind: the most that a rank holds of it within a step; 1 GB is 10^9 bytes.
peak: the largest total at one instant, so it may be less than the sum of all kinds.
saved: how much lower the peak is than that of {first}."""


def add_estimate_command(commands: Any) -> None:
    """Add ``estimate`` to the commands."""
    parser = commands.add_parser(
        "estimate",
        help="predict a model's bytes per rank, by kind and stage",
        description="Predict a model's bytes per rank, by kind and stage, before it runs.",
        epilog=_EXAMPLES,
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
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of ZeROStrategy, such as shard=8 activation_checkpointing=True",
    )
    parser.add_argument("--precision", choices=list(RECIPES), help="as in the Trainer")
    parser.add_argument("--optimizer", help="a name in torch.optim")
    parser.add_argument("--batch", nargs="*", default=[], help='one rank\'s, e.g. "int64[4,128]"')
    parser.add_argument(
        "--accumulate-grad-batches", type=int, help="default: as in the YAML, else 1"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "xpu"])
    parser.add_argument(
        "--offload",
        nargs="+",
        choices=["cpu", "nvme"],
        default=[],
        help="also predict zero2_offload and zero3_offload (cpu), both beside an accelerator, or"
        " zero3_nvme (nvme)",
    )
    parser.add_argument("--device-memory", help="such as 80GB, to see what fits")
    parser.add_argument("--report", type=Path, help="folder for memory.json and memory.svg")
    parser.set_defaults(run=run)


_OF_LIGHTNING = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
}
"""Arguments of the strategy that are Lightning's, and change no memory."""


class _Asked(NamedTuple):
    """A model with the settings of its run, and the other content of a YAML.

    ``given`` are the arguments of the strategy that the settings are made from.
    """

    subject: ModelPlan
    given: dict[str, Any]
    num_microbatches: int
    trainer: dict[str, Any]


def _asked(options: argparse.Namespace) -> _Asked:
    arguments, source = parse_arguments(options.args), options.source
    config: dict[str, Any] = {}
    if Path(source).suffix in (".yaml", ".yml"):
        config = read_config(Path(source))
        source, named = model_of_config(config, options.model)
        arguments = {**named, **arguments}
    trainer = config.get("trainer") or {}
    given = _given(trainer.get("strategy"), parse_arguments(options.set))
    subject = ModelPlan(
        find_model(source, arguments),
        _settings(given),
        precision=options.precision or str(trainer.get("precision") or "32-true"),
        optimizer=options.optimizer,
        batch=parse_batch(options.batch),
        device=torch.device(options.device),
    )
    microbatches = options.accumulate_grad_batches or trainer.get("accumulate_grad_batches") or 1
    return _Asked(subject, given, microbatches, trainer)


def _given(strategy: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a configuration's ``strategy``, with ``more`` of them."""
    given: dict[str, Any] = {}
    if isinstance(strategy, str) and strategy.startswith("zero"):
        given = strategy_arguments(strategy)
    elif isinstance(strategy, dict) and not _foreign(strategy):
        given = dict(strategy.get("init_args") or {})
    given = {name: value for name, value in {**given, **more}.items() if name not in _OF_LIGHTNING}
    return Config.read(given.pop("config", None)).merged(given)


def _settings(given: dict[str, Any]) -> Settings:
    """Return the settings that arguments of the strategy ask for."""
    given = dict(given)
    if isinstance(units := given.get("units", "auto"), list):
        given["units"] = tuple(map(find_class, units))
    elif units != "auto":
        given["units"] = find_class(units)
    return Settings.of(**given)


def _foreign(strategy: Any) -> str:
    """Return the class of a configuration's strategy if it is not this package's, else ``""``."""
    name = str(strategy.get("class_path")) if isinstance(strategy, dict) else ""
    return "" if name.endswith("ZeROStrategy") else name


def run(options: argparse.Namespace) -> int:
    """Print the estimate that ``options`` ask for; return the exit code."""
    asked = subject, _, num_microbatches, trainer = _asked(options)
    device = parse_bytes(options.device_memory) if options.device_memory else None
    ranks = options.ranks or [_ranks_of(trainer) or 8]
    stages = (0, 1, 2, 3) if options.stages is None else options.stages
    offloads = _offloads(options, subject.settings)
    found = compare(subject, stages, ranks, offloads=offloads, num_microbatches=num_microbatches)
    print("\n\n".join(_texts(subject, found)))
    if name := _foreign(trainer.get("strategy")):
        print(f"\nIgnored the arguments of {name}.")
    chosen: Estimate | None = min(found, key=lambda one: one.device_peak)
    if device is not None:
        chosen, advice = advise(subject, found, device, num_microbatches)
        print(f"\n{advice}")
    if options.report is not None:
        print(f"\n{write_report(options.report, found, device)}")
    if chosen is not None:
        print(f"\n{_to_write(asked, chosen)}")
    return 0


def _to_write(asked: _Asked, found: Estimate) -> str:
    """Return a line on how to train as it was estimated."""
    trainer: dict[str, Any] = {"devices": found.world_size}
    num_nodes = asked.trainer.get("num_nodes") or 1
    if num_nodes > 1 and found.world_size % num_nodes == 0:
        trainer = {"devices": found.world_size // num_nodes, "num_nodes": num_nodes}
    trainer |= {"precision": found.precision} if found.precision != "32-true" else {}
    if asked.num_microbatches > 1:
        trainer["accumulate_grad_batches"] = asked.num_microbatches
    after = ", after import lightning_zero" if found.stage else ""
    words = [f"strategy={_strategy(asked.given, found)}", *_as_arguments(trainer)]
    return f"To train with {found.name}: Trainer({', '.join(words)}){after}."


def _strategy(given: dict[str, Any], found: Estimate) -> str:
    """Return the strategy of an estimate as code, with the other arguments that were ``given``."""
    homes = {} if found.offload is None else {
        "offload_optimizer": found.offload.optimizer, "offload_weights": found.offload.weights
    }  # fmt: skip
    is_own = {"stage", "offload_optimizer", "offload_weights"}
    others = {name: value for name, value in given.items() if name not in is_own}
    others = {name: value for name, value in others.items() if value not in (None, "subprocess")}
    if found.stage < 3:
        others = {name: value for name, value in others.items() if name not in OF_STAGE_3}
    if found.stage == 0 or (not others and found.name in STRATEGIES):
        return f'"{found.name}"'
    arguments = {**{name: home for name, home in homes.items() if home}, **others}
    return f"ZeROStrategy({', '.join([str(found.stage), *_as_arguments(arguments)])})"


def _as_arguments(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        text = f'"{value}"' if isinstance(value, str) else repr(value)
        if name == "units" and value != "auto":
            text = f"{{{', '.join(value)}}}" if isinstance(value, list) else value
        yield f"{name}={text}"


def _offloads(options: argparse.Namespace, settings: Settings) -> list[tuple[int, Offload]]:
    """Return the offloads of the options and of the settings, with their stages."""
    offloads = named_offloads(*dict.fromkeys(options.offload))
    if settings.offload is not None:
        own = (settings.stage, settings.offload)
        offloads += [own] if own not in offloads else []
    return offloads


def _texts(subject: ModelPlan, found: list[Estimate]) -> list[str]:
    missing = [] if found[0].has_units else ["gathered and unreduced units"]
    missing += [] if subject.has_activations else ["activations"]
    head = subject.describe() + (f"\nNot counted: {', '.join(missing)}." if missing else "")
    columns = [
        [estimate for estimate in found if estimate.world_size == world_size]
        for world_size in dict.fromkeys(estimate.world_size for estimate in found)
    ]
    whole = (
        f"Host memory before setup: {format_bytes(found[0].whole)} per rank, unless the model is"
        " built on meta; the same after fit, unless restore_weights=False."
    )
    notes = [_ROWS.format(first=found[0].name), textwrap.fill(whole, 80, break_on_hyphens=False)]
    return [head, *map(estimate_table, columns), "\n".join(notes)]


def _ranks_of(trainer: dict[str, Any]) -> int | None:
    devices = trainer.get("devices")
    if not isinstance(devices, int) or devices < 1:
        return None
    return devices * int(trainer.get("num_nodes") or 1)
