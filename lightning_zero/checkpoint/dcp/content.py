"""A Trainer's checkpoint as a directory's entries and a rest, and back.

The names are those of Lightning's ``ModelParallelStrategy``, so that it and FSDP2 programs find
what they look for::

    state_dict.<name>                          weights and buffers
    optimizer_<n>.state.<name>.<key>           states, by the names of their parameters
    optimizer_<n>.param_groups.<g>.<option>    options, each an object of its own
    meta.pt                                    the rest: loops, callbacks, schedulers, ...

Weights have a second name, ``model.<name>``, under which ``FSDPStrategy`` and Lightning's
``consolidate_checkpoint`` look for them. Both names refer to the same bytes.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint.dcp.directory import Directory, Keys, StoredObject
from lightning_zero.checkpoint.values.sharded_value import ShardedValue
from lightning_zero.tensors import tensors_in

WEIGHTS = ("state_dict", "model")
"""Where ``ModelParallelStrategy`` and ``FSDPStrategy`` put weights: the roots of their paths."""

_OPTIMIZER = re.compile(r"optim(?:izer)?(?:_(\d+))?")


# -- saving ----------------------------------------------------------------------------------------


def entries_of(
    checkpoint: Mapping[str, Any], parameters: Sequence[Sequence[str]]
) -> tuple[dict[Keys, Any], dict[str, Any]]:
    """Split a Trainer's checkpoint into the entries of a directory, by path, and the rest.

    ``parameters`` are, for each optimizer, its parameters' names in the order of its groups.
    """
    entries: dict[Keys, Any] = {}
    rest = {}
    for key, value in checkpoint.items():
        if key == WEIGHTS[0]:
            entries.update(_leaves(value, (WEIGHTS[0],)))
        elif key == "optimizer_states":
            for number, state in enumerate(value):
                names = parameters[number] if number < len(parameters) else ()
                entries.update(_optimizer_entries(state, f"optimizer_{number}", names))
        else:
            rest[key] = _without_sharded_values(value, (key,), entries)
            if (key,) in entries:
                del rest[key]
    return entries, rest


def _leaves(value: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield the leaves of nested dictionaries; one that loading could not rebuild is a leaf."""
    if _is_table(value) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


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
    given = known if len(known) == len(ids) else names if len(names) == len(ids) else ids
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


def _without_sharded_values(value: Any, path: Keys, found: dict[Keys, Any]) -> Any:
    """Copy nested dictionaries without their sharded values, which go to ``found``."""
    if isinstance(value, ShardedValue):
        found[path] = value
        return None
    if not any(
        isinstance(tensor, ShardedValue) for tensor in tensors_in(value, within_objects=False)
    ):
        return value
    if not _is_table(value):
        raise ValueError(
            f"the checkpoint has sharded tensors under {'/'.join(map(str, path))!r}, in a"
            f" {type(value).__name__}, but checkpoint='dcp' stores them only in dictionaries with"
            " string keys. Use checkpoint='file'"
        )
    copied = copy.copy(value)
    for key, item in value.items():
        copied[key] = _without_sharded_values(item, (*path, key), found)
        if (*path, key) in found:
            del copied[key]
    return copied


# -- loading ---------------------------------------------------------------------------------------


def weights_of(directory: Directory, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the weights in a directory by name, unread; raise if there are none."""
    roots = {path[0]: path for path in directory.entries}
    root = next((name for name in WEIGHTS if name in roots), None)
    if root is not None:
        return _nested(directory, (root,), weights_only)
    if any(
        isinstance(value, Tensor) and len(path) == 1 for path, value in directory.entries.items()
    ):
        return _nested(directory, (), weights_only)  # a state dict and nothing else
    raise ValueError(
        f"{str(directory.path)!r} holds no weights: expected tensors under 'state_dict' or 'model',"
        f" but it has {', '.join(sorted(map(repr, roots)))}"
    )


def checkpoint_of(directory: Directory, rest: Any, *, weights_only: bool = True) -> dict[str, Any]:
    """Return a Trainer's checkpoint as a plain file would hold it, with its tensors unread."""
    checkpoint = dict(rest) if isinstance(rest, dict) else {}
    checkpoint["state_dict"] = weights_of(directory, weights_only=weights_only)
    roots = dict.fromkeys(str(path[0]) for path in directory.entries if len(path) > 1)
    numbered = {root: int(match[1] or 0) for root in roots if (match := _OPTIMIZER.fullmatch(root))}
    states = [
        _optimizer_state(directory, root, weights_only)
        for root in sorted(numbered, key=numbered.__getitem__)
    ]
    # Lightning saves both or none; a module without optimizers has an empty list.
    if states or "lr_schedulers" in checkpoint:
        checkpoint["optimizer_states"] = states
    for path, value in directory.entries.items():
        if len(path) > 1 and path[0] not in WEIGHTS and path[0] not in numbered:
            _put(checkpoint, path, _made(value, weights_only))
    return checkpoint


def _optimizer_state(directory: Directory, root: str, weights_only: bool) -> dict[str, Any]:
    """Return an optimizer's state, by integer ids in the order of its groups."""
    state = _nested(directory, (root,), weights_only)
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError(
            f"{str(directory.path)!r} has no param groups for {root!r}, so it is unknown which"
            " parameters its states belong to. Load only the weights"
        )
    # Paths have numbers as strings, so plain programs' integer ids come as strings.
    ids: dict[str, int] = {}
    for group in groups:
        group["params"] = [ids.setdefault(str(name), len(ids)) for name in group["params"]]
    by_name = state.get("state", {})
    return {
        **state,
        "state": {ids.get(name, name): entries for name, entries in by_name.items()},
        "param_groups": groups,
    }


def _nested(directory: Directory, root: Keys, weights_only: bool) -> dict[str, Any]:
    """Return what is under ``root``, as nested dictionaries and lists."""
    nested: dict[str, Any] = {}
    for path, value in directory.entries.items():
        if path[: len(root)] == root and len(path) > len(root):
            _put(nested, path[len(root) :], _made(value, weights_only))
    return nested


def _put(container: Any, path: Keys, value: Any) -> None:
    for step, following in itertools.pairwise(path):
        container = _child(container, step, [] if isinstance(following, int) else {})
    if isinstance(container, list):
        _child(container, path[-1], None)
    container[path[-1]] = value


def _child(container: Any, step: Any, empty: Any) -> Any:
    if isinstance(container, list):
        container.extend(None for _ in range(step + 1 - len(container)))
        if container[step] is None:
            container[step] = empty
    elif step not in container:
        container[step] = empty
    return container[step]


def _made(value: Any, weights_only: bool) -> Any:
    return value.read(weights_only=weights_only) if isinstance(value, StoredObject) else value
