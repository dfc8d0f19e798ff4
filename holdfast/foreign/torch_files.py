"""Files of `torch.save`, and folders of them, as catalogs: state dicts, Lightning, Accelerate.

A file that is a dict of dicts gives one part per entry; a flat dict of tensors is the part `model`.
In a folder each file is a part by its name (`optimizer.bin` is `optimizer`), and safetensors files
next to them are the part `model`. What a file asks for beyond the closed list is never run: by
itself it is an error, in a folder the file is left out, by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.arrays.boxes import Box
from holdfast.errors import CorruptionError, PlacementError
from holdfast.foreign import safetensors_files
from holdfast.foreign.catalog import Catalog, CatalogTensor, Chunk, HeldBytes, chunks_of_view
from holdfast.foreign.location import Location
from holdfast.foreign.pickle_nodes import NodeLeaf, array_form, to_node
from holdfast.foreign.pickled_values import (
    PickledStorage,
    PickledTensor,
)
from holdfast.foreign.torch_save import TorchFile, open_torch_save
from holdfast.foreign.weights import with_optimizers
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import Node, is_tensor, walk

FORMAT = "torch.save"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
_WEIGHTS = "pytorch_model"
_STEPS = ("global_step", "iteration", "step")
_MAX_STEP = 10**18


def detect(location: Location) -> bool:
    """Return True for a file of torch.save, and for a folder that has some."""
    if location.file is not None:
        return _is_torch(location, location.file)
    return any(_is_torch(location, name) for name in _candidates(location))


def _candidates(location: Location) -> list[str]:
    return [name for name in location.names() if name.endswith(_SUFFIXES)]


def _is_torch(location: Location, name: str) -> bool:
    """Return True if a file starts as torch.save writes it: a ZIP archive or a pickle."""
    head = location.head(name, 4)
    # A pickle of protocol 2 and more, whose first opcode after the version builds a number, as the
    # legacy form does.
    return head == b"PK\x03\x04" or (head[:1] == b"\x80" and head[2:3] == b"\x8a")


def open_catalog(location: Location) -> Catalog:
    """Describe a file or a folder.

    Raises:
        CorruptionError: A file is damaged, or asks for what is never run.
        StorageError: A file cannot be read.

    Cost: reads the pickles, not the tensors.
    """
    if location.file is not None:
        return _open_file(location, location.file)
    return _open_folder(location)


def _open_file(location: Location, name: str) -> Catalog:
    file, identity = _open(location, name)
    trees, step = _parts(file.value)
    catalog = _Parts(location)
    for part, value in trees.items():
        catalog.add(part, value, file, name)
    return catalog.finish(identity, [name], step=step)


def _open_folder(location: Location) -> Catalog:
    """Describe a folder: one part per file."""
    parts, identity, step = _Parts(location), bytearray(), 0
    used: list[str] = []
    has_safetensors = safetensors_files.detect(location)
    shards = _shards(location)
    for name in _candidates(location):
        stem = name.rpartition(".")[0]
        if has_safetensors and stem.startswith(_WEIGHTS):
            parts.left_out.append(f"{name}: the safetensors files are read instead")
            continue
        try:
            file, own = _open(location, name)
            if name in shards or stem == _WEIGHTS:
                parts.add("model", file.value, file, name, joins=True)
            else:
                _, step_there = _parts(file.value)
                step = max(step, step_there)
                parts.add(stem, file.value, file, name)
        except CorruptionError as error:
            # One odd file (arguments of a trainer) does not make all others unreadable.
            parts.left_out.append(f"{name}: {error}")
            continue
        identity += own
        used.append(name)
    if not has_safetensors:
        return parts.finish(bytes(identity), used, step=step)
    weights = safetensors_files.open_catalog(location)
    own_notes = [each for each in weights.left_out if each.partition(":")[0] not in used]
    catalog = parts.finish(bytes(identity) + weights.identity, used, step=step)
    noted = {each.partition(":")[0] for each in catalog.left_out}
    return replace(
        catalog,
        tensors={**weights.tensors, **catalog.tensors},
        parts={**weights.parts, **catalog.parts},
        left_out=[
            *(each for each in own_notes if each.partition(":")[0] not in noted),
            *catalog.left_out,
        ],
    )


def _shards(location: Location) -> set[str]:
    """Return the files that an index of sharded weights names (`pytorch_model.bin.index.json`)."""
    name = f"{_WEIGHTS}.bin.index.json"
    if not location.has(name):
        return set()
    place = location.storage.describe(name)
    try:
        table = msgspec.convert(json.loads(location.storage.read(name)), dict[str, Any])
        files = set(msgspec.convert(table["weight_map"], dict[str, str]).values())
    except (ValueError, KeyError, RecursionError) as error:
        raise CorruptionError(f"{place}: this is not an index of tensors: {error}") from None
    missing = files - set(location.names())
    if missing:
        raise CorruptionError(f"{place}: it names {sorted(missing)[0]!r}, which is not there")
    return files


def _open(location: Location, name: str) -> tuple[TorchFile, bytes]:
    """Open one file; also what identifies it."""
    place = location.storage.describe(name)
    with closing(location.storage.open(name)) as source:
        file = open_torch_save(source, place=place)
        identity = digest128(f"{name}:{source.nbytes}:{sorted(file.storages)}".encode())
    return file, identity.encode()


def _parts(value: object) -> tuple[dict[str, object], int]:
    """Return the parts that the value of a file has, and its step."""
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        return {"value": value}, 0
    step = next((value[name] for name in _STEPS if _is_step(value.get(name))), 0)
    if any(isinstance(each, PickledTensor) for each in value.values()):
        return {"model": value}, 0
    return dict(value), step


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_STEP


class _Parts:
    """Collects the parts of a catalog.

    Attributes:
        left_out: What the catalog will not have.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._tensors: dict[str, CatalogTensor] = {}
        self._trees: dict[str, Node] = {}
        self.left_out: list[str] = []

    def add(
        self, part: str, value: object, file: TorchFile, name: str, *, joins: bool = False
    ) -> None:
        """Add the tree of a value as a part, or join it with the part that is there.

        Raises:
            CorruptionError: The value has no stored form, or a name is there twice.
        """
        tensors, node, left_out = tensors_of(value, part, file, name)
        twice = sorted(set(tensors) & set(self._tensors))
        if twice or (part in self._trees and not joins):
            what = twice[0] if twice else part
            raise CorruptionError(f"{self._location.label}: {what!r} is there twice")
        self._tensors |= tensors
        self.left_out += left_out
        there: Any = self._trees.get(part)
        self._trees[part] = {**there, **node} if there is not None else node

    def finish(self, identity: bytes, names: Iterable[str], *, step: int) -> Catalog:
        """Return the catalog."""
        return Catalog(
            format=FORMAT,
            storage=self._location.storage,
            label=self._location.label,
            identity=identity,
            step=step,
            created=self._location.created(names),
            tensors=self._tensors,
            parts=with_optimizers(self._trees, self._tensors),
            left_out=self.left_out,
        )


