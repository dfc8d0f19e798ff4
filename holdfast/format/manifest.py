"""The manifest: the commit record of a checkpoint.

The file is compact JSON whose last member is `digest`. The digest covers every byte before
`,"digest":"<32 hexadecimal digits>"}` and a newline, so that every byte of the file is covered and
nobody needs a canonical form of JSON to check it.

An entry of `tensors` is an array, and a key that the tree implies is left out: a `tensor` or
`array` node has no `k` if its key is its path, that is, the part's name, the names of dict members
and the positions in lists on the way to it, joined with dots. Only plain dicts and lists count;
below any other node every `k` is written.

A user's own JSON object is kept in `parts` under a name that no part can have, so that a reader
that does not know it sees one more tree of plain values, and the digest covers it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from holdfast.errors import ConfigError, CorruptionError, HoldfastError, PlanError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import (
    Node,
    decode_tree,
    encode_tree,
    fill_implied_keys,
    is_plain_dict,
    tag_of,
    without_implied_keys,
)

FORMAT = "holdfast"
VERSION = 1
"""What is written; every version from 1 on is read."""
MAX_MANIFEST_NBYTES = 1 << 28
MAX_INDEX_NBYTES = 1 << 32
MAX_HEADER_NBYTES = 100_000_000
"""The limit of the safetensors library itself; longer headers are refused."""
MAX_NDIM = 64

_TAIL = re.compile(rb',"digest":"([0-9a-f]{32})"\}\n')
_TAIL_NBYTES = len(b',"digest":"') + 32 + len(b'"}\n')
_HEX128 = re.compile(r"[0-9a-f]{32}")
_DATA_FILE = re.compile(r"data/[0-9]{5,9}\.safetensors", re.ASCII)
"""Names that a data file may have; no other path that a manifest states is opened."""
MIN_BLOCK_NBYTES = 16
MAX_BLOCK_NBYTES = 1 << 26
_MAX_NBYTES = 2**63 - 1
METADATA_PART = "$metadata"
"""Where it is in `parts`; the name of a part of the state does not begin with `$`."""
MAX_METADATA_NBYTES = 64 * 1024
"""Bytes of JSON text. The manifest is read by `ls` and broadcast by every load."""


class _StrictStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Immutable, and unknown members are refused."""


class LayoutInfo(_StrictStruct, frozen=True, kw_only=True):
    """One layout the state lives on, enough to rebuild it: see `Layout.to_dict`."""

    name: str
    axes: dict[str, int]
    order: str
    ranks: list[int]


class CutInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A dim that is cut over a group or axis of the layout, as `torch.chunk` cuts."""

    dim: int
    axis: str
    is_strided: bool = False
    """Whether each of the pieces that the later cuts of this dim give is cut, and not the whole:
    torch's `_StridedShard`."""


class PlacementInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the boxes that a rank holds of a tensor follow from its coordinates on the layout.

    Which ranks hold a tensor at all is not part of it: that is in the index, box by box.
    """

    kind: Literal["whole", "cut", "runs", "per_coordinate", "irregular"]
    """One box; what `cuts` leave; runs of elements of that; a tensor for each coordinate, named in
    its key; boxes that follow from no coordinates that are stored."""
    cuts: tuple[CutInfo, ...] = ()
    """In the order in which they are made."""
    over: str = ""
    """Of runs: ranks that differ along this group or axis hold other runs, of lengths that depend
    on what else is in the same buffer."""

    @classmethod
    def of(cls, cuts: Iterable[CutInfo]) -> PlacementInfo:
        """The placement of a tensor that is cut like this, or whole without cuts."""
        cuts = tuple(cuts)
        return cls(kind="cut", cuts=cuts) if cuts else WHOLE

    def runs_over(self, axis: str) -> PlacementInfo:
        """The placement of runs of what ranks hold by this one."""
        if self.kind == "irregular":
            return self
        return PlacementInfo(kind="runs", cuts=self.cuts, over=axis)


WHOLE = PlacementInfo(kind="whole")
PER_COORDINATE = PlacementInfo(kind="per_coordinate")
IRREGULAR = PlacementInfo(kind="irregular")


class TensorInfo(_StrictStruct, frozen=True, kw_only=True):
    """One logical tensor: global shape, element type (`DTYPES`), positions of its layout and of its
    placement there."""

    key: str
    dtype: str
    shape: list[int]
    layout: int
    placement: int = 0
    fingerprint: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy."""
        return self.numel * DTYPES[self.dtype].itemsize


