"""Hugging Face folders and single `.safetensors` files, whole or as PyTorch DCP shards them.

The tensors are the part `model`, under the names that they have in the files. Only headers are read
to open one. An index (`*.safetensors.index.json`) states which file has which tensor; a folder
without one is all of its files. DCP's variant cuts tensors over files and states each piece's
offset in the header (`DCP_SHARDING_INFO`).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast.arrays.boxes import Box
from holdfast.decoding import convert_as
from holdfast.errors import ConfigError, CorruptionError, PlacementError, some_of
from holdfast.foreign.catalog import Catalog, CatalogTensor, Chunk, FileBytes, each_once
from holdfast.foreign.location import Location, why_none
from holdfast.foreign.other_formats import STATE_SUFFIXES
from holdfast.foreign.output import DEFAULT_MAX_FILE_NBYTES, Output, OutputFile, split_by_size
from holdfast.foreign.shard_index import (
    decode_json,
    note_on_siblings,
    read_index,
    refuse_missing_shards,
    refuse_missing_tensors,
    refuse_two_models,
    shard_sets,
    the_index,
)
from holdfast.foreign.weights import Weights, choose_part, weights_of
from holdfast.foreign.zip_files import read_bytes
from holdfast.format.dtypes import DTYPES, OLDEST_SAFETENSORS
from holdfast.format.index import (
    HeaderEntry,
    ImageEntry,
    header_metadata,
    header_nbytes,
    layout_file,
    parse_header,
)
from holdfast.format.names import INDEX, MANIFEST
from holdfast.format.values import is_unicode, tensor_node

FORMAT = "safetensors"
PART = "model"
"""The part of the state that weights without a tree are."""

_SUFFIX = ".safetensors"
_WHOLE = "model.safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_VARIANT_INDEX = re.compile(r"\.safetensors\.index\.[\w-]+\.json$")
"""Of Transformers' `variant=`, such as `model.safetensors.index.fp16.json`."""
_SHARDED = "DCP_SHARDING_INFO"
_SHARDED_FOLDER = "sharded"
"""Where DCP leaves what it has consolidated."""
OWN = (_SUFFIX,)
"""How the names of files end that a folder's description has, or says something about."""
"""As large as a file of a Hugging Face folder usually is."""
_MAX_CARRIED_NBYTES = 256 << 20


def detect(location: Location) -> bool:
    """Return True for a safetensors file, and for a folder that has some."""
    if location.file is not None:
        return _is_safetensors(location, location.file)
    if location.has(MANIFEST) and location.has(INDEX):
        return False  # a checkpoint of our own, whose index is such a file
    return any(_is_safetensors(location, name) for name in _names(location))


def _is_safetensors(location: Location, name: str) -> bool:
    """Return True if a file starts as a safetensors file does: a length, and a JSON object."""
    head = location.head(name, 9)
    if len(head) < 9:
        return False
    length = int.from_bytes(head[:8], "little")
    return head[8:] == b"{" and 2 <= length <= location.storage.size(name)


def _names(location: Location) -> list[str]:
    """Return the names in the folder that are those of safetensors files."""
    return [name for name in location.names() if name.endswith(_SUFFIX)]


def open_catalog(location: Location) -> Catalog:
    """Describe a folder or a file.

    Raises:
        CorruptionError: A header or the index is damaged, a tensor is there twice or not at all, or
            pieces do not tile their tensor.
        StorageError: A file cannot be read.

    Cost: reads the headers.
    """
    files = _files_of(location)
    placed, left_out = files.placed, files.left_out
    metadata = dict(files.metadata)
    identity = bytearray()
    pieces: defaultdict[str, list[_Piece]] = defaultdict(list)
    consolidated = set()
    for name in files.names:
        header = _read_header(location, name)
        identity += header
        if _is_consolidated(header):
            consolidated.add(name)
        left_out += _merge(metadata, _own_metadata(location, name, header), name)
        for piece in _pieces(location, name, header):
            if placed is not None and placed.get(piece.entry.name) != name:
                left_out.append(f"{name}: {piece.entry.name!r}, which the index does not name")
                continue
            pieces[piece.entry.name].append(piece)
    refuse_missing_tensors(location, placed or (), pieces)
    tensors = [_tensor(location, name, each) for name, each in pieces.items()]
    left_out += _lost_by_consolidation(
        location,
        {
            name: piece
            for name, (piece, *_) in pieces.items()
            if piece.file in consolidated and not piece.entry.shape
        },
    )
    return Catalog(
        format=FORMAT,
        storage=location.storage,
        label=location.label,
        identity=bytes(identity),
        created=location.created(files.names),
        tensors={tensor.key: tensor for tensor in tensors},
        parts={PART: {name: tensor_node(_key(name)) for name in pieces}},
        left_out=left_out,
        metadata=metadata,
    )