def tensors_of(
    value: object, path: str, file: TorchFile, name: str
) -> tuple[dict[str, CatalogTensor], Any, list[str]]:
    """Return the tensors of a pickled value by key, its node, and what the node leaves out.

    Args:
        value: Of the file, or a part of it.
        path: Of the tree; keys start with it.
        file: That it came from.
        name: Of the file in the folder.

    Raises:
        CorruptionError: The value has no stored form; the message names its path.
    """
    try:
        tree = to_node(value, path=path, keeps_order_type=False)
    except PlacementError as error:
        raise CorruptionError(f"{file.place}: {error}") from error
    tensors: dict[str, CatalogTensor] = {}
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for leaf in tree.leaves:
        if isinstance(leaf.value, PickledTensor):
            same = first.setdefault(leaf.value.identity, leaf.key)
            if same != leaf.key:
                tied[leaf.key] = same
                continue
        tensors[leaf.key] = tensor_of(leaf, file, name)
    if tied:
        for node in walk(tree.node):
            if is_tensor(node) and node["k"] in tied:
                node["k"] = tied[node["k"]]
    return tensors, tree.node, list(tree.left_out)


def tensor_of(leaf: NodeLeaf, file: TorchFile, name: str) -> CatalogTensor:
    """Return the tensor of a leaf of a pickled tree; arguments as of `tensors_of`."""
    value = leaf.value
    if isinstance(value, PickledTensor):
        start, _ = file.range_of(value)
        itemsize = DTYPES[value.dtype].itemsize
        chunks = chunks_of_view(name, start, value.shape, value.stride, itemsize)
        return CatalogTensor(key=leaf.key, dtype=value.dtype, shape=value.shape, chunks=chunks)
    if isinstance(value, PickledStorage):
        range_ = file.storages[value.key]
        shape = (value.numel,)
        itemsize = DTYPES[value.dtype].itemsize
        chunks = chunks_of_view(name, range_.start, shape, (1,), itemsize)
        return CatalogTensor(key=leaf.key, dtype=value.dtype, shape=shape, chunks=chunks)
    dtype, elements, _ = array_form(value, path=leaf.key)
    held = Chunk(Box((0,) * elements.ndim, elements.shape), HeldBytes(elements.tobytes(), name))
    return CatalogTensor(key=leaf.key, dtype=dtype, shape=elements.shape, chunks=(held,))