class FileInfo(_StrictStruct, frozen=True, kw_only=True):
    """One data file: its name inside the directory, sizes, and the rank that wrote it."""

    name: str
    nbytes: int
    header_nbytes: int
    header_digest: str
    writer: int
    coordinate: dict[str, int]


class IndexInfo(_StrictStruct, frozen=True, kw_only=True):
    """The index file: size, XXH3-128, number of rows."""

    nbytes: int
    digest: str
    num_rows: int


class Totals(_StrictStruct, frozen=True, kw_only=True):
    """Sums: `nbytes` of all tensors once, `stored_nbytes` of all payloads, copies included."""

    num_tensors: int
    nbytes: int
    stored_nbytes: int


class _TensorRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A `TensorInfo` as it is written: what is 0 or null at the end is left out."""

    key: str
    dtype: str
    shape: list[int]
    layout: int = 0
    placement: int = 0
    fingerprint: str | None = None


class _Members(_StrictStruct, frozen=True, kw_only=True):
    """The members of a manifest that are the same on disk and in memory, in their order."""

    format: str = FORMAT
    version: int = VERSION
    step: int
    save_id: str
    created: str
    holdfast: str
    torch: str
    layouts: list[LayoutInfo]
    signature: str
    block_nbytes: int
    placements: list[PlacementInfo]
    tensors: list[Any]
    parts: dict[str, Any]
    files: list[FileInfo]
    index: IndexInfo
    totals: Totals


class Manifest(_Members, frozen=True, kw_only=True):
    """Everything a checkpoint says about itself, but for the chunk table.

    Args:
        metadata: the user's own JSON object, which is stored among the `parts`; empty for none.
    """

    tensors: list[TensorInfo]
    metadata: dict[str, Any] = {}


class _Written(_Members, frozen=True, kw_only=True):
    """A manifest as it is written."""

    tensors: list[_TensorRow]


class _Peek(msgspec.Struct):
    format: str
    version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`. PlanError when they would not be accepted back."""
    problem = _problem(manifest)
    if problem is not None:
        raise PlanError(f"manifest of step {manifest.step}: {problem}")
    try:
        body = msgspec.json.encode(_members(manifest)).removesuffix(b"}")
    except (UnicodeEncodeError, RecursionError, TypeError, OverflowError) as error:
        raise PlanError(f"manifest of step {manifest.step} cannot be written: {error}") from error
    data = body + b',"digest":"' + digest128(body).encode() + b'"}\n'
    if len(data) > MAX_MANIFEST_NBYTES:
        raise PlanError(
            f"manifest of step {manifest.step} would have {len(data)} bytes, the limit is "
            f"{MAX_MANIFEST_NBYTES}: large values belong in arrays or tensors"
        )
    return data


