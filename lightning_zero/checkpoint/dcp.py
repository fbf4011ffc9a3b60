"""Directories of torch.distributed.checkpoint, written and read by torch's planners.

    name/
        .metadata           a table: the shape, dtype and chunks of each tensor, and where they lie
        __0_0.distcp ...    concatenated torch.save archives, each a chunk of a tensor or an object
        meta.pt             everything but tensors, if a Lightning strategy wrote it
        lightning_zero.json who wrote it, if this package did

The names are those of Lightning's ``ModelParallelStrategy``, so that it and FSDP2 programs find
what they look for::

    state_dict.<name>                          weights and buffers
    optimizer_<n>.state.<name>.<key>           states, by the names of their parameters
    optimizer_<n>.param_groups.<g>.<option>    options, each an object of its own

Weights have a second name, ``model.<name>``, under which ``FSDPStrategy`` and Lightning's
``consolidate_checkpoint`` look for them. Tensors with two names are written once.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_zero.checkpoint.archive import read_archive
from lightning_zero.checkpoint.files import (
    PROVENANCE,
    REST,
    TABLE,
    Kind,
    Reading,
    mapped,
    places_of,
    provenance,
)
from lightning_zero.checkpoint.save import Save
from lightning_zero.checkpoint.values import ShardedValue
from lightning_zero.tensors import is_wrapper, tensors_in

Keys = tuple[str | int, ...]
"""The path of an entry in nested dictionaries and lists."""

WEIGHTS = ("state_dict", "model")
"""Where ``ModelParallelStrategy`` and ``FSDPStrategy`` put weights: the roots of their paths."""

_OPTIMIZER = re.compile(r"optim(?:izer)?(?:_(\d+))?")


def is_directory(path: Path) -> bool:
    """Return whether ``path`` is a directory of torch.distributed.checkpoint."""
    return (path / TABLE).is_file()


# -- saving ----------------------------------------------------------------------------------------


class DirectorySave(Save):
    """A save of a Trainer's checkpoint to a directory, on a disk that all ranks share.

    ``parameters`` are, for each optimizer, its parameters' names in the order of its groups.
    """

    is_folder = True

    def __init__(self, *args: Any, parameters: Sequence[Sequence[str]] = (), **kwargs: Any) -> None:
        self._parameters = parameters
        super().__init__(*args, **kwargs)

    @override
    def _take(self, checkpoint: Mapping[str, Any]) -> None:
        self.values, self.others = {}, {}
        self._paths: dict[str, Keys] = {}
        self._aliases: dict[str, str] = {}
        entries, rest = _entries_of(checkpoint, self._parameters)
        first: dict[int, str] = {}
        for path, given in entries.items():
            value = given.settled() if isinstance(given, ShardedValue) else given
            roots = WEIGHTS if path[0] == WEIGHTS[0] else path[:1]
            for root in roots:
                name = ".".join(map(str, (root, *path[1:])))
                if name in self._paths:
                    raise ValueError(f"two entries of the checkpoint would be named {name!r}")
                # One path for both names, so that programs that read all read a weight once.
                self._paths[name] = (roots[-1], *path[1:])
                if (other := first.setdefault(id(value), name)) != name:
                    self._aliases[name] = other
                elif isinstance(value, ShardedValue):
                    self.values[name] = value
                else:
                    _require_storable(name, value)
                    self.others[name] = value
        if self.control.rank:  # everything unsharded is taken from rank 0
            self.others = {}
        _require_storable("", rest)
        self._rest = io.BytesIO()
        if self.control.rank == 0:
            torch.save(rest, self._rest)

    @override
    def _write(self, layout: None, place: Path, *, all_see: bool) -> None:
        if not all_see:
            raise ValueError(
                f"Saving {self.path!r} failed: checkpoint='dcp' needs a disk that all ranks share,"
                " not a URL. Use checkpoint='file' to save anywhere else"
            )
        control, is_first = self.control, self.control.rank == 0
        writer = filesystem.FileSystemWriter(place)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        table: Any = None
        with self.together():
            planner.set_up_planner({**self.others, **self.values}, writer.storage_meta(), is_first)
            writer.set_up_storage_writer(is_first)
            plan = writer.prepare_local_plan(planner.create_local_plan())
        plans = control.gather_objects(plan)
        with self.together():
            if is_first:
                plans, table = planner.create_global_plan(plans)
                plans = writer.prepare_global_plan(plans)
        plan = control.broadcast_object(plans)[control.rank]
        with self.together():
            results = writer.write_data(planner.finish_plan(plan), planner).wait()
        every = control.gather_objects(results)
        with self.together():
            if is_first:
                self._finish(place, writer, table, [one for of in every for one in of])

    def _finish(self, place: Path, writer: Any, table: Any, results: list[WriteResult]) -> None:
        """Write the table, with a second name for what has two, and what lies beside it."""
        written: dict[str, list[WriteResult]] = {}
        for result in results:
            written.setdefault(result.index.fqn, []).append(result)
        for name, other in self._aliases.items():
            table.state_dict_metadata[name] = table.state_dict_metadata[other]
            for result in written[other]:
                index = dataclasses.replace(result.index, fqn=name)
                results.append(dataclasses.replace(result, index=index))
        table.planner_data = self._paths
        origin = self.provenance.encoded()
        for name, content in ((REST, self._rest.getbuffer()), (PROVENANCE, origin)):
            with (place / name).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
        writer.finish(table, [results])


def _require_storable(name: str, value: Any) -> None:
    """Raise a ``ValueError`` if an object holds a sharded tensor, or a tensor is made of others."""
    if is_wrapper(value):
        raise ValueError(
            f"{name!r} is of the class {type(value).__name__}, whose tensors wrap others."
            " checkpoint='dcp' cannot store it. Use checkpoint='file'"
        )
    for tensor in () if isinstance(value, Tensor | str | int | float) else tensors_in(value):
        if isinstance(tensor, ShardedValue):
            raise ValueError(
                f"the sharded tensor {tensor.key!r} is inside an object, where checkpoint='dcp'"
                " cannot store it. Use checkpoint='file'"
            )


def _entries_of(
    checkpoint: Mapping[str, Any], parameters: Sequence[Sequence[str]]
) -> tuple[dict[Keys, Any], dict[str, Any]]:
    """Split a Trainer's checkpoint into the entries of a directory, by path, and the rest."""
    entries: dict[Keys, Any] = {}
    rest = {}
    for key, value in checkpoint.items():
        if key == WEIGHTS[0]:
            entries.update(_leaves(value, (WEIGHTS[0],)))
        elif key == "optimizer_states":
            for number, state in enumerate(value):
                names = parameters[number] if number < len(parameters) else ()
                entries.update(_optimizer_entries(state, f"optimizer_{number}", names))
        elif any(isinstance(t, ShardedValue) for t in tensors_in(value, within_objects=False)):
            entries.update(_leaves(value, (key,)))
        else:
            rest[key] = value
    return entries, rest


