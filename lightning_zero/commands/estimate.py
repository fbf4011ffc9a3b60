"""``lightning-zero estimate``: the memory of a model before it runs."""

from __future__ import annotations

import argparse
import contextlib
import inspect
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
    compare,
    estimate_table,
    format_bytes,
    format_ranks,
    named_offloads,
    parse_bytes,
    write_report,
)
from lightning_zero.plan import ARGUMENTS, STRATEGIES, Settings, strategy_arguments
from lightning_zero.trainer import ZeROStrategy

_ROWS = """\
Each kind: the most that a rank holds of it within a step; 1 GB is 10^9 bytes.
peak: the largest total at one instant, so it may be less than the sum of all kinds.
saved: how much lower the peak is than that of {first}."""


_OF_LIGHTNING = inspect.signature(ZeROStrategy).parameters.keys() - ARGUMENTS - {"config"}
"""Arguments of the strategy that are Lightning's, and change no memory."""


_HOMES = {"stage", "offload_optimizer", "offload_weights"}
"""Arguments of the strategy that say what it keeps where."""


_PER_HOST = 8
"""Ranks that are assumed to share a host, if there are as many."""


class _Asked(NamedTuple):
    """A model with the settings of its run, and the other content of a YAML.

    ``given`` are the arguments of the strategy that the settings are made from; ``device`` and
    ``host`` are bytes of memory, if they are limited.
    """

    subject: ModelPlan
    given: dict[str, Any]
    num_microbatches: int
    trainer: dict[str, Any]
    device: int | None
    host: int | None

    def nodes(self, world_size: int) -> int:
        """Return the number of hosts that the ranks are divided over."""
        num_nodes = int(self.trainer.get("num_nodes") or 1)
        if num_nodes == 1 and world_size > _PER_HOST and self.trainer.get("devices") is None:
            num_nodes = world_size // _PER_HOST
        return num_nodes if world_size % num_nodes == 0 else 1

    def on_host(self, one: Estimate) -> int:
        """Return the bytes that the ranks of a host hold in its memory."""
        return one.host_peak * (one.world_size // self.nodes(one.world_size))

    def fits(self, one: Estimate, share: float = 1.0) -> bool:
        """Return whether an estimate is within the limits, on the device within a ``share``."""
        is_within = self.device is None or one.peak.total <= share * self.device
        return is_within and (self.host is None or self.on_host(one) <= self.host)

    def chose(self, one: Estimate) -> bool:
        """Return whether an estimate is of the stage and offload that the user has set."""
        settings, is_set = self.subject.settings, _HOMES & self.given.keys()
        return bool(is_set) and (one.stage, one.offload) == (settings.stage, settings.offload)

    @property
    def room(self) -> float:
        """The share of a device that an estimate should take: what is not counted needs some."""
        return 1.0 if self.subject.has_units and self.subject.has_activations else 0.8


def _asked(options: argparse.Namespace) -> _Asked:
    arguments, source = parse_arguments(options.args), options.source
    config: dict[str, Any] = {}
    if Path(source).suffix in (".yaml", ".yml"):
        config = read_config(Path(source))
        source, named = model_of_config(config, options.model)
        arguments = {**named, **arguments}
    trainer = config.get("trainer") or {}
    given = _given(trainer.get("strategy"), parse_arguments(options.set))
    device, host = (
        parse_bytes(size) if size else None for size in (options.device_memory, options.host_memory)
    )
    present = torch.accelerator.current_accelerator(check_available=True)
    implied = (present.type if present else "cuda") if device is not None else "cpu"
    subject = ModelPlan(
        find_model(source, arguments),
        _settings(given),
        precision=options.precision or str(trainer.get("precision") or "32-true"),
        optimizer=options.optimizer,
        batch=parse_batch(options.batch),
        device=torch.device(options.device or implied),
    )
    microbatches = options.accumulate_grad_batches or trainer.get("accumulate_grad_batches") or 1
    return _Asked(subject, given, microbatches, trainer, device, host)


def _given(strategy: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a configuration's ``strategy``, with ``more`` of them."""
    given: dict[str, Any] = {}
    if isinstance(strategy, str) and strategy.startswith("zero"):
        given = strategy_arguments(strategy)
    elif isinstance(strategy, dict) and not _foreign(strategy):
        given = dict(strategy.get("init_args") or {})
    given = {name: value for name, value in {**given, **more}.items() if name not in _OF_LIGHTNING}
    config = Config.read(given.pop("config", None))
    merged = config.merged(given)
    if not config.is_given and "stage" not in given:
        del merged["stage"]  # the default, which nobody has set
    return merged


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


def run_estimate(options: argparse.Namespace) -> int:
    """Print the estimate that ``options`` ask for; return the exit code."""
    asked = subject, _, num_microbatches, trainer, device, _ = _asked(options)
    ranks = options.ranks or [_ranks_of(trainer) or 8]
    stages = (0, 1, 2, 3) if options.stages is None else options.stages
    offloads = _offloads(options, subject.settings)
    found = compare(subject, stages, ranks, offloads=offloads, num_microbatches=num_microbatches)
    print("\n\n".join(["\n".join(_advice(asked, found)), *_texts(subject, found)]))
    if name := _foreign(trainer.get("strategy")):
        print(f"\nIgnored the arguments of {name}.")
    if options.report is not None:
        written = map(str, write_report(options.report, found, device))
        print(f"\nWrote {' and '.join(written)}.")
    return 0


def _advice(asked: _Asked, found: list[Estimate]) -> list[str]:
    """Return lines on what to train with: as it is set, or what fits first, or else what would.

    Offloads of the table that are not set are among what would.
    """
    chosen = [one for one in found if asked.chose(one)]
    found = [one for one in found if one.offload is None or one in chosen] or found
    least = min(found, key=lambda one: one.peak.total)
    if asked.device is None and asked.host is None:
        one, needs = (chosen[0], "needs") if chosen else (least, "needs least:")
        return [f"{_named(one)} {needs} {_need(asked, one)}.", _to_write(asked, one)]
    fit = [one for one in (*chosen, *found) if asked.fits(one)]
    roomy = [one for one in fit if asked.fits(one, asked.room)]
    if fit:
        one = roomy[0] if roomy else min(fit, key=lambda one: one.peak.total)
        fits = " fits" if asked.subject.has_units and asked.subject.has_activations else ""
        return [f"{_named(one)}{fits}: {_need(asked, one)}.", _to_write(asked, one)]
    wide = f"{_named(least)} needs {_need(asked, least)}."
    lines: list[str] = []
    others = list(_others(asked, least.world_size))
    for one, code in (pair for pair in others if pair[1]):
        lines += [f"{'or:' if lines else 'What would fit:'} {code}", f"    {_need(asked, one)}"]
    for one, _ in (pair for pair in others if not pair[1]):
        lines += [f"not: {_named(one)}", f"    {_need(asked, one)}"]
    if not any(code for _, code in others):
        lines.insert(0, "Nothing fits. Use more ranks, larger devices or a smaller micro-batch.")
    return [*lines, f"Otherwise nothing fits: {wide}"]


def _others(asked: _Asked, ranks: int) -> Iterator[tuple[Estimate, str]]:
    """Yield what else to try on so many ranks, and how to train with it if it fits."""
    subject, given = asked.subject, asked.given
    tries: list[tuple[_Asked, int, str | None]] = []
    if subject.has_activations and not subject.microbatch.checkpointing:
        leaner = {**given, "activation_checkpointing": True}
        tries = [(asked._replace(subject=subject.checkpointed(), given=leaner), ranks, None)]
    tries += [(asked, ranks, "cpu"), (asked, ranks, "nvme")]
    tries += [(asked, factor * ranks, None) for factor in (2, 4, 8, 16, 32, 64)]
    for own, world_size, offload in tries:
        with contextlib.suppress(ValueError):  # not with these settings or this optimizer
            microbatches = own.num_microbatches
            one = own.subject.estimate(
                3, world_size, offload=offload, num_microbatches=microbatches
            )
            is_fit = own.fits(one, own.room)
            if is_fit or world_size == ranks:
                yield one, _to_write(own, one) if is_fit else ""
            if is_fit and world_size > ranks:
                return


def _named(one: Estimate) -> str:
    return f"{one.name} on {format_ranks(one.world_size)}"


def _need(asked: _Asked, one: Estimate) -> str:
    """Return the memory that an estimate needs, with the limits, and what is not counted."""
    missing = [] if asked.subject.has_units else ["gathered weights"]
    missing += [] if asked.subject.has_activations else ["activations"]
    what, ranks = " and ".join(missing), one.world_size // asked.nodes(one.world_size)
    least = "at least " if what else ""
    least += _among(one.peak.total, " per rank", asked.device, "a device has")
    parts = [f"{least}, before {what}" if what else least]
    if not one.peak.total:
        parts = [f"only {what}"]
    if one.offload is not None:
        of_ranks = f" for {ranks} ranks" if ranks > 1 else ""
        host = _among(asked.on_host(one), of_ranks, asked.host, "it has")
        parts = [f"device: {parts[0]}", f"host: {host}"]
    if size := sum(one.disk.values()) * ranks:
        parts.append(f"files: {format_bytes(size)}")
    return "; ".join(parts)


def _among(count: int, whose: str, limit: int | None, has: str) -> str:
    """Return a number of bytes, with the limit if there is one."""
    if limit is None or count > limit:
        more = "" if limit is None else f" ({has} {format_bytes(limit)})"
        return f"{format_bytes(count)}{whose}{more}"
    return f"{format_bytes(count)} of {format_bytes(limit)}{whose}"


def _to_write(asked: _Asked, found: Estimate) -> str:
    """Return how to train as it was estimated, as code."""
    num_nodes = asked.nodes(found.world_size)
    trainer: dict[str, Any] = {"devices": found.world_size // num_nodes}
    trainer |= {"num_nodes": num_nodes} if num_nodes > 1 else {}
    trainer |= {"precision": found.precision} if found.precision != "32-true" else {}
    if asked.num_microbatches > 1:
        trainer["accumulate_grad_batches"] = asked.num_microbatches
    after = ", after import lightning_zero" if found.stage else ""
    words = [f"strategy={_strategy(asked.given, found)}", *_as_arguments(trainer)]
    return f"Trainer({', '.join(words)}){after}"


def _strategy(given: dict[str, Any], found: Estimate) -> str:
    """Return the strategy of an estimate as code, with the other arguments that were ``given``."""
    homes = {} if found.offload is None else {
        "offload_optimizer": found.offload.optimizer, "offload_weights": found.offload.weights
    }  # fmt: skip
    others = {name: value for name, value in given.items() if name not in _HOMES}
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
    missing = [] if subject.has_units else ["gathered weights", "unreduced gradients"]
    missing += [] if subject.has_activations else ["activations"]
    head = subject.describe() + (f"\nNot counted: {', '.join(missing)}." if missing else "")
    if missing:
        what = "--batch" if subject.has_units else "a model (file.py:Class) and its --batch"
        head += f"\nTo count them, pass {what}."
    if subject.has_activations and subject.microbatch.device.type != subject.device.type:
        head += "\nActivations are those of CPU kernels, as torch finds no accelerator here."
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