def decode_manifest(data: bytes, *, place: str = "manifest.json") -> Manifest:
    """The manifest in these bytes.

    CorruptionError when a byte is wrong, when the version is newer (by name), or when the content
    breaks a rule of the format; a manifest that is returned is safe to act upon.
    """
    if len(data) > MAX_MANIFEST_NBYTES:
        raise CorruptionError(f"{place}: {len(data)} bytes are beyond {MAX_MANIFEST_NBYTES}")
    body, tail = data[:-_TAIL_NBYTES], _TAIL.fullmatch(data[-_TAIL_NBYTES:])
    is_intact = tail is not None and tail[1].decode() == digest128(body)
    text = body + b"}"
    peek = _peek(text if is_intact else data)
    if peek is not None and peek.format == FORMAT and peek.version > VERSION:
        damage = "" if is_intact else " (or damaged: its digest does not match)"
        raise CorruptionError(
            f"{place}: written by a newer Holdfast: format version {peek.version}, "
            f"this is {VERSION}{damage}; update Holdfast to read it"
        )
    if not is_intact:
        raise CorruptionError(
            f"{place}: damaged: its digest does not match its bytes; use another copy or step"
        )
    if peek is None:
        raise CorruptionError(f"{place}: it states no format and version")
    try:
        manifest = _decode(text)
    except (CorruptionError, msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptionError(
            f"{place}: not a manifest of version {peek.version}: {error}"
        ) from None
    problem = _problem(manifest)
    if problem is not None:
        raise CorruptionError(f"{place}: {problem}")
    return manifest


def _members(manifest: Manifest) -> dict[str, Any]:
    """The members as they are written, in their order."""
    table = {name: getattr(manifest, name) for name in _Members.__struct_fields__}
    table["tensors"] = [_tensor_row(tensor) for tensor in manifest.tensors]
    table["parts"] = without_implied_keys(manifest.parts)
    if manifest.metadata:
        table["parts"] = table["parts"] | {METADATA_PART: encode_tree(manifest.metadata)}
    return table


def _tensor_row(tensor: TensorInfo) -> list[Any]:
    """A tensor as it is written."""
    row: list[Any] = [tensor.key, tensor.dtype, tensor.shape]
    if tensor.fingerprint is not None:
        return [*row, tensor.layout, tensor.placement, tensor.fingerprint]
    if tensor.placement:
        return [*row, tensor.layout, tensor.placement]
    return [*row, tensor.layout] if tensor.layout else row


def _decode(text: bytes) -> Manifest:
    """The manifest of a checked text."""
    decoded = msgspec.json.decode(text, type=_Written)
    table = {name: getattr(decoded, name) for name in _Members.__struct_fields__}
    node = decoded.parts.pop(METADATA_PART, None)
    if node is not None:
        table["metadata"] = decode_metadata(node)
    fill_implied_keys(decoded.parts, limit=MAX_MANIFEST_NBYTES)
    table["tensors"] = [
        TensorInfo(
            key=row.key,
            dtype=row.dtype,
            shape=row.shape,
            layout=row.layout,
            placement=row.placement,
            fingerprint=row.fingerprint,
        )
        for row in decoded.tensors
    ]
    return Manifest(**table)


def _peek(text: bytes) -> _Peek | None:
    """Format and version; None where there are none."""
    try:
        return msgspec.json.decode(text, type=_Peek)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _problem(m: Manifest) -> str | None:
    """The first rule of the format that a manifest breaks, in words."""
    if m.format != FORMAT or m.version != VERSION:
        return f"format {m.format!r} version {m.version} is not {FORMAT!r} version {VERSION}"
    if not 0 <= m.step < 10**18:
        return f"step {m.step} is not in [0, 10**18)"
    power = m.block_nbytes.bit_count() == 1
    if not power or not MIN_BLOCK_NBYTES <= m.block_nbytes <= MAX_BLOCK_NBYTES:
        return (
            f"block_nbytes {m.block_nbytes} is not a power of two "
            f"from {MIN_BLOCK_NBYTES} to {MAX_BLOCK_NBYTES}"
        )
    return _tensor_problem(m) or _file_problem(m) or _total_problem(m)


def _tensor_problem(m: Manifest) -> str | None:
    """What is wrong with the tensors, in words."""
    # Most often nothing is, and of many tensors only few shapes differ.
    keys = {tensor.key for tensor in m.tensors}
    if (
        len(keys) == len(m.tensors)
        and "" not in keys
        and {tensor.dtype for tensor in m.tensors} <= DTYPES.keys()
        and all(0 <= layout < len(m.layouts) for layout in {t.layout for t in m.tensors})
        and all(0 <= number < len(m.placements) for number in {t.placement for t in m.tensors})
        and all(map(_is_possible, {tuple(tensor.shape) for tensor in m.tensors}))
        and not _cuts_problem(m)
    ):
        return None
    seen = set()
    for tensor in m.tensors:
        if tensor.key in seen or not tensor.key:
            return f"tensor key {tensor.key!r} is empty or there twice"
        seen.add(tensor.key)
        if tensor.dtype not in DTYPES:
            return f"tensor {tensor.key!r} has the unknown element type {tensor.dtype!r}"
        if len(tensor.shape) > MAX_NDIM:
            return f"tensor {tensor.key!r} has {len(tensor.shape)} dims, the limit is {MAX_NDIM}"
        if any(size < 0 for size in tensor.shape):
            return f"tensor {tensor.key!r} has the impossible shape {tensor.shape}"
        if not _is_possible(tensor.shape):
            return f"tensor {tensor.key!r} of shape {tensor.shape} is larger than any memory"
        if not 0 <= tensor.layout < len(m.layouts):
            return f"tensor {tensor.key!r} is on layout {tensor.layout} of {len(m.layouts)}"
        if not 0 <= tensor.placement < len(m.placements):
            return f"tensor {tensor.key!r} has placement {tensor.placement} of {len(m.placements)}"
    return _cuts_problem(m)


def _cuts_problem(m: Manifest) -> str | None:
    """A placement that cuts a dim which one of its tensors does not have, in words."""
    fewest: dict[int, int] = {}
    for number, ndim in {(tensor.placement, len(tensor.shape)) for tensor in m.tensors}:
        fewest[number] = min(ndim, fewest.get(number, ndim))
    for number, ndim in fewest.items():
        for cut in m.placements[number].cuts:
            if not 0 <= cut.dim < ndim:
                return f"placement {number} cuts dim {cut.dim} of a tensor of {ndim} dims"
    return None


def _is_possible(shape: Sequence[int]) -> bool:
    """Whether a tensor may have this shape."""
    numel = math.prod(max(size, 1) for size in shape)
    return len(shape) <= MAX_NDIM and min(shape, default=0) >= 0 and numel <= _MAX_NBYTES // 16


def _file_problem(m: Manifest) -> str | None:
    """What is wrong with the data files, in words."""
    if len({file.name for file in m.files}) != len(m.files):
        return "a data file is listed twice"
    for file in m.files:
        if _DATA_FILE.fullmatch(file.name) is None:
            return f"data file name {file.name!r} is not of the form 'data/00000.safetensors'"
        if not 8 <= file.header_nbytes <= min(MAX_HEADER_NBYTES + 8, file.nbytes):
            return f"{file.name}: a header of {file.header_nbytes} bytes in {file.nbytes} bytes"
        if file.nbytes > _MAX_NBYTES:
            return f"{file.name}: {file.nbytes} bytes are more than any file has"
        if _HEX128.fullmatch(file.header_digest) is None:
            return f"{file.name}: header_digest is not 32 hexadecimal digits"
    return None


def _total_problem(m: Manifest) -> str | None:
    """What is wrong with index and totals, in words."""
    if not 8 <= m.index.nbytes <= MAX_INDEX_NBYTES or _HEX128.fullmatch(m.index.digest) is None:
        return f"an index of {m.index.nbytes} bytes with digest {m.index.digest!r} cannot be"
    if m.totals.num_tensors != len(m.tensors):
        return f"totals state {m.totals.num_tensors} tensors, {len(m.tensors)} are listed"
    nbytes = sum(math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in m.tensors)
    if m.totals.nbytes != nbytes:
        return f"totals state {m.totals.nbytes} bytes of tensors, they have {nbytes}"
    return None


def encode_metadata(metadata: Mapping[str, object]) -> bytes:
    """The JSON of the node that stands for a user's object; empty for `{}`.

    Args:
        metadata: texts, finite numbers, booleans, None, and lists and dicts of them with texts as
            keys: what comes back from JSON as it was.

    Raises:
        ConfigError: anything else, or more than `MAX_METADATA_NBYTES`.
    """
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata must be a dict, got {type(metadata).__name__}")
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata cannot be written as JSON: {error}") from error
    if len(text) > MAX_METADATA_NBYTES:
        raise ConfigError(
            f"metadata has {len(text):,} bytes of JSON, the limit is {MAX_METADATA_NBYTES:,}; what "
            f"is larger belongs into a part of the state"
        )
    if value != metadata:
        raise ConfigError(
            "metadata would not come back from JSON as it is: use lists instead of tuples, and "
            "texts as keys"
        )
    return msgspec.json.encode(encode_tree(value, path="metadata")) if value else b""


def decode_metadata(node: Node) -> dict[str, Any]:
    """The user's object of a stored node; CorruptionError where it is none."""
    try:
        if not is_plain_dict(node) and tag_of(node) != "dict":
            raise CorruptionError("not an object")
        value: Any = decode_tree(node, path=METADATA_PART)
        if json.loads(json.dumps(value, allow_nan=False)) != value:
            raise CorruptionError("it holds what JSON does not")
    except (HoldfastError, TypeError, ValueError, RecursionError) as error:
        raise CorruptionError(f"{METADATA_PART!r} is not a JSON object: {error}") from None
    return dict(value)