def _is_consolidated(header: bytes) -> bool:
    """Return True for a header as torch's consolidation of DCP's shards writes it."""
    return b'": {' in header and b'"__metadata__"' not in header  # all others write no spaces


def _lost_by_consolidation(location: Location, scalars: Mapping[str, _Piece]) -> list[str]:
    """Say which tensors without dims may have had another value than 0.

    torch's consolidation (2.13) writes 0 for every tensor without dims.

    Raises:
        CorruptionError: The shards, which it leaves next to its result, have other values.
    """
    zeros = [name for name, piece in scalars.items() if not any(_bytes_of(location, piece))]
    shards = location.inside(_SHARDED_FOLDER) if zeros and location.file is None else None
    known: dict[str, bytes] = {}
    if shards is not None:
        known = {
            piece.entry.name: _bytes_of(shards, piece)
            for file in _names(shards)
            if _is_safetensors(shards, file)
            for piece in _pieces(shards, file, _read_header(shards, file))
            if piece.entry.name in zeros
        }
    if lost := [name for name in zeros if any(known.get(name, b""))]:
        raise CorruptionError(
            f"{location.label}: 0 is not the value of {some_of(lost)}: torch's consolidation loses "
            f"tensors without dims; name {_SHARDED_FOLDER}, which has them"
        )
    odd = [name for name in zeros if name not in known]
    why = "0 may not be the value: torch's consolidation loses tensors without dims"
    return [f"{some_of(odd)}: {why}"] if odd else []


def _bytes_of(location: Location, piece: _Piece) -> bytes:
    with closing(location.storage.open(piece.file)) as source:
        return read_bytes(source, piece.entry.start, piece.entry.nbytes)


def _own_metadata(location: Location, name: str, header: bytes) -> dict[str, str]:
    """Return what the user or a program of his has put into a header, by key."""
    words = header_metadata(header, place=location.storage.describe(name))
    return {
        key: text
        for key, text in sorted(words.items())  # safetensors writes them in any order
        if not key.startswith("DCP_") and (key, text) != ("format", "pt")
    }


def _merge(metadata: dict[str, Any], words: Mapping[str, str], name: str) -> list[str]:
    """Add the words of one file to those of the others; return what differs and is left out."""
    odd = [key for key, text in words.items() if metadata.setdefault(key, text) != text]
    return (
        [f"{name}: {some_of(odd)} of its header, which another file has otherwise"] if odd else []
    )


def _key(name: str) -> str:
    return f"{PART}.{name}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """One entry of one file, and its offset in the tensor; None for a whole tensor."""

    file: str
    entry: HeaderEntry
    offset: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The files of a model.

    Args:
        names: Their names.
        placed: By tensor the file that an index states; None without an index.
        metadata: What the index has besides.
        left_out: What is not read, one sentence each.
    """

    names: list[str]
    placed: Mapping[str, str] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    left_out: list[str]


def _files_of(location: Location) -> _Files:
    """Return the files of the model at a location."""
    if location.file is not None:
        return _Files(names=[location.file], left_out=note_on_siblings(location.file))
    indices = [name for name in location.names() if name.endswith(_INDEX_SUFFIX)]
    indices = indices or [name for name in location.names() if _VARIANT_INDEX.search(name)]
    present = _names(location)
    is_one = {name: _is_safetensors(location, name) for name in present}
    names = [name for name in present if is_one[name]]
    odd = [name for name in present if not is_one[name]]
    left_out = [f"{name}: it is not a safetensors file" for name in odd]
    index = the_index(location, indices)
    if index is None:
        # Files that the system makes begin with a dot; any other was to be a part of the model.
        _refuse_odd(location, [name for name in odd if not name.startswith(".")])
        refuse_missing_shards(location, names)
        if _WHOLE in names:
            # Its name says that it is all of the model. Adapters may lie next to it, and the same
            # model under other names ("consolidated").
            left_out += [f"{name}: name this file to read it" for name in names if name != _WHOLE]
            names = [_WHOLE]
        elif sets := shard_sets(names):
            if len(sets) > 1:
                raise CorruptionError(
                    f"{location.label} has the shards of {len(sets)} models "
                    f"({some_of(sorted(sets))}): move those of all but one away"
                )
            (shards,) = sets.values()
            left_out += [
                f"{name}: it is not one of the shards of the model; name this file to read it"
                for name in names
                if name not in shards
            ]
            names = shards
        return _Files(names=names, left_out=left_out)
    placed, metadata = read_index(location, index, set(present))
    used = sorted(set(placed.values()))
    refuse_two_models(location, _WHOLE, used)
    _refuse_odd(location, [name for name in odd if name in used])
    left_out += [f"{name}: no tensor of the index is in it" for name in names if name not in used]
    return _Files(names=used, placed=placed, metadata=metadata, left_out=left_out)