def _leaves(value: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield the leaves of nested dictionaries; one that loading could not rebuild is a leaf."""
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _optimizer_entries(
    state: Mapping[str, Any], root: str, names: Sequence[str]
) -> Iterator[tuple[Keys, Any]]:
    if "param_groups" not in state:
        raise ValueError(
            f"the state of {root} has its own format ({', '.join(map(repr, state))}), which"
            " checkpoint='dcp' cannot store. Use checkpoint='file'"
        )
    ids = [key for group in state["param_groups"] for key in group["params"]]
    known = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    given = names if len(names) == len(ids) else known if len(known) == len(ids) else ids
    name_of = {key: str(name) for key, name in zip(ids, given, strict=True)}
    for key, entries in state["state"].items():
        yield from _leaves(entries, (root, "state", name_of.get(key, str(key))))
    for number, group in enumerate(state["param_groups"]):
        for option, value in group.items():
            written = [name_of[key] for key in value] if option == "params" else value
            yield (root, "param_groups", number, option), written
    for key, value in state.items():
        if key not in ("state", "param_groups"):
            yield from _leaves(value, (root, key))


# -- loading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Directory:
    """A directory whose table is read, whichever program wrote it.

    Reading the table makes only the few classes that such a table consists of, so a directory from
    a stranger cannot run code.
    """

    path: Path
    table: metadata.Metadata

    @classmethod
    def open(cls, path: Path) -> Directory:
        """Read the table.

        Raises:
            FileNotFoundError: A part is missing of what this package wrote.
            ValueError: The table is not consistent, or of a later version.
        """
        if provenance(path) is not None and not (path / REST).is_file():
            raise FileNotFoundError(f"the file {REST!r} of {str(path)!r} is missing")
        table = _Table((path / TABLE).read_bytes()).load()
        if not isinstance(table, metadata.Metadata) or not isinstance(table.storage_data, Mapping):
            raise ValueError("its table has an unknown form, perhaps of another kind of storage")
        for info in table.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"its table names {info.relative_path!r}, outside the folder")
        for name, entry in table.state_dict_metadata.items():
            if isinstance(entry, metadata.TensorStorageMetadata):
                held = sum(chunk.sizes.numel() for chunk in entry.chunks)
                if held != entry.size.numel():
                    raise ValueError(
                        f"{name!r} of shape {tuple(entry.size)} has {held} stored elements;"
                        f" expected {entry.size.numel()}"
                    )
        return cls(path, table)

    def rest(self, *, weights_only: bool = True) -> Any:
        """Return everything but tensors; ``{}`` if no Lightning strategy wrote it."""
        file = self.path / REST
        found = file.is_file()
        return read_archive(file, str(file), weights_only=weights_only) if found else {}

    @property
    def names(self) -> dict[Keys, str]:
        """The name of each entry in the table, by its path."""
        paths = self.table.planner_data or {}
        return {tuple(paths.get(name, (name,))): name for name in self.table.state_dict_metadata}

    @property
    def kinds(self) -> dict[str, Kind]:
        """Dtype and shape of each tensor, by its name in the table."""
        return {
            name: (entry.properties.dtype, tuple(entry.size))
            for name, entry in self.table.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }

    @property
    def weights_root(self) -> Keys:
        """The path under which its weights are; raise a ``ValueError`` if there are none."""
        names = self.names
        roots = dict.fromkeys(path[0] for path in names)
        root = next((name for name in WEIGHTS if name in roots), None)
        if root is not None:
            return (root,)
        if any(len(path) == 1 and name in self.kinds for path, name in names.items()):
            return ()  # a state dict and nothing else
        raise ValueError(
            f"{str(self.path)!r} holds no weights: expected tensors under 'state_dict' or 'model',"
            f" but it has {', '.join(sorted(map(repr, roots)))}"
        )

    def read(self, reading: Reading, wanted: Callable[[Keys], bool]) -> dict[Keys, Any]:
        """Return the wanted entries by path; the ranks of a host share the reading and the memory.

        Tensors are put together in a temporary file, which each rank maps to memory. A collective.
        """
        names = {path: name for path, name in self.names.items() if wanted(path)}
        kinds = self.kinds
        # Names of the same bytes, such as tied weights, share a tensor.
        keys = {name: self.key(name) for name in names.values() if name in kinds}
        tensors = {key: name for name, key in keys.items()}
        places, nbytes = places_of(kinds[name] for name in tensors.values())
        with reading.host_file(nbytes) as (file, number, count):
            with reading.together():
                shared = mapped(file, places, is_shared=True)
                held = sorted(
                    zip(tensors.values(), shared, strict=True), key=lambda x: -x[1].nbytes
                )
                mine: dict[str, Any] = dict(held[number::count])
                mine.update((name, None) for name in names.values() if name not in kinds)
                found = self._filled(mine, reading.weights_only)
            with reading.together():
                whole = mapped(file, places)
        of_key = dict(zip(tensors, whole, strict=True))
        return {
            path: of_key[keys[name]] if name in keys else found[name]
            for path, name in names.items()
        }

    def key(self, name: str) -> Any:
        """Return what names of the same bytes share."""
        places: Any = self.table.storage_data
        entry = self.table.state_dict_metadata[name]
        offset = entry.chunks[0].offsets if entry.chunks else None  # type: ignore[union-attr]
        place = places.get(metadata.MetadataIndex(name, offset))
        return name if place is None else (place.relative_path, place.offset, entry.size)  # type: ignore[union-attr]

    def archives(self) -> Iterator[tuple[str, io.BytesIO]]:
        """Yield a name and the archive of torch.save of each chunk and object."""
        places = {
            (o.relative_path, o.offset, o.length): i for i, o in self.table.storage_data.items()
        }
        for (name, offset, nbytes), index in places.items():
            with (self.path / name).open("rb") as file:
                file.seek(offset)
                yield f"{index.fqn}: ", io.BytesIO(file.read(nbytes))

    def _filled(self, entries: dict[str, Any], weights_only: bool) -> dict[str, Any]:
        """Read entries: tensors in place, and objects, which are given as ``None``."""
        reader = filesystem.FileSystemReader(self.path)
        reader.set_up_storage_reader(self.table, is_coordinator=True)
        planner = _LoadPlanner(weights_only)
        planner.set_up_planner(entries, self.table, is_coordinator=True)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return planner.state_dict


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's planner, but it unpickles only plain values if ``weights_only``."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        found = torch.load(value, map_location="cpu", weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = found


def read_directory(place: Path, reading: Reading, *, only_weights: bool) -> dict[str, Any]:
    """Return a Trainer's checkpoint as a plain file would hold it; a collective.

    But optimizer states have the names of parameters as ids, if the directory has them.
    """
    with reading.together():
        directory = Directory.open(place)
        rest = directory.rest(weights_only=reading.weights_only)
    root = directory.weights_root

    def is_wanted(path: Keys) -> bool:
        return path[: len(root)] == root if only_weights or path[0] in WEIGHTS else True

    entries = directory.read(reading, is_wanted)
    weights = _nested(entries, root)
    if only_weights:
        return {"state_dict": weights}
    checkpoint = {**(rest if isinstance(rest, dict) else {}), "state_dict": weights}
    others = {
        path: value
        for path, value in entries.items()
        if path[0] not in WEIGHTS and (root or len(path) > 1)
    }
    states = {}
    for name, held in _nested(others, ()).items():
        match = _OPTIMIZER.fullmatch(name) if isinstance(held, dict) else None
        if match is None:
            checkpoint[name] = held
        else:
            states[int(match[1] or 0)] = _optimizer_state(directory, name, held)
    # Lightning saves both or none; a module without optimizers has an empty list.
    if states or "lr_schedulers" in checkpoint:
        checkpoint["optimizer_states"] = [states[number] for number in sorted(states)]
    return checkpoint


def _optimizer_state(directory: Directory, root: str, state: Any) -> dict[str, Any]:
    """Return an optimizer's state, by names or, if those are numbers, by integer ids."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError(
            f"{str(directory.path)!r} has no param groups for {root!r}, so it is unknown which"
            " parameters its states belong to. Load only the weights"
        )
    # Paths have numbers as strings, so plain programs' integer ids come as strings.
    ids = {str(name): name for group in groups for name in group["params"]}
    by_name = state.get("state", {})
    return {**state, "state": {ids.get(name, name): held for name, held in by_name.items()}}


def _nested(entries: Mapping[Keys, Any], root: Keys) -> dict[str, Any]:
    """Return what is under ``root``, as nested dictionaries and lists."""
    found: Any = {p[len(root) :]: v for p, v in entries.items() if p[: len(root)] == root != p}
    return unflatten_state_dict(found, {path: path for path in found})


class _Table(pickle.Unpickler):
    """An unpickler that makes only the classes that a table consists of."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        found = _OF_A_TABLE.get((module, name))
        if module == metadata.__name__:
            found = vars(metadata).get(name)
            found = found if isinstance(found, type) and found.__module__ == module else None
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        elif module.partition(".")[0] == "pathlib":  # the path it was saved to, on any system
            found = pathlib.PurePosixPath
        if found is None:
            raise ValueError(f"its table holds an object of {module}.{name}")
        return found


_OF_A_TABLE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # Private, but every table has it, so no reader can do without it.
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
}
