"""The lines that a strategy prints when training begins, and when memory runs out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from lightning_zero.engine import Engine, open_engines
from lightning_zero.memory.report import format_bytes
from lightning_zero.memory.states import OptimizerStates
from lightning_zero.memory.walk import KINDS, UnitTerms, Walk, in_order
from lightning_zero.plan import whole_tensors
from lightning_zero.tensors import bytes_held, without_draws


def summary(engine: Engine, checkpoint: str, ranks_on_host: int) -> str:
    """Return at most eight lines: stage and ranks, units, memory, optimizers and checkpoints.

    Nothing is run for it. Ranks do not communicate, so they may differ in a few bytes of padding.

    Args:
        engine: The engine. It has adopted the optimizers, if there are any.
        checkpoint: What a checkpoint is.
        ranks_on_host: The ranks that share this host.
    """
    sharded = engine.sharded
    sizes = {unit.label: unit.numel for unit in sharded.units}
    largest = max(sizes, key=lambda label: sizes[label])
    units = f"{len(sizes)} units" if len(sizes) > 1 else "1 unit"
    units += f", {sum(sizes.values()):,} parameters"
    if len(sizes) > 1:
        units += f"; the largest, {largest}, has {sizes[largest]:,}"
    counted = [f"{n} x {step}" if n > 1 else step for step, n in Counter(engine.steps).items()]
    first, *others = counted or [""]
    steps = [step for step in (first, "; ".join(others)) if step]
    rows = [
        ("model", units),
        *_memory(engine, ranks_on_host),
        *(("optimizer", step) for step in steps),
        ("checkpoint", checkpoint),
    ]
    if sharded.replicated:
        kept = sum(map(bytes_held, sharded.replicated.values()))
        rows.append(("quantized", f"{format_bytes(kept)} of frozen weights, whole on every rank"))
    if sharded.moves_nothing:
        rows.append(("offload", "none to 'cpu': the device is the host, so nothing moves"))
    return "\n".join([sharded.headline, *(f"  {name:<11} {text}" for name, text in rows)])


def _memory(engine: Engine, ranks_on_host: int) -> list[tuple[str, str]]:
    """Return rows on the bytes of a rank, on the device, on its host and in files."""
    device, missing = engine.sharded.settings.device, "activations"
    try:
        units = terms_of(engine)
    except Exception:  # toys run the user's code, whose errors must not end the run
        units, missing = terms_of(engine, counts_states=False), "activations and states"
    rests = resting(engine, units)
    away = {
        word: sum(count for row, count in rests.items() if row.startswith(f"{word} "))
        for word in ("host", "disk")
    }
    at_rest = rests.total() - sum(away.values())
    what = "between steps" if engine.sharded.optimizers else "of weights"
    still = {kind: rests[kind] for kind in KINDS}
    walk = Walk(in_order(units), units, still, engine.sharded.settings)
    peak = format_bytes(max(part.total for part in walk.parts))
    found = f"{format_bytes(at_rest)} {what}, peak {peak} + {missing}"
    held = engine.sharded.memory()
    on_host = sum(held.values()) if device.type == "cpu" else 0
    on_host += sum(count for row, count in held.items() if row.startswith("host "))
    of_host = ""
    if (free := free_of_host()) is not None:  # of which each rank takes a share
        of_host = f" ({format_bytes(free / ranks_on_host + on_host)} available)"
    rows = [("per rank", found + (of_host if device.type == "cpu" else of_device(device)))]
    if away["host"]:
        rows.append(("on its host", f"{format_bytes(away['host'])}{of_host}"))
    if away["disk"]:
        rows.append(("in files", format_bytes(away["disk"])))
    return rows


def resting(engine: Engine, units: Iterable[UnitTerms]) -> Counter[str]:
    """Return this rank's bytes from the first step on, between steps, by kind and medium.

    Without optimizers these are the weights. Kinds are those of ``ShardedModel.memory``.
    """
    buffers = sum(map(bytes_held, whole_tensors(engine.sharded.module)))
    return sum((unit.rests for unit in units), Counter({"buffers": buffers}))


def terms_of(engine: Engine, *, counts_states: bool = True) -> list[UnitTerms]:
    """Return the terms of an engine's units; optimizers step toys for the bytes of states."""
    sharded, axis = engine.sharded, engine.comm.mesh.shard
    states = OptimizerStates(sharded.optimizers if counts_states else [])
    trains = bool(sharded.optimizers)
    with without_draws():
        state_of, found = states.of_rank(axis.rank, axis.size), []
        for unit in sharded.units:
            flats = [
                (flat.plan, flat.layout, [piece.parameter for piece in flat.pieces],
                 flat.trainable and trains)
                for flat in unit.flat_parameters
            ]  # fmt: skip
            found.append(UnitTerms.of(unit.name, flats, axis.rank, state_of))
    return found