def _refuse_odd(location: Location, names: list[str]) -> None:
    """Raise CorruptionError for files of the model that are not safetensors files."""
    if names:
        raise CorruptionError(
            f"{location.storage.describe(names[0])}: this is not a safetensors file"
            f"{why_none(location, names[0])}; name one file to read it alone"
        )


def _read_header(location: Location, name: str) -> bytes:
    """Return the whole header of a file, its length included."""
    place = location.storage.describe(name)
    with closing(location.storage.open(name)) as source:
        prefix = read_bytes(source, 0, min(8, source.nbytes))
        nbytes = header_nbytes(prefix, file_nbytes=source.nbytes, place=place)
        return read_bytes(source, 0, nbytes)


def _pieces(location: Location, name: str, header: bytes) -> Iterator[_Piece]:
    """Yield the entries of a file with their offsets."""
    place = location.storage.describe(name)
    entries = parse_header(header, file_nbytes=location.storage.size(name), place=place)
    sharding = header_metadata(header, place=place).get(_SHARDED)
    offsets = _offsets(sharding, place) if sharding else {}
    for entry in entries:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise CorruptionError(
                f"{place}: tensor {entry.name!r} has the element type {entry.dtype}, which is not "
                f"supported"
            )
        if entry.nbytes != math.prod(entry.shape) * dtype.itemsize:
            raise CorruptionError(
                f"{place}: tensor {entry.name!r} has {entry.nbytes} bytes, not those of "
                f"{entry.dtype} {list(entry.shape)}"
            )
        if offsets and entry.name not in offsets:
            raise CorruptionError(f"{place}: {_SHARDED} lacks the tensor {entry.name!r}")
        yield _Piece(name, entry, offsets.get(entry.name))


class _Saved(msgspec.Struct):
    saved_offsets: list[int]


def _offsets(text: str, place: str) -> dict[str, tuple[int, ...]]:
    """Return by tensor where the piece of this file lies in it."""
    try:
        table = convert_as(decode_json(text), dict[str, _Saved])
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{place}: {_SHARDED} cannot be decoded: {error}") from None
    return {name: tuple(each.saved_offsets) for name, each in table.items()}


def _tensor(location: Location, name: str, pieces: list[_Piece]) -> CatalogTensor:
    """Return a tensor with its chunks; whole ones are there once."""
    first = pieces[0]
    if len(pieces) > 1 and any(piece.offset is None for piece in pieces):
        files = ", ".join(sorted({piece.file for piece in pieces}))
        raise CorruptionError(
            f"{location.label}: tensor {name!r} is in several files: {files}; name one of them to "
            f"read it alone"
        )
    try:
        stated = (
            Chunk(
                Box(piece.offset or (0,) * len(piece.entry.shape), piece.entry.shape),
                FileBytes(piece.file, piece.entry.start),
            )
            for piece in pieces
        )
        chunks = each_once(stated, place=f"{location.label}: {name!r}")
        ends = [chunk.box.stop for chunk in chunks]
        shape = tuple(map(max, zip(*ends, strict=True)))
    except (PlacementError, ValueError) as error:
        raise CorruptionError(f"{location.label}: pieces of {name!r} do not fit: {error}") from None
    odd = {piece.entry.dtype for piece in pieces} - {first.entry.dtype}
    if odd:
        raise CorruptionError(
            f"{location.label}: pieces of {name!r} are {first.entry.dtype} and {odd.pop()}"
        )
    return CatalogTensor(key=_key(name), dtype=first.entry.dtype, shape=shape, chunks=chunks)


