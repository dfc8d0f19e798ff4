"""Files of `torch.save`, and folders of them, as catalogs: state dicts, Lightning, Accelerate.

A file that is a dict of dicts gives one part per entry; a flat dict of tensors is the part `model`.
In a folder each file is a part by its name (`optimizer.bin` is `optimizer`), and safetensors files
next to them are the part `model`. What a file asks for beyond the closed list is never run: by
itself it is an error, in a folder the file is left out, by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from holdfast.arrays.boxes import Box, strided_span
from holdfast.arrays.intervals import overlapping
from holdfast.errors import CorruptionError, PlacementError, some_of
from holdfast.foreign import safetensors_files
from holdfast.foreign.catalog import (
    Catalog,
    CatalogTensor,
    Checksum,
    Chunk,
    HeldBytes,
    chunks_of_view,
)
from holdfast.foreign.draft import Draft, twice
from holdfast.foreign.location import Location, is_step, why_none
from holdfast.foreign.other_formats import is_cut_by_rank, note_on_ranks
from holdfast.foreign.pickle_nodes import NodeLeaf, array_form, module_versions, to_node
from holdfast.foreign.pickled_values import PickledStorage, PickledTensor
from holdfast.foreign.pickles import NOT_READ
from holdfast.foreign.shard_index import (
    note_on_siblings,
    read_index,
    refuse_missing_shards,
    refuse_missing_tensors,
    refuse_two_models,
    shard_sets,
    the_index,
)
from holdfast.foreign.torch_save import TorchFile, open_torch_save
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import is_plain_dict, is_tensor, walk

FORMAT = "torch.save"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
OWN = (*_SUFFIXES, ".safetensors")
"""How the names of files end that a folder's description has, or says something about."""
_WEIGHTS = ("pytorch_model", "diffusion_pytorch_model", "consolidated.00")
"""Names, without suffix, of a file that is all of a model: of Transformers, Diffusers and Llama."""
_INDEX = re.compile(r"(?P<stem>.+)\.bin\.index(?P<variant>\.[\w-]+)?\.json")
_MODEL = safetensors_files.PART
_STEPS = ("global_step", "iteration", "step")


def detect(location: Location) -> bool:
    """Return True for a file of torch.save, and for a folder that has some."""
    if location.file is not None:
        return _is_torch(location, location.file)
    if is_cut_by_rank(location):
        return False
    return any(_is_torch(location, name) for name in _candidates(location))


def _candidates(location: Location) -> list[str]:
    return [name for name in location.names() if name.endswith(_SUFFIXES)]


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


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


def open_file(location: Location, name: str) -> tuple[TorchFile, bytes]:
    """Open one file of a folder; also return what identifies it.

    Raises:
        CorruptionError: As `open_torch_save`, with what is known of a file that is none.
    """
    place = location.storage.describe(name)
    try:
        with closing(location.storage.open(name)) as source:
            file = open_torch_save(source, place=place)
            identity = digest128(f"{name}:{source.nbytes}:{sorted(file.storages)}".encode())
    except CorruptionError as error:
        why = why_none(location, name)
        # What was not downloaded is not a file that is only never read.
        raise CorruptionError(f"{error}{why}", details={} if why else error.details) from error
    return file, identity.encode()


def _open_file(location: Location, name: str) -> Catalog:
    file, identity = open_file(location, name)
    trees, step = _parts(file.value)
    made = Draft(location, FORMAT)
    made.left_out += [*note_on_siblings(name), *note_on_ranks(location, name)]
    checksums = add_file(made, trees, file, name)
    return made.catalog(
        identity=identity, files=[name], step=step, checksums=lambda files: checksums
    )