@contextlib.contextmanager
def explained_memory() -> Iterator[None]:
    """Add to an out-of-memory error of the block what this rank holds, and what to try next."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        explain(error)
        raise


def explain(error: BaseException) -> None:
    """Add to torch's out-of-memory error what this rank holds, and what to try next."""
    is_new = isinstance(error, torch.OutOfMemoryError) and not getattr(error, "__notes__", ())
    engines = open_engines()
    if is_new and engines and hasattr(error, "add_note"):  # from Python 3.11 on
        with contextlib.suppress(Exception):  # an explanation must not hide the error
            error.add_note(out_of_memory(engines))


def out_of_memory(engines: Sequence[Engine]) -> str:
    """Return a sentence on the bytes that this rank holds, and one on what to try next.

    Modules of one process have the same settings.
    """
    settings, num_shards = engines[0].sharded.settings, engines[0].comm.mesh.shard.size
    num_units = sum(len(engine.sharded.units) for engine in engines)
    held = sum((Counter(engine.sharded.memory()) for engine in engines), Counter[str]())
    counted = sum(n for kind, n in held.items() if not kind.startswith(("host ", "disk ")))
    activations = max(0, allocated_on(settings.device) - counted)
    weights, gradients = held["weights"] + held["master"], held["gradients"] + held["unreduced"]
    sizes = {
        "weights": weights,
        "gradients": gradients,
        "optimizer states": held["states"],
        "gathered units": held["gathered"],
        "activations and temporary tensors": activations,
    }
    parts = ", ".join(f"{format_bytes(size)} of {name}" for name, size in sizes.items())
    offloaded = gradients + held["states"]
    tries = [("half the micro-batch with twice the accumulate_grad_batches", activations // 2)]
    if settings.device.type != "cpu" and settings.offload is None:
        offloaded += weights if settings.stage == 3 else held["master"]
        tries.insert(0, (f'strategy="zero{max(2, settings.stage)}_offload"', offloaded))
    if settings.stage < 3 and num_shards > 1:
        saved = held["weights"] + (held["unreduced"] if settings.stage == 1 else 0)
        tries.insert(0, ('strategy="zero3"', saved * (num_shards - 1) // num_shards))
    if not settings.activation_checkpointing:
        saved = activations * (num_units - 1) // num_units
        tries.insert(0, ("activation_checkpointing=True", saved))
    most = max(saved for _, saved in tries)
    name, saved = next(one for one in tries if one[1] >= most // 4)
    more = f" Try {name}, which would save up to {format_bytes(saved)}." if saved else ""
    return f"lightning_zero: this rank holds {parts}.{more}"


def allocated_on(device: torch.device) -> int:
    """Return the bytes that torch has allocated on an accelerator, 0 if unknown."""
    count = getattr(getattr(torch, device.type, None), "memory_allocated", None)
    return 0 if count is None else int(count(device))


def of_device(device: torch.device) -> str:
    """Return the bytes that this process can use on an accelerator, in words, if known."""
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "mem_get_info"):
        return ""
    free, _ = module.mem_get_info(device)
    return f" ({format_bytes(free + module.memory_reserved(device))} available)"


def free_of_host(root: Path = Path("/")) -> int | None:
    """Return the bytes that processes of this host, or container, may still take, if known."""
    try:
        fields = (root / "proc/meminfo").read_text().split()
        free = 1024 * int(fields[fields.index("MemAvailable:") + 1])
    except (OSError, ValueError):
        return None
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text())  # "max" if there is none
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text().split()
        # Pages of files that the system drops when memory is needed.
        used -= int(stat[stat.index("inactive_file") + 1])
    except (OSError, ValueError):
        return free
    return max(0, min(free, limit - used))
