"""Checkpoints of Megatron-core in its format `torch_dist`, and the run directories above them.

A checkpoint is a DCP directory with `metadata.json` and `common.pt`: the values that all ranks
share. Its flat names tell what is what: `optimizer.…` is the optimizer, a name with `/shard_` is an
object that each rank has for itself, and all others are the model, under Megatron's names and with
its leading dim over layers where layers are stored as one tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.errors import CorruptionError
from holdfast.foreign import dcp
from holdfast.foreign.catalog import Catalog, CatalogTensor, OpenFiles, describing
from holdfast.foreign.draft import Draft, twice
from holdfast.foreign.location import Location, is_step
from holdfast.foreign.shared_opening import behind, found_once
from holdfast.foreign.torch_dist_optimizer import OBJECTS_PART, add_optimizer, is_of_optimizer
from holdfast.foreign.torch_dist_tensors import join_copies, unflattened
from holdfast.foreign.torch_files import open_file, tensors_of
from holdfast.format.names import LATEST, step_dir
from holdfast.format.values import is_plain_dict, is_tensor, walk

FORMAT = "Megatron torch_dist"
CONFIG = "metadata.json"
COMMON = "common.pt"

_BACKEND = "torch_dist"
_MODEL = "model"
_OPTIMIZER = "optimizer"
_SHARD = re.compile(r"(.+)/(shard_[0-9.]+_[0-9.]+)", re.ASCII)
_EXTRA_STATE = "_extra_state"
_ITERATION = re.compile(r"[0-9]{1,18}", re.ASCII)
_MAX_CONFIG_NBYTES = 1 << 20


def detect(location: Location) -> bool:
    """Return True for a checkpoint of this format, and for a run directory whose latest is one."""
    return _checkpoint_at(location) is not None


def _checkpoint_at(location: Location) -> Location | None:
    """Return the checkpoint that a location is or names as its latest; None if there is none."""
    return location.or_latest(LATEST, _is_checkpoint, _folder_of)


def _folder_of(latest: str) -> str | None:
    if _ITERATION.fullmatch(latest):
        return step_dir(int(latest))
    return latest if latest == "release" else None


def _is_checkpoint(location: Location) -> bool:
    if not dcp.detect(location) or not location.has(CONFIG):
        return False
    try:
        config = json.loads(location.head(CONFIG, _MAX_CONFIG_NBYTES))
    except (ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("sharded_backend") == _BACKEND


def open_catalog(location: Location) -> Catalog:
    """Describe a checkpoint.

    Raises:
        CorruptionError: It is damaged, or asks for what is never run.
        StorageError: A file cannot be read.

    Cost: reads the metadata and all values, and every tensor of which there are copies.
    """
    location = _checkpoint_at(location) or location
    with describing(location.label, "a checkpoint of Megatron"):
        return _open(location)


def _open(location: Location) -> Catalog:
    items = dcp.read_items(location)
    common, identity = _read_common(location)
    made = Draft(location, FORMAT)
    made.left_out += [*items.left_out, *common.left_out]
    # The bytes of copies are read by one rank, which has a sentence for the others.
    with OpenFiles(behind(location.storage)) as files:
        joined = join_copies(
            _restored(items, made), files, once=partial(found_once, location.storage)
        )
    model = {name: t for name, t in joined.tensors.items() if not is_of_optimizer(name)}
    for name, tensor in model.items():
        node = made.add_tensor(replace(tensor, key=f"{_MODEL}.{name}"))
        made.parts.setdefault(_MODEL, {})[name] = node
    of_optimizer = _add_objects(items, made)
    add_optimizer(
        made,
        {name: t for name, t in joined.tensors.items() if is_of_optimizer(name)},
        of_optimizer,
        common.parts.pop(_OPTIMIZER, None),
        shapes={name: tensor.shape for name, tensor in model.items()},
        common_tensors=common.tensors,
        file=COMMON,
    )
    _add_common(common, made)
    if joined.drift:
        made.left_out.append(f"{joined.drift}; only the first copy is read")
    return made.catalog(
        identity=items.identity + identity,
        files=[dcp.METADATA, CONFIG, COMMON],
        step=_step(common, location),
        drift=f"{location.label}: {joined.drift}" if joined.drift else "",
        checksums=items.checksums,
    )


# ---- tensors ----


def _restored(items: dcp.Items, made: Draft) -> dict[str, CatalogTensor]:
    """Return all tensors in their own shapes, as far as these are known."""
    tensors: dict[str, CatalogTensor] = {}
    for name, tensor in items.tensors.items():
        shape = _own_shape(name, tensor, items)
        whole = None if shape is None else unflattened(tensor, shape)
        if shape is not None and whole is None:
            made.left_out.append(
                f"{name}: its shape {list(shape)}; it is stored as {list(tensor.shape)}, which is "
                f"not a grid of it"
            )
        tensors[name] = tensor if whole is None else whole
    return tensors


def _own_shape(name: str, tensor: CatalogTensor, items: dcp.Items) -> tuple[int, ...] | None:
    """Return the shape of a tensor of flattened ranges; None for any other tensor."""
    stated = items.mcore_data.get(name)
    shape = stated.get("nd_reformulated_orig_global_shape") if isinstance(stated, dict) else None
    if isinstance(shape, tuple | list) and all(type(n) is int and n >= 0 for n in shape):
        return tuple(shape)
    # Without the record, the parameter's shape is the shape of its state.
    if is_of_optimizer(name) and ".optimizer.state." in f".{name}":
        parameter = name.partition("optimizer.state.")[2].partition(".")[2]
        model = items.tensors.get(parameter)
        if model is not None and len(tensor.shape) == len(model.shape) + 1:
            return model.shape
    return None


# ---- objects ----


def _add_objects(items: dcp.Items, made: Draft) -> dict[str, Any]:
    """Add the objects of ranks, and return those of the optimizer by flat name."""
    of_optimizer: dict[str, Any] = {}
    empty: list[str] = []
    for name, node in items.values.items():
        # Megatron saves a list: of all objects of a rank under one name, which is one.
        listed = isinstance(node, list) and len(node) == 1
        value = node[0] if isinstance(node, list) and listed else node
        prefix = f"{name}.0" if listed else name
        match = _SHARD.fullmatch(name)
        owner, shard = (name, name) if match is None else (match[1], match[2])
        if is_of_optimizer(name):
            place = f"{OBJECTS_PART}.{name}"
            of_optimizer[name] = value
        elif owner.endswith(_EXTRA_STATE):
            place = f"extra_state.{name}"
            if value is None:
                empty.append(name)
                continue
            made.parts.setdefault("extra_state", {})[name] = value
        elif owner.isidentifier() and not owner.startswith((_MODEL, _OPTIMIZER)):
            place = f"{owner}.{shard}"
            made.parts.setdefault(owner, {})[shard] = value
        else:
            place = f"objects.{name}"
            made.parts.setdefault("objects", {})[name] = value
        _rename(items.more, value, prefix, place, made)
    if empty:
        made.left_out.append(f"{len(empty)} extra states that are empty, such as {empty[0]}")
    return of_optimizer


def _rename(
    tensors: Mapping[str, CatalogTensor], node: Any, prefix: str, place: str, made: Draft
) -> None:
    """Add the tensors of a node under keys that are their paths in the catalog."""
    renamed = {}  # several nodes may name one tensor
    for each in walk(node):
        if is_tensor(each):
            old = each["k"]
            each["k"] = new = place + old[len(prefix) :]
            renamed[new] = replace(tensors[old], key=new)
    made.add_tensors(renamed.values())


# ---- common values ----


def _read_common(location: Location) -> tuple[Draft, bytes]:
    """Return the common values by name, and what identifies them.

    One that is never read is left out, with the reason: an odd one (a class among the arguments)
    does not make the weights unreadable.
    """
    common = Draft(location, FORMAT)
    if not location.has(COMMON):
        common.left_out.append(f"{COMMON}: it is not there, so that settings and step are missing")
        return common, b""
    try:
        file, identity = open_file(location, COMMON)
    except CorruptionError as error:
        if not error.details.get("not_read"):
            raise
        common.left_out.append(f"{COMMON}: {error}")
        return common, b""
    if not isinstance(file.value, dict):
        common.left_out.append(f"{COMMON}: it is not a dict")
        return common, identity
    for key, value in file.value.items():
        name = str(key)
        try:
            if name in common.parts:
                raise twice(location, name)
            where = "optimizer_common" if name == _OPTIMIZER else name
            tensors, node, left_out = tensors_of(value, where, file, COMMON)
            common.add_tensors(tensors.values())
        except CorruptionError as error:
            if not error.details.get("not_read"):
                raise
            common.left_out.append(str(error))
            continue
        common.parts[name] = node
        common.left_out += left_out
    return common, identity


def _add_common(common: Draft, made: Draft) -> None:
    """Add the common values as parts; what remains where tensors were taken out is nothing."""
    for name, node in common.parts.items():
        if re.fullmatch(r"model[0-9]*", name) and _holds_nothing([node]):
            continue
        part = made.free_name(name)
        made.parts[part] = node
        _rename(common.tensors, node, name, part, made)


def _holds_nothing(nodes: Iterable[Any]) -> bool:
    """Return True for dicts of dicts that have no value."""
    return all(is_plain_dict(node) and _holds_nothing(node.values()) for node in nodes)


def _step(common: Draft, location: Location) -> int:
    """Return the iteration: as stored, else of the directory's name."""
    stored = common.parts.get("iteration")
    return stored if is_step(stored) else location.step