def _open_folder(location: Location) -> Catalog:
    """Describe a folder: one part per file."""
    made, identity, step = Draft(location, FORMAT), bytearray(), 0
    used: list[str] = []
    checksums: list[Checksum] = []
    weights: Catalog | None = None
    shards = _Shards(frozenset(), {})
    if safetensors_files.detect(location):
        weights = safetensors_files.open_catalog(location)
        made.add_tensors(weights.tensors.values())
        made.parts |= weights.parts
    else:
        shards = _shards(location)
        odd = [name for name in location.names() if name.endswith(".safetensors")]
        made.left_out += [f"{name}: it is not a safetensors file" for name in odd]
    made.left_out += [f"{name}: name this file to read it" for name in shards.others]
    for name in _candidates(location):
        stem = _stem(name)
        if name in shards.others:
            continue
        if weights is not None and (stem.startswith(_WEIGHTS[:2]) or stem == _MODEL):
            made.left_out.append(f"{name}: the safetensors files are read instead")
            continue
        is_shard = name in shards.files
        try:
            file, own = open_file(location, name)
            is_model = is_shard or name == shards.whole
            part = _MODEL if is_model else stem
            checksums += add_file(made, {part: file.value}, file, name, joins=is_shard)
            if not is_model:
                step = max(step, _parts(file.value)[1])
        except CorruptionError as error:
            if is_shard or not error.details.get("not_read"):
                # Without it the others would look like all of it.
                raise CorruptionError(
                    f"{error}; to read another file of the folder alone, name it"
                ) from error
            # One odd file (arguments of a trainer) does not make all others unreadable.
            made.left_out.append(f"{name}: {error}")
            continue
        identity += own
        used.append(name)
    if weights is None:
        model = made.parts.get(_MODEL)
        refuse_missing_tensors(location, shards.placed, model if isinstance(model, dict) else ())
    elif not used:
        return replace(weights, left_out=[*weights.left_out, *made.left_out])
    else:
        made.left_out = [*weights.left_out, *made.left_out]
        identity += weights.identity
    return made.catalog(
        identity=bytes(identity),
        files=used,
        step=step,
        metadata=shards.metadata if weights is None else weights.metadata,
        checksums=lambda files: checksums,
    )


class _Shards(NamedTuple):
    """The files of sharded weights, and by tensor the one that an index states."""

    files: frozenset[str]
    placed: Mapping[str, str]
    metadata: Mapping[str, Any] = MappingProxyType({})
    others: Sequence[str] = ()
    """Shards next to a file that is the whole model by its name."""
    whole: str = ""
    """The file that is the whole model by its name."""


def _shards(location: Location) -> _Shards:
    """Return the files of the weights: of an index, one file, or shards by their names.

    Raises:
        CorruptionError: Some are missing, or there are several models.
    """
    present = location.names()
    indices = {name: m for name in present if (m := _INDEX.fullmatch(name))}
    chosen = [name for name, match in indices.items() if not match["variant"]] or [*indices]
    files = _candidates(location)
    name = the_index(location, chosen)
    if name is not None:
        placed, metadata = read_index(location, name, present)
        named = [file for file in files if _stem(file) == _MODEL]
        for whole in (f"{indices[name]['stem']}.bin", *named):
            refuse_two_models(location, whole, list(placed.values()))
        return _Shards(frozenset(placed.values()), placed, metadata)
    refuse_missing_shards(location, files)
    sets = shard_sets(files)
    sharded = [name for names in sets.values() for name in names]
    wholes = [name for name in files if _stem(name) in (*_WEIGHTS, _MODEL)]
    if len(wholes) > 1 or (len(sets) > 1 and not wholes):
        raise CorruptionError(
            f"{location.label} has the weights of several models "
            f"({some_of(wholes or sorted(sets))}): name one file, or move all but one away"
        )
    if wholes:
        return _Shards(frozenset(), {}, others=sharded, whole=wholes[0])
    return _Shards(frozenset(sharded), {})


def _parts(value: object) -> tuple[dict[str, object], int]:
    """Return the parts that the value of a file has, and its step."""
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        return {"value": value}, 0
    step = next((value[name] for name in _STEPS if is_step(value.get(name))), 0)
    if any(isinstance(each, PickledTensor) for each in value.values()):
        return {_MODEL: value}, 0
    return dict(value), step


_VERSIONS = ": _metadata attached to"
_TO_MODULES = ": a module gets the versions in it, a plain dict does not"


def add_file(
    made: Draft, trees: Mapping[str, object], file: TorchFile, name: str, *, joins: bool = False
) -> list[Checksum]:
    """Add the trees of a file as parts, or join them with the parts that are there.

    Args:
        made: The catalog so far, unchanged if a single tree is refused.
        trees: What the file has, by part.
        file: That they came from.
        name: Of the file in the folder.
        joins: Another file may have a dict with other names of such a part.

    Returns:
        The checksums that the file states.

    Raises:
        CorruptionError: A value has no stored form, or a name is there twice.
    """
    memory = FileMemory()
    for part, value in trees.items():
        tensors, node, left_out = tensors_of(value, part, file, name, memory, taken=made.tensors)
        if part in made.parts:
            if not joins:
                raise twice(made.location, part)
            before = made.parts[part]
            if not (is_plain_dict(before) and is_plain_dict(node)):
                raise CorruptionError(f"{file.place}: a shard of a model that is not a state dict")
            if again := sorted(before.keys() & node.keys()):
                raise twice(made.location, f"{part}.{again[0]}")
            node = {**before, **node}
        made.add_tensors(tensors.values())
        made.parts[part] = node
        versions = module_versions(value)
        if versions is not None:
            made.versions[part] = {**made.versions.get(part, {}), **versions}
            left_out = [each + _TO_MODULES if _VERSIONS in each else each for each in left_out]
        made.left_out += left_out
    made.left_out += memory.notes()
    return [*memory.checksums(file, name)]


