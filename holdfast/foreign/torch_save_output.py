"""Writes one file that `torch.load` reads: a part of a checkpoint, or all of it.

A part becomes what `torch.save(model.state_dict())` writes; all parts become a dict of them. An
optimizer gets the form of PyTorch's state dicts, see `optimizer_trees`. Tensors that are tied share
a storage, as there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.foreign.catalog import Catalog, free_key
from holdfast.foreign.output import Extent, Output, OutputFile
from holdfast.foreign.weights import choose_part
from holdfast.format.envelopes.optimizer_trees import to_torch
from holdfast.format.envelopes.pickle_output import pickled
from holdfast.format.envelopes.plain_values import PlainValues, TensorRef
from holdfast.format.envelopes.torch_archive import layout_archive, tensor_value
from holdfast.format.manifest import USUAL_VERSION
from holdfast.format.values import join_path, key_name

FORMAT = "torch.save"


def layout(catalog: Catalog, *, part: str | None = None, whole_tree: bool = False) -> Output:
    """Lay out a part of a checkpoint, or all of it, as a file of `torch.save`.

    Args:
        catalog: What to write.
        part: See `choose_part`; the file has what is in the part.
        whole_tree: Write a dict of all parts instead.

    Raises:
        ConfigError: The part is not there.
        PlanError: A value cannot be written.
        CorruptionError: A node is malformed.

    Cost: linear in the number of tensors and the size of values.
    """
    plain = PlainValues()
    notes = list(catalog.left_out)
    trees = {name: to_torch(node) for name, node in catalog.parts.items()}
    value: Any
    if whole_tree:
        written = list(trees)
        value = plain.parts(trees)
    else:
        part = choose_part(catalog, part)
        written = [part]
        value = plain.parts({part: trees[part]}).get(part, {})
        value = OrderedDict(value) if type(value) is dict else value
        notes += [f"part {name!r} was not asked for" for name in trees if name != part]
    places = _places(value)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(places.values()))}
    described = with_tensors(value, catalog, numbers)
    for name, noted in (catalog.versions or {}).items():
        if whole_tree and name in described:
            described[name] = _with_versions(described[name], noted)
        elif name == part:
            described = _with_versions(described, noted)
    sizes = [catalog.tensors[key].nbytes for key in numbers]
    archive = layout_archive(pickled(described), sizes)
    notes += [
        *plain.notes,
        *(f"{each}: torch.load reads the file with weights_only=False" for each in plain.unsafe),
    ]
    notes += catalog.lost_kinds(written)
    if catalog.metadata:
        notes.append(f"the user's metadata is left out: {', '.join(catalog.metadata)}")
    extents = [
        Extent(
            start=archive.starts[numbers[key]],
            key=key,
            box=catalog.tensors[key].whole,
            crc_at=archive.crc_at[numbers[key]],
            to_key=to_key,
        )
        for to_key, key in places.items()
        if catalog.tensors[key].nbytes
    ]
    file = OutputFile(
        name="model.pt", nbytes=archive.nbytes, literals=archive.literals, extents=extents
    )
    return Output(files=[file], num_tensors=len(places), is_folder=False, notes=notes)


def _with_versions(entries: Any, noted: Mapping[str, int]) -> Any:
    """Return a state dict with the versions of its modules, as `Module.state_dict()` notes them.

    Args:
        entries: Of a part that is a module, or that has state dicts inside.
        noted: All versions but those that are 1, by name in the part.
    """
    if not isinstance(entries, dict):
        return entries
    own = dict(noted)
    result = OrderedDict(entries)
    vars(result).update(vars(entries) if isinstance(entries, OrderedDict) else {})
    for key, member in entries.items():
        below = {name: own.pop(name) for name in noted if f"{name}.".startswith(f"{key}.")}
        if isinstance(member, dict) and below:
            inner = {name[len(key) + 1 :]: version for name, version in below.items()}
            result[key] = _with_versions(member, inner)
        else:
            own |= below
    if own or not noted:
        # For torch a module without an entry has no version, which means the earliest.
        modules = {key[:at] for key in entries for at, char in enumerate(key) if char == "."}
        vars(result)["_metadata"] = OrderedDict(
            (name, {"version": own.get(name, USUAL_VERSION)})
            for name in sorted({"", *modules, *own})
        )
    return result


def _places(value: Any) -> dict[str, str]:
    """Return the keys that tensors get in the reader's catalog, with those in the source.

    A tied tensor is there once, in one part or in several; so is it in the reader's.
    """
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        parts = {"value": value}
    elif any(isinstance(member, TensorRef) for member in value.values()):
        parts = {"model": value}
    else:
        parts = value
    places: dict[str, str] = {}
    seen: set[str] = set()
    for part, member in parts.items():
        for path, key in _tensor_paths(member, part):
            if key not in seen:
                seen.add(key)
                places[free_key(path, places)] = key  # as the reader names it
    return places


def _tensor_paths(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the key of every tensor in a value, in order."""
    if isinstance(value, TensorRef):
        yield path, value.key
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _tensor_paths(member, join_path(path, key_name(key)))
    elif isinstance(value, list | tuple | deque):
        for i, member in enumerate(value):
            yield from _tensor_paths(member, join_path(path, i))


def with_tensors(value: Any, catalog: Catalog, numbers: dict[str, int]) -> Any:
    """Return a value with tensors described, each by the number of its storage."""
    if isinstance(value, TensorRef):
        tensor = catalog.tensors[value.key]
        return tensor_value(tensor.dtype, tensor.shape, numbers[value.key])
    if isinstance(value, dict):
        table = {key: with_tensors(member, catalog, numbers) for key, member in value.items()}
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, table)
        made = type(value)(table)
        if isinstance(value, OrderedDict):
            vars(made).update(vars(value))  # the versions of modules
        return made
    if isinstance(value, list | tuple | deque):
        items = [with_tensors(member, catalog, numbers) for member in value]
        return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)
    return value