def layout(
    catalog: Catalog,
    *,
    part: str | None = None,
    max_file_nbytes: int = DEFAULT_MAX_FILE_NBYTES,
    config_from: Path | None = None,
    is_folder: bool = True,
) -> Output:
    """Lay out the tensors of one part as a Hugging Face folder, or as one file.

    Args:
        catalog: What to write.
        part: See `weights_of`.
        max_file_nbytes: A folder gets more files than one beyond it; a larger tensor has its own.
        config_from: A folder whose other files (config, tokenizer) are copied.
        is_folder: False for a single file.

    Raises:
        ConfigError: The part is not there, or `config_from` is not a folder.
        PlanError: A name or type cannot be written.
    """
    weights = weights_of(catalog, part)
    words = {
        key: text
        for key, text in catalog.metadata.items()
        if isinstance(text, str) and is_unicode(key + text)
    }
    chosen = [choose_part(catalog, part)]
    notes = [*weights.left_out, *catalog.lost_versions(chosen), *catalog.lost_kinds(chosen)]
    if odd := [key for key in catalog.metadata if key not in words]:
        notes.append(f"metadata that is not text: {some_of(odd)}")
    notes += _late_types(catalog, weights)
    sizes = {name: catalog.tensors[key].nbytes for name, key in weights.keys.items()}
    most = max_file_nbytes if is_folder else sum(sizes.values()) + 1
    groups = split_by_size(sizes, max_nbytes=most)
    files = []
    placed: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}{_SUFFIX}"
        file = f"model{_SUFFIX}" if len(groups) == 1 else file
        placed |= dict.fromkeys(names, file)
        files.append(_layout_file(catalog, weights, names, file, words))
    if len(groups) > 1:
        table = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        text = json.dumps(table, indent=2, sort_keys=True).encode() + b"\n"
        files.append(OutputFile.of(f"model{_INDEX_SUFFIX}", text))
    carried: dict[str, Path] = {}
    if config_from is not None:
        carried, others = _carried(config_from)
        notes += [f"{name} of {config_from}: no small file, so not copied" for name in others]
    elif is_folder and catalog.format == FORMAT and (names := _next_to_weights(catalog)):
        folder = catalog.storage.describe("").rstrip("/")
        notes.append(f"{some_of(names)}: --config-from {folder} copies them")
    return Output(
        files=files, num_tensors=len(sizes), is_folder=is_folder, carried=carried, notes=notes
    )


def _late_types(catalog: Catalog, weights: Weights) -> list[str]:
    """Say which release of safetensors is the first that reads the types of some tensors."""
    late: defaultdict[str, list[str]] = defaultdict(list)
    for name, key in weights.keys.items():
        dtype = catalog.tensors[key].dtype
        if DTYPES[dtype].since not in (None, OLDEST_SAFETENSORS):
            late[dtype].append(name)
    return [
        f"{some_of(names, most=3)}: of the type {dtype}, which programs read with safetensors "
        f"{DTYPES[dtype].since} or later"
        for dtype, names in late.items()
    ]


def _layout_file(
    catalog: Catalog, weights: Weights, names: list[str], file: str, metadata: Mapping[str, str]
) -> OutputFile:
    """Lay out one file."""
    tensors = [catalog.tensors[weights.keys[name]] for name in names]
    image = layout_file(
        [
            ImageEntry(name=name, dtype=tensor.dtype, shape=tensor.shape)
            for name, tensor in zip(names, tensors, strict=True)
        ],
        metadata=metadata,
    )
    return OutputFile.of_image(file, image, [*zip(tensors, map(_key, names), strict=True)])


def _carried(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files of a folder that are not weights: config, tokenizer, templates.

    Also the names of what is neither: large files, and folders.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder with the config of a model")
    others = [path for path in sorted(folder.iterdir()) if not _is_of_weights(path.name)]
    carried = {
        path.name: path
        for path in others
        if path.is_file() and path.stat().st_size <= _MAX_CARRIED_NBYTES
    }
    return carried, [
        path.name for path in others if path.name not in carried and path.name[0] != "."
    ]


def _is_of_weights(name: str) -> bool:
    is_index = name.endswith(".index.json") or _VARIANT_INDEX.search(name) is not None
    return is_index or name.endswith(STATE_SUFFIXES)


def _next_to_weights(catalog: Catalog) -> list[str]:
    """Return the names of the files with which the weights of a folder are a model."""
    names = catalog.storage.list("") if catalog.storage.local_path("") is not None else []
    if "config.json" not in names:
        return []
    return [
        name
        for name in names
        if name[0] != "." and not _is_of_weights(name) and not catalog.storage.is_dir(name)
    ]