_EXPANDED_NBYTES = 1 << 30
_EXPANSION = 1000
"""Views of a file may have so many bytes, and so many for each byte of its storages."""


class FileMemory:
    """The memory of one file: which of its tensors are one, and which are views of one storage.

    Equal views, the same tensor met twice among them, become one tensor, in all parts of the file.
    Other views with memory in common become a tensor each, and are noted.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[object, ...], str] = {}
        self._spans: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        """By storage (first byte, stop, key) of each tensor."""
        self._nbytes = 0

    def key_of(self, leaf: NodeLeaf, value: PickledTensor) -> str:
        """Return the key of the tensor that a leaf is: its own, or that of an equal one before."""
        key = self._first.setdefault(value.identity, leaf.key)
        if key == leaf.key and value.nbytes:
            self._nbytes += value.nbytes
            reach = strided_span(value.shape, value.stride) * DTYPES[value.dtype].itemsize
            self._spans[value.storage.key].append((value.start, value.start + reach, key))
        return key

    def refuse_expansion(self, file: TorchFile) -> None:
        """Raise CorruptionError if a small file states tensors that no memory and no disk holds.

        Views repeat elements (`expand`), so a kilobyte may state any number of terabytes.
        """
        stored = sum(storage.nbytes for storage in file.storages.values())
        if self._nbytes > _EXPANDED_NBYTES + _EXPANSION * stored:
            raise CorruptionError(
                f"{file.place}: its views have {self._nbytes} bytes, and its storages {stored}: "
                f"expanded tensors as large are not read; store what was expanded"
            )

    def checksums(self, file: TorchFile, name: str) -> Iterator[Checksum]:
        """Yield those that the file states of its storages."""
        for key, storage in file.storages.items():
            if storage.crc is not None:
                spans = self._spans.get(key)
                yield Checksum(
                    key=spans[0][2] if spans else None,
                    file=name,
                    start=storage.start,
                    nbytes=storage.nbytes,
                    crc=storage.crc,
                )

    def notes(self) -> list[str]:
        """Say which tensors share memory in the file, and not in what is read of it."""
        return [
            f"{some_of([key for _, _, key in run])}: they share memory in the file; each is read "
            f"as a tensor of its own"
            for spans in self._spans.values()
            for run in overlapping(sorted(spans), span=lambda each: each[:2])
            if len(run) > 1
        ]


def tensors_of(
    value: object,
    path: str,
    file: TorchFile,
    name: str,
    memory: FileMemory | None = None,
    *,
    taken: Container[str] = (),
) -> tuple[dict[str, CatalogTensor], Any, list[str]]:
    """Return the tensors of a pickled value by key, its node, and what the node leaves out.

    Args:
        value: Of the file, or a part of it.
        path: Of the tree; keys start with it.
        file: That it came from.
        name: Of the file in the folder.
        memory: Of the file, where it has more than this value; the caller notes what it has.
        taken: Keys that other tensors have.

    Raises:
        CorruptionError: The value has no stored form; the message names its path.
    """
    try:
        tree = to_node(value, path=path, taken=taken)
    except PlacementError as error:
        raise CorruptionError(f"{file.place}: {error}", details=NOT_READ) from error
    own = FileMemory() if memory is None else memory
    tensors: dict[str, CatalogTensor] = {}
    tied: dict[str, str] = {}
    for leaf in tree.leaves:
        key = own.key_of(leaf, leaf.value) if isinstance(leaf.value, PickledTensor) else leaf.key
        if key != leaf.key:
            tied[leaf.key] = key
            continue
        tensors[leaf.key] = tensor_of(leaf, file, name)
    own.refuse_expansion(file)
    if tied:
        for node in walk(tree.node):
            if is_tensor(node) and node["k"] in tied:
                node["k"] = tied[node["k"]]
    notes = own.notes() if memory is None else []
    return tensors, tree.node, [*tree.left_out, *notes]


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
